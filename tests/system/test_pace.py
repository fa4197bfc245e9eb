"""The controller over real processes: costs are put in, and its decision and reason must name them."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from in_process import service
from pacing import Loop, slowly, stalled_ms
from rig import MB, RigError, rig

from everstep.checkpoint.frequency_format import load_memory
from everstep.checkpoint.frequency_types import BoundKind
from everstep.hook.trainer_testing import Job

STEP_S = 0.004


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[list[Path]]:
    path = tmp_path / "d0"
    path.mkdir()
    with service():
        yield [path]


def test_a_slow_copy_makes_the_guard_wait_and_the_budget_binds(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 0.08)
    loop = Loop()
    with loop.attach(storage, budget=0.2) as run:
        decision = loop.until(
            run,
            lambda decision: decision.kind is BoundKind.BUDGET and stalled_ms(decision) > 70,
            inside=lambda: time.sleep(STEP_S),
        )
        # The copy's 80 ms stand between two boundaries, less the step that goes on beside it.
        assert decision.interval_steps * loop.step_s >= 0.07 / 0.2 / 2
        assert run.report().guard_s > 0.07


def test_a_crash_loop_counts_each_death(storage: list[Path]) -> None:
    """The second and third attempt die before their first checkpoint; what ended by itself did not die."""

    def one_attempt(*, checkpoint: bool, dies: bool) -> int:
        loop = Loop()
        known = 0
        with suppress(KeyboardInterrupt), loop.attach(storage, budget=0.2) as run:
            run.restore()
            loop.step(run, inside=lambda: None)
            while checkpoint and not run.report().checkpoints_complete:
                assert run.wait(60)
                run.checkpoint()
                loop.step(run, inside=lambda: None)
                assert run.wait(60)
            meter = load_memory(run._pace.memory).meter
            known = meter.trainer_failures + meter.node_failures
            if dies:
                raise KeyboardInterrupt
        return known

    ways = [(True, True), (False, True), (False, True), (True, False), (False, True), (True, True)]
    assert [one_attempt(checkpoint=checkpoint, dies=dies) for checkpoint, dies in ways] == [0, 1, 2, 3, 3, 4]


def test_a_step_that_holds_the_copy_hides_it(storage: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 0.01)
    loop = Loop()
    with loop.attach(storage, budget=0.2) as run:
        loop.until(run, lambda _: run.report().checkpoints_sealed >= 4, inside=lambda: time.sleep(0.03))
        report = run.report()
        assert report.decision.kind is not BoundKind.PROFILE
        assert report.guard_s < 0.01 * report.checkpoints_sealed / 2


@pytest.mark.root
def test_a_throttled_drive_binds_by_its_bandwidth() -> None:
    try:
        with rig([20 * MB], size_bytes=310 * 2**20, checked=False) as (drive,), service():
            place = drive.mount / "store"
            place.mkdir()
            loop = Loop(megabytes=8)
            with loop.attach([place], budget=0.9) as run:
                decision = loop.until(
                    run,
                    lambda decision: decision.kind in (BoundKind.BANDWIDTH, BoundKind.SLOTS),
                    inside=lambda: time.sleep(STEP_S),
                )
                assert "persist bandwidth" in decision.reason
                assert run.wait()
    except RigError as error:
        pytest.skip(f"needs root and blkio of cgroup v1: {error}")


def test_a_restart_goes_on_with_what_was_learnt(storage: list[Path]) -> None:
    loop = Loop()
    with loop.attach(storage, budget=0.2) as run:
        learnt = loop.until(
            run, lambda decision: decision.cost_share is not None, inside=lambda: time.sleep(STEP_S)
        )
    with Loop().attach(storage, budget=0.2) as run:
        assert run.restore() is not None
        for _ in range(2):
            run.step()
        assert run.report().decision.kind is not BoundKind.PROFILE
        assert run.report().decision.interval_steps <= 4 * learnt.interval_steps


def test_all_ranks_take_the_same_checkpoints_by_one_decision(job: Job) -> None:
    lines = job.start("--adaptive", "--epochs", "12", "--step-s", "0.002", ranks=2).done()
    (first, second) = lines
    assert first["complete"] == second["complete"] != ""
    assert first["decision"] == second["decision"]
    assert first["decision"]["kind"] != BoundKind.PROFILE.value
    assert first["taken"] == second["taken"] > 1
