"""Green, amber, red, and why."""

from dataclasses import replace

import pytest

from everstep.checkpoint.keep import Keep
from everstep.core.ids import CheckpointId
from everstep.daemon.control.views import (
    DaemonView,
    DeviceStatus,
    DeviceView,
    PaceView,
    RankState,
    RankView,
    RunView,
    ScrubView,
    StatusView,
    StoreView,
)
from everstep.daemon.web.history_machine import SAMPLE_S, History, Sums
from everstep.daemon.web.verdict_plan import Level, RunFacts, facts_of, findings_of, level_of

DAEMON = DaemonView(
    version="1", pid=1, is_private=False, uptime_s=1.0, socket="/s", uid=0, arena_bytes=0, metrics_port=1,
    is_draining=False, persisted_count=0, failed_count=0,
)  # fmt: skip
DEVICE = DeviceView(
    device_id="d", path="/nvme0", free_bytes=1, total_bytes=2, engine="aio", engine_reason="", is_direct=True,
    state=DeviceStatus.OK, reason="", pool_bytes=0, write_bytes_per_s=0,
)  # fmt: skip
RANK = RankView(rank=0, state=RankState.ATTACHED, step=10, slots=(), arena_bytes=0, pid=1)
RUN = RunView(
    name="gpt", run_id="0" * 32, owner_uid=0, attempt=1, world_size=1, ranks=(RANK,), complete_floor=None,
    keep=Keep(last=2), is_own_keep=False, newest=CheckpointId(1, 10), newest_unix_s=1.0,
    pace=PaceView(interval_steps=100, reason="as asked", goal_missed="", cost_share=0.0, skipped_count=0),
)  # fmt: skip
WELL = RunFacts(view=RUN, newest_age_s=5.0, steps_per_s=10.0, stall_share=0.01, data_share=0.02)


def paced(**pace: float) -> RunView:
    """Return the run with something else told of its pace."""
    assert RUN.pace is not None
    return replace(RUN, pace=replace(RUN.pace, **pace))


def costing(share: float, **pace: float) -> RunFacts:
    """Return the run with checkpoints that cost so much of the time without them."""
    lately = Sums(steps=600, train_s=60.0 * (1 + share), stall_s=60.0 * share, data_s=0.0)
    return replace(WELL, view=paced(**pace), lately=lately)


def status(
    device: DeviceView = DEVICE, daemon: DaemonView = DAEMON, problems: tuple[str, ...] = ()
) -> StatusView:
    scrub = ScrubView(newest=None, next_unix_s=None)
    store = StoreView(store_id="s", devices=(device,), notes=(), problems=problems, scrub=scrub)
    return StatusView(daemon=daemon, runs=(), stores=(store,))


def test_all_is_well() -> None:
    assert findings_of(status(), [WELL]) == []
    assert level_of([]) is Level.GREEN


def test_that_a_trainer_left_as_announced_is_nothing_to_look_after() -> None:
    left = replace(RANK, state=RankState.LINGERING, left="SIGTERM")
    assert findings_of(status(), [replace(WELL, view=replace(RUN, ranks=(left,)), steps_per_s=None)]) == []


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (replace(WELL, newest_age_s=300.0), Level.RED, "is 5 min old, although one is due every 10 s"),
        (replace(WELL, newest_age_s=100.0), Level.GREEN, ""),
        (replace(WELL, newest_age_s=None), Level.GREEN, ""),
        (replace(WELL, newest_age_s=300.0, steps_per_s=None), Level.GREEN, ""),
        (costing(0.08), Level.AMBER, "checkpoints cost 8.0 % in the last 64.8 s of training"),
        (costing(0.08, budget=0.1), Level.GREEN, ""),
        (costing(0.02, budget=0.01), Level.AMBER, "checkpoints cost 2.0 % in the last 61.2 s of training"),
        (replace(WELL, newest_age_s=300.0, view=paced(paused_until_unix_s=2e9)), Level.GREEN, ""),
        (replace(WELL, data_share=0.5), Level.AMBER, "waits for data 50 %"),
        (
            replace(WELL, view=replace(RUN, ranks=(replace(RANK, state=RankState.LINGERING),))),
            Level.AMBER,
            "rank 0 lost its trainer",
        ),
        (
            replace(
                WELL, newest_age_s=9e9, view=replace(RUN, ranks=(replace(RANK, state=RankState.CLOSED),))
            ),
            Level.GREEN,
            "",
        ),
    ],
)
def test_runs(facts: RunFacts, level: Level, words: str) -> None:
    found = findings_of(status(), [facts])
    assert level_of(found) is level
    assert words in " ".join(finding.text for finding in found)
    assert bool(found) == (level is not Level.GREEN)


@pytest.mark.parametrize(("budget", "level"), [(0.06, Level.GREEN), (0.04, Level.AMBER)])
def test_what_checkpoints_cost_is_told_of_whole_intervals(budget: float, level: Level) -> None:
    """6 s each 2 minutes are 5.3 %; the minute that such a checkpoint lies in was said to cost 11 %, the next one 0."""
    view, history, levels = paced(budget=budget), History(), set[Level]()
    assert view.pace is not None
    view = replace(view, newest=None, pace=replace(view.pace, interval_steps=1200))
    for number in range(1, 240):
        at_s = number * SAMPLE_S
        taken, late_s = divmod(at_s, 120.0)
        stall_s = 6.0 * taken + min(6.0, late_s)
        steps = round(10 * at_s)
        history.add((0, RUN.run_id), at_s, Sums(steps=steps, train_s=at_s, stall_s=stall_s, data_s=0.0))
        if at_s >= 600.0:
            levels.add(level_of(findings_of(status(), [facts_of(view, history, at_s + 1)])))
    assert levels == {level}


@pytest.mark.parametrize(
    ("state", "reason", "level"),
    [
        (DeviceStatus.OK, "", Level.GREEN),
        (DeviceStatus.OK, "it has room for no checkpoint", Level.AMBER),
        (DeviceStatus.SLOW, "", Level.AMBER),
        (DeviceStatus.DRAINING, "", Level.AMBER),
        (DeviceStatus.SUSPECT, "EIO", Level.RED),
        (DeviceStatus.MISSING, "mount it", Level.RED),
        (DeviceStatus.RETIRED, "by hand", Level.GREEN),
    ],
)
def test_devices(state: DeviceStatus, reason: str, level: Level) -> None:
    found = findings_of(status(replace(DEVICE, state=state, reason=reason)), [])
    assert level_of(found) is level
    assert all(reason in finding.text and "/nvme0" in finding.subject for finding in found)


def test_the_worst_comes_first() -> None:
    daemon = replace(DAEMON, is_draining=True, failed_count=1)
    found = findings_of(status(daemon=daemon, problems=("gpt@1.2 is damaged: block 3",)), [WELL])
    assert [finding.level for finding in found] == [Level.RED, Level.AMBER, Level.AMBER]
    assert "1 shard could not be committed" in " ".join(finding.text for finding in found)
