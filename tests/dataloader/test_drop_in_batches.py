"""In the place of torch's DataLoader: the same batches of the same samples, with and without workers.

docs/loader-drop-in.md says what of upstream's behaviour applies, and what differs on purpose.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drop_in import assert_same, ours, torchs
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from everstep.core.errors import UsageError
from everstep.dataloader.workers.batches import Pinner

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")

workers = pytest.mark.parametrize("num_workers", [0, 2])


class Samples(Dataset[Any]):
    """Sample i is `make(i)`."""

    def __init__(self, make: Callable[[int], object], count: int = 10) -> None:
        self._make = make
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> object:
        return self._make(index)


class Point(NamedTuple):
    x: object
    label: object


KINDS: dict[str, Callable[[int], object]] = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "large tensor": lambda i: torch.full((64, 64), i, dtype=torch.int16),
    "scalar tensor": torch.tensor,
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": str,
    "bytes": lambda i: b"x" * i,
    "dict": lambda i: {"a": i, "b": {"c": torch.ones(i % 1 + 2)}, "name": f"sample {i}"},
    "named tuple": lambda i: Point(torch.tensor([i]), str(i)),
    "nested": lambda i: [(i, [float(i)]), {"x": (i,)}],
    "array": lambda i: np.full((4,), i, dtype=np.float32),
    "large array": lambda i: np.full((100, 100), i),
    "array scalar": np.float64,
    "array of no dimension": np.array,
    "bfloat16": lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    "empty tensor": lambda i: torch.empty(0, 3),
}


@workers
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_every_kind_collate_as_in_torch(kind: str, num_workers: int) -> None:
    data = Samples(KINDS[kind])
    pairs = zip(ours(data, batch_size=4, num_workers=num_workers), torchs(data, batch_size=4), strict=True)
    for batch, other in pairs:
        assert_same(batch, other)


@workers
@pytest.mark.parametrize("kind", ["tensor", "str", "dict", "named tuple", "array", "float"])
def test_without_batching_samples_are_converted_as_in_torch(kind: str, num_workers: int) -> None:
    data = Samples(KINDS[kind])
    pairs = zip(
        ours(data, batch_size=None, num_workers=num_workers), torchs(data, batch_size=None), strict=True
    )
    for batch, other in pairs:
        assert_same(batch, other)


class Wrapped:
    """A batch type of one's own, with its own way to be pinned."""

    def __init__(self, samples: Sequence[torch.Tensor]) -> None:
        self.whole = torch.stack(list(samples))
        self.is_pinned = False

    def pin_memory(self) -> "Wrapped":
        self.is_pinned = True
        return self


@workers
def test_a_batch_type_of_ones_own(num_workers: int) -> None:
    batches = list(
        ours(Samples(KINDS["large tensor"]), batch_size=5, num_workers=num_workers, collate_fn=Wrapped)
    )
    assert [type(batch) for batch in batches] == [Wrapped] * 2
    assert batches[1].whole[:, 0, 0].tolist() == [5, 6, 7, 8, 9]


def test_a_batch_type_of_ones_own_is_pinned_by_its_method() -> None:
    pinner = Pinner.__new__(Pinner)  # made where there is a device
    loader = ours(Samples(KINDS["tensor"]), batch_size=5, collate_fn=Wrapped)
    made = loader._maker().make(next(iter_tickets(loader)))
    assert not made.data.is_pinned  # type: ignore[attr-defined]
    assert pinner.pin(made).data.is_pinned  # type: ignore[attr-defined]


def iter_tickets(loader: Any) -> Any:
    from everstep.dataloader.sampler import EpochPlan, tickets

    return tickets(EpochPlan(order=loader._position.order, epoch=0, cursor=0, split=loader._split()))


@workers
def test_collate_may_return_none(num_workers: int) -> None:
    loader = ours(
        Samples(KINDS["int"]), batch_size=4, num_workers=num_workers, collate_fn=lambda _batch: None
    )
    assert list(loader) == [None, None, None]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("count", "batch_size"), [(0, 3), (1, 3), (9, 3), (10, 3), (10, 1), (10, 100), (10, None)]
)
def test_len_is_the_number_of_batches(count: int, batch_size: int | None, drop_last: bool) -> None:
    if batch_size is None and drop_last:
        with pytest.raises(ValueError, match="drop_last"):
            ours(Samples(KINDS["int"], count), batch_size=None, drop_last=True)
        return
    arguments = {"batch_size": batch_size, "drop_last": drop_last}
    loader = ours(Samples(KINDS["int"], count), **arguments)
    assert len(loader) == len(list(loader)) == len(torchs(Samples(KINDS["int"], count), **arguments))


@workers
def test_shuffled_batches_hold_each_sample_once_in_another_order_each_epoch(num_workers: int) -> None:
    loader = ours(Samples(KINDS["int"], 40), batch_size=7, shuffle=True, num_workers=num_workers)
    epochs = [[int(i) for batch in loader for i in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@workers
def test_a_dataset_that_grew_is_refused_and_its_loader_keeps_its_length(num_workers: int) -> None:
    data = [torch.ones(2) for _ in range(4)]
    loader = ours(data, num_workers=num_workers)
    data.append(torch.ones(2))
    assert len(loader) == 4
    assert len(torchs(data)) == 5
    with pytest.raises(UsageError, match="had 4 samples when the loader was made and has 5 now"):
        iter(loader)


@workers
def test_a_sampler_of_lists_is_refused_and_a_batch_sampler_does_its_work(num_workers: int) -> None:
    class Bulk(Samples):
        def __getitems__(self, indices: list[int]) -> list[object]:
            asked.append(tuple(indices))
            return [self[index] for index in indices]

    asked: list[tuple[int, ...]] = []
    lists = [[3, 1], [0, 2, 4]]
    with pytest.raises(UsageError, match="the sampler yielded list"):
        list(ours(Bulk(KINDS["int"]), batch_size=None, sampler=lists, num_workers=num_workers))
    loader = ours(Bulk(KINDS["int"]), batch_sampler=lists, num_workers=num_workers, augment_seed=False)
    assert [batch.tolist() for batch in loader] == lists
    if num_workers == 0:
        assert asked == [(3, 1), (0, 2, 4)]


@workers
def test_datasets_of_datasets(num_workers: int) -> None:
    tensors = TensorDataset(torch.arange(12), torch.arange(12.0))
    stacked = StackDataset(tensors, TensorDataset(torch.arange(12)))
    subsets = random_split(tensors, [8, 4], generator=torch.Generator().manual_seed(1))
    for data in (tensors, stacked, *subsets, Subset(tensors, [3, 5, 7]), ConcatDataset([tensors, tensors])):
        for batch, other in zip(
            ours(data, batch_size=5, num_workers=num_workers), torchs(data, batch_size=5), strict=True
        ):
            assert_same(batch, other)


@workers
def test_samples_of_different_shapes_are_torchs_error(num_workers: int) -> None:
    loader = ours(Samples(torch.zeros), batch_size=4, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(loader)


@workers
def test_samples_that_cannot_be_collated_are_torchs_error(num_workers: int) -> None:
    loader = ours(Samples(lambda _i: object()), batch_size=4, num_workers=num_workers)
    with pytest.raises(TypeError, match="default_collate: batch must contain tensors"):
        list(loader)


def test_batches_of_workers_can_be_written_and_outlive_the_loader() -> None:
    batches = list(ours(Samples(KINDS["large tensor"]), batch_size=5, num_workers=2))
    for number, batch in enumerate(batches):
        assert batch[:, 0, 0].tolist() == list(range(5 * number, 5 * number + 5))
        batch.add_(1)
        assert math.isclose(float(batch[0, 0, 0]), 5 * number + 1)


def test_batches_of_workers_share_memory_with_processes_of_the_trainer() -> None:
    batch = next(iter(ours(Samples(KINDS["large tensor"]), batch_size=5, num_workers=1)))
    assert batch.is_shared()
    assert "/memfd:everstep-batch" in Path("/proc/self/maps").read_text()


def test_a_batch_of_more_samples_than_a_message_holds() -> None:
    data = TensorDataset(torch.arange(60_000))
    loader = ours(data, batch_size=30_000, num_workers=1, augment_seed=False)
    assert [batch.tolist() for (batch,) in loader] == [list(range(30_000)), list(range(30_000, 60_000))]


def test_a_batch_of_more_tensors_than_descriptors() -> None:
    loader = ours(
        Samples(lambda i: torch.full((4096,), float(i)), 300), batch_size=300, num_workers=1, collate_fn=list
    )
    (batch,) = loader
    assert [float(each[-1]) for each in batch] == [float(i) for i in range(300)]


def test_collate_runs_where_the_batch_is_made() -> None:
    def collate(batch: list[int]) -> tuple[object, bool]:
        return default_collate(batch), torch.utils.data.get_worker_info() is not None

    assert {flag for _, flag in ours(Samples(KINDS["int"]), num_workers=2, collate_fn=collate)} == {True}
    assert {flag for _, flag in ours(Samples(KINDS["int"]), collate_fn=collate)} == {False}
