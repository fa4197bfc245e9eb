"""What the steps that count cost, beside their time: sums of the workers' counters and of processor time."""

import time

from .device_clock import CopyWatch, settle
from .instrument import Instrument
from .worker_counters import WorkTotals


class Window:
    """Sums over the times between `open` and `close`."""

    def __init__(self, instrument: Instrument, copies: CopyWatch) -> None:
        self._instrument = instrument
        self._copies = copies
        self._begun: tuple[WorkTotals, float, float] | None = None
        self.work = WorkTotals()
        self.cpu_s = 0.0
        """Processor time of this process, all threads."""
        self.copy_s = 0.0
        """Of copies to the device."""

    def follow(self, instrument: Instrument) -> None:
        """Count what another loader's workers do, from the next `open` on."""
        self.close()
        self._instrument = instrument

    def open(self) -> None:
        """Begin to count, once the device has done everything."""
        self.close()
        settle()
        self._begun = self._instrument.totals(), time.process_time(), self._copies.total_s()

    def close(self) -> None:
        """Count no more; nothing if nothing was counted."""
        if self._begun is None:
            return
        work, cpu_s, copy_s = self._begun
        self._begun = None
        self.work = self.work.plus(self._instrument.totals().plus(work, -1.0))
        self.cpu_s += time.process_time() - cpu_s
        settle()
        self.copy_s += self._copies.total_s() - copy_s
