"""Where a run went back, as checkpoints say it in their notes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.lineage_plan import (
    TURN_COUNT_MAX,
    WENT_BACK_NOTE,
    Goal,
    Turn,
    is_left,
    note_of,
    turns_of,
)
from everstep.core.ids import CheckpointId


def turn(attempt: int, goal: str) -> Turn:
    return Turn(attempt=attempt, goal=Goal.parse(goal))


@pytest.mark.parametrize(
    ("turns", "here", "left"),
    [
        ([], "1.1 3.9", ""),
        ([turn(4, "2.50")], "1.99 2.50 4.51 5.1", "2.51 3.1 3.900"),
        ([turn(4, "2.50"), turn(7, "5.80")], "2.50 4.51 5.80 7.81", "2.51 3.900 5.81 6.1"),
        ([turn(4, "2.50"), turn(5, "2.50#2")], "2.50 5.51", "2.51 3.900 4.51"),
    ],
)
def test_what_is_left_and_what_is_not(turns: list[Turn], here: str, left: str) -> None:
    assert [each for each in here.split() if is_left(CheckpointId.parse(each), turns)] == []
    assert [each for each in left.split() if not is_left(CheckpointId.parse(each), turns)] == []


def test_a_note_reads_back_and_does_not_grow_for_ever() -> None:
    turns = [turn(4, "2.50"), turn(5, "2.50#2")]
    assert note_of(turns) == "4:2.50 5:2.50#2"
    assert turns_of({WENT_BACK_NOTE: note_of(turns)}) == tuple(turns)
    assert turns_of({}) == ()
    many = [turn(attempt, "1.1") for attempt in range(2, 200)]
    assert turns_of({WENT_BACK_NOTE: note_of(many)}) == tuple(many[-TURN_COUNT_MAX:])
    assert len(turns_of({WENT_BACK_NOTE: "4:2.50 " * 10_000})) == TURN_COUNT_MAX, "whoever wrote it"


@pytest.mark.parametrize(("text", "again"), [("2.50", "2.50#2"), ("2.50#2", "2.50#3"), ("2.50#9", "2.50#10")])
def test_how_to_go_there_once_more(text: str, again: str) -> None:
    assert Goal.parse(text).once_more == Goal.parse(again).text


@given(st.text(max_size=30))
def test_what_is_no_note_is_none(text: str) -> None:
    found = turns_of({WENT_BACK_NOTE: text})
    assert turns_of({WENT_BACK_NOTE: note_of(found)}) == found


@pytest.mark.parametrize(
    "text", ["", "best", "2", "2.", "2.50#", "2.50#x", "2.50#1234567890", "0.1", "2.50#1#2", "-1.5"]
)
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint is named|attempt must|a number"):
        Goal.parse(text)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8), st.data())
def test_it_is_what_a_run_that_forgets_by_itself_would_know(
    starts: list[tuple[bool, int]], data: st.DataObject
) -> None:
    """A model: each attempt begins with the branch that it takes, and adds its own checkpoints."""
    branches = dict[CheckpointId, frozenset[CheckpointId]]()
    notes = dict[CheckpointId, tuple[Turn, ...]]()
    now, turns = frozenset[CheckpointId](), tuple[Turn, ...]()
    for number, (goes_back, count) in enumerate(starts, start=1):
        if goes_back and branches:
            goal = data.draw(st.sampled_from(sorted(branches)))
            now, turns = branches[goal], (*notes[goal], turn(number, str(goal)))
        for step in range(count):
            made = CheckpointId(number, step)
            now |= {made}
            branches[made], notes[made] = now, turns
    assert {each for each in branches if not is_left(each, turns)} == now
