"""Parallel calls of the product made one after the other, and ids drawn from a seed: one seed, one trace.

What ran in parallel is recorded as lanes of one section, so that the plan can stop each lane anywhere.
"""

import sys
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from model_storage import Recorder

from everstep.checkpoint import shard_write
from everstep.core import ids

_T = TypeVar("_T")
_EXECUTOR = "ThreadPoolExecutor"
_HASHING = "everstep-checksum"
"""What the pool's threads are called that take checksums."""


class _Sections:
    """Where the running call belongs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last = 0

    def new(self) -> int:
        """Return the number of a section that begins."""
        self._last += 1
        return self._last

    def run(self, section: int, lane: int, call: Callable[[], _T]) -> _T:
        """Make a call in a lane; one inside another belongs to the outer one."""
        recorder = self._recorder
        if recorder.section:
            return call()
        recorder.section, recorder.lane = section, lane
        try:
            return call()
        finally:
            recorder.section, recorder.lane = 0, 0


class _Late(Future[_T]):
    """What is called only when somebody asks for it."""

    def __init__(self, call: Callable[[], Future[_T]]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> _T:
        """See Future."""
        return self._call().result(timeout)


@contextmanager
def in_lanes(recorder: Recorder, seed: int) -> Generator[None]:
    """Let every pool of threads of the product run in lanes of `recorder`, and draw every id from `seed`."""
    sections = _Sections(recorder)

    class LaneExecutor(Executor):
        def __init__(self, *_: object, thread_name_prefix: str = "") -> None:
            self._section = sections.new()
            self._lane = 0
            self._is_late = thread_name_prefix == _HASHING and recorder.hashes_last

        def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
            self._lane += 1
            call = partial(self._run, self._lane, partial(fn, *args, **kwargs))
            return _Late(call) if self._is_late else call()

        def _run(self, lane: int, call: Callable[[], _T]) -> Future[_T]:
            future: Future[_T] = Future()
            try:
                future.set_result(sections.run(self._section, lane, call))
            except Exception as exc:  # noqa: BLE001 - as a pool does
                future.set_exception(exc)
            return future

    patched = {
        module: getattr(module, _EXECUTOR)
        for name, module in sorted(sys.modules.items())
        if name.startswith("everstep.checkpoint.") and hasattr(module, _EXECUTOR)
    }
    before: Any = ids.os
    together_s = shard_write.TOGETHER_S
    shard_write.TOGETHER_S = 0.0  # one after the other: whoever is waited for has not begun  # pyright: ignore[reportConstantRedefinition]
    for module in patched:
        setattr(module, _EXECUTOR, LaneExecutor)
    ids.os = SimpleNamespace(urandom=Random(seed).randbytes)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ids.os = before
        shard_write.TOGETHER_S = together_s  # pyright: ignore[reportConstantRedefinition]
        for module, executor in patched.items():
            setattr(module, _EXECUTOR, executor)
