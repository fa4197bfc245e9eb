"""Where a loader's iterator gets its batches from: made in the trainer, by a pool of workers, or pinned by a thread."""

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol, cast

import torch
import torch.utils.data._utils.pin_memory as torch_pinning

from ..batch_maker import AnyTicket, MadeBatch, Maker
from .pool import PoolWoken, WorkerPool


class Batches(Protocol):
    """The batches of one run of tickets, in their order."""

    def __iter__(self) -> Iterator[MadeBatch]:
        """Return itself."""
        ...

    def __next__(self) -> MadeBatch:
        """Return the next batch; what the dataset raises comes through."""
        ...

    def close(self) -> None:
        """Make no more; workers end unless they are kept for the next run. Idempotent."""
        ...


class TrainerBatches:
    """Batches that the trainer makes itself, when they are asked for."""

    def __init__(
        self,
        maker: Maker,
        tickets: Iterator[AnyTicket],
        pinner: "Pinner | None",
        came: Callable[[MadeBatch], None] | None = None,
    ) -> None:
        """Call `came` with each batch as it is made, before the next ticket is taken."""
        self._maker = maker
        self._tickets = tickets
        self._pinner = pinner
        self._came = came

    def __iter__(self) -> Iterator[MadeBatch]:
        """Return itself."""
        return self

    def __next__(self) -> MadeBatch:
        """Return the next batch."""
        made = self._maker.make(next(self._tickets))
        if self._came is not None:
            self._came(made)
        return made if self._pinner is None else self._pinner.pin(made)

    def close(self) -> None:
        """Make no more."""
        self._tickets = iter(())


class PoolBatches:
    """Batches of a pool, which ends with them unless it is kept."""

    def __init__(self, pool: WorkerPool, tickets: Iterator[AnyTicket], *, is_kept: bool) -> None:
        self.pool = pool
        self._is_kept = is_kept
        self._is_closed = False
        try:
            pool.begin(tickets)
        except BaseException:
            pool.close(deadline_s=0.0)
            raise

    def __iter__(self) -> Iterator[MadeBatch]:
        """Return itself."""
        return self

    def __next__(self) -> MadeBatch:
        """Return the next batch."""
        made = None if self._is_closed else self.pool.next_made()
        if made is None:
            raise StopIteration
        return made

    def close(self) -> None:
        """Drop what is being made; end the workers unless they are kept."""
        has_run, self._is_closed = not self._is_closed, True
        if not has_run:
            return
        if self._is_kept:
            self.pool.pause()
        else:
            self.pool.close()


class DrawnTickets:
    """Tickets that one thread draws, which the loop runs in, and another takes.

    Who draws from a user's sampler has the global generators meanwhile.
    """

    def __init__(self, tickets: Iterator[AnyTicket]) -> None:
        self._tickets = tickets
        self._drawn: deque[AnyTicket] = deque()
        self._is_handed_over = False

    def __iter__(self) -> Iterator[AnyTicket]:
        """Return itself."""
        return self

    def __next__(self) -> AnyTicket:
        """Return the next one; once handed over the oldest of those drawn: where there is none it was the last."""
        if not self._is_handed_over:
            return next(self._tickets)
        if not self._drawn:
            raise StopIteration
        return self._drawn.popleft()

    def hand_over(self, ahead: int) -> None:
        """From here on another thread takes them, so many before the `draw` that they would be drawn by."""
        self._is_handed_over = True
        self.draw(ahead)

    def draw(self, count: int = 1) -> None:
        """Draw the next ones, as far as there are any."""
        self._drawn.extend(islice(self._tickets, count))


class PinnedBatches:
    """Batches of a pool, each pinned by a thread while the one before is trained on. The thread never polls."""

    def __init__(self, batches: PoolBatches, pinner: "Pinner", drawn: DrawnTickets | None = None) -> None:
        """Start the thread, which alone uses the pool until `close`; `drawn`: what the pool takes, to be drawn here."""
        self._batches = batches
        self._pinner = pinner
        self._drawn = drawn
        if drawn is not None:
            drawn.hand_over(2)  # of a batch that waits to be taken, and of one that is pinned behind it
        self._changed = threading.Condition()
        self._ready: MadeBatch | BaseException | None = None
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="everstep-pin", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[MadeBatch]:
        """Return itself."""
        return self

    def __next__(self) -> MadeBatch:
        """Return the next batch."""
        if self._drawn is not None and not self._is_closed:
            try:
                self._drawn.draw()
            except BaseException as error:
                self.close()
                self._ready = error
                raise
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._is_closed)
            ready = self._ready
            if isinstance(ready, MadeBatch):
                self._ready = None
                self._changed.notify_all()
                return ready
        if ready is None:
            raise StopIteration
        raise ready

    def close(self) -> None:
        """Stop the thread, then do what closing the pool's batches does. In a forked child there is no thread."""
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            has_run, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        if has_run:
            if self._batches.pool.is_open:
                self._batches.pool.wake()
            self._thread.join()
            self._batches.close()

    def _run(self) -> None:
        self._pinner.begin()
        while True:
            try:
                ready = self._pinner.pin(next(self._batches))
            except PoolWoken:
                return
            except BaseException as exc:  # noqa: BLE001  the trainer raises it, StopIteration among them
                ready = exc
            with self._changed:
                self._changed.wait_for(lambda: self._ready is None or self._is_closed)
                self._ready = ready
                self._changed.notify_all()
                if self._is_closed or isinstance(ready, BaseException):
                    return


class Pinner:
    """Copies batches into page-locked memory, for the accelerator that is current when it is made."""

    def __init__(self) -> None:
        self._device = torch.accelerator.current_device_index()

    def begin(self) -> None:
        """Make the calling thread one that pins."""
        torch.set_num_threads(1)  # the copy is not to take all cores; this counts for the thread
        torch.accelerator.set_device_index(self._device)

    def pin(self, made: MadeBatch) -> MadeBatch:
        """Return the batch with its tensors pinned, as torch does it: also in containers, and by `pin_memory()`."""
        return made._replace(data=cast(Any, torch_pinning).pin_memory(made.data))


def pinner_for(wanted: bool, device: str) -> Pinner | None:
    """Return who pins the batches, if they are to be pinned; warns as torch does where they cannot be."""
    if wanted and device:
        warnings.warn(
            f"pin_memory_device is deprecated: the current accelerator is used, not {device!r}", stacklevel=5
        )
    if not wanted:
        return None
    if not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
            "used.",
            stacklevel=5,
        )
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None or accelerator.type == "mps" else Pinner()
