"""What a device holds and when it may leave."""

from collections.abc import Sequence

import pytest

from everstep.checkpoint.catalogue import CheckpointInfo, CheckpointState
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.retire_plan import (
    HIGHEST_RUN_COUNT_MAX,
    Holding,
    Verdict,
    holdings_of,
    is_drained,
    judge_missing,
    newest_restorable,
    refusal,
    retired_device,
)
from everstep.core.ids import CheckpointId

COMPLETE, LOCAL, DAMAGED = CheckpointState.COMPLETE, CheckpointState.LOCAL, CheckpointState.DAMAGED
DAY_S = 86400.0


def info(step: int, state: CheckpointState = COMPLETE) -> CheckpointInfo:
    return CheckpointInfo(
        checkpoint=CheckpointId(1, step),
        parent=None,
        world_size=1,
        ranks=(0,),
        state=state,
        is_set_aside=False,
        is_finished=False,
        size_bytes=100,
        created_unix_s=step,
        notes={},
        problems=(),
        tags=(),
    )


def held(infos: Sequence[CheckpointInfo], *steps: int) -> list[Holding]:
    there = {CheckpointId(1, step): 10 for step in steps}
    return holdings_of(run="gpt", owner_uid=0, run_id="f" * 32, infos=infos, held=there)


def test_a_holding_says_what_a_restart_needs() -> None:
    infos = [info(1), info(2), info(3), info(4, LOCAL), info(5, DAMAGED)]
    found = held(infos, 2, 3, 5)
    assert [(each.checkpoint.step, each.is_newest, each.is_offered) for each in found] == [
        (5, False, False),
        (3, True, True),
        (2, False, True),
    ]
    assert {each.newest_elsewhere for each in found} == {CheckpointId(1, 1)}
    assert newest_restorable([info(4, LOCAL), info(5, DAMAGED)]) == CheckpointId(1, 4)
    assert newest_restorable([info(5, DAMAGED)]) is None


def test_a_device_is_drained_when_no_run_would_restart_from_it() -> None:
    infos = [info(1), info(2)]
    assert is_drained(held(infos))
    assert is_drained(held(infos, 1))
    assert not is_drained(held(infos, 1, 2))


@pytest.mark.parametrize(
    ("state", "on_it", "force", "expected"),
    [
        (DeviceState.MISSING, (1, 2), False, ""),
        (DeviceState.SUSPECT, (1, 2), False, ""),
        (DeviceState.OK, (), False, "it is well, and not drained"),
        (DeviceState.OK, (1, 2), True, ""),
        (DeviceState.DRAINING, (2,), False, "it is well, and not drained"),
        (DeviceState.DRAINING, (2,), True, ""),
        (DeviceState.DRAINING, (1,), False, ""),
    ],
)
def test_what_is_well_and_needed_leaves_by_force_only(
    state: DeviceState, on_it: tuple[int, ...], force: bool, expected: str
) -> None:
    found = held([info(1), info(2)], *on_it)
    assert refusal(state, found, is_last=False, force=force) == expected
    assert "no other device" in refusal(state, found, is_last=True, force=True)


def test_policy_waits_for_its_time_and_gives_up_nothing_that_a_restart_would_take() -> None:
    week_s = 7 * DAY_S

    def judge(holdings: list[Holding], at_s: float = week_s) -> Verdict:
        return judge_missing(1000.0, holdings, now_unix_s=1000.0 + at_s, missing_after_s=week_s)

    lost_then_newer = held([info(2, DAMAGED), info(3)], 2)
    assert judge(lost_then_newer) is Verdict.RETIRE
    assert judge(lost_then_newer, week_s - 1) is Verdict.WAIT
    assert judge(lost_then_newer, -DAY_S) is Verdict.WAIT, "a clock that was set back"
    assert judge([]) is Verdict.RETIRE
    assert judge(held([info(1), info(2, DAMAGED)], 2)) is Verdict.KEEP, "the newest is on it"
    assert judge(held([info(2, DAMAGED)], 2)) is Verdict.KEEP, "nothing else is there"
    assert judge(held([info(2, DAMAGED), info(3, LOCAL)], 2)) is Verdict.KEEP, "is 1.3 complete?"


def test_a_retired_device_is_remembered_by_the_runs_that_wrote_last() -> None:
    many = [
        holding
        for number in range(100)
        for holding in holdings_of(
            run=f"run {number}",
            owner_uid=0,
            run_id=f"{number:032x}",
            infos=[info(number), info(number + 1000)],
            held={CheckpointId(1, number): 1, CheckpointId(1, number + 1000): 1},
        )
    ]
    record = retired_device("/nvme0", many, now_unix_s=5.0)
    newest = range(100 - HIGHEST_RUN_COUNT_MAX, 100)
    assert record.highest == {f"0/{number:032x}": CheckpointId(1, number + 1000) for number in newest}
    assert (record.path, record.retired_unix_s) == ("/nvme0", 5.0)
