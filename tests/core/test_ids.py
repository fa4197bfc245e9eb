"""Identities: their order, their text, what may reach a path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.ids import RUN_NAME_BYTES_MAX, CheckpointId, is_id, random_id, run_id_of

CHECKPOINTS = st.builds(CheckpointId, st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1))


@given(CHECKPOINTS)
def test_text_and_back(checkpoint: CheckpointId) -> None:
    assert CheckpointId.parse(str(checkpoint)) == checkpoint


@given(CHECKPOINTS, CHECKPOINTS)
def test_a_newer_attempt_is_newer_whatever_the_steps(one: CheckpointId, other: CheckpointId) -> None:
    assert (one < other) == ((one.attempt, one.step) < (other.attempt, other.step))


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "0.5", "1.-1", "1.2.3", " 1.2", "1.2 ", "a.b", "１.２", "1.²", "+1.2"]
)
def test_anything_else_is_no_checkpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"attempt|checkpoint"):
        CheckpointId.parse(text)


@given(st.text())
def test_a_run_id_is_safe_in_a_path_or_the_name_is_refused(name: str) -> None:
    try:
        made = run_id_of(name)
    except (ValueError, UnicodeEncodeError):
        return
    assert is_id(made)
    assert made == run_id_of(name)


@pytest.mark.parametrize(
    "name", ["", "a\nb", "\0", "x" * (RUN_NAME_BYTES_MAX + 1), "ü" * (RUN_NAME_BYTES_MAX // 2 + 1)]
)
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 bytes of printable text"):
        run_id_of(name)


def test_the_longest_name_is_allowed() -> None:
    assert is_id(run_id_of("x" * RUN_NAME_BYTES_MAX))


def test_run_ids_are_part_of_the_format() -> None:
    assert run_id_of("gpt") == "4cc21a0de911344a2ae7bb4677c89f28"


@pytest.mark.parametrize(
    "text", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 31 + "\n", "../" + "a" * 29]
)
def test_what_is_no_id(text: str) -> None:
    assert not is_id(text)


def test_random_ids_are_ids_and_differ() -> None:
    made = {random_id() for _ in range(100)}
    assert len(made) == 100
    assert all(is_id(each) for each in made)
