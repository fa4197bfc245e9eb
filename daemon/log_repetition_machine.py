"""Bounds how often the same event of the same source is logged, and counts what is left out. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

PER_WINDOW = 60
WINDOW_S = 60.0
SOURCES_MAX = 1024
"""Beyond it the oldest source is forgotten: a client that makes sources up costs a bounded memory."""

Source = tuple[str, ...]
"""Event, and what tells one source of it from another."""


@dataclass(slots=True)
class _Window:
    began_s: float
    written: int = 0
    left_out: int = 0


class LogRepetition:
    """Asked before each line."""

    def __init__(self, per_window: int = PER_WINDOW, window_s: float = WINDOW_S) -> None:
        """Let so many lines of a source pass in each window of time."""
        self._per_window, self._window_s = per_window, window_s
        self._windows: OrderedDict[Source, _Window] = OrderedDict()

    def admit(self, source: Source, now_s: float) -> int | None:
        """Return how many lines of this source were left out since its last one; None: leave this one out, too."""
        window = self._windows.get(source)
        if window is None or now_s - window.began_s >= self._window_s:
            left_out = window.left_out if window is not None else 0
            self._windows[source] = _Window(now_s, written=1)
            self._windows.move_to_end(source)
            while len(self._windows) > SOURCES_MAX:
                self._windows.popitem(last=False)
            return left_out
        if window.written < self._per_window:
            window.written += 1
            return 0
        window.left_out += 1
        return None

    def ended(self, now_s: float) -> list[tuple[Source, int]]:
        """Return, once, the sources whose window has ended with lines left out and no line since."""
        ended: list[tuple[Source, int]] = []
        for source, window in list(self._windows.items()):
            if now_s - window.began_s < self._window_s:
                break  # in the order in which they began
            del self._windows[source]
            if window.left_out:
                ended.append((source, window.left_out))
        return ended
