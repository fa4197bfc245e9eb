"""The rows of `make bench-storage` about writing: beside fio, beside what users pick instead, and flooded."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from itertools import product
from pathlib import Path

from flood import flooded, save_wide
from meter import Meter
from node import KEEP_LAST, node
from paired import PAIRS_MIN, Row, interleaved, ratios, row
from rig import fio
from rivals import rivals, speed, state_of

POOL_DEADLINE_S = 60.0
MEMORY_MIB = 128
FIO_BLOCKS = ("1M", "4M")
FIO_DEPTHS = (8, 16, 32)
FIO_MEMORY = ("malloc", "mmapshared")


def best_fio(mounts: Sequence[Path], size_bytes: int, *, way: str = "write") -> dict[str, object]:
    """Return the options with which fio writes fastest here, or reads files that it has written already."""
    found: dict[float, dict[str, object]] = {}
    for block, depth, memory in product(FIO_BLOCKS, FIO_DEPTHS, FIO_MEMORY):
        options: dict[str, object] = {"bs": block, "iodepth": depth, "iomem": memory}
        found[fio(mounts, size_bytes=size_bytes, way=way, keep=way == "read", options=options)] = options
    return found[max(found)]


@contextlib.contextmanager
def scratch(place: Path | None = None) -> Generator[Path]:
    """A folder that goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def persist_once(
    mounts: Sequence[Path], size_bytes: int, meter: Meter | None = None, *, rank_count: int = 1
) -> float:
    """Return bytes per second of the first checkpoint of a new store: a drive of memory has room for no second."""
    with (
        scratch() as folder,
        node(mounts, size_bytes, folder, slot_count=1, rank_count=rank_count) as ours,
        (meter or Meter()).over(ours.pid),
    ):
        return ours.persist()


def new_stores(
    name: str,
    mounts: Sequence[Path],
    size_bytes: int,
    *,
    goal: float | None,
    pairs: int,
    options: dict[str, object],
    rank_count: int = 1,
) -> list[Row]:
    """Compare with fio on the same drives, new files against new files, a new store for each sample.

    `rank_count` ranks have the state in equal parts, and are written together.
    """
    each_bytes = size_bytes // len(mounts)
    meter = Meter()
    found = interleaved(
        lambda: persist_once(mounts, size_bytes, meter, rank_count=rank_count),
        lambda: fio(mounts, size_bytes=each_bytes, options=options),
        pairs,
    )
    what = f"{name}: persist" if rank_count == 1 else f"{name}: persist of {rank_count} ranks together"
    return [row(f"{what} / fio", ratios(found), goal=goal), memory_row(what, meter)]


def memory_row(name: str, meter: Meter, *, goal: float | None = MEMORY_MIB) -> Row:
    """Return the row of the daemon's memory, a sample per block that was metered."""
    return row(
        f"{name}: daemon's memory above the arena, peak",
        [each / 2**20 for each in meter.memory_bytes],
        goal=goal,
        at_most=True,
        unit="MiB",
    )


def scaling(name: str, mounts: Sequence[Path], size_bytes: int, *, pairs: int) -> Row:
    """Compare all drives with one of them, which gets its part of the bytes."""
    found = interleaved(
        lambda: persist_once(mounts, size_bytes),
        lambda: persist_once(mounts[:1], size_bytes // len(mounts)),
        pairs,
    )
    per_drive = [ratio / len(mounts) for ratio in ratios(found)]
    return row(f"{name}: speed-up over one drive / number of drives", per_drive, goal=0.96)


def one_store(
    name: str, mounts: Sequence[Path], size_bytes: int, *, goal: float, pairs: int, options: dict[str, object]
) -> list[Row]:
    """Compare checkpoint after checkpoint of one run with fio, and say what the daemon took for it.

    New files against new files, so that nothing depends on what was written before.
    """
    with scratch() as folder, node(mounts, size_bytes, folder, recycles=False) as ours:
        ours.persist()  # the engines' first use of the arena
        meter = Meter()

        def persist() -> float:
            with meter.over(ours.pid):
                return ours.persist()

        found = interleaved(
            persist, lambda: fio(mounts, size_bytes=ours.size_bytes // len(mounts), options=options), pairs
        )
        cpu_s_per_gb = [each / (ours.size_bytes / 1e9) for each in meter.cpu_s]
    return [
        row(f"{name}: persist / fio", ratios(found), goal=goal),
        row(f"{name}: persist", [each / 1e9 for each, _ in found], goal=None, unit="GB/s"),
        row(f"{name}: daemon's CPU with checksums", cpu_s_per_gb, goal=0.25, at_most=True, unit="s/GB"),
        memory_row(f"{name}: persist", meter),
    ]


def over_old_files(
    name: str, mounts: Sequence[Path], size_bytes: int, *, goal: float, pairs: int, options: dict[str, object]
) -> Row:
    """Compare checkpoints over files of deleted ones with fio over files that lie there already."""
    with scratch() as folder, node(mounts, size_bytes, folder) as ours:
        for _ in range(KEEP_LAST + 1):  # from here on each one finds the files of one that was collected
            ours.persist()
        each_bytes = ours.size_bytes // len(mounts)

        def over_old() -> float:
            _wait_for_pools(mounts, ours.size_bytes)
            return ours.persist()

        def fio_over_old() -> float:
            return fio(mounts, size_bytes=each_bytes, keep=True, options=options | {"overwrite": 1})

        try:
            fio_over_old()  # lays them out
            found = interleaved(over_old, fio_over_old, pairs)
        finally:
            for mount in mounts:
                (mount / "fio.tmp").unlink(missing_ok=True)
    return row(f"{name}: persist recycled / fio existing", ratios(found), goal=goal)


def _wait_for_pools(mounts: Sequence[Path], size_bytes: int) -> None:
    """Return when what was collected is there to be written over: collection begins when a commit was acknowledged."""
    deadline_s = time.monotonic() + POOL_DEADLINE_S
    pools = [mount / "everstep" / "pool" for mount in mounts]
    while sum(path.stat().st_size for pool in pools for path in pool.glob("*")) < size_bytes:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing to write over in {pools}")
        time.sleep(0.01)


def under_flood(
    name: str, mounts: Sequence[Path], size_bytes: int, *, pairs: int, io_process: bool = False
) -> list[Row]:
    """Compare persisting beside clients that never stop asking with persisting in peace.

    `io_process`: both with each device's engine in a process of its own, which no goal asks for.
    """
    meter, answered = Meter(), list[dict[str, int]]()
    with (
        scratch() as folder,
        node(mounts, size_bytes, folder, serves_metrics=True, io_process=io_process) as ours,
    ):
        save_wide(ours.socket, [Path(f"drive{number}") for number in range(len(mounts))])
        ours.persist()

        def beside_flood() -> float:
            with flooded(ours.socket) as counts, meter.over(ours.pid):
                speed = ours.persist()
            answered.append(counts)
            return speed

        found = interleaved(beside_flood, ours.persist, pairs)
    what = f"{name}: persist under a flood{', I/O processes' if io_process else ''}"
    return [
        row(f"{what} / quiet", ratios(found), goal=None if io_process else 0.95),
        row(f"{what}: 5 MB parsed meanwhile", [each["draft"] for each in answered], goal=None, unit="times"),
        memory_row(what, meter, goal=None if io_process else MEMORY_MIB),
    ]


def rival_rows(name: str, mounts: Sequence[Path], size_bytes: int, *, pairs: int) -> list[Row]:
    """Compare persisting on all the drives with what writes to one directory, as each of these does."""
    rows: list[Row] = []
    state = state_of(size_bytes)
    with scratch() as folder, node(mounts, size_bytes, folder) as ours:
        ours.persist()
        for rival, save in rivals()[0].items():
            found = interleaved(ours.persist, lambda save=save: speed(save, state, mounts[0]), pairs)
            rows.append(row(f"{name}: persist / {rival}", ratios(found), goal=1.0))
    return rows


def slow_drive(name: str, mounts: Sequence[Path], speeds: Sequence[int], size_bytes: int) -> Row:
    """Return the time of each checkpoint from the second on, over that of an ideal split by the drives' speeds.

    The ideal is arithmetic, no run to pair with: as many samples as other rows have pairs.
    """
    ideal_s = size_bytes / sum(speeds)
    with scratch() as folder, node(mounts, size_bytes, folder) as ours:
        ours.persist()
        times_s = [ours.size_bytes / ours.persist() for _ in range(PAIRS_MIN)]
    return row(
        f"{name}: time / ideal weighted split, from the second checkpoint on",
        [time_s / ideal_s for time_s in times_s],
        goal=1.3,
        at_most=True,
    )
