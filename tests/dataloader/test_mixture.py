"""Mixtures: exact shares after any number of samples, each dataset through its own epochs exactly once."""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Subset

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import BlockShuffle, DataLoader, Ledger, Mixture
from everstep.dataloader.batch_maker import BatchMaker, Ticket
from everstep.dataloader.ledger_format import ledger_problems
from everstep.dataloader.mixture_plan import PERIOD_MAX, Schedule, whole_weights

weights_lists = st.lists(st.integers(1, 60), min_size=1, max_size=7)


class Letters(Dataset[int]):
    """Sample i of dataset k is 1000 k + i."""

    def __init__(self, n: int, k: int = 0) -> None:
        self.n, self.k = n, k

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.n
        return 1000 * self.k + index

    def fingerprint(self) -> str:
        return f"letters {self.n} {self.k}"


def mixture(sizes: dict[str, int], weights: object = None, **more: object) -> Mixture:
    data = {name: Letters(n, k) for k, (name, n) in enumerate(sizes.items())}
    return cast(Callable[..., Mixture], Mixture)(data, weights, **more)


def numbers(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()


# -- the schedule ---------------------------------------------------------------------------------------------------


@given(weights=weights_lists)
def test_after_any_number_of_samples_each_share_is_exact(weights: list[int]) -> None:
    """Rounded down or up, never further off: the best that whole samples allow."""
    schedule, counts = Schedule(weights), [0] * len(weights)
    period = sum(weights)
    for position in range(2 * period + 1):
        assert list(schedule.counts_before(position)) == counts
        for weight, count in zip(weights, counts, strict=True):
            assert position * weight // period <= count <= -(-position * weight // period)
        draw = schedule.at(position)
        assert draw.count == counts[draw.dataset_index]
        assert schedule.position_of(draw) == position
        counts[draw.dataset_index] += 1


@given(weights=weights_lists, start=st.integers(0, 10**15), length=st.integers(1, 300))
def test_any_window_has_each_share_but_for_one_sample_at_each_end(
    weights: list[int], start: int, length: int
) -> None:
    schedule, period = Schedule(weights), sum(weights)
    before, after = schedule.counts_before(start), schedule.counts_before(start + length)
    for weight, low, high in zip(weights, before, after, strict=True):
        assert abs(Fraction(high - low) - Fraction(length * weight, period)) < 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.5, 1 / 3, 1 / 6], (3, 2, 1)),
        ([10**9, 2 * 10**9], (1, 2)),
        ([Fraction(1, 7), Fraction(2, 7)], (1, 2)),
        ([5], (1,)),
    ],
)
def test_weights_become_the_smallest_whole_numbers(weights: list[float], expected: tuple[int, ...]) -> None:
    assert whole_weights(weights) == expected


@given(weights=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20))
def test_other_weights_are_rounded_to_one_slot(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert sum(whole) <= PERIOD_MAX
    assert min(whole) >= 1
    for given_weight, weight in zip(weights, whole, strict=True):
        off = abs(weight / sum(whole) - given_weight / sum(weights))
        assert off <= (len(weights) + 1) / PERIOD_MAX


# -- as a dataset ---------------------------------------------------------------------------------------------------


def test_schedules_are_part_of_the_format() -> None:
    """A change is another order of samples after a restart: a new `order_kind`, never an edit here."""
    mixed = mixture({"a": 7, "b": 5, "c": 3}, {"a": 7, "b": 2, "c": 1}, seed=5)
    assert "".join(mixed.locate(i).name for i in range(20)) == "aaabaabaacaaabaabaac"
    assert [mixed[i] for i in range(12)] == [3, 0, 1, 1002, 6, 2, 1001, 4, 5, 2000, 1, 3]


def test_each_dataset_goes_through_its_own_epochs_exactly_once() -> None:
    sizes = {"a": 7, "b": 5, "c": 3}
    mixed = mixture(sizes, [0.7, 0.2, 0.1])
    streams: dict[str, list[int]] = {name: [] for name in sizes}
    for sample_id in range(400):
        found = mixed.locate(sample_id)
        assert found.epoch == len(streams[found.name]) // sizes[found.name]
        streams[found.name].append(found.index)
    assert {name: len(stream) for name, stream in streams.items()} == {"a": 280, "b": 80, "c": 40}
    assert mixed.counts_before(400) == {"a": 280, "b": 80, "c": 40}
    for name, n in sizes.items():
        epochs = [streams[name][start : start + n] for start in range(0, len(streams[name]) - n, n)]
        assert all(sorted(each) == list(range(n)) for each in epochs)
        assert len(set(map(tuple, epochs))) > 1, "each in another order"


@pytest.mark.parametrize(("epoch", "length"), [("first", 10), ("all", 30), (17, 17)])
def test_what_an_epoch_is(epoch: int | str, length: int) -> None:
    mixed = mixture({"a": 7, "b": 5, "c": 3}, [7, 2, 1], epoch=epoch)
    assert len(mixed) == length
    if epoch == "first":
        assert mixed.counts_before(length)["a"] == 7
        assert mixed.counts_before(length + 1)["a"] == 8
    if epoch == "all":
        assert all(
            count >= n for count, n in zip(mixed.counts_before(length).values(), (7, 5, 3), strict=True)
        )
        assert mixed.counts_before(length - 1)["c"] == 2


def test_without_weights_the_sizes_decide() -> None:
    assert mixture({"a": 60, "b": 20}).proportions == {"a": Fraction(3, 4), "b": Fraction(1, 4)}
    assert len(mixture({"a": 60, "b": 20})) == 80


def test_orders_of_the_datasets() -> None:
    plain = mixture({"a": 10, "b": 10}, shuffle=False)
    assert [plain.locate(i).index for i in range(20)] == [i // 2 for i in range(20)]
    blocks = mixture({"a": 100, "b": 100}, shuffle=BlockShuffle(block=10, window=1))
    of_a = [found.index for i in range(40) if (found := blocks.locate(i)).name == "a"]
    assert sorted(of_a[:10]) == list(range(min(of_a[:10]), min(of_a[:10]) + 10))
    one, other = (mixture({"a": 100, "b": 100}, seed=seed) for seed in (0, 1))
    assert [one.locate(i).index for i in range(40)] != [other.locate(i).index for i in range(40)]
    same_size = [[found.index for i in range(80) if (found := one.locate(i)).name == name] for name in "ab"]
    assert same_size[0] != same_size[1], "datasets of one size have orders of their own"


def test_large_datasets_cost_nothing() -> None:
    mixed = mixture({"a": 10**12, "b": 10**10}, [3, 1], epoch="all")
    far = 10**13
    assert mixed.locate(far).index < 10**12
    assert mixed.counts_before(far) == {"a": 3 * far // 4, "b": far // 4}


class Told(Letters):
    """Keeps what it is told of the samples that are read next."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__(n, k)
        self.told: list[int] = []

    def will_read(self, indices: list[int]) -> None:
        self.told += indices


def test_each_dataset_is_told_what_is_read_of_it_next() -> None:
    """Those that want it: a cache over several nodes fetches together what it hears of together."""
    first, second = Told(10, 1), Told(30, 2)
    mixed = Mixture(
        {"a": first, "b": Subset(second, range(29, 9, -1)), "c": Letters(10)}, [1, 1, 1], epoch=30
    )
    list(DataLoader(mixed, batch_size=7))
    read = [mixed.locate(each) for each in range(30)]
    assert first.told == [each.index for each in read if each.name == "a"]
    assert second.told == [29 - each.index for each in read if each.name == "b"]
    assert mixture({"a": 10}).will_read is None


def test_what_tells_them_goes_to_workers_however_started() -> None:
    for dataset in (
        Subset(Told(9, 0), [3, 1, 2]),
        Mixture({"a": Subset(Told(9, 0), [3, 1, 2])}, shuffle=False),
    ):
        maker = BatchMaker(cast(Any, dataset), list, is_batched=True, augment_seed=True)
        copied = pickle.loads(pickle.dumps(maker))
        assert copied.make(Ticket(seed=0, epoch=0, cursor=0, ids=[2, 0])).data == [2, 3]


def test_other_loaders_get_the_shares_too() -> None:
    mixed = mixture({"a": 7, "b": 5, "c": 3}, [7, 2, 1], epoch=100)
    seen = [i // 1000 for batch in TorchDataLoader(mixed, batch_size=5) for i in numbers(batch)]
    assert Counter(seen) == {0: 70, 1: 20, 2: 10}


def test_it_goes_to_workers_without_its_tables() -> None:
    mixed = mixture({"a": 60_000, "b": 50_000}, [1, 1])
    expected = [mixed[i] for i in range(50)]
    copy = pickle.dumps(mixed)
    assert len(copy) < 10_000
    assert [cast(Mixture, pickle.loads(copy))[i] for i in range(50)] == expected


# -- in a loader ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    epoch=st.sampled_from(["first", "all", 23]),
    attempts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 6)), max_size=4),
)
def test_exactly_once_over_epochs_and_resumes(
    sizes: list[int], weights: list[int], epoch: int | str, attempts: list[tuple[int, int, int]]
) -> None:
    """`attempts`: (ranks, batch size, steps). What comes is the mixture, in order, and both verdicts prove it."""
    names = {chr(97 + k): n for k, n in enumerate(sizes)}
    mixed = mixture(names, weights[: len(sizes)], epoch=epoch)
    state: dict[str, object] = {}
    ledgers, seen = list[object](), list[int]()
    for world, batch, steps in [*attempts, (2, 3, 10**6)]:
        loaders = [DataLoader(mixed, batch, rank=r, world_size=world, seed=9) for r in range(world)]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            for each in ledgers[rank::world]:
                loader.ledger.merge(Ledger.from_state(each))
        done = 0
        while loaders[0].epoch < 2 and done < steps:
            for batches in zip(*loaders, strict=True):
                done += 1
                for loader, each in zip(loaders, batches, strict=True):
                    seen += numbers(each) if loader.weight else []
                if done >= steps:
                    break
        state = json.loads(json.dumps(loaders[0].state_dict()))
        ledgers = [json.loads(json.dumps(loader.ledger.state())) for loader in loaders]
        assert ledger_problems(ledgers, state) == []
        assert Ledger.verify([Ledger.from_state(each) for each in ledgers], state) == []
    assert seen == [mixed[i] for i in range(2 * len(mixed))]


def test_one_sample_twice_in_a_mixture_is_found() -> None:
    loader = DataLoader(mixture({"a": 7, "b": 5}, [1, 1], epoch=20), batch_size=20)
    loader.set_epoch(3)
    list(loader)
    state = loader.state_dict()
    assert [p for p in Ledger.verify([loader.ledger], state) if p.startswith("epoch 3")] == []
    entry = cast("list[dict[str, object]]", loader.ledger.state()["epochs"])[0]
    wrong = Ledger(0)
    wrong.add(3, torch.tensor([60, *range(60, 79)]).numpy())
    assert entry["count"] == wrong.tally(3).count == 20
    assert "epoch 3: the count of 20 samples is right" in Ledger.verify([wrong], state)[-1]


def test_state_is_small_and_of_this_mixture_only() -> None:
    loader = DataLoader(mixture({f"name {k}": k + 1 for k in range(200)}), batch_size=8)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    for other in (
        mixture({"a": 7, "b": 5}, [1, 2]),
        mixture({"a": 7, "b": 5}, [2, 1], seed=1),
        mixture({"a": 7, "b": 5}, [2, 1], shuffle=False),
        mixture({"a": 7, "c": 5}, [2, 1]),
    ):
        ours = DataLoader(mixture({"a": 7, "b": 5}, [2, 1], epoch=len(other)))
        with pytest.raises(LoaderStateError, match="belongs to dataset 'mixture-"):
            ours.load_state_dict(DataLoader(other).state_dict())


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_workers_give_the_same() -> None:
    mixed = mixture({"a": 17, "b": 5}, [3, 1])
    alone, helped = _loader(mixed, 0), _loader(mixed, 2)
    for _ in range(2):
        assert [numbers(batch) for batch in helped] == [numbers(batch) for batch in alone]


def _loader(mixed: Mixture, workers: int) -> DataLoader[object]:
    return DataLoader(mixed, batch_size=4, num_workers=workers)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mixture({}), "1 to 32768 datasets, got 0"),
        (lambda: mixture({"a": 0, "b": 1}), "dataset 'a' of the mixture is empty"),
        (lambda: Mixture(cast(Any, [range(2)])), "the datasets of a mixture have names, got a list"),
        (lambda: mixture({"a": 1}, {"b": 1}), r"weights are for \['b'\], the datasets are \['a'\]"),
        (lambda: mixture({"a": 1}, [1, 2]), "2 weights for 1 datasets"),
        (lambda: mixture({"a": 1, "b": 1}, [1, 0]), "a weight is a number above 0, got 0"),
        (lambda: mixture({"a": 1, "b": 1}, [1, float("nan")]), "above 0, got nan"),
        (lambda: mixture({"a": 1}, epoch="last"), "'first' or 'all', got 'last'"),
        (lambda: mixture({"a": 1}, epoch=0), "got 0"),
        (
            lambda: DataLoader(mixture({"a": 1}), shuffle=True),
            "a Mixture, which shuffles its datasets itself",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def test_ids_below_zero_are_refused() -> None:
    with pytest.raises(IndexError, match="numbered from 0, got -1"):
        mixture({"a": 1})[-1]
