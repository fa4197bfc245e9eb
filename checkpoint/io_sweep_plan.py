"""What a sweep over engines, block sizes and depths measures, and what its numbers recommend. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .engine import BLOCK_SIZE_MULTIPLE_BYTES, QUEUE_DEPTH_MAX, EngineKind, TransferKind

KIB, MIB = 1024, 1024 * 1024
BLOCK_SIZES_BYTES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
DEPTHS = (1, 4, 8, 16, 32, 64)
PLAIN_DEPTHS = (1, 4)
"""The plain engine has no more threads."""

QUEUE_FILLED_MIN = 4
"""A transfer that fills the queue only once measures how it begins and ends."""
GOOD_ENOUGH = 0.97
"""What is within 3 % of the best is as good: more in flight only takes longer to end."""
FINALISTS = 0.25
"""Share of the cells that the second half of the time goes to: those that were fastest in the first."""
STALL_S = 0.1
"""How long a queue should keep a drive busy while another thread holds the GIL (docs/adr/0019)."""
SLOW_RATIO = 3.0
"""A device so many times slower than the median of its peers is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to move bytes."""

    queue_depth: int
    block_size_bytes: int
    engine: str
    """Value of an EngineKind: the kinds themselves have no order."""

    @property
    def rank(self) -> tuple[int, int, str]:
        """What is recommended first among equals: little in flight, then few blocks, then kernel AIO."""
        return self.queue_depth * self.block_size_bytes, self.queue_depth, self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed transfer; a write with its fdatasync."""

    cell: Cell
    kind: TransferKind
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Medians over all samples of a cell, in bytes/s."""

    cell: Cell
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Settings of `[io]` that serve all measured devices."""

    engine: EngineKind
    block_size_bytes: int
    queue_depth: int
    """What saturates the drives, or more: enough work for `STALL_S`."""
    saturating_depth: int
    write_share: float
    """Of each device's own best writing speed: the least of all devices."""


def cells(kinds: Sequence[EngineKind], size_bytes: int) -> list[Cell]:
    """Return every cell whose queue a file of `size_bytes` fills at least four times over."""
    return [
        Cell(engine=kind.value, block_size_bytes=block, queue_depth=depth)
        for kind in kinds
        for block in BLOCK_SIZES_BYTES
        for depth in (DEPTHS if kind is not EngineKind.PLAIN else PLAIN_DEPTHS)
        if QUEUE_FILLED_MIN * block * depth <= size_bytes
    ]


def finalists(samples: Iterable[Sample]) -> list[Cell]:
    """Return the cells to measure again: the fastest quarter in writing, at least one."""
    found = summarised(samples)
    found.sort(key=lambda result: -result.write_bytes_per_s)
    return [result.cell for result in found[: max(1, round(FINALISTS * len(found)))]]


def summarised(samples: Iterable[Sample]) -> list[CellResult]:
    """Return the medians of each cell that was written and read, in the order in which they came."""
    speeds: dict[Cell, dict[TransferKind, list[float]]] = {}
    for sample in samples:
        speeds.setdefault(sample.cell, {}).setdefault(sample.kind, []).append(sample.bytes_per_s)
    return [
        CellResult(
            cell=cell,
            write_bytes_per_s=statistics.median(found[TransferKind.WRITE]),
            read_bytes_per_s=statistics.median(found[TransferKind.READ]),
        )
        for cell, found in speeds.items()
        if len(found) == len(TransferKind)
    ]


def best_write(results: Iterable[CellResult]) -> float:
    """Return the highest writing speed in bytes/s; 0 when nothing was measured."""
    return max((result.write_bytes_per_s for result in results), default=0.0)


def recommend(devices: Mapping[str, Sequence[CellResult]]) -> Recommendation | None:
    """Return what serves all devices, or None when no cell was measured on each of them.

    A cell is worth what it reaches of the best on the device where that is least. The first of the cells that are
    within 3 % of the most worth is taken.
    """
    shares = [
        {result.cell: result.write_bytes_per_s / best for result in results}
        for results in devices.values()
        if (best := best_write(results)) > 0
    ]
    common = set[Cell].intersection(*map(set[Cell], shares)) if shares else set[Cell]()
    if not common or len(shares) < len(devices):
        return None
    worth = {cell: min(share[cell] for share in shares) for cell in common}
    goal = GOOD_ENOUGH * max(worth.values())
    cell = min((cell for cell, found in worth.items() if found >= goal), key=lambda cell: cell.rank)
    fastest = max(best_write(results) for results in devices.values())
    return Recommendation(
        engine=EngineKind(cell.engine),
        block_size_bytes=cell.block_size_bytes,
        queue_depth=_deep_enough(cell, fastest),
        saturating_depth=cell.queue_depth,
        write_share=worth[cell],
    )


def _deep_enough(cell: Cell, bytes_per_s: float) -> int:
    """Return the depth that saturates, or the next power of two that holds work for `STALL_S`."""
    if cell.engine == EngineKind.PLAIN.value:
        return cell.queue_depth
    wanted, depth = STALL_S * bytes_per_s / cell.block_size_bytes, cell.queue_depth
    while depth < wanted and depth < QUEUE_DEPTH_MAX:
        depth *= 2
    return min(depth, QUEUE_DEPTH_MAX)


def slow_devices(devices: Mapping[str, Sequence[CellResult]]) -> dict[str, float]:
    """Return the devices that are three times slower than the median of their peers, with that ratio."""
    best = {name: best_write(results) for name, results in devices.items()}
    found: dict[str, float] = {}
    for name, speed in best.items():
        peers = [other for peer, other in best.items() if peer != name]
        if peers and statistics.median(peers) >= SLOW_RATIO * speed:
            found[name] = statistics.median(peers) / speed if speed else float("inf")
    return found


def transfer_bytes(cell: Cell, size_bytes: int, bytes_per_s: float, wanted_s: float) -> int:
    """Return how much to move so that it takes about `wanted_s`: whole blocks, and the queue filled twice at least."""
    blocks = max(2 * cell.queue_depth, round(bytes_per_s * wanted_s / cell.block_size_bytes))
    found = min(blocks * cell.block_size_bytes, size_bytes - size_bytes % cell.block_size_bytes)
    assert found > 0
    assert found % BLOCK_SIZE_MULTIPLE_BYTES == 0
    return found
