"""Samplers of the user's own: resumed by their own state, or by their generator and a skip of indices."""

import io
import json
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import DataLoader, Ledger
from everstep.dataloader.ledger_format import unproven
from everstep.dataloader.state_format import parse_state

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
Make = Callable[[int], DataLoader[int]]
N = 23


class Numbers(Dataset[int]):
    """Sample i is the number i; counts what is read."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.read = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


class Counting(Sampler[int]):
    """Descending numbers, with a state of its own: how many were drawn; never to be drawn again from the begin."""

    def __init__(self) -> None:
        self.drawn = 0
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.begun_at.append(self.drawn)
        while self.drawn < N:
            self.drawn += 1
            yield N - self.drawn
        self.drawn = 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, object]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.drawn = state_dict["drawn"]


class CountingIterator:
    """An iterator that knows where it stands, of a sampler that does not."""

    def __init__(self, seed: int) -> None:
        self.order = np.random.default_rng(seed).permutation(N).tolist()
        self.at = 0

    def __iter__(self) -> "CountingIterator":
        return self

    def __next__(self) -> int:
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, object]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.order, self.at = list(cast(list[int], state["order"])), cast(int, state["at"])


class OfIterators(Sampler[int]):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        return CountingIterator(self.seed)

    def __len__(self) -> int:
        return N


class Drawing(Sampler[int]):
    """Draws from all global generators, all the time."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield (random.randrange(N) + int(np.random.randint(N)) + int(torch.randint(N, ()))) % N


class Buckets(Sampler[list[int]]):
    """Batches of different sizes."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        ids = torch.randperm(N, generator=self.generator).tolist()
        size = 1
        while ids:
            yield ids[:size]
            ids, size = ids[size:], size + 1

    def __len__(self) -> int:
        return 7


def loader(**arguments: object) -> DataLoader[int]:
    build = cast(Callable[..., DataLoader[int]], DataLoader)
    return build(**({"dataset": Numbers(), "seed": 1} | arguments))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MAKES: dict[str, Make] = {
    "random": lambda seed: loader(batch_size=4, sampler=RandomSampler(Numbers(), generator=generator(seed))),
    "without a generator": lambda _: loader(batch_size=4, sampler=RandomSampler(Numbers())),
    "weighted": lambda seed: loader(
        batch_size=5, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 17, generator=generator(seed))
    ),
    "distributed": lambda _: loader(
        batch_size=2,
        sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=7),
        rank=1,
        world_size=2,
    ),
    "own state": lambda _: loader(batch_size=4, sampler=Counting()),
    "own state of the iterator": lambda seed: loader(batch_size=4, sampler=OfIterators(seed)),
    "global generators": lambda _: loader(batch_size=4, sampler=Drawing()),
    "drop_last": lambda seed: loader(
        batch_size=4, drop_last=True, sampler=RandomSampler(Numbers(), generator=generator(seed))
    ),
    "batch sampler of torch": lambda seed: loader(
        batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=generator(seed)), 4, True)
    ),
    "batch sampler of one's own": lambda seed: loader(batch_sampler=Buckets(generator(seed))),
    "no batches": lambda seed: loader(
        batch_size=None, sampler=RandomSampler(Numbers(), generator=generator(seed))
    ),
    "a plain list": lambda _: loader(batch_size=3, sampler=[5, 5, 1, 2, 9, 0, 22]),
}


def numbers(batch: object) -> list[int]:
    return [batch] if isinstance(batch, int) else cast(torch.Tensor, batch).tolist()


def epoch(each: DataLoader[int]) -> list[list[int]]:
    return [numbers(batch) for batch in each]


def stored(state: dict[str, object]) -> dict[str, object]:
    """Through torch.save, which may load nothing but plain values, and through JSON."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return json.loads(json.dumps(torch.load(file, weights_only=True)))


@pytest.mark.parametrize("name", MAKES)
def test_resumed_at_every_batch_it_goes_on_as_if_nothing_had_been(name: str) -> None:
    """Of three epochs; the resumed loader's generator stands elsewhere, to begin with."""
    undisturbed = MAKES[name](3)
    epochs = [epoch(undisturbed) for _ in range(3)]
    for steps in range(len(epochs[0]) + 1):
        first = MAKES[name](3)
        batches = iter(first)
        before = [numbers(next(batches)) for _ in range(steps)]
        state = stored(first.state_dict())
        second = MAKES[name](77)
        if name == "own state of the iterator" and steps == 0:
            second = MAKES[name](3)  # nothing was drawn: it said nothing yet
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert before + epoch(second) == epochs[0]
        if name != "own state of the iterator":  # whose later epochs nothing says
            assert [epoch(second), epoch(second)] == epochs[1:]


@pytest.mark.parametrize("name", ["random", "own state", "batch sampler of one's own"])
@pytest.mark.parametrize("steps", [2, 5])
def test_prefetched_batches_do_not_count(name: str, steps: int) -> None:
    make = MAKES[name]
    expected = epoch(make(3))
    first = make(3)
    first.num_workers, first.prefetch_factor = 2, 2
    batches = iter(first)
    before = [numbers(next(batches)) for _ in range(steps)]
    second = make(9)
    second.load_state_dict(stored(first.state_dict()))
    assert before + epoch(second) == expected


def test_skipping_reads_no_data_and_a_state_of_its_own_skips_nothing() -> None:
    for sampler in (SequentialSampler(Numbers()), Counting()):
        first = loader(batch_size=4, sampler=sampler)
        batches = iter(first)
        for _ in range(4):
            next(batches)
        data, other = Numbers(), Counting() if isinstance(sampler, Counting) else SequentialSampler(Numbers())
        second = loader(dataset=data, batch_size=4, sampler=other)
        second.load_state_dict(first.state_dict())
        list(second)
        assert data.read == N - 16
        if isinstance(other, Counting):
            assert other.begun_at == [16]


def test_batches_are_torchs() -> None:
    ours = loader(batch_size=4, sampler=RandomSampler(Numbers(), generator=generator(3)))
    theirs = TorchDataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), generator=generator(3)))
    for _ in range(2):
        assert epoch(ours) == [batch.tolist() for batch in theirs]
    assert len(ours) == len(theirs) == 6
    assert isinstance(ours.sampler, RandomSampler)
    assert ours.batch_size == 4


def test_the_trainers_generators_are_left_alone() -> None:
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    for _ in loader(batch_size=4, sampler=Drawing()):
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_after_a_break_and_after_reset() -> None:
    each = loader(batch_size=4, sampler=RandomSampler(Numbers(), generator=generator(3)))
    expected = epoch(loader(batch_size=4, sampler=RandomSampler(Numbers(), generator=generator(3))))
    batches = iter(each)
    seen = [numbers(next(batches)) for _ in range(2)]
    with pytest.warns(UserWarning, match="goes on with epoch 0 at sample 8"):
        batches = iter(each)
    seen += [numbers(next(batches))]
    assert seen == expected[:3]
    assert len(list(each)) == 3
    assert each.epoch == 1
    next(iter(each))
    each.reset()
    assert len(epoch(each)) == 6


def test_another_number_of_ranks_is_refused() -> None:
    state = MAKES["distributed"](0).state_dict()
    other = loader(
        batch_size=2, sampler=DistributedSampler(Numbers(), num_replicas=3, rank=0), rank=0, world_size=3
    )
    with pytest.raises(LoaderStateError, match="the state is of 2 ranks, here are 3"):
        other.load_state_dict(state)


def test_a_sampler_that_changed_is_found() -> None:
    first = loader(batch_sampler=Buckets(generator(3)))
    batches = iter(first)
    for _ in range(3):
        next(batches)
    other = loader(batch_sampler=BatchSampler(SequentialSampler(Numbers()), 4, False))
    other.load_state_dict(first.state_dict())
    with pytest.raises(LoaderStateError, match="draws other samples now than the 6 of this epoch"):
        iter(other)
    shorter = loader(batch_size=2, sampler=SequentialSampler(Numbers(4)))
    shorter.load_state_dict(first.state_dict())
    with pytest.raises(LoaderStateError, match="draws 4 samples now, 6 of this epoch were"):
        iter(shorter)


class Keeping(Sampler[int]):
    """In an order of a generator that nobody can find."""

    def __init__(self) -> None:
        self.kept = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(N, generator=self.kept).tolist()


def test_an_order_that_cannot_be_drawn_again_is_refused() -> None:
    """In its first epoch a new one draws the same; from the second on samples came twice, and others never."""
    for epochs in range(2):
        first, other = loader(batch_size=4, sampler=Keeping()), loader(batch_size=4, sampler=Keeping())
        for _ in range(epochs):
            list(first)
        batches = iter(first)
        seen = [numbers(next(batches)) for _ in range(2)]
        other.load_state_dict(first.state_dict())
        if epochs:
            with pytest.raises(LoaderStateError, match="draws other samples now than the 8 of this epoch"):
                iter(other)
        else:
            assert sorted(chain.from_iterable(seen + epoch(other))) == list(range(N))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nor_may_it_go_on_within_a_process(num_workers: int) -> None:
    """After `break` the next loop would hand out the rest of another permutation."""
    broken_off = loader(batch_size=4, sampler=Keeping(), num_workers=num_workers)
    batches = iter(broken_off)
    seen = [numbers(next(batches)) for _ in range(2)]
    with pytest.raises(LoaderStateError, match="draws other samples now than the 8 of this epoch"):
        seen += epoch(broken_off)
    assert len(set(chain.from_iterable(seen))) == 8
    broken_off.reset()
    assert sorted(chain.from_iterable(epoch(broken_off))) == list(range(N))


@pytest.mark.parametrize("make", [Counting, lambda: RandomSampler(Numbers(), generator=generator(3))])
def test_batches_of_another_size_go_on_behind_the_same_sample(make: Callable[[], Sampler[int]]) -> None:
    first, other = loader(batch_size=4, sampler=make()), loader(batch_size=3, sampler=make())
    batches = iter(first)
    seen = [numbers(next(batches)) for _ in range(2)]
    other.load_state_dict(first.state_dict())
    rest = iter(other)
    if not isinstance(other.sampler, Counting):
        assert len(cast(Any, rest)) == 5
    seen += [numbers(batch) for batch in rest]
    assert sorted(chain.from_iterable(seen)) == list(range(N))


def test_orders_of_everstep_and_of_a_sampler_do_not_mix() -> None:
    own, ours = loader(batch_size=4, sampler=Counting()), loader(batch_size=4)
    with pytest.raises(LoaderStateError, match=r"'sampler-1', this loader 'sequential-1'"):
        ours.load_state_dict(own.state_dict())
    with pytest.raises(LoaderStateError, match=r"'sequential-1', this loader 'sampler-1'"):
        own.load_state_dict(ours.state_dict())
    state = own.state_dict()
    with pytest.raises(LoaderStateError, match="expected batches, own, generator and is_over"):
        own.load_state_dict({**state, "source": {"world_size": 1}})


def test_the_ledger_counts_and_claims_no_proof() -> None:
    each = loader(batch_size=4, sampler=[5, 5, 1])
    list(each)
    assert each.ledger.tally(0).count == 3
    assert Ledger.verify([each.ledger], each.state_dict()) == []
    assert "'sampler-1' is the user's own" in unproven(parse_state(each.state_dict()))
    assert unproven(parse_state(loader().state_dict())) == ""


class Strings(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(cast(list[int], ["a"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": Strings()}, "the sampler yielded str"),
        ({"batch_sampler": [[1], []]}, "a batch without an index"),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(loader(**arguments))


def test_torchs_own_checks_still_hold() -> None:
    with pytest.raises(ValueError, match="mutually exclusive"):
        loader(batch_size=4, batch_sampler=[[1]])
    with pytest.raises(ValueError, match="mutually exclusive"):
        loader(sampler=[1], shuffle=True)
    with pytest.raises(TypeError, match="len"):
        len(loader(sampler=Strings()))
