"""The keep rules alone: what each of them keeps, and what holds whatever they are."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.catalogue import CheckpointInfo, CheckpointState
from everstep.checkpoint.collect_plan import plan_collection
from everstep.checkpoint.keep import Keep
from everstep.core.errors import ConfigError
from everstep.core.ids import CheckpointId

C, L, D = CheckpointState.COMPLETE, CheckpointState.LOCAL, CheckpointState.DAMAGED
HOUR_S = 3600.0


def at(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(attempt, step)


def info(checkpoint: CheckpointId, state: CheckpointState = C) -> CheckpointInfo:
    """A checkpoint; its step is also the hour of its commit."""
    return CheckpointInfo(
        checkpoint=checkpoint,
        parent=None,
        world_size=1,
        ranks=(0,),
        state=state,
        is_set_aside=False,
        is_finished=False,
        size_bytes=1,
        created_unix_s=checkpoint.step * HOUR_S,
        notes={},
        problems=(),
        tags=(),
    )


def complete(*steps: int) -> list[CheckpointInfo]:
    return [info(at(step)) for step in steps]


def kept(infos: Sequence[CheckpointInfo], keep: Keep, floor: CheckpointId | None = None) -> list[str]:
    gone = plan_collection(infos, floor=floor, keep=keep)
    return [str(each.checkpoint) for each in infos if each.checkpoint not in gone]


@pytest.mark.parametrize(
    ("states", "floor", "last", "removed"),
    [
        ([C, C, C, C], 4, 1, [1, 2]),  # the one before the floor stays
        ([C, C, C, C], 4, 3, [1]),
        ([C, C, C, C], 2, 1, []),  # newer than the floor stays, whatever it is
        ([C, C, C, C], 3, 1, [1]),
        ([C, C, C, C], None, 1, [1, 2]),
        ([L, L, L, L], None, 1, []),  # nothing known complete: nothing goes
        ([L, L, L, C], 4, 1, [1, 2]),  # the newest intact one before the floor, where none is known complete
        ([C, L, L, C], 4, 1, [2, 3]),
        ([C, D, D, C], 4, 1, [2, 3]),
        ([D, D, C, L], 3, 1, [1, 2]),
        ([C, C, D, D], 3, 1, [1]),  # a damaged floor stays, and so does a complete one before it
        ([D, D, D, D], None, 1, []),
        ([], None, 1, []),
        ([C, C, C], 9, 1, [1, 2]),  # a floor that is on other nodes only
    ],
)
def test_the_last_ones(
    states: list[CheckpointState], floor: int | None, last: int, removed: list[int]
) -> None:
    infos = [info(at(step), state) for step, state in enumerate(states, 1)]
    found = plan_collection(infos, floor=at(floor) if floor else None, keep=Keep(last=last))
    assert [checkpoint.step for checkpoint in found] == removed


def test_what_was_given_up_goes_however_new_it_is() -> None:
    infos = [info(at(step), state) for step, state in enumerate([C, L, L, C, L, L, L, D], 1)]
    tagged = replace(infos[6], tags=("looked at",))
    gone = plan_collection(
        [*infos[:6], tagged, infos[7]],
        floor=at(4),
        keep=Keep(last=3),
        pinned={at(6)},
        given_up={at(4), at(5), at(6), at(7), at(8), at(9)},
    )
    assert [each.step for each in gone] == [2, 3, 5, 8]


def test_what_was_given_up_goes_where_nothing_is_complete() -> None:
    infos = [info(at(step), L) for step in (1, 2, 3)]
    assert plan_collection(infos, floor=None, keep=Keep(last=3), given_up={at(1), at(3)}) == (at(1), at(3))


def test_one_in_each_stretch_of_steps() -> None:
    infos = complete(5, 99, 100, 150, 207, 290, 301, 350)
    assert kept(infos, Keep(last=1, every_steps=100)) == ["1.5", "1.100", "1.207", "1.301", "1.350"]
    assert kept(infos, Keep(last=1, every_steps=200)) == ["1.5", "1.207", "1.301", "1.350"]


def test_one_in_each_stretch_of_time() -> None:
    infos = complete(1, 5, 6, 7, 13, 20, 30, 31)
    assert kept(infos, Keep(last=1, every="6h")) == ["1.1", "1.6", "1.13", "1.20", "1.30", "1.31"]
    assert kept(infos, Keep(last=1, every="1d")) == ["1.1", "1.30", "1.31"]


def test_a_newer_attempt_replaces_the_branch_that_it_left() -> None:
    infos = [*complete(10, 20, 30, 40), info(at(35, 2)), info(at(38, 2)), info(at(50, 2))]
    assert kept(infos, Keep(last=1, every_steps=10)) == ["1.10", "1.20", "1.40", "2.35", "2.38", "2.50"]


def test_a_complete_one_is_preferred_and_an_incomplete_one_stays_where_none_is_known() -> None:
    infos = [info(at(1), L), info(at(2)), info(at(11), L), info(at(12), D), *complete(20, 30)]
    assert kept(infos, Keep(last=1, every_steps=10)) == ["1.2", "1.11", "1.20", "1.30"]


def test_what_a_fresh_start_set_aside_is_not_kept_for_its_step() -> None:
    aside = [replace(each, is_set_aside=True) for each in complete(1, 11, 21)]
    infos = [*aside, info(at(5, 2)), info(at(6, 2))]
    assert kept(infos, Keep(last=1, every_steps=10)) == ["2.5", "2.6"]


def went_back(*infos: CheckpointInfo) -> list[CheckpointInfo]:
    """Of steps 1 to 5 of the first attempt, 2 is where a later one went back to."""
    aside = [replace(each, is_set_aside=True) for each in complete(3, 4, 5)]
    return [*complete(1, 2), *aside, *infos]


def test_what_a_run_left_by_going_back_takes_nobodys_place() -> None:
    assert kept(went_back(info(at(3, 2))), Keep(last=2), at(3, 2)) == ["1.2", "2.3"]
    assert kept(went_back(info(at(3, 2)), info(at(4, 2))), Keep(last=2), at(4, 2)) == ["2.3", "2.4"]
    assert kept(went_back(info(at(3, 2))), Keep(last=4), at(3, 2)) == ["1.1", "1.2", "1.5", "2.3"]


def test_what_the_newest_attempt_goes_on_from_stays_however_old_it_is() -> None:
    gone = plan_collection(complete(1, 2, 3, 4, 5), floor=at(5), keep=Keep(last=1), origin=at(2))
    assert [str(each) for each in gone] == ["1.1", "1.3"]


@pytest.mark.parametrize("state", [C, L, D])
def test_what_has_a_tag_stays(state: CheckpointState) -> None:
    infos = [replace(info(at(1), state), tags=("best",)), *complete(2, 3, 4)]
    assert kept(infos, Keep(last=1)) == ["1.1", "1.3", "1.4"]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (lambda: Keep(last=0), "last is 0"),
        (lambda: Keep(every_steps=0), "every_steps is 0"),
        (lambda: Keep(every="6 hours"), "'6 hours'.*such as '6h'"),
        (lambda: Keep(every="0h"), "'0h'"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rules: Callable[[], Keep], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rules()


def test_rules_as_text() -> None:
    assert str(Keep(last=2, every_steps=1000, every="6h")) == "last 2, one every 1000 steps, one every 6h"


# --- whatever the rules are -----------------------------------------------------------------------------------------

infos_of = st.lists(
    st.builds(
        lambda checkpoint, state, hour, tags, aside: replace(
            info(checkpoint, state),
            created_unix_s=hour * HOUR_S,
            tags=tags,
            is_set_aside=aside,
        ),
        st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 40)),
        st.sampled_from([C, L, D]),
        st.integers(0, 60),
        st.sampled_from([(), (), (), ("best",)]),
        st.booleans(),
    ),
    max_size=14,
    unique_by=lambda each: each.checkpoint,
)
floors = st.none() | st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 40))
rules = st.builds(
    lambda last, steps, hours: Keep(last=last, every_steps=steps, every=hours and f"{hours}h"),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
)


@given(infos_of, floors, rules, st.data())
def test_never_what_may_be_needed(
    infos: list[CheckpointInfo], floor: CheckpointId | None, keep: Keep, data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from([each.checkpoint for each in infos]))) if infos else set()
    gone = plan_collection(infos, floor=floor, keep=keep, pinned=pinned)
    assert list(gone) == sorted(set(gone))
    in_order = sorted(infos, key=lambda each: (not each.is_set_aside, each.checkpoint))
    whole = [each.checkpoint for each in in_order if each.state is C]
    base = floor or max(whole, default=None)
    assert base is not None or not gone
    tagged = {each.checkpoint for each in infos if each.tags}
    assert not set(gone) & (set(whole[-keep.last :]) | tagged | pinned)
    if base is not None:
        assert all(checkpoint < base for checkpoint in gone)
        before = [each for each in in_order if each.checkpoint < base]
        before = [each for each in before if not each.is_set_aside] or before
        last = [each.checkpoint for each in before if each.state is C][-1:]
        assert not set(gone).intersection(last)


@given(infos_of, floors, rules)
def test_planning_again_lets_nothing_more_go(
    infos: list[CheckpointInfo], floor: CheckpointId | None, keep: Keep
) -> None:
    gone = plan_collection(infos, floor=floor, keep=keep)
    left = [each for each in infos if each.checkpoint not in gone]
    assert plan_collection(left, floor=floor, keep=keep) == ()


@given(infos_of, floors, rules, rules)
def test_another_rule_never_lets_more_go(
    infos: list[CheckpointInfo], floor: CheckpointId | None, keep: Keep, more: Keep
) -> None:
    both = Keep(last=max(keep.last, more.last), every_steps=keep.every_steps, every=keep.every or more.every)
    assert set(plan_collection(infos, floor=floor, keep=both)) <= set(
        plan_collection(infos, floor=floor, keep=keep)
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40), st.integers(1, 30))
def test_each_stretch_that_was_ever_reached_keeps_one(saves: list[tuple[int, bool]], steps: int) -> None:
    """A run saves, completes and collects; sometimes it starts again from its newest checkpoint's step."""
    keep, present, reached = Keep(last=1, every_steps=steps), dict[CheckpointId, CheckpointInfo](), set[int]()
    attempt, step = 1, 0
    for distance, is_restart in saves:
        attempt, step = attempt + is_restart, step + distance
        present[at(step, attempt)] = info(at(step, attempt))
        reached.add(step // steps)
        for gone in plan_collection([*present.values()], floor=at(step, attempt), keep=keep):
            del present[gone]
        assert {checkpoint.step // steps for checkpoint in present} == reached
