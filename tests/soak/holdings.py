"""What a daemon holds at a moment of a soak."""

import os
import re
from collections.abc import Iterator

from held_by import held_by
from leak_plan import Holding

_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/memfd:(\S+)", re.MULTILINE)
_STAGINGS, _BATCH = {"everstep-staging", "everstep-share-staging"}, "everstep-share-batch"


def read_holding(pid: int, at_s: float) -> Holding:
    """Return what process `pid` holds now."""
    held, opened = held_by(pid), list(_opened(pid))
    # One that is mapped and not open holds its memory as well; a duplicate of a descriptor holds no more of it.
    names = dict(opened) | {int(inode): name for inode, name in _MAPPED.findall(_maps(pid))}
    stagings = sum(name in _STAGINGS for name in names.values())
    batches = sum(name == _BATCH for name in names.values())
    coming_and_going = sum(name == _BATCH or name in _STAGINGS for _, name in opened)
    return Holding(
        at_s=at_s,
        pid=pid,
        memory_bytes=held.anonymous_bytes,
        descriptors=held.descriptors - coming_and_going,
        threads=held.threads,
        memfds=len(names) - stagings - batches,
        aio_contexts=held.aio_contexts,
        stagings=stagings,
        shared_batches=batches,
    )


def _opened(pid: int) -> Iterator[tuple[int, str]]:
    """Yield inode and name of the memfd behind each descriptor that has one."""
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):  # noqa: PTH208
        try:
            target, inode = os.readlink(f"{folder}/{number}"), os.stat(f"{folder}/{number}").st_ino  # noqa: PTH115, PTH116
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("/memfd:"):
            yield inode, target.removeprefix("/memfd:").partition(" ")[0]


def _maps(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as file:  # noqa: PTH123
        return file.read()
