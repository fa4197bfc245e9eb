"""The controller over real processes while costs change: known costs are put in; decision and reason must follow.

At most ten checkpoints after the start or a change the interval must fit; in steady noise it changes at most once in
five checkpoints. Times are compared with what the steps really took: a busy machine oversleeps.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from in_process import service
from pacing import Loop, changes, slowly, stalled_ms
from rig import MB, RigError, rig, throttle

from everstep.checkpoint.frequency_machine import PROFILE_STEPS
from everstep.checkpoint.frequency_plan import ROOM
from everstep.checkpoint.frequency_types import BoundKind, Decision
from everstep.hook.copier import Copier

BUDGET = 0.2
STALL_S = 0.05
STEP_S = 0.01
SETTLED_IN = 10
"""Checkpoints from start or change until the interval fits."""
CALM = 5


@pytest.fixture
def storage() -> Iterator[list[Path]]:
    """In memory: how fast a shared disk is must not decide."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="es-pace-") as path, service():
        yield [Path(path)]


def sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def fits(decision: Decision, loop: Loop, copy_s: float = STALL_S, budget: float = BUDGET) -> bool:
    """Tell whether checkpoints at this interval keep the budget.

    What is put in counts: the guard waits for what of the copy is left after one step. The eager part comes on top.
    """
    return decision.interval_steps * loop.step_s * budget >= copy_s - loop.step_s


def assert_stalled(
    decision: Decision, step_s: float, copy_s: float = STALL_S, budget: float = BUDGET
) -> None:
    """The budget decides, and the reason names what the copy stalls and which budget that is held against."""
    assert decision.kind is BoundKind.BUDGET, decision
    assert f" / {100 * budget:.3g} %" in decision.reason
    assert stalled_ms(decision) >= 0.8e3 * (copy_s - step_s), decision


def test_a_sleeping_guard_is_named_and_kept_within_the_budget(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 2 * STEP_S)  # into the next guard
    wait = Copier.guard

    def slow(self: Copier) -> float:
        if not self.busy:
            return 0.0
        time.sleep(STALL_S)
        return wait(self) + STALL_S

    monkeypatch.setattr(Copier, "guard", slow)
    loop = Loop()
    with loop.attach(storage, BUDGET) as run:
        decision = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(STEP_S))[-1]
        assert decision.kind is BoundKind.BUDGET, decision
        assert stalled_ms(decision) >= 0.8e3 * STALL_S
        assert fits(decision, loop, STALL_S + loop.step_s), "the guard sleeps so long after the step"
        report = run.report()
        assert report.guard_s >= 0.8 * STALL_S * (report.checkpoints_complete - 1)


@pytest.mark.parametrize("budget", [0.01, 0.035, 0.1])
def test_each_budget_holds_from_the_tenth_checkpoint_on(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """Of a short copy: at 1 % a hundred of what it stalls lie between two checkpoints."""
    slowly(monkeypatch, copy_s := 0.012)
    loop = Loop(megabytes=1)
    with loop.attach(storage, budget) as run:
        decision = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(0.004))[-1]
        assert decision.kind is BoundKind.BUDGET, decision
        assert decision.reason.endswith(f"/ {100 * budget:.3g} %")
        assert decision.interval_steps * loop.step_s * budget >= copy_s - loop.step_s


def test_after_a_crash_the_budget_holds_from_the_first_steps_on(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, STALL_S)
    loop, again, before = Loop(), Loop(), list[Decision]()
    with suppress(KeyboardInterrupt), loop.attach(storage, BUDGET) as run:
        before += loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(STEP_S))
        raise KeyboardInterrupt
    with again.attach(storage, BUDGET) as run:
        assert run.restore() is not None
        for _ in range(PROFILE_STEPS // 2):
            again.step(run, sleeping(STEP_S))
        decisions = [run.report().decision]
        decisions += again.for_checkpoints(run, 2 * CALM, inside=sleeping(STEP_S))
        assert {each.kind for each in decisions} == {BoundKind.BUDGET}
        assert all(fits(each, again) for each in decisions), decisions
        assert decisions[0].interval_steps <= 1.5 * before[-1].interval_steps
        assert changes([before[-1], *decisions]) <= 2


@pytest.mark.parametrize(
    ("variation", "costs"),
    [(0.0, (BUDGET, STALL_S, STEP_S)), (0.3, (BUDGET, STALL_S, STEP_S)), (0.3, (0.035, 0.015, 0.003))],
    ids=["steady", "noisy", "noisy, 3.5 %"],
)
def test_steady_costs_move_the_interval_rarely(
    storage: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    variation: float,
    costs: tuple[float, float, float],
) -> None:
    """`costs`: budget, and seconds of a copy and of a step."""
    budget, copy_s, step_s = costs
    slowly(monkeypatch, copy_s)
    noise = random.Random(5)
    loop = Loop(megabytes=1 if copy_s < STALL_S else 4)

    def step() -> None:
        time.sleep(max(step_s * noise.gauss(1.0, variation), 0.0))

    with loop.attach(storage, budget) as run:
        settled = loop.for_checkpoints(run, SETTLED_IN, inside=step)[-1]
        assert settled.kind is BoundKind.BUDGET, settled
        assert settled.reason.endswith(f"/ {100 * budget:.3g} %")
        assert fits(settled, loop, copy_s, budget)
        later = loop.for_checkpoints(run, 4 * CALM, inside=step)
        assert changes([settled, *later]) <= 4
        assert fits(later[-1], loop, copy_s, budget)


@pytest.mark.parametrize(("budget", "copy_s", "step_s"), [(BUDGET, 0.12, STEP_S), (0.035, 0.018, 0.003)])
def test_steps_that_become_shorter_and_longer_again_take_the_interval_along(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch, budget: float, copy_s: float, step_s: float
) -> None:
    slowly(monkeypatch, copy_s)
    loop = Loop(megabytes=1)
    with loop.attach(storage, budget) as run:
        long_steps = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(3 * step_s))[-1]
        assert_stalled(long_steps, loop.step_s, copy_s, budget)
        short_steps = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(step_s))[-1]
        assert short_steps.interval_steps >= 2 * long_steps.interval_steps
        assert fits(short_steps, loop, copy_s, budget)
        assert_stalled(short_steps, loop.step_s, copy_s, budget)
        again = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(3 * step_s))[-1]
        assert again.interval_steps <= short_steps.interval_steps / 2
        assert fits(again, loop, copy_s, budget)
        assert_stalled(again, loop.step_s, copy_s, budget)


def test_a_pause_for_an_evaluation_is_no_step(storage: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, STALL_S)
    loop, count = Loop(), 0
    pauses_s = 0.0

    def step() -> None:
        nonlocal count
        count += 1
        time.sleep(STEP_S)

    def step_or_evaluate() -> None:
        nonlocal pauses_s
        step()
        if count % 20 == 0:
            time.sleep(0.3)
            pauses_s += 0.3

    with loop.attach(storage, BUDGET) as run:
        without = loop.for_checkpoints(run, SETTLED_IN, inside=step)[-1]
        step_s = loop.step_s
        decisions = loop.for_checkpoints(run, 4 * CALM, inside=step_or_evaluate)
        assert pauses_s > 1.0
        assert_stalled(decisions[-1], step_s)
        # Counted as steps, the pauses would make a step 2.5 times as long and the interval as much shorter.
        assert decisions[-1].interval_steps * step_s >= without.interval_steps * step_s / 1.5
        assert changes([without, *decisions]) <= 4


def test_steps_that_are_slower_beside_checkpoints_are_told_and_decide(storage: list[Path]) -> None:
    """Each busy step sleeps as long again: what is reported is what was put in."""
    loop, slept_s = Loop(megabytes=1), 0.0

    def step() -> None:
        nonlocal slept_s
        time.sleep(2 * STEP_S)
        if run._costs._opened_busy:
            began_s = time.perf_counter()
            time.sleep(2 * STEP_S)
            slept_s += time.perf_counter() - began_s

    with loop.attach(storage, BUDGET) as run:
        decision = loop.until(
            run,
            lambda decision: "slower steps" in decision.reason and run.report().compared_steps >= 30,
            inside=step,
        )
        report = run.report()
        assert decision.kind is BoundKind.BUDGET, decision
        slower_ms = decision.reason.partition(" stall + ")[2].partition(" ms slower steps")[0]
        assert float(slower_ms) >= 0.8e3 * 2 * STEP_S, "of one busy step at least"
        assert decision.interval_steps * loop.step_s * BUDGET >= 0.8 * 2 * STEP_S
        assert report.slower_steps_s == pytest.approx(slept_s, rel=1 / 3), report
        assert "compared with quiet ones of their time" in str(report)


def computing() -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < STEP_S:
        pass


@contextmanager
def neighbours() -> Generator[None]:
    """As many processes that only spin as there are processors."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_neighbour_that_takes_half_the_cpu_is_no_cost_of_checkpoints(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the copy, which takes longer beside it, too; once it has left the interval comes back."""
    copy_s = STALL_S
    slowly(monkeypatch, lambda: copy_s)
    loop = Loop()
    with loop.attach(storage, BUDGET) as run:
        alone = loop.for_checkpoints(run, SETTLED_IN, inside=computing)[-1]
        assert fits(alone, loop)
        assert_stalled(alone, loop.step_s)
        with neighbours():
            copy_s = 3 * STALL_S
            beside = loop.for_checkpoints(run, SETTLED_IN, inside=computing)[-1]
            assert fits(beside, loop, copy_s)
            later = loop.for_checkpoints(run, 4 * CALM, inside=computing)[-1]
            assert fits(later, loop, copy_s)
            assert_stalled(later, loop.step_s, copy_s)
            asked_s = later.interval_steps * loop.step_s
        copy_s = STALL_S
        after = loop.for_checkpoints(run, SETTLED_IN, inside=computing)[-1]
        assert fits(after, loop)
        after = loop.until(
            run, lambda decision: decision.interval_steps * loop.step_s <= asked_s / 1.5, inside=computing
        )
        assert_stalled(after, loop.step_s)
        assert stalled_ms(after) <= stalled_ms(later) / 1.5


def test_beside_a_neighbour_the_interval_is_calm(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps beside it come in bursts of shorter and of longer ones."""
    slowly(monkeypatch, STALL_S)
    loop = Loop()
    with loop.attach(storage, BUDGET) as run, neighbours():
        beside = loop.for_checkpoints(run, SETTLED_IN, inside=computing)[-1]
        later = loop.for_checkpoints(run, 4 * CALM, inside=computing)
        assert changes([beside, *later]) <= 4


@pytest.mark.root
def test_a_device_that_slows_down_and_recovers_takes_the_interval_along() -> None:
    fast, megabytes = 80 * MB, 8
    try:
        with rig([fast], size_bytes=310 * 2**20, checked=False) as (drive,), service():
            place = drive.mount / "store"
            place.mkdir()
            loop = Loop(megabytes)
            with loop.attach([place], budget=0.9) as run:
                before = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(STEP_S))[-1]
                throttle(drive, fast // 5)
                slow = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(STEP_S))[-1]
                assert slow.kind in (BoundKind.BANDWIDTH, BoundKind.SLOTS), slow
                assert "persist bandwidth" in slow.reason
                needed_s = megabytes * 1e6 / (fast / 5)
                assert slow.interval_steps * loop.step_s >= 0.8 * needed_s
                assert slow.interval_steps >= 2 * before.interval_steps
                throttle(drive, fast)
                recovered = loop.for_checkpoints(run, SETTLED_IN, inside=sleeping(STEP_S))[-1]
                assert recovered.interval_steps <= slow.interval_steps / 2
                assert recovered.interval_steps * loop.step_s <= ROOM * needed_s / 2
    except RigError as error:
        pytest.skip(f"needs root and blkio of cgroup v1: {error}")
