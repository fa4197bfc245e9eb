"""The iterator of a loader: hands out prepared batches and moves the position by each."""

import time
from collections.abc import Callable
from typing import Any

from ..core.errors import UsageError
from . import data_wait
from .batch_maker import MadeBatch
from .position import Position
from .split_plan import Split
from .workers.batches import Batches

Callback = Callable[[], object]


class EpochIterator:
    """The rest of one epoch; moves the loader's position by each batch it returns, and to the next epoch at the end.

    After an error while a batch was prepared (in the dataset, a worker, an interrupt) it returns nothing more, and
    the next iter() of the loader begins with the batch that failed. What a signal handler throws at another moment
    (Ctrl-C) can come between counting a batch and the loop's body: whoever catches
    that should go on from a checkpoint, not from this loader.
    """

    def __init__(
        self,
        position: Position,
        token: int,
        split: Split,
        made: Batches | None,
        first_batch_callbacks: list[Callback],
    ) -> None:
        self._position = position
        self._token = token
        self._split = split
        self._made = made
        self._is_closed = False
        self._callbacks: list[Callback] | None = first_batch_callbacks
        self._is_finished = False

    def __iter__(self) -> "EpochIterator":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch: whatever collate_fn makes of samples, hence Any, as in torch.

        Raises:
            UsageError: a newer iter() or reset() took over, or this iterator ended with an error before.
        """
        if self._is_finished:
            raise StopIteration
        self._check_usable()
        asked_s = time.perf_counter()
        try:
            made = self._next_made()
        except BaseException:
            self._close()
            raise
        if made is None:
            self._is_finished = True
            self._close()
            self._position.finish(self._split.sample_count)
            raise StopIteration
        data_wait.add(time.perf_counter() - asked_s)
        part = self._split.part(made.cursor)
        assert part is not None
        self._position.hand(part, made.ids, made.left_out, is_stand_in=made.is_stand_in)
        return made.data

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return 0 if self._is_finished else self._split.step_count(self._position.cursor)

    def __del__(self) -> None:
        self._close()

    def _next_made(self) -> MadeBatch | None:
        """Return the next prepared batch, or None at the end of the epoch."""
        self._call_back()  # first: the trainer itself may make the batch, with random numbers
        for made in self._made or ():
            return made
        if self._split.part(self._position.cursor) is not None:
            raise UsageError(
                f"the dataset or collate_fn raised StopIteration at sample {self._position.cursor}",
                hint="raise another error: this one means the end of the epoch",
            )
        return None

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in tuple(callbacks or ()):
            callback()

    def _check_usable(self) -> None:
        if not self._position.is_newest(self._token):
            raise UsageError(
                "a newer iter() or reset() of this loader took over; this iterator cannot go on",
                hint="use one iterator of a loader at a time",
            )
        if self._is_closed:
            raise UsageError(
                f"this iterator ended with an error at sample {self._position.cursor}",
                hint="call iter() on the loader again: it begins with the batch that failed",
            )

    def _close(self) -> None:
        self._is_closed = True
        made, self._made = self._made, None
        self._position.release(self._token)
        if made is not None:
            made.close()
