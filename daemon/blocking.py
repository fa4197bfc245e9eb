"""Calling blocking work from the event loop without ever abandoning a buffer or descriptor that it uses."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..core.errors import LimitError

P = ParamSpec("P")
T = TypeVar("T")


def started_threads(
    count: int, name: str, initializer: Callable[[], None] = lambda: None
) -> ThreadPoolExecutor:
    """Return an executor whose threads all run: what `submit` takes is never left behind for want of one.

    Raises:
        LimitError: not so many can be started.
    """
    made = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initializer)
    meeting = threading.Barrier(count)
    try:
        for begun in [made.submit(meeting.wait) for _ in range(count)]:
            begun.result()
    except RuntimeError as error:
        meeting.abort()
        made.shutdown()
        raise LimitError(
            f"{count} threads {name} cannot be started: {error}",
            hint="raise pids.max of the cgroup (TasksMax=) or `ulimit -u`",
        ) from error
    return made


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(...)` run in the default executor; a caller, however often cancelled, waits for it to end."""
    return await in_executor(None, lambda: work(*args, **kwargs))


async def in_executor(executor: Executor | None, work: Callable[[], T]) -> T:
    """Return `work()` run in `executor`; like `in_thread`, cancelling detaches only after the work has ended."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # again: the first one is raised when it may be
                await asyncio.wait([future])
        raise
    finally:
        del (
            future
        )  # else frame, future and a failure's traceback hold each other, with all that the work had in hand
