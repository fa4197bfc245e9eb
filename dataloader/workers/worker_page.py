"""The page that a worker and its trainer share: where the worker is, and which tickets are void.

Three cells of 64 bits in a memfd, each written by one side only; a store of eight aligned bytes is seen whole. The
worker writes before each sample, so that the trainer knows after a SIGKILL what was being read. No lock: a dead worker
can hold none.
"""

import mmap
import os

from .phase import Phase

_FLOOR, _NUMBER, _PLACE = range(3)
STOP = (1 << 63) - 1
"""As a floor: every ticket is void, the worker is to end."""


class WorkerPage:
    """One side's view of the page; `close` unmaps it."""

    def __init__(self, fd: int) -> None:
        """Map the page behind a descriptor, which the caller keeps and closes."""
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._cells = memoryview(self._map).cast("q")

    @staticmethod
    def create() -> int:
        """Return a descriptor of a new page, zeroed but for the phase START; the caller closes it."""
        fd = os.memfd_create("everstep-worker", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        page = WorkerPage(fd)
        page.at(-1, Phase.START)
        page.close()
        return fd

    @property
    def floor(self) -> int:
        """The least number that is not void; the trainer's cell."""
        return self._cells[_FLOOR]

    @floor.setter
    def floor(self, number: int) -> None:
        self._cells[_FLOOR] = number

    @property
    def number(self) -> int:
        """The ticket that the worker is at; the worker's cell."""
        return self._cells[_NUMBER]

    @property
    def place(self) -> int:
        """The place in that ticket, or a Phase; the worker's cell."""
        return self._cells[_PLACE]

    def at(self, number: int, place: int) -> None:
        """Say where the worker is."""
        self._cells[_NUMBER] = number
        self._cells[_PLACE] = place

    def at_place(self, place: int) -> None:
        """Say where in the same ticket it is."""
        self._cells[_PLACE] = place

    def close(self) -> None:
        """Unmap the page; the view is not used any more."""
        self._cells.release()
        self._map.close()
