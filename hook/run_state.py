"""The run's own part of the state: how far it is, and what it has learnt."""

from collections.abc import Callable

import msgspec

from ..core.converter import Converter
from ..core.errors import StateMismatchError
from .state_protocol import Sink
from .stored_state import StoredState

RUN_COMPONENT = "everstep"

Places = dict[str, tuple[int, int]]
"""By loader: its epoch, and how much of that was handed out."""


class RunState:
    """Steps, epochs and the end; a component like the user's objects.

    `learnt` gives what the frequency controller keeps for the next attempt, `loop` the name of the loader in whose loop
    training is: empty for none, None where that is still the restored one.
    """

    name = RUN_COMPONENT

    def __init__(self, learnt: Callable[[], object], loop: Callable[[], str | None] = lambda: None) -> None:
        self._learnt, self._loop = learnt, loop
        self.step = 0
        """Boundaries passed along the lineage."""
        self.beyond = 0
        """How much higher the number of the checkpoint that is taken is: after the last boundary there is one more."""
        self.epoch = 0
        """Epoch that `epochs()` is in, or begins with."""
        self.loader_epoch: int | None = None
        """That of the loader that leads, when `epoch` began; None: unknown, or there is none."""
        self.begun: Places = {}
        """Where each loader stood when `epoch` began, as far as it is known."""
        self.loop = ""
        """The loader in whose loop the restored boundary has passed; empty: none, or unknown."""
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

    def next_epoch(self, loader_epoch: int | None, begun: Places) -> None:
        """The epoch is over; the leading loader, if any, begins the next one with one of its own."""
        self.epoch, self.loader_epoch, self.begun = self.epoch + 1, loader_epoch, begun

    def capture(self, sink: Sink) -> None:
        """Add the record."""
        place: dict[str, object] = {"step": self.step, "epoch": self.epoch, "finished": self.finished}
        if self.loader_epoch is not None:
            place["loader_epoch"] = self.loader_epoch
        loop = self._loop()
        place["loop"] = self.loop if loop is None else loop
        place["loaders"] = {name: list(begun) for name, begun in self.begun.items()}
        sink.value(place | {"last": self.is_last, "pace": self._learnt()})

    def check(self, stored: StoredState) -> None:
        """Raise StateMismatchError unless the checkpoint holds it."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Take it over."""
        document = self._read(stored)
        self.step, self.epoch, self.finished = document.step, document.epoch, document.finished
        self.loader_epoch, self.begun, self.loop = document.loader_epoch, document.loaders, document.loop
        self.restored_last, self.restored_learnt = document.last, document.pace

    @classmethod
    def step_of(cls, stored: StoredState) -> int:
        """Return after how many boundaries of the lineage it was taken. Raises StateMismatchError as `check` does."""
        return cls._read(stored).step

    @staticmethod
    def _read(stored: StoredState) -> "_Document":
        values = stored.values(RUN_COMPONENT)
        try:
            return _DOCUMENT.convert(values)
        except msgspec.ValidationError as error:
            raise StateMismatchError(
                f"the checkpoint's own record is not readable: {values!r:.200}"
            ) from error


class _Document(msgspec.Struct, kw_only=True):
    """As it is stored. Versions of before did not write all of it."""

    step: int
    epoch: int
    finished: bool
    loader_epoch: int | None = None
    loaders: Places = {}
    loop: str = ""
    last: bool = False
    pace: object = None


_DOCUMENT = Converter(_Document)
