"""What a run measures reaches its frequency controller, and what that decides reaches the run."""

import itertools
import json

import pytest
from msgspec.structs import replace

from everstep.checkpoint.frequency_format import load_memory
from everstep.checkpoint.frequency_machine import PROFILE_STEPS
from everstep.checkpoint.frequency_meter_machine import FAILURES_NEEDED, WARMUP_STEPS
from everstep.checkpoint.frequency_plan import DEADLINE_ROOM
from everstep.checkpoint.frequency_types import BoundKind, FailureKind, Limits, StepEnded
from everstep.core.ids import CheckpointId
from everstep.hook.end_machine import LEASE_ENDS, Ask, Boundary, EndMachine, Notice, Progress
from everstep.hook.pace import Pace
from everstep.proto import frames

STEP_S = 0.1
DEVICE = frames.DeviceInfo(
    device_id="d" * 32,
    path="/nvme/a",
    condition=frames.DeviceCondition.OK,
    reason="",
    write_bytes_per_s=0.0,
    capacity_bytes=10**12,
)


class Loop:
    """A training loop that costs what it is told to, one rank, decided boundary by boundary."""

    def __init__(self, pace: Pace, step: int = 0) -> None:
        self.pace, self.step, self.now_s = pace, step, 0.0
        self.taken: list[int] = []
        self._is_busy = False

    def run(
        self, steps: int, *, stall_s: float = 0.001, guard_s: float = 0.0, devices_s: float = 0.01
    ) -> None:
        """Pass so many boundaries; a checkpoint is durable before the next one."""
        for _ in range(steps):
            self.step += 1
            self.now_s += STEP_S
            ended = StepEnded(at_s=self.now_s, step_s=STEP_S, is_busy=self._is_busy)
            self.pace.arrived(ended, guard_s=guard_s if self._is_busy else 0.0, copying=False)
            self._is_busy = bool(self.pace.due(self.step, self.step + 1))
            if self._is_busy:
                checkpoint = CheckpointId(1, self.step)
                self.taken.append(self.step)
                self.pace.taken(checkpoint)
                self.pace.persisted(persisted(checkpoint, devices_s))
            self.pace.left(stall_s if self._is_busy else 0.0, taken=self._is_busy)

    @property
    def interval(self) -> int:
        """Steps between the two newest checkpoints."""
        return self.taken[-1] - self.taken[-2]


def persisted(checkpoint: CheckpointId, devices_s: float) -> frames.Persisted:
    return frames.Persisted(
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        size_bytes=10**6,
        persist_s=devices_s,
        devices_s=devices_s,
        under_replicated=False,
    )


def begun(limits: Limits | None = None, every: int | None = None) -> Pace:
    pace = Pace(every=every, limits=limits or Limits())
    pace.begin(0, devices=[DEVICE])
    return pace


def test_every_n_is_every_n_whatever_it_costs() -> None:
    loop = Loop(begun(every=7))
    loop.run(30, stall_s=5.0)
    assert loop.taken == [7, 14, 21, 28]
    assert loop.pace.decision.kind is BoundKind.FIXED
    assert "every=7" in loop.pace.decision.reason


def test_the_first_steps_are_a_profile_without_checkpoints() -> None:
    loop = Loop(begun())
    loop.run(PROFILE_STEPS)
    assert loop.taken == []
    assert loop.pace.decision.kind is BoundKind.PROFILE
    loop.run(3 * PROFILE_STEPS)
    assert loop.taken[0] > PROFILE_STEPS


def test_eager_copy_and_guard_are_what_a_checkpoint_stalls() -> None:
    cheap, dear = Loop(begun()), Loop(begun())
    cheap.run(2000, stall_s=0.02)
    dear.run(4000, stall_s=0.02, guard_s=0.18)
    assert cheap.pace.decision.kind is dear.pace.decision.kind is BoundKind.BUDGET
    assert "the budget: 200 ms" in dear.pace.decision.reason
    assert dear.interval == pytest.approx(10 * cheap.interval, rel=0.15)
    assert dear.interval * STEP_S * 0.035 >= 0.2


def test_devices_that_need_longer_than_the_budget_asks_for_bind() -> None:
    loop = Loop(begun())
    loop.run(3000, stall_s=0.0001, devices_s=2.0)
    assert loop.pace.decision.kind is BoundKind.BANDWIDTH
    assert loop.interval * STEP_S >= 2.0


def test_the_wear_of_the_drives_binds() -> None:
    pace = Pace(every=None, limits=Limits(drive_writes_per_day=0.01))
    pace.begin(0, devices=[DEVICE])
    loop = Loop(pace)
    loop.run(3000, stall_s=0.0001)
    assert pace.decision.kind is BoundKind.ENDURANCE
    assert loop.interval * STEP_S >= 86400 / 0.01 * 1e6 / 1e12


@pytest.mark.parametrize(
    ("devices", "fill"),
    [
        ({"a": (0.0, 10**12), "b": (0.0, 15 * 10**12)}, 0.5 * 1e6 / 1e12),
        ({"a": (7e9, 10**12), "b": (1e9, 15 * 10**12)}, 7 / 8 * 1e6 / 1e12),
        ({"a": (7e9, 10**12), "b": (7e9, 10**12), "c": (0.0, 15 * 10**12)}, 1 / 3 * 1e6 / 1e12),
        ({"a": (1e9, 10**12), "b": (1e9, 0)}, 0.5 * 1e6 / 1e12),
        ({"a": (1e9, 0), "b": (1e9, 0)}, None),
    ],
    ids=["unknown speeds", "small and fast", "one unknown speed", "one unknown size", "unknown sizes"],
)
def test_the_wear_that_binds_is_that_of_the_drive_that_is_full_soonest(
    devices: dict[str, tuple[float, int]], fill: float | None
) -> None:
    """Each gets bytes by its speed; their sum would say that a small one lasts as long as the large ones."""
    pace = Pace(every=None, limits=Limits())
    drained = replace(DEVICE, device_id="z", condition=frames.DeviceCondition.DRAINING, capacity_bytes=10**6)
    present = [
        replace(DEVICE, device_id=name, write_bytes_per_s=speed, capacity_bytes=capacity_bytes)
        for name, (speed, capacity_bytes) in devices.items()
    ]
    pace.begin(0, devices=[*present, drained])
    Loop(pace).run(100)
    assert pace.figures.fill == ({"a": pytest.approx(fill, rel=1e-6)} if fill else {})


def test_the_wear_is_that_of_the_drives_that_are_written_to_now() -> None:
    """One of two that fails leaves the other one all that both were written; what was taken back shares it again."""
    both = [DEVICE, replace(DEVICE, device_id="e" * 32, path="/nvme/b")]
    pace = Pace(every=None, limits=Limits())
    pace.begin(0, devices=both)
    loop = Loop(pace)
    loop.run(100)
    fill = {DEVICE.device_id: pytest.approx(0.5 * 1e6 / 1e12, rel=1e-6)}
    assert pace.figures.fill == fill
    pace.devices_changed([replace(DEVICE, condition=frames.DeviceCondition.SUSPECT), both[1]])
    loop.run(1)
    assert pace.figures.fill == {DEVICE.device_id: pytest.approx(1e6 / 1e12, rel=1e-6)}, "by the same name"
    pace.devices_changed(both)
    loop.run(1)
    assert pace.figures.fill == fill


@pytest.mark.parametrize(
    ("steps_s", "usual_s"),
    [
        ([], 0.0),
        ([10.0], 10.0),
        ([10.0, 0.05], 0.05),
        ([0.05] * 20 + [10.0], 0.05),
        ([0.05] * 20 + [10.0, 10.0], 0.05),
        ([0.05] * 20 + [10.0] * 3, 10.0),
        ([0.05, 0.05, 0.05, 0.5] * 5, 0.5),
        ([10.0] * 20 + [0.05] * 14, 0.05),
    ],
    ids=["none", "first", "second", "pause", "two pauses", "all long", "each fourth long", "short again"],
)
def test_what_a_step_takes_does_not_count_pauses(steps_s: list[float], usual_s: float) -> None:
    pace = begun()
    stepped(pace, steps_s)
    assert pace.usual_step_s == usual_s


@pytest.mark.parametrize("every", [None, 10**6])
@pytest.mark.parametrize(
    ("steps_s", "mean_s"),
    [([], 0.0), ([0.04, 0.06] * 20, 0.05), ([0.04, 0.06] * 20 + [10.0], 0.05)],
    ids=["none", "they vary", "pause"],
)
def test_seconds_of_an_interval_are_those_of_mean_steps_without_pauses(
    every: int | None, steps_s: list[float], mean_s: float
) -> None:
    """By the newest step an interval was minutes after an evaluation; by the longest usual one it is 0.06 s a step."""
    pace = begun(every=every)
    stepped(pace, steps_s)
    assert pace.mean_step_s == pytest.approx(mean_s, rel=0.02)


def stepped(pace: Pace, steps_s: list[float]) -> None:
    """Reach the boundaries after these steps."""
    for at_s, step_s in zip(itertools.accumulate(steps_s), steps_s, strict=True):
        pace.arrived(StepEnded(at_s=at_s, step_s=step_s, is_busy=False), guard_s=0.0, copying=False)


def ask_of(pace: Pace, *, left_s: float) -> Ask | None:
    """Return what a lease that ends so soon makes of the next boundary."""
    machine = EndMachine(rank=0, world_size=1)
    machine.leased(Notice(reason=LEASE_ENDS, until_s=100.0 + left_s, ends=True))
    progress = Progress(step=100, saved=90, tried=90, under_way=False, is_busy=False)
    return machine.at_boundary(
        Boundary(progress=progress, at_s=100.0, step_s=pace.usual_step_s, needed_s=1.0)
    )


def test_one_evaluation_ends_no_lease_early_and_long_steps_do() -> None:
    evaluates, slow = begun(), begun()
    stepped(evaluates, [0.05] * 20 + [10.0])
    stepped(slow, [0.05] * 20 + [10.0] * 3)
    assert ask_of(evaluates, left_s=20.0) is None
    assert ask_of(evaluates, left_s=1.1) == Ask(end=LEASE_ENDS)
    assert ask_of(slow, left_s=20.0) == Ask(end=LEASE_ENDS)


def test_a_copy_that_goes_on_over_several_steps_is_one_stall() -> None:
    pace = begun()
    pace.taken(CheckpointId(1, 30))
    pace.left(1.0, taken=True)
    for copying in (True, True, False):
        pace.arrived(None, guard_s=2.0, copying=copying)
    stall = pace.figures.stall
    assert stall is not None
    assert (stall.count, stall.mean) == (1, pytest.approx(7.0))


def test_a_checkpoint_whose_copy_ends_as_the_next_one_waits_for_it_is_a_sample_too() -> None:
    """A host that is ahead of its CUDA devices comes to the next boundary before the copy has ended."""
    pace = begun(every=1)
    for step, stall_s in ((1, 1.0), (2, 3.0)):
        pace.arrived(None, guard_s=0.0, copying=step > 1)
        pace.taken(CheckpointId(1, step))
        pace.left(stall_s, taken=True)
    pace.arrived(None, guard_s=0.0, copying=False)
    stall = pace.figures.stall
    assert stall is not None
    assert (stall.count, stall.mean) == (2, 2.0)


def test_what_was_learnt_spares_the_next_attempt_its_profile() -> None:
    before = Loop(begun())
    before.run(1000)
    after = Pace(every=None, limits=Limits())
    after.restored(json.loads(json.dumps(before.pace.memory)), FailureKind.TRAINER)
    told = after.decision
    assert (told.interval_steps, told.reason) == (
        before.pace.decision.interval_steps,
        "as an attempt before has learnt, until it is decided anew",
    ), "known before the first step, too"
    after.begin(before.step, devices=[DEVICE])
    assert after.decision == told
    loop = Loop(after, before.step)
    loop.run(before.interval + 2)
    assert loop.taken
    assert loop.taken[0] <= before.step + before.interval


def test_how_long_a_checkpoint_takes_is_measured_or_remembered() -> None:
    before = Loop(begun())
    assert before.pace.needed_s is None
    before.run(1000)
    assert before.pace.needed_s is not None
    after = Pace(every=None, limits=Limits())
    after.restored(json.loads(json.dumps(before.pace.memory)), None)
    after.begin(before.step, devices=[DEVICE])
    assert after.needed_s is not None
    assert after.needed_s > 0


@pytest.mark.parametrize("guard_s", [0.0, 2.0], ids=["nobody waits", "the guard waits"])
def test_what_the_guard_waits_lies_within_what_a_checkpoint_takes(
    monkeypatch: pytest.MonkeyPatch, guard_s: float
) -> None:
    """A ring: the copy streams, and the step's optimizer waits for it; the eager part came before."""
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    pace, checkpoint = begun(every=1), CheckpointId(1, 1)
    pace.arrived(None, guard_s=0.0, copying=False)
    clock[0] += 0.5
    pace.taken(checkpoint)
    pace.left(0.5, taken=True)
    clock[0] += 2.5
    pace.arrived(StepEnded(at_s=3.0, step_s=0.5, is_busy=True), guard_s=guard_s, copying=False)
    pace.left(0.0, taken=False)
    clock[0] += 0.5
    pace.persisted(persisted(checkpoint, 3.0))
    assert pace.needed_s == pytest.approx(DEADLINE_ROOM * (0.5 + 3.0))


def test_failures_are_counted_over_attempts_until_their_mean_time_is_known() -> None:
    pace = begun(Limits(budget=0.5))
    for attempt in range(FAILURES_NEEDED + 2):
        remembered = pace.memory
        pace = Pace(every=None, limits=Limits(budget=0.5))
        pace.restored(remembered, FailureKind.NODE)
        pace.begin(attempt * 100, devices=[DEVICE])
        Loop(pace, attempt * 100).run(100, stall_s=0.0005)
    assert pace.decision.kind is BoundKind.FAILURES
    assert "a failure each" in pace.decision.reason


@pytest.mark.parametrize(
    "remembered", [None, {"format": 99}, begun(every=7).memory], ids=["none", "other", "fixed"]
)
def test_failures_are_not_counted_where_nobody_knows_over_which_time_they_came(remembered: object) -> None:
    """Else the seconds of this attempt would be divided by the deaths of those before."""
    pace = Pace(every=None, limits=Limits(budget=0.01))
    pace.restored(remembered, FailureKind.NODE, attempts=FAILURES_NEEDED + 1)
    pace.begin(0, devices=[DEVICE])
    Loop(pace).run(400, stall_s=0.05)
    assert pace.decision.kind is BoundKind.BUDGET
    assert "for a failure each" not in pace.decision.reason


def test_at_another_number_of_ranks_failures_stay_known_and_costs_do_not() -> None:
    """Of twice as many ranks each lasts as long, so that one fails twice as often."""
    before = Loop(begun())
    before.run(1000, stall_s=0.05)
    after = Pace(every=None, limits=Limits())
    after.restored(json.loads(json.dumps(before.pace.memory)), FailureKind.NODE, attempts=4, grown=2.0)
    after.begin(before.step, devices=[DEVICE])
    assert after.decision.kind is BoundKind.PROFILE
    assert after.own_needed_s is None
    known = load_memory(after.memory).meter
    assert (known.trained_s, known.node_failures) == (pytest.approx(1000 * STEP_S / 2), 4)


def test_attempts_that_died_before_their_first_checkpoint_count() -> None:
    before = Loop(begun())
    before.run(10)
    pace = Pace(every=None, limits=Limits())
    pace.restored(before.pace.memory, FailureKind.NODE, attempts=10)
    pace.begin(0, devices=[DEVICE])
    assert load_memory(pace.memory).meter.node_failures == 10


def test_memory_that_cannot_be_read_means_measuring_anew(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace(every=None, limits=Limits())
    pace.restored({"format": 99}, None)
    assert "frequency_unknown" in caplog.text
    pace.begin(0, devices=[DEVICE])
    assert pace.decision.kind is BoundKind.PROFILE


def test_rank_0_decides_by_the_slowest_of_all() -> None:
    fast, slow = Loop(begun()), Loop(begun())
    fast.run(200, stall_s=0.001)
    slow.run(200, stall_s=0.1)
    fast.pace.hear([slow.pace.figures])
    fast.run(2000, stall_s=0.001)
    assert "the budget: 100 ms" in fast.pace.decision.reason


def test_a_skipped_boundary_is_tried_again_soon_wherever_it_was_skipped() -> None:
    loop = Loop(begun())
    loop.run(500, stall_s=0.02)
    due = loop.taken[-1] + loop.interval
    loop.run(due - loop.step - 1, stall_s=0.02)
    assert loop.pace.due(due, due + 1) == (due,)
    loop.pace.failed(CheckpointId(1, due), skipped=True)
    loop.pace.arrived(None, guard_s=0.0, copying=False)
    horizon = due + loop.interval
    assert loop.pace.due(due + 1, horizon)


def test_before_the_warm_up_nothing_is_measured() -> None:
    loop = Loop(begun())
    loop.run(WARMUP_STEPS)
    assert loop.pace.figures.step is None


def test_it_reckons_with_the_slots_there_are() -> None:
    pace = Pace(every=None, limits=Limits())
    pace.has_slots(4)
    pace.begin(0, devices=[DEVICE])
    assert pace.figures.slot_count == 4
    pace.has_slots(1)
    assert pace.figures.slot_count == 1
