"""Killed and resumed at any number of ranks and workers: each epoch is the dataset, exactly, less declared padding.

Plans alone for breadth; `EVERSTEP_ELASTIC_EXAMPLES` makes the search longer. Some runs with real loaders and workers.
"""

import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import BlockShuffle, DataLoader, Ledger, Mixture
from everstep.dataloader.block_format import equal_blocks, listed_blocks
from everstep.dataloader.holes_format import Holes
from everstep.dataloader.ledger_format import ledger_problems, unproven
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order
from everstep.dataloader.sampler import EpochPlan, tickets
from everstep.dataloader.split_plan import Part, Split, Uneven
from everstep.dataloader.state_format import parse_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]
EXAMPLES = int(os.environ.get("EVERSTEP_ELASTIC_EXAMPLES", "200"))
State = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Some ranks that run until they are killed: `kept` steps up to the checkpoint, `undone` ones after it."""

    world: int
    batch: int
    kept: int
    undone: int


attempts = st.lists(
    st.builds(
        Attempt,
        world=st.integers(1, 9),
        batch=st.integers(1, 8),
        kept=st.integers(0, 30),
        undone=st.integers(0, 3),
    ),
    max_size=6,
)


def spec_of(kind: OrderKind, n: int, seed: int) -> OrderSpec:
    if kind is OrderKind.BLOCKS:
        sizes = equal_blocks(n, 7, 3) if seed % 2 else listed_blocks([5] * (n // 5) + [n % 5], 4)
        return OrderSpec(kind=kind, seed=seed, blocks=sizes)
    return OrderSpec(kind=kind, seed=seed)


@settings(max_examples=EXAMPLES)
@given(
    n=st.integers(0, 300),
    kind=st.sampled_from([OrderKind.PERMUTED, OrderKind.BLOCKS, OrderKind.CONTINUED, OrderKind.SEQUENTIAL]),
    seed=st.integers(0, 2**64 - 1),
    uneven=st.sampled_from(Uneven),
    drop_last=st.booleans(),
    lives=attempts,
)
def test_two_epochs_of_any_lives(  # noqa: PLR0917  hypothesis names them
    n: int, kind: OrderKind, seed: int, uneven: Uneven, drop_last: bool, lives: list[Attempt]
) -> None:
    """The stream of what survives, over all ranks, less padding, is the order of the epoch but for a declared rest."""
    spec, place = spec_of(kind, n, seed), (0, 0)
    kept: dict[int, list[int]] = {0: [], 1: []}
    dropped = {0: 0, 1: 0}
    for life in [*lives, Attempt(world=4, batch=3, kept=10**9, undone=0)]:
        for step, (epoch, ids, end) in enumerate(life_steps(spec, n, place, life, (uneven, drop_last))):
            if step < life.kept:
                place = (epoch, end) if ids is not None else (epoch + 1, 0)
                kept[epoch] += ids or []
                if ids is None:
                    dropped[epoch] = n - end
            elif step >= life.kept + life.undone:
                break
    largest = 8 * 9 if drop_last else 9
    for epoch in (0, 1):
        whole = order(spec, epoch, n).at(np.arange(n)).tolist()
        assert kept[epoch] == whole[: n - dropped[epoch]]
        assert sorted(whole) == list(
            range(epoch * n, epoch * n + n) if kind is OrderKind.CONTINUED else range(n)
        )
        if uneven is Uneven.DROP or drop_last:
            assert dropped[epoch] < largest
        else:
            assert dropped[epoch] == 0


def life_steps(
    spec: OrderSpec, n: int, place: tuple[int, int], life: Attempt, rules: tuple[Uneven, bool]
) -> Iterator[tuple[int, list[int] | None, int]]:
    """Yield (epoch, ids of all ranks without padding, cursor) per step, and (epoch, None, cursor) at each end."""
    epoch, cursor = place
    while epoch < 2:
        splits = [
            Split(
                sample_count=n,
                batch_size=life.batch,
                rank=rank,
                world_size=life.world,
                uneven=rules[0],
                drop_last=rules[1],
            )
            for rank in range(life.world)
        ]
        plans = [EpochPlan(order=spec, epoch=epoch, cursor=cursor, split=split) for split in splits]
        for group in zip(*(tickets(plan) for plan in plans), strict=True):
            parts = [cast(Part, split.part(cursor)) for split in splits]
            assert sum(part.weight for part in parts) == pytest.approx(life.world)
            assert {ticket.cursor for ticket in group} == {cursor}
            cursor = parts[0].next_cursor
            ids = [
                i
                for ticket, part in zip(group, parts, strict=True)
                if not part.is_padding
                for i in ticket.ids
            ]
            yield epoch, ids, cursor
        yield epoch, None, cursor
        epoch, cursor = epoch + 1, 0


# -- real loaders ---------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Sample i is the number i; counts what is read in this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index

    def block_sizes(self) -> list[int]:
        return [5] * (self.n // 5) + [self.n % 5]


def numbers(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()


def loaders_of(data: object, world: int, **arguments: object) -> list[DataLoader[int]]:
    build = cast(Callable[..., DataLoader[int]], DataLoader)
    return [build(data, rank=r, world_size=world, seed=5, **arguments) for r in range(world)]


DATA = {
    "permuted": (lambda: Numbers(47), {"shuffle": True}),
    "blocks": (lambda: Numbers(47), {"shuffle": "blocks"}),
    "mixture": (
        lambda: Mixture({"a": Numbers(20), "b": Numbers(9)}, [5, 1], epoch=47),
        {},
    ),
}
Life = tuple[int, int, int, int, int]
"""(ranks, workers, batch size, steps up to the checkpoint, steps after it)"""
LIVES: list[list[Life]] = [
    [(1, 0, 4, 3, 2), (3, 2, 2, 2, 1), (2, 1, 5, 10**6, 0)],
    [(4, 1, 3, 1, 3), (1, 2, 7, 2, 0), (1, 0, 7, 0, 2), (5, 0, 2, 10**6, 0)],
    [(2, 0, 100, 1, 0), (3, 2, 4, 10**6, 0)],  # killed after the last batch of an epoch
]


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("lives", LIVES)
def test_real_loaders_and_workers(name: str, lives: list[Life]) -> None:
    check_real_lives(name, lives)


lives_with_workers = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.integers(1, 20), st.integers(0, 12), st.integers(0, 3)
    ),
    max_size=3,
)
"""Up to three that are killed, before one that goes on to the end."""


@settings(max_examples=10)
@given(
    name=st.sampled_from(sorted(DATA)),
    lives=lives_with_workers,
    ranks=st.integers(1, 3),
    workers=st.integers(0, 2),
    batch=st.integers(3, 20),
)
def test_any_lives_of_real_loaders_and_workers(
    name: str, lives: list[Life], ranks: int, workers: int, batch: int
) -> None:
    """What workers had prepared ahead and the loop was not given is lost with them, each time anew."""
    check_real_lives(name, [*lives, (ranks, workers, batch, 10**6, 0)])


def check_real_lives(name: str, lives: list[Life]) -> None:
    make, arguments = DATA[name]
    spec = loaders_of(make(), 1, **arguments)[0]._position.order
    state: State = {}
    ledgers, kept = list[State](), dict[int, list[int]]()
    for world, workers, batch, steps, undone in lives:
        loaders = loaders_of(make(), world, num_workers=workers, batch_size=batch, **arguments)
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            for each in ledgers[rank::world]:
                loader.ledger.merge(Ledger.from_state(each))
        step = 0
        while loaders[0].epoch < 2 and step < steps + undone:
            epoch = loaders[0].epoch
            for batches in zip(*loaders, strict=True):
                if step < steps:
                    for loader, each in zip(loaders, batches, strict=True):
                        kept.setdefault(epoch, []).extend(numbers(each) if loader.weight else [])
                    state = json.loads(json.dumps(loaders[0].state_dict()))
                    ledgers = [loader.ledger.state() for loader in loaders]
                    assert ledger_problems(ledgers, state) == []
                step += 1
                if step >= steps + undone:
                    break
    data = make()
    for epoch in (0, 1):
        ids = order(spec, epoch, 47).at(np.arange(47)).tolist()
        assert kept[epoch] == [data[i] for i in ids]
    if name != "mixture":
        assert Counter(kept[0]) == Counter(kept[1]) == Counter(range(47))


def test_blocks_of_the_dataset_and_of_the_argument() -> None:
    data = Numbers(47)
    by_name, by_size, by_list = (
        cast(State, DataLoader(data, shuffle=shuffle).state_dict()["order"])["block"]
        for shuffle in (
            "blocks",
            BlockShuffle(block=5),
            BlockShuffle(block=np.array([5] * 9 + [2], dtype=np.int32), window=16),
        )
    )
    assert by_name == by_size == by_list == {"window": 16, "runs": [[9, 5], [1, 2]]}


def test_other_blocks_are_refused_and_many_are_resumed_by_their_digest() -> None:
    sizes = [1, 2, 3, 4] * 4 + [7]
    first = loaders_of(Numbers(47), 1, batch_size=5, shuffle=BlockShuffle(block=sizes, window=3))[0]
    whole = [i for batch in first for i in numbers(batch)]
    first.set_epoch(0)
    batches = iter(first)
    seen = [i for _ in range(4) for i in numbers(next(batches))]
    state = json.loads(json.dumps(first.state_dict()))
    assert set(state["order"]["block"]) == {"window", "count", "digest"}
    second = loaders_of(Numbers(47), 1, batch_size=5, shuffle=BlockShuffle(block=sizes, window=3))[0]
    second.load_state_dict(state)
    for batch in second:
        seen += numbers(batch)
        break
    assert seen == whole[:25]
    state, ledger = second.state_dict(), Ledger(5)
    ledger.add(0, np.array(whole[:25]))
    assert Ledger.verify([ledger], state) == Ledger.verify([ledger], state, block_sizes=sizes) == []
    wrong = Ledger(5)
    wrong.add(0, np.array(whole[1:26]))
    assert Ledger.verify([wrong], state) == [], (
        "the state has no room for the sizes: the count alone is compared"
    )
    assert "no room for the sizes of 17 blocks" in unproven(parse_state(state))
    for verdict in (
        Ledger.verify([wrong], state, block_sizes=sizes),
        ledger_problems([wrong.state()], state, block_sizes=sizes),
    ):
        assert "some were lost and others handed out twice" in verdict[0]
    with pytest.raises(LoaderStateError, match="made with 17 blocks"):
        Ledger.verify([wrong], state, block_sizes=[47])
    for other in (BlockShuffle(block=sizes, window=4), BlockShuffle(block=sizes[::-1], window=3)):
        with pytest.raises(LoaderStateError, match="the state has windows of 3 out of 17 blocks"):
            loaders_of(Numbers(47), 1, shuffle=other)[0].load_state_dict(state)
    with pytest.raises(UsageError, match="hold 46 samples, the dataset 47"):
        loaders_of(Numbers(47), 1, shuffle=BlockShuffle(block=[46]))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_augmentation_follows_samples_through_blocks_ranks_and_workers(workers: int) -> None:
    """What a sample draws depends on (seed, epoch, sample): not on shuffling, ranks, workers, batch size or resume."""
    expected = {row[0]: row[1:] for row in rows(DataLoader(Noisy(), batch_size=23, seed=5))}
    for world in (1, 2, 3):
        loaders = loaders_of(Noisy(), world, num_workers=workers, batch_size=3, shuffle=BlockShuffle(block=4))
        seen = {row[0]: row[1:] for loader in loaders for row in rows(loader)}
        assert seen == expected
    resumed = loaders_of(Noisy(), 1, num_workers=workers, batch_size=3, shuffle=BlockShuffle(block=4))[0]
    resumed.load_state_dict({**resumed.state_dict(), "cursor": 11})
    later = {row[0]: row[1:] for row in rows(resumed)}
    assert later.items() < expected.items()
    assert len(later) == 12


class Noisy(Dataset[list[float]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        return [index, float(torch.rand(())), float(np.random.rand())]


def rows(loader: object) -> list[list[float]]:
    batches = list(cast("list[list[torch.Tensor]]", loader))
    return [row for batch in batches for row in torch.stack([each.double() for each in batch]).T.tolist()]


# -- resume costs nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False, BlockShuffle(block=1000)])
@pytest.mark.parametrize("holes", [[], [[950_000_000, 960_000_000]]])
def test_resume_at_nine_tenths_of_a_billion_reads_no_data_and_takes_no_memory(
    shuffle: bool | BlockShuffle, holes: list[list[int]]
) -> None:
    """From load_state_dict to the first list of indices: that of the batch which then is read."""
    data = Numbers(10**9)
    loader = DataLoader(data, batch_size=256, shuffle=shuffle, seed=1)
    state = {**loader.state_dict(), "cursor": 900_000_000, "holes": holes}
    tracemalloc.start()
    try:
        loader.load_state_dict(state)
        split, position = loader._split(), loader._position
        plan = EpochPlan(order=position.order, epoch=0, cursor=position.cursor, split=split)
        first = next(iter(tickets(plan)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.read == 0
    assert peak < 4_000_000
    positions = np.arange(900_000_000, 900_000_256)
    assert first.ids == order(position.order, 0, 10**9).at(positions).tolist()
    assert numbers(next(iter(loader))) == first.ids
    assert data.read == 256
    assert Holes() == loader._split().holes or holes


def test_a_mixture_resumes_as_cheaply() -> None:
    big, small = Numbers(10**9), Numbers(10**7)
    loader = DataLoader(Mixture({"big": big, "small": small}, [99, 1], epoch=10**9), batch_size=256)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "cursor": 900_000_000})
    next(iter(loader))
    assert (big.read + small.read, big.read) in {(256, 253), (256, 254)}
