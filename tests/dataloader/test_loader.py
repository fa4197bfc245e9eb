"""The loader in one process: exactly once, resumable anywhere, and it leaves the trainer's random numbers alone."""

import copy
import io
import json
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterDataPipe, Subset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import DataLoader, Ledger
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order

State = dict[str, object]


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, n: int, print_: str | None = None) -> None:
        self.n = n
        self.print = print_

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index

    def fingerprint(self) -> str | None:
        return self.print


class Noisy(Dataset[list[float]]):
    """A sample is its number and what the three global generators give."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def numbers(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()


def make(
    n: int, batch: int = 4, seed: int = 3, rank: int = 0, world: int = 1, **more: object
) -> DataLoader[int]:
    build = cast(Callable[..., DataLoader[int]], DataLoader)
    return build(Numbers(n), batch_size=batch, shuffle=True, seed=seed, rank=rank, world_size=world, **more)


def whole_order(n: int, seed: int, epoch: int) -> list[int]:
    return order(OrderSpec(kind=OrderKind.PERMUTED, seed=seed), epoch, n).at(np.arange(n)).tolist()


# -- order and exactly once -----------------------------------------------------------------------------------------


def test_two_epochs_in_the_documented_order() -> None:
    loader = make(10)
    assert len(loader) == 3
    for epoch in range(2):
        assert loader.epoch == epoch
        assert [numbers(batch) for batch in loader] == [
            whole_order(10, 3, epoch)[start : start + 4] for start in (0, 4, 8)
        ]
    assert loader.state_dict() == {
        "format": "everstep-loader/1",
        "dataset": {"fingerprint": "Numbers", "n": 10},
        "order": {"algo": "permuted-1", "seed": 3, "block": 0},
        "epoch": 2,
        "cursor": 0,
        "holes": [],
    }
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_without_shuffle_the_order_is_sequential() -> None:
    loader = DataLoader(Numbers(5), batch_size=2)
    assert [numbers(batch) for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.state_dict()["order"] == {"algo": "sequential-1", "seed": 0, "block": 0}


class Job:
    """The ranks of one attempt, run in step; killed by being dropped, resumed from what `boundary` stored."""

    def __init__(self, n: int, batch: int, world: int, stored: tuple[State, list[State]] | None) -> None:
        self.loaders = [make(n, batch=batch, rank=rank, world=world) for rank in range(world)]
        if stored is None:
            return
        state, ledgers = stored
        for rank, loader in enumerate(self.loaders):
            loader.load_state_dict(state)
            loader.ledger = Ledger(loader.seed)
            for each in ledgers[rank::world]:
                loader.ledger.merge(Ledger.from_state(each))

    def boundary(self) -> tuple[State, list[State]]:
        """What a checkpoint holds: the one state of all ranks, a ledger per rank; through JSON."""
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert len(set(states)) == 1
        return json.loads(states[0]), [
            json.loads(json.dumps(loader.ledger.state())) for loader in self.loaders
        ]

    def batches(self) -> Iterator[list[list[int]]]:
        """Yield per step the ids of each rank, less padding; every rank has a batch at every step."""
        for batches in zip(*self.loaders, strict=True):
            parts = [numbers(batch) for batch in batches]
            weights = [loader.weight for loader in self.loaders]
            assert sum(weights) == pytest.approx(len(weights))
            yield [[] if weight == 0 else part for part, weight in zip(parts, weights, strict=True)]


@given(
    n=st.integers(0, 40),
    batch=st.integers(1, 5),
    attempts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(0, 4)), max_size=6),
    final_world=st.integers(1, 4),
)
def test_exactly_once_whatever_is_killed_and_resumed(
    n: int, batch: int, attempts: list[tuple[int, int, int]], final_world: int
) -> None:
    """`attempts`: (ranks, steps up to the checkpoint, steps after it that the crash undoes)."""
    stored: tuple[State, list[State]] | None = None
    trained: dict[int, list[int]] = {}
    for world, kept_steps, undone_steps in [*attempts, (final_world, 10**6, 0)]:
        job = Job(n, batch, world, stored)
        stored = stored or job.boundary()
        is_last, steps = kept_steps == 10**6, 0
        while job.loaders[0].epoch < 3 and (is_last or steps < kept_steps + undone_steps):
            epoch = job.loaders[0].epoch
            for parts in job.batches():
                if steps < kept_steps:
                    trained.setdefault(epoch, []).extend(i for part in parts for i in part)
                    stored = job.boundary()
                steps += 1
                if not is_last and steps >= kept_steps + undone_steps:
                    break
        if is_last:
            stored = job.boundary()
    assert trained == {epoch: whole_order(n, 3, epoch) for epoch in range(3) if n}
    assert stored is not None
    state, ledgers = stored
    assert Ledger.verify([Ledger.from_state(each) for each in ledgers], state) == []
    assert (state["epoch"], state["cursor"]) == (3, 0)


def test_uneven_end_weights_and_padding() -> None:
    loaders = [make(9, batch=2, rank=rank, world=4) for rank in range(4)]
    last = [list(loader)[-1] for loader in loaders]
    assert [len(numbers(batch)) for batch in last] == [1, 1, 1, 1]
    assert [loader.weight for loader in loaders] == [4, 0, 0, 0]
    assert [loader.ledger.tally(0).padding_count for loader in loaders] == [0, 1, 1, 1]
    assert Ledger.verify([loader.ledger for loader in loaders], loaders[0].state_dict()) == []


@pytest.mark.parametrize(("more", "kept"), [({"uneven": "drop"}, 10), ({"drop_last": True}, 8)])
def test_dropped_ends_are_declared(more: dict[str, object], kept: int) -> None:
    build = cast(Callable[..., DataLoader[int]], make)
    loaders = [build(11, batch=2, rank=rank, world=2, **more) for rank in range(2)]
    seen = [numbers(batch) for loader in loaders for batch in loader]
    assert len({len(list(loader)) for loader in loaders}) == 1
    assert sum(len(each) for each in seen) == kept
    assert loaders[0].ledger.tally(0).dropped_count == 11 - kept
    assert Ledger.verify([loader.ledger for loader in loaders], loaders[0].state_dict()) == []


def test_uneven_error_refuses_before_the_epoch() -> None:
    loader = make(11, batch=2, world=2, uneven="error")
    with pytest.raises(UsageError, match="ends with 3 samples for 2 ranks"):
        iter(loader)
    assert [len(numbers(batch)) for batch in make(10, batch=2, world=2, uneven="error")] == [2, 2, 1]


def test_an_empty_dataset_has_empty_epochs() -> None:
    loader = make(0)
    assert list(loader) == list(loader) == []
    assert loader.epoch == 2


# -- state ----------------------------------------------------------------------------------------------------------


def test_state_after_the_last_batch_ends_the_epoch_and_after_its_end_begins_the_next() -> None:
    first = make(8)
    states = [first.state_dict() for _ in first]
    after_last, after_end = states[-1], first.state_dict()
    assert (after_last["epoch"], after_last["cursor"]) == (0, 8)
    assert (after_end["epoch"], after_end["cursor"]) == (1, 0)
    second = make(8)
    second.load_state_dict(after_last)
    assert list(second) == []
    assert second.epoch == 1
    third = make(8)
    third.load_state_dict(after_end)
    assert numbers(next(iter(third))) == numbers(next(iter(second))) == whole_order(8, 3, 1)[:4]


def test_state_counts_what_the_loop_got_and_is_fresh() -> None:
    loader = make(20)
    before = loader.state_dict()
    batches = iter(loader)
    assert loader.state_dict() == before
    next(batches)
    after = loader.state_dict()
    assert (before["cursor"], after["cursor"]) == (0, 4)
    cast(list[object], after["holes"]).append("edited")
    cast(State, after["order"])["seed"] = 99
    assert loader.state_dict()["holes"] == []
    assert loader.seed == 3


def test_load_keeps_no_reference_to_the_callers_dict() -> None:
    given_state = make(20).state_dict() | {"cursor": 8}
    loader = make(20)
    loader.load_state_dict(given_state)
    copy = json.loads(json.dumps(given_state))
    given_state["cursor"] = 0
    assert loader.state_dict() == copy
    list(loader)
    assert given_state == {**copy, "cursor": 0}


def test_state_through_torch_save() -> None:
    first = make(20)
    for _ in zip(range(2), first, strict=False):
        pass
    stored = io.BytesIO()
    torch.save({"loader": first.state_dict(), "ledger": first.ledger.state()}, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    second = make(20)
    second.load_state_dict(loaded["loader"])
    second.ledger = Ledger.from_state(loaded["ledger"])
    assert [i for batch in second for i in numbers(batch)] == whole_order(20, 3, 0)[8:]
    assert Ledger.verify([second.ledger], second.state_dict()) == []


def test_an_empty_state_changes_nothing() -> None:
    loader = make(8)
    loader.load_state_dict({})
    assert numbers(next(iter(loader))) == whole_order(8, 3, 0)[:4]


def test_the_states_seed_wins_and_the_ledger_follows() -> None:
    loader = make(8, seed=3)
    loader.load_state_dict(make(8, seed=5).state_dict())
    assert loader.seed == loader.ledger.seed == 5
    assert numbers(next(iter(loader))) == whole_order(8, 5, 0)[:4]


def test_a_state_of_another_dataset_is_refused_by_name() -> None:
    with pytest.raises(LoaderStateError, match=r"'Numbers' with 9 samples.*'Numbers' with 8"):
        make(8).load_state_dict(make(9).state_dict())
    ours, theirs = DataLoader(Numbers(8, "v2")), DataLoader(Numbers(8, "v1"))
    with pytest.raises(LoaderStateError, match=r"'v1' with 8 samples.*'v2' with 8"):
        ours.load_state_dict(theirs.state_dict())


def test_a_state_of_another_kind_of_order_is_refused() -> None:
    with pytest.raises(LoaderStateError, match=r"'sequential-1', this loader 'permuted-1'"):
        make(8).load_state_dict(DataLoader(Numbers(8)).state_dict())


@pytest.mark.parametrize("garbage", [{"cursor": 3}, {"format": "everstep-loader/9"}, [], None, "state"])
def test_garbage_is_refused_and_changes_nothing(garbage: object) -> None:
    loader = make(8)
    before = loader.state_dict()
    with pytest.raises(LoaderStateError):
        loader.load_state_dict(cast(State, garbage))
    assert loader.state_dict() == before


def test_load_after_iteration_began_is_refused() -> None:
    state = make(8).state_dict()
    loader = make(8)
    batches = iter(loader)
    with pytest.raises(LoaderStateError, match="iteration has begun"):
        loader.load_state_dict(state)
    next(batches)
    del batches
    with pytest.raises(LoaderStateError, match="epoch 0 stands at sample 4"):
        loader.load_state_dict(state)
    loader.reset()
    loader.load_state_dict(state)
    list(loader)
    loader.load_state_dict(state)  # between epochs
    assert loader.epoch == 0


def test_a_ledger_of_another_seed_is_refused() -> None:
    loader = make(8, seed=3)
    loader.ledger = Ledger(4)
    with pytest.raises(LoaderStateError, match="under seed 4"):
        iter(loader)


def test_fingerprint_of_bytes_and_of_nonsense() -> None:
    class Bytes(Numbers):
        def fingerprint(self) -> str | None:
            return cast(str, b"\x01\xff")

    class Nonsense(Numbers):
        def fingerprint(self) -> str | None:
            return cast(str, 1.5)

    assert cast(State, DataLoader(Bytes(1)).state_dict()["dataset"])["fingerprint"] == "01ff"
    with pytest.raises(UsageError, match=r"Nonsense\.fingerprint\(\) returned float"):
        DataLoader(Nonsense(1)).state_dict()


# -- epochs and iterators -------------------------------------------------------------------------------------------


def test_after_a_break_the_next_loop_goes_on_and_says_so_once() -> None:
    loader = make(12)
    seen = list[int]()
    for batch in loader:
        seen += numbers(batch)
        break
    with pytest.warns(UserWarning, match="goes on with epoch 0 at sample 4"):
        seen += numbers(next(iter(loader)))
    seen += [i for batch in loader for i in numbers(batch)]
    assert seen == whole_order(12, 3, 0)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


@pytest.mark.parametrize("more", [{}, {"drop_last": True}])
def test_a_loop_that_takes_len_batches_and_never_hears_of_the_end(more: dict[str, object]) -> None:
    """As Lightning does: then set_epoch names the next one, or the next iter() begins it."""
    build = cast(Callable[..., DataLoader[int]], make)
    loader, count = build(10, **more), 3 - len(more)
    for epoch in range(3):
        if epoch == 1:
            loader.set_epoch(1)
        batches = iter(loader)
        seen = [i for _ in range(count) for i in numbers(next(batches))]
        assert seen == whole_order(10, 3, epoch)[: len(seen)]
        assert (loader.epoch, loader.state_dict()["cursor"]) == (epoch, len(seen))
    loader.set_epoch(3)
    assert loader.state_dict()["cursor"] == 0
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_reset_starts_over_and_the_ledger_tells_the_truth() -> None:
    loader = make(8)
    next(iter(loader))
    loader.reset()
    assert [i for batch in loader for i in numbers(batch)] == whole_order(8, 3, 0)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == [
        "epoch 0: 8 samples should have been handed out, the ledger counts 12"
    ]


def test_set_epoch() -> None:
    loader = make(8)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "cursor": 4})
    loader.set_epoch(2)
    assert loader.state_dict()["cursor"] == 4
    cast("torch.utils.data.DistributedSampler[int]", loader.sampler).set_epoch(5)
    assert (loader.epoch, loader.state_dict()["cursor"]) == (5, 0)
    for batch in loader:
        loader.set_epoch(5)
        if loader.state_dict()["cursor"] == 8:
            continue
        with pytest.raises(UsageError, match=r"set_epoch\(6\) while epoch 5 is being iterated at sample"):
            loader.set_epoch(6)
        assert set(numbers(batch)) <= set(range(8))
    assert loader.epoch == 6
    with pytest.raises(UsageError, match="whole number"):
        loader.set_epoch(-1)


def test_only_the_newest_iterator_goes_on() -> None:
    loader = make(12)
    old = iter(loader)
    first = numbers(next(old))
    with pytest.warns(UserWarning, match="goes on"):
        new = iter(loader)
    with pytest.raises(UsageError, match="newer iter"):
        next(old)
    del old  # collecting it must not end the new one
    assert first + [i for batch in new for i in numbers(batch)] == whole_order(12, 3, 0)
    with pytest.raises(StopIteration):
        next(new)


def test_reset_ends_a_running_iterator() -> None:
    loader = make(12)
    batches = iter(loader)
    next(batches)
    loader.reset()
    with pytest.raises(UsageError, match="reset"):
        next(batches)


class Failing(Numbers):
    """Raises at sample 0 as long as `error` is set."""

    error: BaseException | None = None

    def __getitem__(self, index: int) -> int:
        if index == 0 and self.error is not None:
            raise self.error
        return index


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError("disk gone"), OSError, "disk gone"),
        (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
        (StopIteration(), UsageError, "raised StopIteration at sample 4"),
    ],
)
def test_after_an_error_the_next_iter_begins_with_the_batch_that_failed(
    error: BaseException, raised: type[BaseException], message: str
) -> None:
    data = Failing(8)
    seed = next(seed for seed in range(100) if 0 in whole_order(8, seed, 0)[4:])
    loader = DataLoader(data, batch_size=4, shuffle=True, seed=seed)
    data.error = error
    batches = iter(loader)
    seen = numbers(next(batches))
    with pytest.raises(raised, match=message):
        next(batches)
    with pytest.raises(UsageError, match="ended with an error at sample 4"):
        next(batches)
    data.error = None
    with pytest.warns(UserWarning, match="goes on with epoch 0 at sample 4"):
        seen += [i for batch in loader for i in numbers(batch)]
    assert seen == whole_order(8, seed, 0)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_first_batch_callbacks_run_before_the_first_batch_of_each_iter() -> None:
    loader, calls = make(8), list[object]()
    remove = loader.add_first_batch_callback(lambda: calls.append(loader.state_dict()["cursor"]))
    batches = iter(loader)
    assert calls == []
    next(batches)
    assert calls == [0]
    list(batches)
    assert calls == [0]
    list(loader)
    assert calls == [0, 0]
    remove()
    list(loader)
    assert calls == [0, 0]


def test_first_batch_callbacks_run_where_an_epoch_is_resumed_at_its_end() -> None:
    """What was drawn since is to be undone before the next epoch draws, not at its first batch."""
    loader = make(8)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    resumed, calls = make(8), list[str]()
    resumed.load_state_dict(loader.state_dict())
    resumed.add_first_batch_callback(lambda: calls.append("undone"))
    assert list(resumed) == []
    assert calls == ["undone"]


# -- random numbers -------------------------------------------------------------------------------------------------


def global_draws() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_iterating_draws_nothing_from_the_global_generators() -> None:
    random.gauss()
    np.random.randn()  # both keep half of a pair: that belongs to the state too
    before = global_draws()
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
    for _ in range(2):
        for _ in loader:
            assert global_draws() == before


def noise(epoch: int, **arguments: object) -> dict[float, list[float]]:
    """What the samples of one rank drew, by sample."""
    loader = cast(Callable[..., DataLoader[list[float]]], DataLoader)(Noisy(), seed=1, **arguments)
    loader.set_epoch(epoch)
    return {
        row[0]: row[1:] for batch in loader for row in torch.stack(cast(list[torch.Tensor], batch)).T.tolist()
    }


def test_augmentation_depends_on_seed_epoch_and_sample_only() -> None:
    alone = noise(0, batch_size=10)
    assert noise(0, batch_size=3, shuffle=True) == alone
    assert noise(0, rank=0, world_size=2) | noise(0, rank=1, world_size=2) == alone
    drawn = [value for epoch in (0, 1) for values in noise(epoch).values() for value in values]
    assert len(set(drawn)) == len(drawn) == 60


def test_augment_seed_off_draws_as_torch_does() -> None:
    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(4)]
    torch.manual_seed(5)
    (batch,) = DataLoader(cast("Dataset[float]", TorchNoise()), batch_size=4, augment_seed=False)
    assert cast(torch.Tensor, batch).tolist() == pytest.approx(expected)


class TorchNoise(Numbers):
    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, index: int) -> int:
        return cast(int, torch.rand(()))


class Batched(Numbers):
    """Has torch's batched access; may answer with too little."""

    missing = 0

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(indices)
        return [-index for index in indices][self.missing :]


@pytest.mark.parametrize("augment_seed", [True, "batch", False])
def test_batched_access_is_used_and_checked(augment_seed: bool | Literal["batch"]) -> None:
    """For whole batches where the samples need no seed each."""
    data = Batched(4)

    def batches(dataset: Dataset[int]) -> list[list[int]]:
        return [numbers(batch) for batch in DataLoader(dataset, batch_size=2, augment_seed=augment_seed)]

    assert batches(data) == [[0, -1], [-2, -3]]
    assert data.calls == ([[0], [1], [2], [3]] if augment_seed is True else [[0, 1], [2, 3]])
    data.calls.clear()
    assert batches(Subset(data, [1, 3])) == [[-1, -3]]
    assert data.calls == ([[1], [3]] if augment_seed is True else [[1, 3]])
    data.missing = 1
    with pytest.raises(UsageError, match=r"asked for [12] samples? and returned [01]"):
        batches(data)


class Transformed(Dataset[tuple[int, float]]):
    """As a Hugging Face dataset with `set_transform`: one call draws for all samples of a batch."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        drawn = torch.rand(len(indices)) + np.random.random() + random.random()
        return list(zip(indices, drawn.tolist(), strict=True))


def drawn_by(
    batch_size: int, ranks: int = 1, workers: int = 0, augment_seed: bool | Literal["batch"] = True
) -> dict[int, float]:
    """Return what each sample of an epoch drew, over all ranks."""
    found: dict[int, float] = {}
    for rank in range(ranks):
        loader = DataLoader(
            Transformed(), batch_size, True, seed=3, rank=rank, world_size=ranks, num_workers=workers,
            multiprocessing_context="fork" if workers else None, augment_seed=augment_seed,
        )  # fmt: skip
        for ids, values in cast("Iterable[tuple[torch.Tensor, torch.Tensor]]", loader):
            found |= zip(ids.tolist(), values.tolist(), strict=True)
    return found


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_augmentation_of_batched_access_depends_on_nothing_but_the_sample() -> None:
    expected = drawn_by(4)
    assert len(expected) == 22
    assert expected == drawn_by(3) == drawn_by(1) == drawn_by(4, ranks=3) == drawn_by(3, workers=2)


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_augmentation_by_batches_depends_on_the_batch_and_not_on_workers() -> None:
    """What augment_seed="batch" costs; it is said in docs/data.md."""
    expected = drawn_by(4, augment_seed="batch")
    assert expected == drawn_by(4, workers=2, augment_seed="batch")
    assert expected != drawn_by(3, augment_seed="batch")


def test_no_other_way_to_seed() -> None:
    with pytest.raises(UsageError, match="augment_seed='sample'"):
        DataLoader(Numbers(3), augment_seed=cast(Any, "sample"))


def test_subset_of_a_plain_dataset_keeps_a_seed_per_sample() -> None:
    (whole,) = DataLoader(cast("Dataset[object]", Noisy()), batch_size=10)
    (part,) = DataLoader(cast("Dataset[object]", Subset(Noisy(), range(5))), batch_size=5)
    columns = zip(cast(list[torch.Tensor], whole), cast(list[torch.Tensor], part), strict=True)
    assert all(torch.equal(left[:5], right) for left, right in columns)


# -- a drop-in ------------------------------------------------------------------------------------------------------


def test_attributes_are_torchs() -> None:
    data = Numbers(10)
    loader = DataLoader(data, 4, True, drop_last=True)
    assert isinstance(loader, TorchDataLoader)
    assert loader.dataset is data
    assert (loader.batch_size, loader.drop_last, loader.num_workers, len(loader)) == (4, True, 0, 2)
    assert (loader.rank, loader.world_size, loader.uneven, loader.weight) == (0, 1, "weight", 1.0)
    with pytest.raises(UsageError, match="cannot be iterated apart"):
        iter(cast("list[int]", loader.sampler))
    assert len(cast("list[int]", loader.sampler)) == 10


def test_batches_equal_torchs() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    ours, theirs = DataLoader(data, batch_size=4), TorchDataLoader(data, batch_size=4)
    for left, right in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_no_batching_and_own_collate() -> None:
    assert list(DataLoader(Numbers(3), batch_size=None)) == [0, 1, 2]
    assert list(DataLoader(Numbers(3), batch_size=None, collate_fn=str)) == ["0", "1", "2"]
    assert list(DataLoader(Numbers(3), batch_size=2, collate_fn=sum)) == [1, 2]


def test_the_generators_seed_is_used_and_the_generator_left_alone() -> None:
    generator = torch.Generator().manual_seed(77)
    before = generator.get_state()
    loader = DataLoader(Numbers(8), batch_size=8, shuffle=True, generator=generator)
    (batch,) = loader
    assert numbers(batch) == whole_order(8, 77, 0)
    assert torch.equal(generator.get_state(), before)


class SaysWhereItStands(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.filterwarnings("ignore:.*does not contain a `Shuffler`")
@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (Numbers(3), {"shuffle": "block"}, "got 'block'"),
        (Numbers(3), {"shuffle": "blocks"}, r"Numbers has no block_sizes\(\)"),
        (Numbers(3), {"in_order": False}, "in_order=False"),
        (object(), {}, "has no __getitem__"),
        (Numbers(3), {"uneven": "pad"}, "got 'pad'"),
        (Numbers(3), {"rank": 1}, "rank=1, world_size=None"),
        (Numbers(3), {"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        (Numbers(3), {"seed": -1}, "seed is a whole number"),
        (SaysWhereItStands(), {"shuffle": True}, r"hide its state_dict\(\)"),
        (IterableWrapper(range(3)), {"shuffle": "blocks"}, "shuffle='blocks' with a datapipe"),
    ],
)
def test_what_is_not_supported_says_so(data: object, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cast(Callable[..., object], DataLoader)(data, **arguments)


def test_torchs_own_checks_still_hold() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        DataLoader(Numbers(3), batch_size=0)
    with pytest.raises(ValueError, match="persistent_workers"):
        DataLoader(Numbers(3), persistent_workers=True)


def test_a_dataset_that_changed_its_length_is_refused() -> None:
    data = Numbers(8)
    loader = DataLoader(data)
    data.n = 9
    with pytest.raises(UsageError, match="had 8 samples when the loader was made and has 9 now"):
        iter(loader)


def test_ranks_without_a_process_group_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE=2 but torch.distributed is not initialized"):
        iter(DataLoader(Numbers(8)))


def test_a_position_far_into_a_billion_samples_is_found_at_once() -> None:
    """No data, no list of a billion ids: the first batch needs a few thousand of them."""
    loader = make(10**9)
    loader.load_state_dict({**loader.state_dict(), "cursor": 900_000_000})
    expected = order(OrderSpec(kind=OrderKind.PERMUTED, seed=3), 0, 10**9)
    assert numbers(next(iter(loader))) == expected.at(np.arange(900_000_000, 900_000_004)).tolist()


# -- an epoch that was restored, and a loop that does not know of it ---------------------------------------------------


def restored(epoch: int) -> DataLoader[int]:
    before, after = make(8), make(8)
    before.set_epoch(epoch)
    after.load_state_dict(before.state_dict())
    return after


def test_going_back_behind_a_restored_epoch_is_warned_about() -> None:
    loader = restored(2)
    with pytest.warns(
        UserWarning, match=r"set_epoch\(0\) goes back behind epoch 2.*run\.epochs\(n\)"
    ) as said:
        loader.set_epoch(0)
    assert said[0].filename == __file__
    assert loader.epoch == 0, "whoever wants that has it"


def test_other_epochs_are_not_warned_about() -> None:
    """pytest makes errors of warnings."""
    for epoch in (2, 3):
        restored(2).set_epoch(epoch)
    begun = restored(2)
    next(iter(begun))
    begun.reset()
    begun.set_epoch(0)
    fresh = make(8)
    fresh.set_epoch(2)
    fresh.set_epoch(0)


def test_a_loader_has_all_of_torchs_attributes_and_guards_them() -> None:
    ours, theirs = make(10), TorchDataLoader(Numbers(10), batch_size=4, shuffle=True)
    assert set(vars(theirs)) <= set(vars(ours))
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after"):
            setattr(ours, name, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_is_a_loader_of_its_own(
    copied: Callable[[DataLoader[int]], DataLoader[int]],
) -> None:
    loader = make(10)
    other = copied(loader)
    batches = [numbers(batch) for batch in other]
    assert (loader.epoch, other.epoch) == (0, 1)
    assert [numbers(batch) for batch in loader] == batches
