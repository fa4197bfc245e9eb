"""Executors for what happens on several devices at once."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def side_by_side(count: int, name: str) -> Executor:
    """Return an executor that does so many things at once, in threads of its own called `name`, or one thing here."""
    return ThreadPoolExecutor(count, thread_name_prefix=name) if count > 1 else Here()


class Here(Executor):
    """Does each thing at once, in the thread that asks for it: making one for it and waking up again takes longer."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Return a future that is done."""
        future = Future[_T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
            future.set_exception(error)
        try:
            return future
        finally:
            del future  # else it and a failure's traceback hold each other, with all that `fn` had in hand
