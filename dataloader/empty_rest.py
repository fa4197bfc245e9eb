"""Iterators over an epoch of which nothing may be left: its loop, or a state of it, ended after the last batch."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .epoch_iterator import EpochIterator
from .moves import Moves


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


class PassedOver:
    """Ends at once: it stands for a loop that ended before the checkpoint, and its loader is at the next epoch."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    def __iter__(self) -> "PassedOver":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Raise StopIteration."""
        self._moves.end()
        raise StopIteration

    def __len__(self) -> int:
        """Return 0."""
        return 0


class StreamRest:
    """Goes on with the next epoch where nothing is left of the one whose loop was left: a stream shows that by its end.

    A loader that runs beside another, in a zip or by next(), is never told that its epoch is over.
    """

    def __init__(self, loader: EpochLoader, rest: Iterator[Any], on_rest: Callable[[], object]) -> None:
        """Call `on_rest` where something is left."""
        self._loader, self._rest, self._on_rest = loader, rest, on_rest
        self._is_begun = False

    def __iter__(self) -> "StreamRest":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch of what is left, or of the next epoch."""
        if self._is_begun:
            return next(self._rest)
        for batch in self._rest:
            self._is_begun = True
            self._on_rest()
            return batch
        self._is_begun = True
        self._rest = iter(self._loader)
        return next(self._rest)
