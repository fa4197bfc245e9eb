"""Holes: positions that are skipped on purpose; the rest comes exactly once, and the ledger says what was left out."""

import json
import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from everstep.core.errors import LoaderStateError
from everstep.dataloader import BlockShuffle, DataLoader, Ledger, skip
from everstep.dataloader.holes_format import Holes, united
from everstep.dataloader.ledger_format import ledger_problems
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order
from everstep.dataloader.split_plan import Split, Uneven

State = dict[str, object]
spans_of_100 = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)).map(lambda s: (min(s), max(s))))


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def make(n: int, batch: int = 4, **more: Any) -> DataLoader[int]:
    arguments = {"shuffle": True, "seed": 3} | more
    return cast(Callable[..., DataLoader[int]], DataLoader)(Numbers(n), batch_size=batch, **arguments)


def numbers(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()


def whole_order(n: int, epoch: int = 0) -> list[int]:
    return order(OrderSpec(kind=OrderKind.PERMUTED, seed=3), epoch, n).at(np.arange(n)).tolist()


def problems(loaders: list[DataLoader[int]]) -> list[str]:
    """What both verdicts, with and without numpy, say of the ledgers of all ranks."""
    state = loaders[0].state_dict()
    plain = ledger_problems([json.loads(json.dumps(each.ledger.state())) for each in loaders], state)
    assert Ledger.verify([each.ledger for each in loaders], state) == plain
    return plain


# -- arithmetic -----------------------------------------------------------------------------------------------------


@given(spans=spans_of_100)
def test_turns_and_positions_against_a_list(spans: list[tuple[int, int]]) -> None:
    holes = united(spans)
    left = [p for p in range(100) if not any(a <= p < b for a, b in spans)]
    assert [holes.position_of(turn) for turn in range(len(left))] == left
    assert [holes.turns_before(p) for p in range(101)] == [sum(q < p for q in left) for p in range(101)]
    assert [holes.leap(p) for p in range(100)] == [next((q for q in left if q >= p), 100) for p in range(100)]
    for start, stop in ((0, 100), (20, 50), (70, 71)):
        inside = [p for a, b in holes.between(start, stop) for p in range(a, b)]
        assert inside == [p for p in range(start, stop) if p not in left]


@given(
    spans=spans_of_100,
    batch=st.integers(1, 7),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=5),
    uneven=st.sampled_from([Uneven.WEIGHT, Uneven.STEP, Uneven.DROP]),
)
def test_every_position_outside_holes_is_dealt_out_once(
    spans: list[tuple[int, int]], batch: int, worlds: list[tuple[int, int]], uneven: Uneven
) -> None:
    """`worlds`: (ranks, steps until they are killed)."""
    holes, cursor, seen = united(spans), 0, list[int]()
    for world, steps in [*worlds, (2, 10**6)]:
        splits = [
            Split(sample_count=100, batch_size=batch, rank=r, world_size=world, holes=holes, uneven=uneven)
            for r in range(world)
        ]
        left = splits[0].step_count(cursor)
        for step in range(min(left, steps)):
            parts = [part for split in splits if (part := split.part(cursor)) is not None]
            assert len(parts) == world
            seen += [
                holes.position_of(turn)
                for part in parts
                if not part.is_padding
                for turn in range(part.start, part.stop)
            ]
            cursor = parts[0].next_cursor
            assert splits[0].step_count(cursor) == left - step - 1
        if left <= steps:
            assert splits[0].part(cursor) is None
    expected = [p for p in range(100) if holes.leap(p) == p]
    assert seen == expected[: len(seen)]
    assert len(expected) - len(seen) < (5 if uneven is Uneven.DROP else 1)


# -- in a loader ----------------------------------------------------------------------------------------------------


def test_skipping_what_a_step_took() -> None:
    """The story: the loss jumps at a step, so its samples are left out the next time."""
    first, spans = make(30), list[tuple[int, int]]()
    before = first.state_dict()
    for _ in first:
        spans.append(first.span)
    assert spans[3] == (12, 16)
    second = make(30)
    second.load_state_dict(skip(before, *spans[3]))
    assert second.holes == [(12, 16)]
    assert len(second) == 7
    whole = whole_order(30)
    seen = [numbers(batch) for batch in second]
    assert [i for batch in seen for i in batch] == whole[:12] + whole[16:]
    assert [len(batch) for batch in seen] == [4] * 6 + [2], "batches stay whole"
    assert second.ledger.tally(0).skipped == ((12, 16),)
    assert second.state_dict()["holes"] == [], "they end with the epoch"
    assert [i for batch in second for i in numbers(batch)] == whole_order(30, 1)
    assert problems([second]) == []


def test_the_issues_example(caplog: pytest.LogCaptureFixture) -> None:
    state = skip({**make(20_000).state_dict(), "cursor": 9_984}, 10_000, 10_200)
    loader = make(20_000, batch=64)
    with caplog.at_level(logging.WARNING, "everstep.dataloader.position"):
        loader.load_state_dict(state)
    assert [record.getMessage() for record in caplog.records] == [
        "loader_skips epoch=0 positions=[10000,10200) samples=200"
    ]
    whole = whole_order(20_000)
    batches = iter(loader)
    assert numbers(next(batches)) == whole[9_984:10_000] + whole[10_200:10_248]
    assert loader.span == (9_984, 10_248)
    assert loader.state_dict() == {**state, "cursor": 10_248}


@given(
    spans=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 9)), max_size=4),
    batch=st.integers(1, 5),
    world=st.integers(1, 3),
    more=st.sampled_from([{}, {"uneven": "drop"}, {"drop_last": True}, {"shuffle": BlockShuffle(block=7)}]),
    kept=st.integers(0, 9),
)
def test_exactly_once_but_for_holes_at_any_resume(
    spans: list[tuple[int, int]], batch: int, world: int, more: dict[str, Any], kept: int
) -> None:
    """Skipped from the start, resumed in the middle at another number of ranks; both verdicts agree."""
    state = make(40, **more).state_dict()
    for start, length in spans:
        state = skip(state, start, min(40, start + length))
    holes = united((a, min(40, a + b)) for a, b in spans)
    ledgers, seen = list[State](), list[int]()
    for size, steps in ((world, kept), (world % 3 + 1, 10**6)):
        loaders = [make(40, batch, rank=r, world_size=size, **more) for r in range(size)]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            for each in ledgers[rank::size]:
                loader.ledger.merge(Ledger.from_state(each))
        for step, batches in enumerate(zip(*loaders, strict=True)):
            for loader, each in zip(loaders, batches, strict=True):
                seen += numbers(each) if loader.weight else []
            if step + 1 >= steps:
                break
        assert problems(loaders) == []
        state = json.loads(json.dumps(loaders[0].state_dict()))
        assert all(loader.state_dict() == state for loader in loaders)
        ledgers = [loader.ledger.state() for loader in loaders]
        if state["epoch"]:
            break
    if "uneven" not in more and "drop_last" not in more:
        spec = make(40, **more)._position.order
        wanted = [p for p in range(40) if holes.leap(p) == p]
        assert seen == order(spec, 0, 40).at(np.array(wanted, dtype=np.int64)).tolist()


def test_an_undeclared_skip_and_a_wrong_one_are_found() -> None:
    loader = make(30)
    loader.load_state_dict(skip(loader.state_dict(), 4, 8))
    batches = iter(loader)
    next(batches)
    next(batches)
    honest = loader.state_dict()
    assert Ledger.verify([loader.ledger], honest) == []
    assert Ledger.verify([loader.ledger], {**honest, "holes": []}) == [
        "epoch 0: positions [[4, 8]] were skipped, the state says []"
    ]
    silent = make(30)
    silent.load_state_dict(honest)  # with a ledger that never saw the first batches
    assert silent.ledger.tally(0).count == 0
    assert "positions [] were skipped" in Ledger.verify([silent.ledger], honest)[0]


def test_reset_keeps_the_holes_and_another_epoch_has_none() -> None:
    loader = make(30)
    loader.load_state_dict(skip(loader.state_dict(), 0, 4))
    next(iter(loader))
    loader.reset()
    assert loader.holes == [(0, 4)]
    assert numbers(next(iter(loader))) == whole_order(30)[4:8]
    loader.reset()
    loader.set_epoch(1)
    assert loader.holes == []


def test_an_epoch_that_is_one_hole_is_empty() -> None:
    loader = make(8)
    loader.load_state_dict(skip(loader.state_dict(), 0, 8))
    assert list(loader) == []
    assert loader.epoch == 1
    assert problems([loader]) == []


def test_a_hole_at_the_cursor_and_at_the_end() -> None:
    loader = make(12)
    loader.load_state_dict(skip(skip({**loader.state_dict(), "cursor": 4}, 4, 6), 10, 12))
    assert [i for batch in loader for i in numbers(batch)] == whole_order(12)[6:10]
    assert loader.ledger.tally(0).skipped == ((4, 6), (10, 12))
    assert loader.ledger.tally(0).dropped_count == 0


def test_skip_is_pure_and_refuses_what_makes_no_sense() -> None:
    state = {**make(30).state_dict(), "cursor": 8, "added_by_a_framework": 1}
    copy = json.loads(json.dumps(state))
    edited = skip(skip(state, 20, 22), 8, 20)
    assert state == copy
    assert edited == {**copy, "holes": [[8, 22]]}
    for start, stop in ((7, 9), (20, 20), (22, 20), (29, 31), (-1, 9)):
        with pytest.raises(
            LoaderStateError, match=rf"cannot skip \[{start}, {stop}\): epoch 0 stands at 8 of 30"
        ):
            skip(state, start, stop)
    with pytest.raises(LoaderStateError, match="format"):
        skip({}, 1, 2)
    stream = {**copy, "order": {"algo": "stream-1", "seed": 1, "block": 0}, "source": {}}
    with pytest.raises(LoaderStateError, match="'stream-1' is not everstep's own"):
        skip(stream, 8, 9)


def test_holes_must_not_touch() -> None:
    with pytest.raises(AssertionError):
        Holes(((0, 4), (4, 8)))
