"""The iterator of a SharedLoader: takes batches from it and has them counted."""

from collections.abc import Callable
from typing import Any, Protocol

from ...core.errors import UsageError
from ..batch_maker import MadeBatch

Callback = Callable[[], object]


class Owner(Protocol):
    """The loader, as its iterator sees it."""

    def take(self, token: int) -> MadeBatch | None:
        """Return the next batch; None at the end of the epoch."""
        ...

    def count(self, made: MadeBatch) -> None:
        """Count a batch as handed out."""
        ...

    @property
    def batches_left(self) -> int:
        """The batches that are left of the present epoch."""
        ...

    def release(self, token: int) -> None:
        """Hear that an iterator will not go on."""
        ...


class WalkIterator:
    """The rest of one epoch. After an error the next iter() of the loader begins with the batch that failed."""

    def __init__(self, owner: Owner, token: int, first_batch_callbacks: list[Callback]) -> None:
        self._owner, self._token = owner, token
        self._callbacks: list[Callback] | None = first_batch_callbacks
        self._is_finished = self._has_failed = False

    def __iter__(self) -> "WalkIterator":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch: whatever collate_fn makes of samples, hence Any, as in torch.

        Raises:
            UsageError: a newer iter() or reset() took over, the loader was closed, or this iterator ended with an
                error before.
        """
        if self._is_finished:
            raise StopIteration
        if self._has_failed:
            raise UsageError(
                "this iterator ended with an error",
                hint="call iter() on the loader again: it begins with the batch that failed",
            )
        try:
            self._call_back()  # first: the trainer itself may make the batch, with random numbers
            made = self._owner.take(self._token)
            if made is not None:
                self._owner.count(made)
        except BaseException:
            self._has_failed = True
            self._owner.release(self._token)
            raise
        if made is None:
            self._is_finished = True
            self._owner.release(self._token)
            raise StopIteration
        return made.data

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return 0 if self._is_finished else self._owner.batches_left

    def __del__(self) -> None:
        self._owner.release(self._token)

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in tuple(callbacks or ()):
            callback()
