"""Histories: append-only, restored exactly, and a layout that rarely changes."""

import math

import pytest
import torch

from everstep.core.errors import CorruptDataError, StateTypeError
from everstep.hook.capture import capture_state
from everstep.hook.history import CAPACITY_MIN, KEY_LENGTH_MAX, History
from everstep.hook.state_testing import store


def test_values_come_back_with_their_steps() -> None:
    history = History()
    for step in range(200):
        history.append(step, {"loss": 1 / (step + 1), "odd.steps": math.nan} if step % 2 else {"loss": -0.0})
    other = History()
    other.append(7, {"else": 1.0})
    stored = store([history])
    other.check(stored)
    other.apply(stored)
    assert other.keys() == ["loss", "odd.steps"]
    assert repr(other.series("loss")) == repr(history.series("loss"))
    assert [step for step, _ in other.series("odd.steps")] == list(range(1, 200, 2))
    assert other.series("else") == []


def test_what_was_logged_after_the_checkpoint_is_gone_and_can_be_logged_again() -> None:
    history = History()
    history.append(1, {"loss": 0.5})
    stored = store([history])
    history.append(2, {"loss": 0.25})
    history.apply(stored)
    assert history.series("loss") == [(1, 0.5)]
    for step in range(2, 200):
        history.append(step, {"loss": step})
    assert history.series("loss")[-1] == (199, 199.0)
    assert stored.tensor("log.loss.steps")[1] == 0


def test_the_structure_changes_only_when_the_room_doubles() -> None:
    history = History()
    shapes = set[object]()
    for step in range(5 * CAPACITY_MIN):
        history.append(step, {"loss": 0.0})
        shapes.add(tuple(leaf.spec for leaf in capture_state([history]).leaves))
    assert len(shapes) == 1 + math.ceil(math.log2(5))


def test_tensors_of_one_element_count_as_numbers() -> None:
    history = History()
    history.append(1, {"a": torch.tensor([2.5], requires_grad=True), "b": 3, "c": True})  # pyright: ignore[reportArgumentType]
    assert [history.series(key) for key in ("a", "b", "c")] == [[(1, 2.5)], [(1, 3.0)], [(1, 1.0)]]


@pytest.mark.parametrize("value", ["a", None, torch.zeros(2), [1.0], 10**400])
def test_what_is_no_number_is_refused_and_nothing_appended(value: object) -> None:
    history = History()
    with pytest.raises(StateTypeError, match=r"log\(b=…\)"):
        history.append(1, {"a": 1.0, "b": value})  # pyright: ignore[reportArgumentType]
    assert history.keys() == []


def test_a_count_beyond_the_room_is_corrupt() -> None:
    history = History()
    history.append(1, {"a": 1.0})
    stored = store([history])
    document = stored.values("log")
    assert isinstance(document, dict)
    document["counts"] = [["a", CAPACITY_MIN + 1]]
    with pytest.raises(CorruptDataError, match="too little room"):
        history.check(stored)


def test_a_default_device_does_not_move_histories() -> None:
    with torch.device("meta"):
        history = History()
        for step in range(CAPACITY_MIN + 1):
            history.append(step, {"a": 1.0})
    assert len(history.series("a")) == CAPACITY_MIN + 1


def test_what_an_evaluation_begins_in_inference_mode_goes_on_outside() -> None:
    history = History()
    for step in range(2 * CAPACITY_MIN + 2):
        with torch.inference_mode(step % 2 == 0):
            history.append(step, {"a": float(step)})
    assert history.series("a") == [(step, float(step)) for step in range(2 * CAPACITY_MIN + 2)]


def test_a_key_that_no_leaf_can_be_named_after_is_refused_at_once() -> None:
    history = History()
    history.append(1, {"a" * KEY_LENGTH_MAX: 1.0})
    capture_state([history])
    with pytest.raises(StateTypeError, match=f"a key of {KEY_LENGTH_MAX + 1} characters"):
        history.append(1, {"a" * (KEY_LENGTH_MAX + 1): 1.0})
