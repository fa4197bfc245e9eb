"""Parallel calls of the product made one after the other, and ids drawn from a seed: one seed, one trace.

What ran in parallel is recorded as lanes of one section, so that the plan can stop each lane anywhere.
"""

import sys
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from model_storage import Recorder

from everstep.core import ids

_T = TypeVar("_T")
_EXECUTOR = "ThreadPoolExecutor"


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


@contextmanager
def in_lanes(recorder: Recorder, seed: int) -> Generator[None]:
    """Let every pool of threads of the product run in lanes of `recorder`, and draw every id from `seed`."""
    sections = _Sections(recorder)

    class LaneExecutor(Executor):
        def __init__(self, *_: object, **__: object) -> None:
            self._section = sections.new()
            self._lane = 0

        def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
            future: Future[_T] = Future()
            self._lane += 1
            try:
                future.set_result(sections.run(self._section, self._lane, lambda: fn(*args, **kwargs)))
            except Exception as exc:  # noqa: BLE001 - as a pool does
                future.set_exception(exc)
            return future

    patched = {
        module: getattr(module, _EXECUTOR)
        for name, module in sorted(sys.modules.items())
        if name.startswith("everstep.checkpoint.") and hasattr(module, _EXECUTOR)
    }
    before: Any = ids.os
    for module in patched:
        setattr(module, _EXECUTOR, LaneExecutor)
    ids.os = SimpleNamespace(urandom=Random(seed).randbytes)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ids.os = before
        for module, executor in patched.items():
            setattr(module, _EXECUTOR, executor)
