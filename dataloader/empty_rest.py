"""The iterator over an epoch of which nothing is left: a state that was taken after the last batch."""

from collections.abc import Iterator
from typing import Any, Protocol

from .epoch_iterator import EpochIterator


class EpochLoader(Protocol):
    """What is needed of a loader."""

    @property
    def epoch(self) -> int:
        """The epoch that the next loop belongs to."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of that epoch."""
        ...


class EmptyRest:
    """Ends at once, as the epoch does; or goes on with the next one where `set_epoch` was called before it was used.

    Lightning makes its iterator before it says which epoch comes: after a checkpoint at the end of an epoch it says
    the next one, and goes on with the iterator that it has.
    """

    def __init__(self, loader: EpochLoader, rest: EpochIterator) -> None:
        self._loader, self._epoch = loader, loader.epoch
        self._rest: Iterator[Any] = rest
        self._is_used = False

    def __iter__(self) -> "EmptyRest":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Raise StopIteration, or return the next batch of the epoch that was named since."""
        if not self._is_used and self._loader.epoch != self._epoch:
            self._rest = iter(self._loader)
        self._is_used = True
        return next(self._rest)

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return len(self._rest) if isinstance(self._rest, EpochIterator) else 0
