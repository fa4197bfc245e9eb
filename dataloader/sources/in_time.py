"""Calls that may hang, with a deadline: in a thread of their own, which is left behind where they do."""

import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

LEFT_MAX = 32
"""Calls that may hang at a time in one process; storage that swallows so many answers none."""

_left: list[threading.Thread] = []


def in_time(call: Callable[[], T], limit_s: float) -> T:
    """Return what `call` returns, or raise what it raises; TimeoutError once `limit_s` have passed.

    A call that hangs cannot be ended: its thread stays until it returns, and holds up nobody, nor the process's end.
    """
    _left[:] = [thread for thread in _left if thread.is_alive()]
    if len(_left) >= LEFT_MAX:
        raise TimeoutError(f"{len(_left)} earlier calls have not returned yet")
    outcome: list[tuple[object, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as exc:  # noqa: BLE001  raised below, in the thread that asked
            outcome.append((None, exc))

    thread = threading.Thread(target=run, name="everstep-in-time", daemon=True)
    thread.start()
    thread.join(max(0.0, limit_s))
    if not outcome:
        _left.append(thread)
        raise TimeoutError(f"no answer within {limit_s:.3g} s")
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return cast(T, value)
