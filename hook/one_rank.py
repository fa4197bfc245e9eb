"""The ranks of a run of one process, which agrees with itself."""

from collections import deque
from collections.abc import Callable, Mapping

from ..checkpoint.frequency_types import Decision
from ..core.errors import EverstepError
from ..core.ids import CheckpointId
from .end_machine import Ask, Requests
from .pace import Pace
from .rank_protocol import Listener
from .steering_machine import Steering

TOLD_KEPT = 256
"""Checkpoints whose end was told: what this rank does later with one of them is told to nobody again."""


class OneRank:
    """A run of one process."""

    rank = 0
    world_size = 1
    lost: EverstepError | None = None
    silent = ""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._asked = deque[Ask]()
        """Not taken yet: a handler of a signal may ask in the middle of `is_due`."""
        self._requests = Requests()
        self._ends_here = ""
        """What the boundary that was asked about last had heard of an end; what comes later is for the next one.

        It stays: who leaves the last boundary by an exception, and goes on, ends with the next one.
        """
        self._listener: Listener | None = None
        self._failed = deque[CheckpointId](maxlen=TOLD_KEPT)
        self._due_step: int | None = None
        """The newest boundary that was to get a checkpoint."""

    def agree_settings(self, settings: Mapping[str, str], error: EverstepError | None) -> None:
        """Raise the error: there is nobody to differ."""
        if error is not None:
            raise error

    def agree_attempt(self, known: int, error: EverstepError | None) -> int:
        """Return the next attempt, or raise the error."""
        if error is not None:
            raise error
        return known + 1

    def agree_begun(self, error: EverstepError | None) -> None:
        """Raise the error, if there is one."""
        if error is not None:
            raise error

    def gather(self, topic: str, value: object, *, deadline_s: float | None = None) -> list[object]:
        """Return the value alone."""
        del topic, deadline_s
        return [value]

    def start(self, step: int, listener: Listener) -> None:
        """Remember whom to tell."""
        del step
        self._listener = listener

    def is_due(self, step: int) -> bool:
        """Tell whether the step is due by its pace, or was asked for."""
        while self._asked:
            self._requests.add(self._asked[0])
            self._asked.popleft()  # behind it: who is interrupted between them asks twice, which is once
        ask = self._requests.open
        self._ends_here = self._ends_here or (ask.end if ask is not None else "")
        due = bool(self._pace.due(step, step + 1)) or ask is not None
        if self._ends_here and self._listener is not None:
            due = self._listener.saves_last_boundary()
        elif due:
            self._due_step = step
        self._requests.answered(ask)
        return due

    def passed(self, step: int) -> tuple[int, ...]:
        """Return the newest one, if it is one before."""
        found = self._due_step
        if found is None or found >= step:
            return ()
        self._due_step = None
        return (found,)

    @property
    def decision(self) -> Decision:
        """The pace's own."""
        return self._pace.decision

    def ask_for_checkpoint(self, ask: Ask) -> None:
        """Make the next boundary due."""
        self._asked.append(ask)

    def steer(self, steering: Steering) -> None:
        """Rank 0 is here."""
        self._pace.steer(steering)

    def end_after(self, step: int) -> str:
        """Whatever boundary comes first is the last one."""
        del step
        return self._ends_here

    def ends_in(self, left_s: float) -> None:
        """Nobody else is to know."""

    def gone(self, rank: int) -> None:
        """Nobody else is there to go."""

    def confirm_end(self, ask: Ask) -> None:
        """One rank is all."""
        self.ask_for_checkpoint(ask)

    def saves_after_all(self, has_time: bool, until_s: float) -> bool:
        """By its own time."""
        del until_s
        return has_time

    def sealed(self, checkpoint: CheckpointId) -> None:
        """Sealed here is sealed everywhere."""
        if self._listener is not None:
            self._listener.sealed_everywhere(checkpoint)

    def committed(self, checkpoint: CheckpointId) -> None:
        """Committed here is complete."""
        if self._listener is not None:
            self._listener.complete(checkpoint)

    def failed(self, checkpoint: CheckpointId, reason: str) -> None:
        """Failed here is failed: once, though the daemon's end is noticed by who trains and by who copies."""
        if self._listener is not None and checkpoint not in self._failed:
            self._failed.append(checkpoint)
            self._listener.incomplete(checkpoint, reason, in_memory=True)

    def ends(self) -> None:
        """Nobody else is to end."""

    def close(self, *, stays: Callable[[], bool] | None = None) -> None:
        """Nothing to end."""
