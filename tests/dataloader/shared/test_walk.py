"""The walk of a job through an epoch, and its state: arithmetic."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import LoaderStateError
from everstep.dataloader.holes_format import skip
from everstep.dataloader.ledger import Ledger
from everstep.dataloader.ledger_format import ledger_problems
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.shared.walk_plan import BatchCut, BatchIds, Walk
from everstep.dataloader.shared.walk_state_format import WalkState, parse_walk_state, rotation_of
from everstep.dataloader.state_format import LoaderState, parse_state

CUTS = st.builds(
    BatchCut, sample_count=st.integers(1, 60), batch_size=st.integers(1, 9), drop_last=st.booleans()
).filter(lambda cut: cut.batch_count > 0)

SPEC = OrderSpec(kind=OrderKind.PERMUTED, seed=1)


def state_of(cut: BatchCut, start: int, taken: int, epoch: int = 3) -> WalkState:
    walk = Walk(cut=cut, epoch=epoch, start=start, taken=taken)
    loader = LoaderState(
        fingerprint="d",
        sample_count=cut.sample_count,
        order=SPEC,
        epoch=epoch,
        cursor=walk.samples_taken,
        rotation=rotation_of(walk),
    )
    return WalkState(loader=loader, walk=walk)


@given(cut=CUTS, data=st.data())
def test_a_walk_from_anywhere_hands_out_each_sample_of_the_epoch_once(
    cut: BatchCut, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, cut.batch_count - 1))
    walk = Walk(cut=cut, epoch=2, start=start)
    ids = BatchIds(OrderSpec(kind=OrderKind.PERMUTED, seed=1), cut)
    seen: list[int] = []
    for index in range(len(walk)):
        assert Walk(cut=cut, epoch=2, start=start, taken=index).samples_taken == len(seen)
        epoch, _, found = ids.of(walk.batch(index))
        assert epoch == 2
        seen += found
    assert Walk(cut=cut, epoch=2, start=start, taken=len(walk)).samples_taken == len(seen)
    expected = cut.sample_count - (cut.sample_count % cut.batch_size if cut.drop_last else 0)
    assert len(seen) == len(set(seen)) == expected


@given(cut=CUTS, data=st.data())
def test_a_state_survives_json_at_any_batch(cut: BatchCut, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, cut.batch_count - 1))
    state = state_of(cut, start, data.draw(st.integers(0, cut.batch_count)))
    assert parse_walk_state(json.loads(json.dumps(state.to_dict())), cut) == state


@given(cut=CUTS, data=st.data())
def test_the_ledger_proves_what_a_walk_from_anywhere_handed_out(cut: BatchCut, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, cut.batch_count - 1))
    taken = data.draw(st.integers(0, cut.batch_count))
    ledger, ids = Ledger(1), BatchIds(SPEC, cut)
    walk = Walk(cut=cut, epoch=0, start=start)
    handed = [ids.of(walk.batch(index))[2] for index in range(taken)]
    for each in handed:
        ledger.add(0, np.array(each, dtype=np.int64))
    state = state_of(cut, start, taken, epoch=0).to_dict()
    assert Ledger.verify([ledger], state) == []
    assert ledger_problems([ledger.state()], state) == []
    if handed and start:
        wrong = Ledger(1)
        for each in handed[1:]:
            wrong.add(0, np.array(each, dtype=np.int64))
        wrong.add(0, np.array([*handed[0][1:], handed[0][0] + 1], dtype=np.int64))
        assert Ledger.verify([wrong], state) != []


@pytest.mark.parametrize(
    "rotation", [None, [4], [0, 10], [10, 10], [4, 11], [4, 7], [4.0, 10], "ab", [[4, 10]]]
)
def test_a_rotation_that_cannot_be_is_refused(rotation: object) -> None:
    state = state_of(CUT, 1, 2).to_dict()
    assert parse_state(state).rotation == (4, 10)
    with pytest.raises(LoaderStateError):
        parse_state(state | {"rotation": rotation, "cursor": 8})


def test_positions_that_are_skipped_cannot_be_shared() -> None:
    state = skip(state_of(CUT, 0, 1).to_dict(), 6, 8)
    with pytest.raises(
        LoaderStateError, match=r"skips the positions \[\[6, 8\]\], and jobs share whole batches"
    ):
        parse_walk_state(state, CUT)


def test_the_ids_are_those_of_the_order() -> None:
    cut = BatchCut(sample_count=10, batch_size=4, drop_last=False)
    ids = BatchIds(OrderSpec(kind=OrderKind.SEQUENTIAL, seed=0), cut)
    assert [ids.of(g) for g in (0, 2, 4)] == [(0, 0, [0, 1, 2, 3]), (0, 8, [8, 9]), (1, 4, [4, 5, 6, 7])]
    assert np.unique([len(ids.of(g)[2]) for g in range(6)]).tolist() == [2, 4]


CUT = BatchCut(sample_count=10, batch_size=4, drop_last=False)


def test_a_loaders_state_is_taken_between_two_batches_only() -> None:
    plain = state_of(CUT, 0, 2).to_dict()
    del plain["shared"]
    assert parse_walk_state(plain, CUT).walk.taken == 2
    assert parse_walk_state(plain | {"cursor": 10}, CUT).walk.taken == 3
    with pytest.raises(LoaderStateError, match="sample 6, which is not between two batches of 4"):
        parse_walk_state(plain | {"cursor": 6}, CUT)


@pytest.mark.parametrize(
    "change",
    [
        {"shared": None, "format": "everstep-shared-loader/1"},
        {"shared": {"batch_size": 5, "drop_last": False, "start": 0, "taken": 2}},
        {"shared": {"batch_size": 4, "drop_last": True, "start": 0, "taken": 2}},
        {"shared": {"batch_size": 4, "drop_last": False, "start": 1, "taken": 2}},
        {"shared": {"batch_size": 4, "drop_last": False, "start": 0, "taken": 1}},
        {"shared": {"batch_size": 4, "drop_last": False, "start": -1, "taken": 2}},
        {"shared": {"batch_size": 4, "drop_last": False, "start": 0, "taken": True}},
        {"shared": 7},
        {"format": "other/1"},
        {"cursor": -1},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    state = state_of(CUT, 0, 2).to_dict()
    assert parse_walk_state(state, CUT).walk.taken == 2
    with pytest.raises(LoaderStateError):
        parse_walk_state(state | change, CUT)
    with pytest.raises(LoaderStateError):
        parse_walk_state([state], CUT)
