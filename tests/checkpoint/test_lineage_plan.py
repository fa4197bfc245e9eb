"""Which checkpoints a run goes on from, after attempts that started anew or went back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.lineage_plan import is_set_aside, went_back_to
from everstep.checkpoint.store_format import Attempt
from everstep.core.ids import CheckpointId

PLAIN = [Attempt(attempt=number, fresh=False) for number in (1, 2, 3)]


def back(attempt: int, to: str) -> Attempt:
    return Attempt(attempt=attempt, fresh=False, back_to=CheckpointId.parse(to))


def fresh(attempt: int) -> Attempt:
    return Attempt(attempt=attempt, fresh=True)


@pytest.mark.parametrize(
    ("turns", "here", "aside"),
    [
        ([], "1.1 3.9", ""),
        ([fresh(3)], "3.1", "1.1 2.9"),
        ([back(4, "2.50")], "1.99 2.50 4.51 5.1", "2.51 3.1 3.900"),
        ([back(4, "2.50"), fresh(6)], "6.1", "2.50 4.51 5.1"),
        ([fresh(2), back(4, "2.50")], "2.50 4.51", "1.99 2.51 3.1"),
        # Back, and back again on the new branch: the old one stays left.
        ([back(4, "2.50"), back(7, "5.80")], "2.50 4.51 5.80 7.81", "2.51 3.900 5.81 6.1"),
        # It was a mistake: back to where it was before, by which the new branch is left.
        ([back(4, "2.50"), back(5, "3.900")], "2.51 3.900 5.901", "3.901 4.51"),
        # Before a fresh start, which is thereby left, too.
        ([fresh(3), back(4, "2.50")], "1.1 2.50 4.51", "2.51 3.1"),
    ],
)
def test_what_is_left_and_what_is_not(turns: list[Attempt], here: str, aside: str) -> None:
    attempts = [*PLAIN, *turns]
    assert [each for each in here.split() if is_set_aside(CheckpointId.parse(each), attempts)] == []
    assert [each for each in aside.split() if not is_set_aside(CheckpointId.parse(each), attempts)] == []


def test_where_it_went_last() -> None:
    assert went_back_to(PLAIN) is None
    assert went_back_to([*PLAIN, back(4, "2.50"), back(5, "4.60")]) == CheckpointId(4, 60)
    assert went_back_to([*PLAIN, back(4, "2.50"), fresh(5)]) is None


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 9)), max_size=8),
    st.data(),
)
def test_it_is_what_a_run_that_forgets_by_itself_would_know(
    starts: list[tuple[bool, bool, int]], data: st.DataObject
) -> None:
    """A model: each attempt begins with the branch that it takes, and adds its own checkpoints."""
    known, branches = set[CheckpointId](), dict[CheckpointId, frozenset[CheckpointId]]()
    attempts, now = list[Attempt](), frozenset[CheckpointId]()
    for number, (is_fresh, goes_back, count) in enumerate(starts, start=1):
        goal = data.draw(st.sampled_from(sorted(known))) if goes_back and known and not is_fresh else None
        attempts.append(Attempt(attempt=number, fresh=is_fresh, back_to=goal))
        now = frozenset() if is_fresh else now if goal is None else branches[goal]
        for step in range(count):
            made = CheckpointId(number, step)
            now |= {made}
            known.add(made)
            branches[made] = now
    assert {each for each in known if not is_set_aside(each, attempts)} == now
