"""What the kernel says of this process: bytes read, time spent waiting for a core, files held open or mapped."""

# ruff: noqa: PTH113, PTH115, PTH123, PTH208 - strings: after every batch of every worker

import os
from collections.abc import Iterator
from dataclasses import dataclass

_NANO = 1e-9


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Bytes that this process has read so far."""

    calls: int
    """By read and its kin, from memory, storage, pipes."""
    storage: int
    """That storage had to deliver for it, mapped files included."""


def read_bytes() -> ReadBytes:
    """Return what this process has read; zeros where the kernel does not count it."""
    text = _text("/proc/self/io")
    found = dict(line.split(": ") for line in text.splitlines())
    return ReadBytes(int(found.get("rchar", 0)), int(found.get("read_bytes", 0)))


def queued_s() -> float:
    """Return how long the calling thread has waited for a core; 0 where the kernel does not count it."""
    words = _text("/proc/thread-self/schedstat").split()
    return int(words[1]) * _NANO if len(words) == 3 else 0.0


def held_files() -> Iterator[str]:
    """Yield the paths of regular files that this process has open or mapped, programs and libraries too."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this listing itself
            continue
        if target.startswith("/") and os.path.isfile(target):
            yield target
    for line in _text("/proc/self/maps").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/") and "x" not in words[1] and os.path.isfile(words[5]):
            yield words[5]


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
