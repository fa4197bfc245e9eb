"""The run's own part of the state: how far it is, and what it has learnt."""

from collections.abc import Callable
from typing import cast

from ..core.errors import StateMismatchError
from .state_protocol import Sink
from .stored_state import StoredState

RUN_COMPONENT = "everstep"


class RunState:
    """Steps, epochs and the end; a component like the user's objects.

    `learnt` gives what the frequency controller keeps for the next attempt.
    """

    name = RUN_COMPONENT

    def __init__(self, learnt: Callable[[], object]) -> None:
        self._learnt = learnt
        self.step = 0
        """Boundaries passed along the lineage."""
        self.beyond = 0
        """How much higher the number of the checkpoint that is taken is: after the last boundary there is one more."""
        self.epoch = 0
        """Epoch that `epochs()` is in, or begins with."""
        self.finished = False
        """`epochs()` came to its end."""
        self.is_last = False
        """The checkpoint that is taken is the last one of this attempt, which ends by itself."""
        self.restored_last = False
        """The restored checkpoint was such a one."""
        self.restored_learnt: object = None
        """What its frequency controller kept; None: nothing."""

    checks_bytes = False

    @property
    def number(self) -> int:
        """The number of the checkpoint that could be taken now."""
        return self.step + self.beyond

    def capture(self, sink: Sink) -> None:
        """Add the record."""
        place: dict[str, object] = {"step": self.step, "epoch": self.epoch, "finished": self.finished}
        sink.value(place | {"last": self.is_last, "pace": self._learnt()})

    def check(self, stored: StoredState) -> None:
        """Raise StateMismatchError unless the checkpoint holds it."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Take it over."""
        self.step, self.epoch, self.finished, self.restored_last, self.restored_learnt = self._read(stored)

    @classmethod
    def step_of(cls, stored: StoredState) -> int:
        """Return after how many boundaries of the lineage it was taken. Raises StateMismatchError as `check` does."""
        return cls._read(stored)[0]

    @staticmethod
    def _read(stored: StoredState) -> tuple[int, int, bool, bool, object]:
        values = stored.values(RUN_COMPONENT)
        try:
            document = cast("dict[str, int]", values)
            place = int(document["step"]), int(document["epoch"]), bool(document["finished"])
            return *place, bool(document.get("last", False)), document.get("pace")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StateMismatchError(
                f"the checkpoint's own record is not readable: {values!r:.200}"
            ) from error
