"""Turns of streams of a device that there is not."""

from typing import Any, cast

from everstep.hook.cuda_turns import Turns


class StubStream:
    """Notes, in a list that several share, behind what it waits."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: "StubStream") -> None:
        self._events.append(f"{self.name} behind {other.name}")

    def wait_event(self, end: str) -> None:
        self._events.append(f"{self.name} behind {end}")


def stub_turns(events: list[str] | None = None) -> Turns:
    """Return turns of two such streams."""
    turns: Any = Turns.__new__(Turns)
    shared = [] if events is None else events
    turns.main, turns._other = StubStream("main", shared), StubStream("other", shared)
    return cast("Turns", turns)
