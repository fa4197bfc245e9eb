"""What `attach` gives a script under `everstep analyze`: its loop runs, and nothing is restored or saved.

The steps of an analysis are no training: some get the same few batches again and again. In the run's store they would
be the newest checkpoint.
"""

import contextlib
import logging
from collections.abc import Generator

from .history import History
from .pace import Pace
from .report import CostBook, Report
from .restore import Restored
from .run import Run
from .run_state import RunState

logger = logging.getLogger(__name__)


class AnalysedRun(Run):
    """One rank of a run that counts its steps and epochs, and no more."""

    def __init__(self, name: str, objects: dict[str, object], pace: Pace) -> None:
        """Make one without what a run's own needs: a link to a daemon, ranks, a snapshotter."""
        self.name, self.attempt = name, 0
        self.rank, self.world_size = 0, 1
        self._pace = pace
        self._state = RunState(lambda: pace.memory)
        self._history = History()
        self._costs = CostBook()
        self._objects = objects
        self._unusable, self._closed = None, False
        logger.info("run_analysed run=%s: nothing is restored or saved", name)

    def restore(self) -> Restored | None:
        """Return None: the objects stay as the script made them."""
        return None

    def step(self) -> None:
        """Count a boundary."""
        self._check_usable()
        self._state.step += 1

    def checkpoint(self) -> None:
        """Nothing is taken."""

    def lease(self, seconds: float, *, ends: bool = True) -> None:
        """The analysis ends the script by itself."""

    @contextlib.contextmanager
    def mutating(self) -> Generator[None]:
        """There is no copy to wait for."""
        yield

    def report(self) -> Report:
        """Return a report of no checkpoints."""
        return self._costs.report(self._pace.decision, self._pace.slower_steps)

    def wait(self, deadline_s: float = 0.0) -> bool:
        """Return True: nothing is under way."""
        return True

    def _start(self) -> None:
        self._check_usable()

    def _close(self, error: BaseException | None = None) -> None:
        self._closed = True
