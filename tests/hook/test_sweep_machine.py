"""Only what all ranks are done with goes, and all of it, once."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.ids import CheckpointId
from everstep.hook.horizon_machine import Plan
from everstep.hook.sweep_machine import CHECKPOINT_KEYS, KEPT_MAX, Mark, Sweep


def keys_of(step: int) -> set[str]:
    return {f"{key}/3.{step}" for key in CHECKPOINT_KEYS}


def test_what_the_slowest_rank_is_done_with_goes() -> None:
    sweep = Sweep()
    for number in range(4):
        sweep.published(Plan(number=number, start=number, horizon=number + 1, steps=(number,)))
        sweep.ended([CheckpointId(3, number)])
    old = sweep.old_keys([Mark(plan=4, step=4), Mark(plan=2, step=1)])
    assert sorted(old) == sorted({"plan/0", "plan/1"} | keys_of(0))
    assert sweep.old_keys([Mark(plan=4, step=4), Mark(plan=2, step=1)]) == []


def test_of_what_a_rank_that_is_lost_never_reads_the_newest_stays() -> None:
    sweep, lost = Sweep(), Mark(plan=2, step=1)
    for number in range(KEPT_MAX + 5):
        sweep.published(Plan(number=number, start=number, horizon=number + 1, steps=(number,)))
        sweep.ended([CheckpointId(3, number)])
    old = sweep.old_keys([Mark(plan=KEPT_MAX + 5, step=KEPT_MAX + 5), lost])
    assert set(old) == {f"plan/{number}" for number in range(5)}.union(*map(keys_of, range(5)))
    assert sweep.old_keys([lost]) == []


@given(
    st.lists(
        st.one_of(
            st.just("plan"),
            st.integers(0, 40),
            st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
        ),
        max_size=60,
    )
)
def test_every_key_goes_once_and_none_that_a_rank_may_still_read(
    events: list[str | int | list[tuple[int, int]]],
) -> None:
    """A plan is published, a checkpoint of a boundary ends, or ranks say how far they are."""
    sweep, plans, ended, gone = Sweep(), 0, set[int](), set[str]()
    for event in events:
        if event == "plan":
            sweep.published(Plan(number=plans, start=plans, horizon=plans + 1, steps=()))
            plans += 1
        elif isinstance(event, int):
            if not keys_of(event) & gone:  # a checkpoint ends once
                sweep.ended([CheckpointId(3, event)])
                ended.add(event)
        elif isinstance(event, list):
            old = sweep.old_keys([Mark(plan=plan, step=step) for plan, step in event])
            assert not set(old) & gone
            gone |= set(old)
            done_plan, done_step = min(plan for plan, _ in event), min(step for _, step in event)
            present = {f"plan/{number}" for number in range(plans)} | {
                key for step in ended for key in keys_of(step)
            }
            done = {f"plan/{number}" for number in range(min(plans, done_plan))} | {
                key for step in ended if step < done_step for key in keys_of(step)
            }
            assert done <= gone <= present
