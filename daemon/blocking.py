"""Calling blocking work from the event loop without ever abandoning a buffer or descriptor that it uses."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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
