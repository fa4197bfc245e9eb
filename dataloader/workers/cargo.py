"""What a worker is started with; under spawn and forkserver it travels beside the process's own start.

`multiprocessing` writes a new process's arguments into a pipe, so that starting workers with a large dataset goes one
by one at the pace of their imports. Here they lie in a memfd, and the worker unpickles them itself: what fails there
is reported to the trainer with its traceback. What cannot be pickled at all is named.
"""

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, cast

from ...core.errors import UsageError
from ..batch_maker import Maker
from .channel import memfd

_DEPTH_MAX = 6


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker prepares batches with, and as whom."""

    maker: Maker
    init: Callable[[int], None] | None
    worker: int
    worker_count: int
    base_seed: int


class Cargo:
    """A job on its way to one worker process: itself after a fork, else packed when the process is pickled."""

    def __init__(self, job: WorkerJob) -> None:
        self._job: WorkerJob | None = job
        self._fd = -1

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the job into a memfd, which stays open until `close`; UsageError names what cannot be pickled."""
        assert self._job is not None
        body = _dump(self._job)
        self.close()
        self._fd = memfd(len(body))
        with mmap.mmap(self._fd, len(body)) as area:
            area[:] = body
        return _arrived, (DupFd(self._fd), len(body))

    def close(self) -> None:
        """Close the memfd, if there is one; the worker has its own descriptor of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def open(self) -> WorkerJob:
        """Return the job, in the worker; whatever its unpickling raises comes through."""
        if self._job is None:
            with mmap.mmap(self._fd, os.fstat(self._fd).st_size, prot=mmap.PROT_READ) as area:
                self.close()
                self._job = cast(WorkerJob, cast(Any, ForkingPickler).loads(area))
        return self._job


def _arrived(handle: Any, _size_bytes: int) -> Cargo:
    cargo = Cargo.__new__(Cargo)
    cargo.__dict__.update(_job=None, _fd=handle.detach())
    return cargo


def _dump(job: WorkerJob) -> memoryview:
    """Return the pickled job, or raise UsageError with the path to what cannot be pickled."""
    try:
        return ForkingPickler.dumps(job)
    except Exception as exc:
        parts = (
            ("dataset", job.maker.dataset),
            ("collate_fn", job.maker.collate),
            ("worker_init_fn", job.init),
        )
        path, value = _culprit(parts, 0) or ("the loader", job)
        raise UsageError(
            f"{path} cannot be pickled, which starting workers by spawn or forkserver needs: "
            f"{type(value).__module__}.{type(value).__qualname__}, {_first_line(exc)}",
            hint="define it at the top level of a module, make it when a worker first needs it, or give "
            'multiprocessing_context="fork"',
        ) from exc


def _culprit(parts: Iterable[tuple[str, object]], depth: int) -> tuple[str, object] | None:
    """Return the innermost part that cannot be pickled, by its path."""
    for path, value in parts:
        try:
            ForkingPickler.dumps(value)
        except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
            inner = _culprit(_parts_of(path, value), depth + 1) if depth < _DEPTH_MAX else None
            return inner or (path, value)
    return None


def _parts_of(path: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", each) for key, each in cast("dict[object, object]", value).items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{i}]", each) for i, each in enumerate(cast("list[object]", value))]
    owned = cast("dict[str, object]", getattr(value, "__dict__", {}))
    return [] if isinstance(value, type) else [(f"{path}.{name}", each) for name, each in owned.items()]


def _first_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
