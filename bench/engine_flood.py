"""What a busy thread beside an engine takes from it: in the same process, and with an I/O process.

    python bench/engine_flood.py DIR [--gib 1] [--rounds 7] [--engine aio] [--depths 32 256]

Prints flooded / quiet, for the interpreter's switch interval and for the daemon's (`use_short_switch_interval`).
`loop` is Python code, which gives the GIL up when asked; `parse` decodes 5 MB of JSON, again and again, each time in
one call that does not.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
from engine_io import arena, quartiles, write_new_file

from everstep.checkpoint.engine import Engine, EngineConfig, EngineKind
from everstep.checkpoint.engine_kinds import make_engine
from everstep.checkpoint.engine_process import ProcessEngine

SWITCH_INTERVALS_S = (0.005, 0.0005)


class Case(NamedTuple):
    """What a row of the table is about."""

    engine: str
    switch_interval_s: float
    flood: str


def _loop(ended: threading.Event) -> None:
    count = 0
    while not ended.is_set():
        count += 1


def _parse(ended: threading.Event) -> None:
    record = {"name": "model.layers.0.attention.weight", "shape": [4096, 4096], "pieces": list(range(64))}
    text = msgspec.json.encode([record] * 18_000)
    while not ended.is_set():
        msgspec.json.decode(text)


FLOODS = {"loop": _loop, "parse": _parse}


@contextmanager
def flood(work: Callable[[threading.Event], None]) -> Generator[None]:
    """Keep one thread of this process busy with work that holds the GIL whenever it can."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=[ended])
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def makers(kind: EngineKind, depths: Sequence[int]) -> dict[str, Callable[[], Engine]]:
    """Return how to make the engine with each depth of its queue, in the thread and in a process."""
    found: dict[str, Callable[[], Engine]] = {}
    for depth in depths:
        config = EngineConfig(queue_depth=depth)
        found[f"{kind.value} {depth}, thread"] = lambda config=config: make_engine(kind, config)
        found[f"{kind.value} {depth}, process"] = lambda config=config: ProcessEngine(kind, config)
    return found


def measure(
    folder: Path, made: Mapping[str, Callable[[], Engine]], *, size_bytes: int, round_count: int
) -> dict[Case, list[tuple[float, float]]]:
    """Return (quiet, flooded) bytes per second of each case, one pair for each round."""
    found: dict[Case, list[tuple[float, float]]] = {}
    path = folder / "everstep-bench.tmp"
    with ExitStack() as stack:
        arena_fd = stack.enter_context(arena(size_bytes))
        engines = {name: make() for name, make in made.items()}
        for engine in engines.values():
            stack.callback(engine.close)
            write_new_file(engine, arena_fd, path, size_bytes)
        for _ in range(round_count):
            for name, interval_s, kind in product(engines, SWITCH_INTERVALS_S, FLOODS):
                sys.setswitchinterval(interval_s)
                quiet = write_new_file(engines[name], arena_fd, path, size_bytes)
                with flood(FLOODS[kind]):
                    flooded = write_new_file(engines[name], arena_fd, path, size_bytes)
                pairs = found.setdefault(Case(name, interval_s, kind), [])
                pairs.append((quiet.bytes_per_s, flooded.bytes_per_s))
    return found


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", type=EngineKind, default=EngineKind.AIO)
    parser.add_argument("--depths", type=int, nargs="+", default=[32, 256])
    args = parser.parse_args()
    print("| engine | switch interval | flood | quiet GB/s | flooded / quiet (quartiles) |")
    print("|---" * 5 + "|")
    made = makers(args.engine, args.depths)
    pairs = measure(args.folder, made, size_bytes=int(args.gib * 2**30), round_count=args.rounds)
    for case, own in pairs.items():
        low, ratio, high = quartiles([flooded / quiet for quiet, flooded in own])
        quiet = quartiles([quiet / 1e9 for quiet, _ in own])[1]
        print(
            f"| {case.engine} | {case.switch_interval_s * 1000:.1f} ms | {case.flood} | {quiet:.2f}"
            f" | {ratio:.3f} ({low:.3f}-{high:.3f}) |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
