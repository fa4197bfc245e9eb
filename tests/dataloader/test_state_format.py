"""Loader states: plain, small, and nothing else is taken for one."""

import io
import json
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import LoaderStateError
from everstep.dataloader.block_format import equal_blocks, listed_blocks
from everstep.dataloader.holes_format import united
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.state_format import COUNT_MAX, LoaderState, parse_state, short_fingerprint

GOOD = LoaderState(
    fingerprint="Books",
    sample_count=100,
    order=OrderSpec(kind=OrderKind.PERMUTED, seed=7),
    epoch=2,
    cursor=64,
).to_dict()


def orders(n: int) -> st.SearchStrategy[OrderSpec]:
    seeds = st.integers(0, 2**64 - 1)
    plain = [OrderKind.PERMUTED, OrderKind.SEQUENTIAL, OrderKind.CONTINUED]
    blocks = st.builds(equal_blocks, st.just(n), st.integers(1, 2**40), st.integers(1, 2**40))
    return st.builds(OrderSpec, kind=st.sampled_from(plain), seed=seeds) | st.builds(
        OrderSpec, kind=st.just(OrderKind.BLOCKS), seed=seeds, blocks=blocks
    )


def states_of(n: int) -> st.SearchStrategy[LoaderState]:
    return st.builds(
        LoaderState,
        fingerprint=st.text(max_size=300).map(short_fingerprint),
        sample_count=st.just(n),
        order=orders(n),
        epoch=st.integers(0, COUNT_MAX),
        cursor=st.integers(0, n),
    )


states = st.integers(0, COUNT_MAX).flatmap(states_of)


@given(state=states)
def test_a_state_survives_json_and_torch_save(state: LoaderState) -> None:
    text = json.dumps(state.to_dict())
    assert len(text) < 1024
    assert parse_state(json.loads(text)) == state
    stored = io.BytesIO()
    torch.save(state.to_dict(), stored)
    stored.seek(0)
    assert parse_state(torch.load(stored, weights_only=True)) == state


def test_form_on_disk() -> None:
    """This is in users' checkpoints."""
    assert GOOD == {
        "format": "everstep-loader/1",
        "dataset": {"fingerprint": "Books", "n": 100},
        "order": {"algo": "permuted-1", "seed": 7, "block": 0},
        "epoch": 2,
        "cursor": 64,
        "holes": [],
    }


def test_keys_that_a_framework_adds_are_ignored() -> None:
    assert parse_state({**GOOD, "_iterator_finished": False}) == parse_state(GOOD)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "everstep-loader/2", "format 'everstep-loader/1', got 'everstep-loader/2'"),
        (("format",), None, "got None"),
        (("dataset",), None, "dataset of a loader state is a dict"),
        (("dataset", "fingerprint"), 3, "dataset.fingerprint is a text, got 3"),
        (("dataset", "n"), -1, "dataset.n is a whole number"),
        (("dataset", "n"), 1 << 63, "dataset.n is a whole number"),
        pytest.param(("dataset", "n"), 1 << 20_000, "got a value of type int", id="huge"),
        (("order", "algo"), "mt19937", "order.algo is one of permuted-1, .*, got 'mt19937'"),
        (("order", "algo"), [], "order.algo is one of"),
        (("order", "seed"), 1 << 64, "order.seed is a whole number"),
        (("order", "block"), 256, "order.block is 256, expected 0 for 'permuted-1'"),
        (("order", "block"), {"window": 1, "runs": []}, "order.block is a value of type dict"),
        (("order", "algo"), "blocks-1", "order.block of a loader state is a dict, got 0"),
        (("holes",), 0, "holes is a list of at most 1024 pairs, got 0"),
        (("holes",), [[1, 2]] * 1025, "holes is a list of at most 1024 pairs"),
        (("holes",), [[1, 2, 3]], "holes is a list of pairs"),
        (("holes",), [7], "holes is a list of pairs, got 7"),
        (("holes",), [[2, 2]], r"0 <= a < b <= 100, got \[2, 2\]"),
        (("holes",), [[90, 101]], r"got \[90, 101\]"),
        (("holes",), [[-1, 3]], "holes is a whole number from 0"),
        (("epoch",), True, "epoch is a whole number"),
        (("epoch",), "2", "epoch is a whole number"),
        (("cursor",), 101, "cursor is a whole number from 0 to 100, got 101"),
        (("cursor",), 1.0, "cursor is a whole number"),
    ],
)
def test_one_wrong_value_is_named(path: tuple[str, ...], value: object, message: str) -> None:
    bad = cast(dict[str, dict[str, object]], json.loads(json.dumps(GOOD)))
    inner = cast(dict[str, object], bad) if len(path) == 1 else bad[path[0]]
    inner[path[-1]] = value
    with pytest.raises(LoaderStateError, match=message):
        parse_state(bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(garbage=json_values)
def test_garbage_is_refused(garbage: object) -> None:
    with pytest.raises(LoaderStateError):
        parse_state(garbage)


def test_long_fingerprints_are_shortened_and_stay_apart() -> None:
    assert short_fingerprint("Books") == "Books"
    assert len(short_fingerprint("a" * 10_000)) == 32
    assert short_fingerprint("a" * 10_000) != short_fingerprint("a" * 10_001)


# -- blocks and holes -----------------------------------------------------------------------------------------------

OLD = {
    "format": "everstep-loader/1",
    "dataset": {"fingerprint": "Books", "n": 100},
    "order": {"algo": "sequential-1", "seed": 7, "block": 0},
    "epoch": 2,
    "cursor": 64,
    "holes": [],
}


def test_states_of_before_blocks_and_holes_still_load() -> None:
    old = parse_state(OLD)
    assert (old.order.kind, old.order.blocks, old.holes.spans, old.source) == (
        OrderKind.SEQUENTIAL,
        None,
        (),
        None,
    )
    assert old.to_dict() == OLD


def test_form_of_blocks_on_disk() -> None:
    """These are in users' checkpoints."""
    few = LoaderState(
        fingerprint="Books",
        sample_count=100,
        order=OrderSpec(kind=OrderKind.BLOCKS, seed=7, blocks=equal_blocks(100, 16, 3)),
    )
    many_sizes = [1, 2] * 5
    many = LoaderState(
        fingerprint="Books",
        sample_count=15,
        order=OrderSpec(kind=OrderKind.BLOCKS, seed=7, blocks=listed_blocks(many_sizes, 3)),
    )
    assert few.to_dict()["order"] == {
        "algo": "blocks-1",
        "seed": 7,
        "block": {"window": 3, "runs": [[6, 16], [1, 4]]},
    }
    assert many.to_dict()["order"] == {
        "algo": "blocks-1",
        "seed": 7,
        "block": {"window": 3, "count": 10, "digest": "94bc8b66127dcbd373c6d6fe43ac13d3"},
    }
    assert parse_state(few.to_dict()) == few
    read = parse_state(many.to_dict()).order.blocks
    assert read is not None
    assert read.runs is None
    assert many.order.blocks is not None
    assert read.is_like(many.order.blocks)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"window": 0, "runs": [[1, 100]]}, "order.block.window is a whole number from 1"),
        ({"window": 3, "runs": [[1, 99]]}, "hold 99 samples, the dataset 100"),
        ({"window": 3, "runs": [[1, 1]] * 9}, "at most 8 pairs"),
        ({"window": 3, "runs": [[1, -1]]}, "order.block.runs is a whole number"),
        ({"window": 3, "count": 3}, "order.block.digest is a text, got None"),
    ],
)
def test_blocks_that_are_none_are_refused(block: object, message: str) -> None:
    with pytest.raises(LoaderStateError, match=message):
        parse_state({**OLD, "order": {"algo": "blocks-1", "seed": 7, "block": block}})


def test_holes_by_hand_are_put_in_order() -> None:
    state = parse_state({**OLD, "holes": [[90, 95], (70, 80), [80, 91]]})
    assert state.holes == united([(70, 95)])
    assert state.to_dict()["holes"] == [[70, 95]]


def test_a_users_own_state_is_kept_and_never_shared() -> None:
    inner: dict[str, object] = {"own": [1]}
    state = {**OLD, "order": {"algo": "stream-1", "seed": 7, "block": 0}, "cursor": 10**6, "source": inner}
    read = parse_state(state)
    inner["own"] = [2]
    written = read.to_dict()
    assert written["source"] == {"own": [1]}
    cast(dict[str, list[int]], written["source"])["own"].append(3)
    assert read.to_dict()["source"] == {"own": [1]}
    with pytest.raises(LoaderStateError, match="source of a loader state is a dict, got None"):
        parse_state({**state, "source": None})
    deep: dict[str, object] = {}
    for _ in range(5_000):
        deep = {"a": deep}
    with pytest.raises(LoaderStateError, match="nested too deeply"):
        parse_state({**state, "source": deep})
