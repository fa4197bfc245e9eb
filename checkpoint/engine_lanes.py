"""Several engines for one device behind the seam of one: so many transfers at once, so that between the end of one and
the beginning of the next the device has something to do."""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue

from ..core.errors import EngineLostError
from .engine import Engine, Transfer, TransferDone

logger = logging.getLogger(__name__)

LANE_COUNT = 2


class LanedEngine:
    """An `Engine` for any number of threads; those that find no free lane wait.

    What `make` raises goes on to the caller, and no lane is left then. A lane whose process has ended (killed for want
    of memory, as a rule) gives way to a new one, which moves the same bytes once more.
    """

    def __init__(self, make: Callable[[], Engine], lane_count: int = LANE_COUNT) -> None:
        self._make, self._lanes = make, _all_or_none(make, lane_count)
        self._free: SimpleQueue[Engine] = SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)
        self._taking_all = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the engines."""
        return self._lanes[0].name

    def run(self, transfer: Transfer) -> TransferDone:
        """Block until a lane was free and has moved every byte, see `Engine.run`."""
        lane = self._free.get()
        try:
            try:
                return lane.run(transfer)
            except EngineLostError:
                lane = self._replaced(lane)
                return lane.run(transfer)
        finally:
            self._free.put(lane)

    def _replaced(self, lost: Engine) -> Engine:
        """Return a new engine in the place of a lane that is not free; where none can be made it stays as it is."""
        new = self._make()
        self._lanes[self._lanes.index(lost)] = new
        logger.error("engine_replaced engine=%s: its process has ended; the kernel log may say why", new.name)
        lost.close()
        return new

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena, after the transfers under way."""
        with self._all():
            for lane in self._lanes:
                with contextlib.suppress(EngineLostError):  # with its process its maps have gone
                    lane.forget(arena_fd)

    def close(self) -> None:
        """Finish what is under way and release everything. Again is nothing."""
        with self._all():
            for lane in self._lanes:
                lane.close()

    @contextlib.contextmanager
    def _all(self) -> Generator[None]:
        """Hold every lane; one at a time may ask for that, or two would wait for each other's."""
        with self._taking_all:
            for _ in self._lanes:
                self._free.get()
            try:
                yield
            finally:
                for lane in self._lanes:
                    self._free.put(lane)


def _all_or_none(make: Callable[[], Engine], lane_count: int) -> list[Engine]:
    with contextlib.ExitStack() as made:
        lanes: list[Engine] = []
        for _ in range(lane_count):
            lanes.append(make())
            made.callback(lanes[-1].close)
        made.pop_all()
    return lanes
