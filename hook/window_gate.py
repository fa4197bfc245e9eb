"""Which windows of a ring may be filled again: the daemon says which segments it has written, the copy thread waits."""

import threading
import time
from collections.abc import Callable

from ..core.errors import DaemonUnavailableError, DeadlineError, EverstepError

SILENCE_S = 600.0
"""A daemon that has written no segment for so long, though devices retry and are replaced, hangs."""
_LOOK_S = 0.1
"""How soon a wait notices that the daemon is gone: nothing else would wake it."""


class WindowGate:
    """One snapshot on its way through a ring. `written` and `fail` are called on the reader thread."""

    def __init__(self, is_lost: Callable[[], bool], *, silence_s: float = SILENCE_S) -> None:
        """`is_lost` tells whether the daemon that writes it is gone; `silence_s` is how long it may write nothing."""
        self._is_lost, self._silence_s = is_lost, silence_s
        self._changed = threading.Condition()
        self._written: set[int] = set()
        self._error: EverstepError | None = None
        self._is_over = False
        self.waited_s = 0.0
        """How long the copy thread has stood still."""

    def written(self, segment: int) -> None:
        """A segment is in its file: what had its window may be followed by another."""
        with self._changed:
            self._written.add(segment)
            self._changed.notify_all()

    def fail(self, error: EverstepError) -> bool:
        """The daemon has given the snapshot up. Tell whether who copies it will raise that: not once it has ended."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
            return not self._is_over

    def wait(self, segment: int) -> None:
        """Return when a segment is written.

        Raises:
            EverstepError: it never will be, as `fail` was told.
            DaemonUnavailableError: the daemon is gone.
            DeadlineError: it has written nothing for `silence_s` while it was waited for.
        """
        began_s = heard_s = time.perf_counter()
        with self._changed:
            known = len(self._written)
            while segment not in self._written:
                self._check()
                if len(self._written) > known:
                    known, heard_s = len(self._written), time.perf_counter()
                elif time.perf_counter() > heard_s + self._silence_s:
                    raise DeadlineError(
                        f"segment {segment} was not written: the daemon has written none for {self._silence_s:.0f} s",
                        hint="a device may hang: see `everstep status`, the daemon's log and the kernel's",
                    )
                self._changed.wait(_LOOK_S)
        self.waited_s += time.perf_counter() - began_s

    def end(self) -> None:
        """All is copied; from now on `fail` is too late. Raises what `wait` does."""
        with self._changed:
            self._check()
            self._is_over = True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_lost():
            raise DaemonUnavailableError("the daemon went away while it wrote the snapshot as it was copied")
