"""A value that each process makes for itself: descriptors, locks, file systems. A fork inherits none."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_all: "weakref.WeakSet[PerProcess[Any]]" = weakref.WeakSet()


class PerProcess(Generic[T]):
    """`value()` of one process, made by the first thread that asks. After a fork the child lets its copy go.

    So a child never waits for a lock that a thread of its parent held, and closes the descriptors it inherited.
    """

    def __init__(self, make: Callable[[], T], *, keep_inherited: bool = False) -> None:
        """`make` runs once in each process that asks.

        Where `keep_inherited`, a child keeps its parent's value, unused: finalizers of network clients would wait for
        threads that a fork does not copy.
        """
        self._make = make
        self._inherited: list[T] | None = [] if keep_inherited else None
        self._lock = threading.Lock()
        self._made: list[T] = []
        _all.add(self)

    def value(self) -> T:
        """Return this process's value."""
        made = self._made
        if made:
            return made[0]
        with self._lock:
            if not self._made:
                self._made = [self._make()]
            return self._made[0]

    def let_go(self) -> None:
        """Forget the value; the next call of value() makes another one."""
        if self._inherited is not None:
            self._inherited += self._made
        self._lock = threading.Lock()
        self._made = []


def _after_fork() -> None:
    for each in list(_all):
        each.let_go()


os.register_at_fork(after_in_child=_after_fork)
