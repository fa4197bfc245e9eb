"""Loader states: plain, small, and nothing else is taken for one."""

import io
import json
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import LoaderStateError
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.state_format import COUNT_MAX, LoaderState, parse_state, short_fingerprint

GOOD = LoaderState(
    fingerprint="Books",
    sample_count=100,
    order=OrderSpec(kind=OrderKind.PERMUTED, seed=7),
    epoch=2,
    cursor=64,
).to_dict()
states = st.integers(0, COUNT_MAX).flatmap(
    lambda n: st.builds(
        LoaderState,
        fingerprint=st.text(max_size=300).map(short_fingerprint),
        sample_count=st.just(n),
        order=st.builds(OrderSpec, kind=st.sampled_from(OrderKind), seed=st.integers(0, 2**64 - 1)),
        epoch=st.integers(0, COUNT_MAX),
        cursor=st.integers(0, n),
    )
)


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
        (("order", "algo"), "mt19937", "order.algo is one of permuted-1, sequential-1, got 'mt19937'"),
        (("order", "algo"), [], "order.algo is one of"),
        (("order", "seed"), 1 << 64, "order.seed is a whole number"),
        (("order", "block"), 256, "order.block is 256"),
        (("holes",), [[10, 20]], "newer version"),
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
