"""A handler of a signal runs in the middle of what it interrupts, and cannot wait for it: such a call is refused."""

import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType

from ..core.errors import UsageError


def named_calls(**methods: Callable[..., object]) -> dict[CodeType, str]:
    """Return, by their code, what methods are called for people."""
    return {
        method.__code__: f"run.{name}()"
        for name, method in methods.items()
        if isinstance(method, FunctionType)
    }


def refuse_within(owner: object, calls: Mapping[CodeType, str], what: str) -> None:
    """Return unless `what` was called while one of the owner's `calls` runs in this thread, further up the stack.

    The stack is asked: a note of what runs could be left behind by whoever is interrupted (Ctrl-C).

    Raises:
        UsageError: it was.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and who asks
        frame = frame.f_back if frame is not None else None
    while frame is not None:
        name = calls.get(frame.f_code)
        if name is not None and frame.f_locals.get("self") is owner:
            raise UsageError(
                f"{what} was called in the middle of {name}, as by a handler of a signal: it would wait for ever",
                hint="set a flag in the handler and call it in the training loop; run.checkpoint() may be called "
                "in a handler",
            )
        frame = frame.f_back
