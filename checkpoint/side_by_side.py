"""Executors for what happens on several devices at once."""

import threading
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
        _settle(future, fn, *args, **kwargs)
        try:
            return future
        finally:
            del future  # else it and a failure's traceback hold each other, with all that `fn` had in hand


class Apart(Executor):
    """Does each thing in a thread of its own that nobody waits for at the end of the process: it may hang for good."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Return a future that is done when `fn` is."""
        future = Future[_T]()
        threading.Thread(
            target=_settle,
            args=(future, fn, *args),
            kwargs=kwargs,
            name=f"everstep-{self._name}",
            daemon=True,
        ).start()
        return future


def _settle(future: Future[_T], fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> None:
    try:
        future.set_result(fn(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
        future.set_exception(error)
    finally:
        del future
