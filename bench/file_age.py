"""Whether segments are written faster over files that have been written already than into new ones.

    python bench/file_age.py DIR [--segments 8] [--mib 128] [--pairs 9]

Each sample writes as many segments as a checkpoint has on a device, one after the other through one engine, and makes
them durable, as `persist_shard` does: new ones are created and reserved, recycled ones renamed to their new names.
"""

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from engine_io import MIB, arena
from paired import interleaved, ratios, row

from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.engine import Transfer, TransferKind
from everstep.checkpoint.linux import fallocate


def write(engine: AioEngine, arena_fd: int, paths: Sequence[Path], size_bytes: int, *, is_new: bool) -> float:
    """Return bytes per second from the first call to the last sync."""
    began_s = time.perf_counter()
    fds: list[int] = []
    for index, path in enumerate(paths):
        if is_new:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            fallocate(fd, size_bytes)
        else:
            path.with_suffix(".pool").rename(path)
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        fds.append(fd)
        engine.run(
            Transfer(
                kind=TransferKind.WRITE,
                arena_fd=arena_fd,
                arena_offset_bytes=index * size_bytes,
                file_fd=fd,
                file_offset_bytes=0,
                length_bytes=size_bytes,
            )
        )
    for fd in fds:
        os.ftruncate(fd, size_bytes)
    for fd in fds:
        os.fdatasync(fd)
        os.close(fd)
    return len(paths) * size_bytes / (time.perf_counter() - began_s)


def main() -> None:
    """Print the ratio recycled / new."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    place, size_bytes = args.folder / "everstep-file-age", args.mib * MIB
    place.mkdir()
    engine = AioEngine()
    new = [place / f"new{index}" for index in range(args.segments)]
    old = [place / f"old{index}" for index in range(args.segments)]
    try:
        with arena(args.segments * size_bytes) as arena_fd:
            write(engine, arena_fd, old, size_bytes, is_new=True)

            def into_new() -> float:
                speed = write(engine, arena_fd, new, size_bytes, is_new=True)
                for path in new:
                    path.unlink()
                os.sync()
                return speed

            def over_old() -> float:
                for path in old:
                    path.rename(path.with_suffix(".pool"))
                return write(engine, arena_fd, old, size_bytes, is_new=False)

            into_new()
            found = interleaved(over_old, into_new, args.pairs)
        result = row("recycled / new", ratios(found), goal=None)
        print(f"recycled / new: {result.value:.3f} ({result.low:.3f} to {result.high:.3f})")
        print(f"new: {sorted(theirs / 1e9 for _, theirs in found)[len(found) // 2]:.2f} GB/s")
    finally:
        engine.close()
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
