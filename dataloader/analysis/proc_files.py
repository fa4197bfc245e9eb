"""What the kernel says of this process: bytes read, time spent waiting for a core, files held open or mapped."""

# ruff: noqa: PTH113, PTH115, PTH123, PTH208 - strings: after every batch of every worker

import contextlib
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

_NANO = 1e-9
_MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ [^x\n ]{4} [0-9a-f]+ \S+ \d+ +(/.*)$", re.MULTILINE)
"""A line of /proc/PID/maps whose pages are a file's and not executable."""


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


def open_files(known: Container[str] = ()) -> Iterator[str]:
    """Yield the paths of regular files that this process has open, but for those in `known`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing itself
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith("/") and path not in known and os.path.isfile(path):
                yield path


def mapped_files(known: Container[str] = ()) -> Iterator[str]:
    """Yield the paths of regular files that this process has mapped, not to be executed, but for those in `known`.

    The kernel takes half a millisecond for the few hundred mappings of a process with torch.
    """
    for path in set(_MAPPED.findall(_text("/proc/self/maps"))):
        if path not in known and os.path.isfile(path):
            yield path


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
