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
        self.loader_epoch: int | None = None
        """That of the loader that leads, when `epoch` began; None: unknown, or there is none."""
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

    def go_on(self, loader_epoch: int, *, is_between: bool) -> None:
        """Begin `epochs()` with the leading loader in one of its epochs, or between two of them.

        Between two the epoch that it has passed over is over. In the middle it is not, however often that was: a script
        may train or evaluate on all of it several times in an epoch of the run.
        """
        if self.loader_epoch is None:
            self.epoch, self.loader_epoch = max(self.epoch, loader_epoch), loader_epoch
        elif is_between and loader_epoch > self.loader_epoch:
            self.next_epoch(loader_epoch)

    def next_epoch(self, loader_epoch: int | None) -> None:
        """The epoch is over; the leading loader, if any, begins the next one with one of its own."""
        self.epoch, self.loader_epoch = self.epoch + 1, loader_epoch

    def capture(self, sink: Sink) -> None:
        """Add the record."""
        place: dict[str, object] = {"step": self.step, "epoch": self.epoch, "finished": self.finished}
        if self.loader_epoch is not None:
            place["loader_epoch"] = self.loader_epoch
        sink.value(place | {"last": self.is_last, "pace": self._learnt()})

    def check(self, stored: StoredState) -> None:
        """Raise StateMismatchError unless the checkpoint holds it."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Take it over."""
        place, self.restored_last, self.restored_learnt = self._read(stored)
        self.step, self.epoch, self.finished, self.loader_epoch = place

    @classmethod
    def step_of(cls, stored: StoredState) -> int:
        """Return after how many boundaries of the lineage it was taken. Raises StateMismatchError as `check` does."""
        return cls._read(stored)[0][0]

    @staticmethod
    def _read(stored: StoredState) -> tuple[tuple[int, int, bool, int | None], bool, object]:
        values = stored.values(RUN_COMPONENT)
        try:
            document = cast("dict[str, int]", values)
            loader_epoch = document.get("loader_epoch")
            place = (
                int(document["step"]),
                int(document["epoch"]),
                bool(document["finished"]),
                None if loader_epoch is None else int(loader_epoch),
            )
            return place, bool(document.get("last", False)), document.get("pace")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StateMismatchError(
                f"the checkpoint's own record is not readable: {values!r:.200}"
            ) from error
