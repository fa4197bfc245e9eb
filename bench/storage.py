"""make bench-storage: how near to the drives' own speed everstep writes and reads, beside what users pick instead.

Ratios taken in one run (bench/paired.py); fio is the drives' own speed: the best of its block sizes, depths and kinds
of memory. The rig (bench/rig.py, root) gives several drives of a known speed; without root only the disk is measured,
and the exit status says so unless the rigs are left out by `--drives --recycle --no-slow`.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Container
from pathlib import Path

from child import ended_by_sigterm
from node import KEEP_LAST, LEAF_BYTES
from paired import PAIRS_MIN, Row, publish, write
from persist_rows import (
    best_fio,
    new_stores,
    one_store,
    over_old_files,
    rival_rows,
    scaling,
    scratch,
    slow_drive,
    under_flood,
)
from restore_rows import restore_rows
from rich.console import Console
from rig import MB, RigError, held_to, rig
from rivals import rivals

RIG_SPEEDS = {1: 200, 2: 200, 4: 200, 8: 100, 32: 20}
"""MB/s of each drive, by their number: what memory of 24 GiB can back for ten seconds."""
SAMPLE_S = 10
ROOM_BYTES = 200 * 2**20
"""Of a drive, beside one checkpoint or fio's file: the file system's own needs."""
RECYCLED_SPEED = 100
RECYCLED_TIMES = 4
"""Of a state: two that are kept, one to write over, fio's file."""
SLOTS = 2
RIG_BYTES = 17 * 10**9
"""Drives and arena together."""
RIVALS_AT = (1, 2, 4, 8)
RANKS_AT, RANKS = 4, 4
DRIVES_WITH_GOAL = 8
"""Up to so many drives persisting is held to a goal; scaling and restoring are at any number."""
PARTS = ("persist", "ranks", "scaling", "rivals", "restore", "flood")
PERSIST, TOGETHER, SCALING, RIVALS, RESTORE, FLOOD = PARTS
SLOW_SPEEDS = (200, 200, 200, 40)
SLOW_S = 3
"""Seconds of an ideal split: memory has room for the drives, which hold four checkpoints, and two slots."""

console = Console()


def on_disk(place: Path, *, gib: float, pairs: int, what: Container[str]) -> list[Row]:
    """Measure this machine's own disk."""
    size_bytes = int(gib * 2**30)
    with scratch(place) as folder:
        options = best_fio([folder], size_bytes // 4)
        console.print(f"disk: fio is fastest with {options}")
        rows: list[Row] = []
        if PERSIST in what:
            rows += one_store("disk", [folder], size_bytes, goal=0.90, pairs=pairs, options=options)
            rows.append(over_old_files("disk", [folder], size_bytes, goal=0.90, pairs=pairs, options=options))
        if RESTORE in what:
            rows += restore_rows("disk", [folder], size_bytes, goal=0.85, pairs=pairs)
        if FLOOD in what:
            for io_process in (False, True):
                rows += under_flood("disk", [folder], size_bytes, pairs=pairs, io_process=io_process)
        if RIVALS in what:
            rows += rival_rows("disk", [folder], size_bytes, pairs=pairs)
    return rows


def on_rig(drives: int, *, pairs: int, what: Container[str]) -> list[Row]:
    """Measure that many drives of a known speed.

    Reading is measured at half that speed: memory has room for the drives and a model that takes half of them, and its
    samples, too, are to be long enough.
    """
    mb_s = RIG_SPEEDS[drives]
    name = f"rig {drives} x {mb_s} MB/s"
    each_bytes = -(-mb_s * MB * SAMPLE_S // LEAF_BYTES) * LEAF_BYTES  # fio and everstep write the same
    with rig([mb_s * MB] * drives, size_bytes=each_bytes + ROOM_BYTES) as made:
        mounts = [drive.mount for drive in made]
        rows = _beside_fio(name, mounts, drives * each_bytes, pairs=pairs, what=what)
        if SCALING in what and drives > 1:
            rows.append(scaling(name, mounts, drives * each_bytes, pairs=pairs))
        if RIVALS in what and drives in RIVALS_AT:
            # Each of these has but one drive, on which its part of three checkpoints of ours lies, too.
            rival_bytes = each_bytes * drives // (drives + KEEP_LAST + 1)
            rows += rival_rows(name, mounts, min(rival_bytes, each_bytes // 2), pairs=pairs)
        if RESTORE in what:
            held_to(made, mb_s * MB // 2)
            half = f"rig {drives} x {mb_s // 2} MB/s"
            rows += restore_rows(half, mounts, drives * each_bytes // 2, goal=0.95, pairs=pairs)
    return rows


def _beside_fio(
    name: str, mounts: list[Path], size_bytes: int, *, pairs: int, what: Container[str]
) -> list[Row]:
    """Measure new files beside fio's, of one rank and of several together."""
    drives = len(mounts)
    rank_counts = [1] if PERSIST in what else []
    rank_counts += [RANKS] if TOGETHER in what and drives == RANKS_AT else []
    if not rank_counts:
        return []
    options = best_fio(mounts, size_bytes // drives // 4)
    console.print(f"{name}: fio is fastest with {options}")
    goal = 0.97 if drives <= DRIVES_WITH_GOAL else None
    return [
        row
        for rank_count in rank_counts
        for row in new_stores(
            name, mounts, size_bytes, goal=goal, pairs=pairs, options=options, rank_count=rank_count
        )
    ]


def on_recycling_rig(drives: int, *, pairs: int) -> list[Row]:
    """Measure writing over files of deleted checkpoints, for as long as memory has drives for four of them."""
    room_bytes = (RIG_BYTES // drives - ROOM_BYTES) // (RECYCLED_TIMES + SLOTS)
    most_bytes = min(RECYCLED_SPEED * MB * SAMPLE_S, room_bytes)
    each_bytes = most_bytes // LEAF_BYTES * LEAF_BYTES
    name = f"rig {drives} x {RECYCLED_SPEED} MB/s, {each_bytes / RECYCLED_SPEED / MB:.1f} s"
    with rig([RECYCLED_SPEED * MB] * drives, size_bytes=each_bytes * RECYCLED_TIMES + ROOM_BYTES) as made:
        mounts = [drive.mount for drive in made]
        options = best_fio(mounts, each_bytes // 2)
        return [over_old_files(name, mounts, drives * each_bytes, goal=0.97, pairs=pairs, options=options)]


def with_slow_drive() -> list[Row]:
    """Measure four drives of which one is five times slower."""
    speeds = [speed * MB for speed in SLOW_SPEEDS]
    size_bytes = sum(speeds) * SLOW_S
    # Checkpoint follows checkpoint, so four lie there: without room on the fast ones the slow one gets more.
    most_bytes = size_bytes * max(speeds) // sum(speeds)
    with rig(speeds, size_bytes=int(4.4 * most_bytes) + ROOM_BYTES) as made:
        mounts = [drive.mount for drive in made]
        return [slow_drive(f"rig {' + '.join(map(str, SLOW_SPEEDS))} MB/s", mounts, speeds, size_bytes)]


def main() -> int:
    """Run the benchmark; exit status 1 when a goal is missed, or a rig that was asked for could not be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--place", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    parser.add_argument(
        "--gib", type=float, default=4.0, help="size of the state on the disk; 0: leave it out"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS_MIN)
    parser.add_argument("--drives", type=int, nargs="*", default=list(RIG_SPEEDS), help="rigs to measure")
    parser.add_argument("--rows", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument(
        "--recycle", type=int, nargs="*", default=[1, 2, 4, 8], help="rigs to write over old files on"
    )
    parser.add_argument("--slow", action=argparse.BooleanOptionalAction, default=True, help="the slow drive")
    parser.add_argument("--output", type=Path, default=Path("build/bench/storage.json"))
    args = parser.parse_args()
    with ended_by_sigterm():
        return _measured(args)


def _measured(args: argparse.Namespace) -> int:
    rows = on_disk(args.place, gib=args.gib, pairs=args.pairs, what=args.rows) if args.gib else []
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"rig of {drives}", lambda drives=drives: on_rig(drives, pairs=args.pairs, what=args.rows))
        for drives in args.drives
    ]
    parts += [
        (f"recycling rig of {drives}", lambda drives=drives: on_recycling_rig(drives, pairs=args.pairs))
        for drives in args.recycle
    ]
    if args.slow:
        parts.append(("slow drive", with_slow_drive))
    unmade = dict[str, str]()
    for name, part in parts:
        try:
            rows += part()
        except RigError as error:
            unmade[name] = str(error)
            console.print(f"{name}: left out: {error}")
        write(rows, args.output, unmade)  # each part takes minutes
    absent = {f"persist / {name}": why for name, why in rivals()[1].items()} if RIVALS in args.rows else {}
    met = publish("everstep bench-storage", rows, args.output, {**unmade, **absent})
    _draw(args.output)
    return 0 if met and not unmade else 1


def _draw(results: Path) -> None:
    """Draw the picture beside the results, or say why there is none."""
    target = results.with_suffix(".png")
    try:
        draw_results = importlib.import_module("plot").draw_results
    except ImportError as error:
        console.print(f"no picture: {error}; pip install matplotlib")
        return
    draw_results([results], target)
    console.print(f"picture: {target}")


if __name__ == "__main__":
    sys.exit(main())
