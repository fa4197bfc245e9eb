"""Writes that a shard has stopped waiting for: while one is under way the kernel may read from the slot."""

import threading
from collections.abc import Callable


class LateWrites:
    """Those of one call; who gave the slot must not let it be used again before they are over. Thread-safe."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._count = 0
        self._calls: list[Callable[[], object]] = []

    def begin(self) -> None:
        """One is left behind."""
        with self._state:
            self._count += 1

    def end(self) -> None:
        """One is over, well or not: nothing of it reads from the slot any more."""
        with self._state:
            self._count -= 1
            calls, self._calls = (self._calls, []) if not self._count else ([], self._calls)
            self._state.notify_all()
        for call in calls:
            call()

    @property
    def are_over(self) -> bool:
        """Tell whether none is under way."""
        with self._state:
            return not self._count

    def wait(self) -> None:
        """Return when all are over."""
        with self._state:
            self._state.wait_for(lambda: not self._count)

    def when_over(self, call: Callable[[], object]) -> None:
        """Call this once when all are over: now, or by the thread that ends the last."""
        with self._state:
            if self._count:
                self._calls.append(call)
                return
        call()
