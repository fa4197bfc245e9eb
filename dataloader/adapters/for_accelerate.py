"""A loader that Hugging Face Accelerate's `prepare` leaves whole.

`accelerator.prepare` builds a new loader around the dataset and the sampler that it finds, which would go round the
state and the ledger. One that says `_is_accelerate_prepared` is registered and otherwise left alone: that is how
Accelerate avoids to wrap a loader twice. What its own loaders do besides is done here: batches go to the device, and
`GradientState` hears of the last batch of a loop. They fetch one batch ahead to know it, and so their state has to be
put back by one; we know how many batches are left, so that nothing is fetched ahead.
"""

from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch

from ..empty_rest import EmptyRest, PassedOver, StreamRest
from ..epoch_iterator import EpochIterator
from ..loader import DataLoader as ResumableLoader
from ..stream import StreamIterator

T_co = TypeVar("T_co", covariant=True)


class GradientState(Protocol):
    """Accelerate's record of which loader is being iterated."""

    def _add_dataloader(self, dataloader: object) -> None: ...

    def _remove_dataloader(self, dataloader: object) -> None: ...


class Accelerator(Protocol):
    """What is needed of `accelerate.Accelerator`."""

    device: torch.device
    device_placement: bool
    gradient_state: GradientState
    num_processes: int
    process_index: int


class DataLoader(ResumableLoader[T_co]):
    """`everstep.DataLoader` for Accelerate: `accelerator.prepare(loader)` returns it as it is.

    Arguments as there, and `accelerator`; `uneven` is "step", so that `gather_for_metrics` finds as many rows on every
    process. `batch_size` is that of one process, as with Accelerate's own loaders.
    `accelerator.save_state` and `load_state` carry its state: call `load_state` before the loop. The ledger is not part
    of them; `everstep.attach(..., loader=loader)` keeps both.
    """

    _is_accelerate_prepared: ClassVar[bool] = True
    use_stateful_dataloader: ClassVar[bool] = True
    """Makes Accelerate save and load the state."""

    def __init__(self, *arguments: Any, accelerator: object, **more: Any) -> None:
        self._accelerator = cast(Accelerator, accelerator)
        more.setdefault("rank", self._accelerator.process_index)
        more.setdefault("world_size", self._accelerator.num_processes)
        more.setdefault("uneven", "step")
        self.end_of_dataloader = False
        self.remainder = -1
        """Of the last batch, the samples of all processes if some process repeats one; else -1: nothing to cut off."""
        super().__init__(*arguments, **more)

    def __iter__(self) -> "PlacedIterator":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return an iterator over the rest of the epoch whose batches are on the accelerator's device."""
        batches = super().__iter__()
        self.end_of_dataloader, self.remainder = False, -1
        return PlacedIterator(self, batches, self._accelerator)

    def rows_if_padded(self) -> int:
        """Return how many samples the last step has, over all processes, if some process repeats one; else -1."""
        if self._user_sampler is not None:  # each process has its own: none pads
            return -1
        turns_before = self._position.holes.turns_before
        start, stop = map(turns_before, self.span)
        return stop - start if stop - start < self.world_size else -1

    @property
    def total_batch_size(self) -> int:
        """Samples of a full step, over all processes."""
        return (self.batch_size or 1) * self.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch, over all processes."""
        return len(cast("list[object]", self.dataset))


class PlacedIterator:
    """Moves each batch to the device, and tells Accelerate which one is the last."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: EpochIterator | EmptyRest | PassedOver | StreamIterator | StreamRest,
        accelerator: Accelerator,
    ) -> None:
        self._loader, self._batches, self._accelerator = loader, batches, accelerator
        self._send = cast(Any, import_module("accelerate.utils")).send_to_device
        self._is_known = True
        accelerator.gradient_state._add_dataloader(loader)  # pyright: ignore[reportPrivateUsage]  there is no other

    def __iter__(self) -> "PlacedIterator":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            batch = next(self._batches)
        except BaseException:
            self._end()
            raise
        if not isinstance(self._batches, StreamIterator | StreamRest):
            self._loader.end_of_dataloader = len(self._batches) == 0
            is_last = self._loader.end_of_dataloader
            self._loader.remainder = self._loader.rows_if_padded() if is_last else -1
        if not self._accelerator.device_placement:
            return batch
        return self._send(batch, self._accelerator.device)

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return len(cast(EpochIterator, self._batches))

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_known:
            self._is_known = False
            self._accelerator.gradient_state._remove_dataloader(self._loader)  # pyright: ignore[reportPrivateUsage]
