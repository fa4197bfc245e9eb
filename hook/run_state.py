"""The run's own part of the state: how far it is."""

from typing import cast

from ..core.errors import StateMismatchError
from .state_protocol import Sink
from .stored_state import StoredState

RUN_COMPONENT = "everstep"


class RunState:
    """Steps, epochs and the end; a component like the user's objects."""

    name = RUN_COMPONENT

    def __init__(self) -> None:
        self.step = 0
        """Boundaries passed along the lineage."""
        self.epoch = 0
        """Epoch that `epochs()` is in, or begins with."""
        self.finished = False
        """`epochs()` came to its end."""

    checks_bytes = False

    def capture(self, sink: Sink) -> None:
        """Add the numbers."""
        sink.value({"step": self.step, "epoch": self.epoch, "finished": self.finished})

    def check(self, stored: StoredState) -> None:
        """Raise StateMismatchError unless the checkpoint holds them."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Take them over."""
        self.step, self.epoch, self.finished = self._read(stored)

    @staticmethod
    def _read(stored: StoredState) -> tuple[int, int, bool]:
        values = stored.values(RUN_COMPONENT)
        try:
            document = cast("dict[str, int]", values)
            return int(document["step"]), int(document["epoch"]), bool(document["finished"])
        except (TypeError, KeyError, ValueError) as error:
            raise StateMismatchError(
                f"the checkpoint's own record is not readable: {values!r:.200}"
            ) from error
