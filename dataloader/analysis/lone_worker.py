"""What a sample takes of the processor while one worker has the machine to itself: cores slow each other otherwise."""

import time
from collections.abc import Callable, Iterator

from .instrument import AnyLoader, Instrument
from .worker_counters import WorkTotals

BATCHES, WARMUP = 16, 2
SECONDS_MAX = 2.0


def lone_cpu_s(
    loader: AnyLoader, instrument: Instrument, make: Callable[[AnyLoader], Iterator[object]]
) -> float | None:
    """Return the processor seconds per sample of one worker; None where the loader has fewer than two.

    The loader is iterated from its begin by `make`, with one worker; its own workers have nothing to do meanwhile.
    Those that it keeps (`persistent_workers`) stay, and are its workers again afterwards.
    """
    if loader.num_workers < 2:
        return None
    reset: object = getattr(loader, "reset", None)
    if callable(reset):
        reset()
    kept = {name: getattr(loader, name, None) for name in ("num_workers", "persistent_workers", "_iterator")}
    vars(loader).update(num_workers=1, persistent_workers=False)  # torch refuses to have it set
    try:
        with instrument.making():
            batches = make(loader)
        begin = instrument.totals()
        until_s = time.monotonic() + SECONDS_MAX
        for number, _ in enumerate(batches, start=1):
            if number <= WARMUP:
                begin = instrument.totals()
            elif number == WARMUP + BATCHES or (time.monotonic() > until_s and _counted(instrument, begin)):
                break
        work = instrument.totals().plus(begin, -1.0)
        return work.cpu_s / work.samples if work.samples else None
    finally:
        vars(loader).update(kept)
        instrument.close()


def _counted(instrument: Instrument, begin: WorkTotals) -> bool:
    """Tell whether anything was prepared since: after a long start of the worker it may all be from before."""
    return instrument.totals().samples > begin.samples
