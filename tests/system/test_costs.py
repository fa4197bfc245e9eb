"""What a real run's checkpoints cost, as its report, the daemon's metrics and the processor have it."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from in_process import node_service, own_socket
from pacing import DEADLINE_S, Loop, slowly, stalled_ms
from pausing import wait_until
from scraping import scrape

import everstep
from everstep.checkpoint.frequency_types import BoundKind
from everstep.daemon.control.client import connected
from everstep.hook.run import Run
from everstep.proto.frames import SkipReason

COPY_S = 0.05
MIB = 1024**2
CORES_MAX = 1.2
ROUNDED_DOWN = 0.99
"""A reason's figures have three digits."""


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


def attached(state: Loop, storage: list[str], every: int) -> Run:
    return everstep.attach(
        "costly", model=state.model, optimizer=state.optimizer, storage=storage, every=every
    )


def test_the_metrics_attribute_what_the_report_does(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow copy: the guard waits, and boundaries without an optimizer's step before them find it still going on."""
    slowly(monkeypatch, COPY_S)
    loop = Loop()
    with node_service(storage, "arena_max_bytes = 64_000_000\nreserve_bytes = 0\n") as names:
        with attached(loop, names, every=1) as run:
            until_s = time.monotonic() + DEADLINE_S
            while run.report().checkpoints_complete < 5 or not run.report().skipped:
                assert time.monotonic() < until_s, run.report()
                loop.step(run, inside=lambda: None)
                run.step()
            loop.step(run, inside=lambda: None)
        report = run.report()
        assert report.guard_s > 3 * COPY_S
        with connected(own_socket()) as client:
            port = client.status().daemon.metrics_port

        def told() -> dict[str, float]:
            return scrape(port)

        parts = {
            "guard": report.guard_s,
            "eager": report.eager_s,
            "ranks": report.wait_s,
            "boundary": report.boundary_s - report.eager_s - report.wait_s,
        }
        guard = "everstep_checkpoint_cost_seconds_total{guard}"
        wait_until(lambda: told()[guard] == pytest.approx(report.guard_s))
        for part, cost_s in parts.items():
            assert told()[f"everstep_checkpoint_cost_seconds_total{{{part}}}"] == pytest.approx(cost_s), part
        skipped = {
            reason: told()[f"everstep_checkpoints_skipped_total{{{reason.value}}}"] for reason in SkipReason
        }
        reported = {reason: each.count for reason, each in report.skipped.items()}
        assert skipped == dict.fromkeys(SkipReason, 0) | reported
        assert sum(reported.values()) > 0


def test_a_ring_is_planned_for(storage: list[Path]) -> None:
    """A state of 48 MB through a ring of 22 MiB: what the optimizer waits for the drives decides, and is named."""
    loop = Loop(megabytes=48)
    limits = everstep.Limits(budget=0.3, drive_writes_per_day=1e6)
    with (
        node_service(storage, f"arena_max_bytes = {22 * MIB}\nreserve_bytes = 0\n") as names,
        everstep.attach(
            "ring", model=loop.model, optimizer=loop.optimizer, storage=names, limits=limits
        ) as run,
    ):
        guards_s, boundaries_s = [0.0], [0.0]

        def train() -> None:
            report = run.report()
            guards_s.append(report.guard_s)
            boundaries_s.append(report.boundary_s)
            time.sleep(0.01)

        decision = loop.until(
            run,
            lambda decision: decision.kind is BoundKind.BUDGET and run.report().checkpoints_complete >= 4,
            inside=train,
        )
        report = run.report()
    assert any("stream through a ring" in note for note in report.notes)
    # What is planned with is the mean of those that look like the present: the first ones may be dearer.
    waited_s = [wait_s for wait_s in increments(guards_s, report.guard_s) if wait_s > 0]
    most_s = max(waited_s) + max(increments(boundaries_s, report.boundary_s))
    assert len(waited_s) >= report.checkpoints_complete
    assert ROUNDED_DOWN * min(waited_s) <= stalled_ms(decision) / 1e3 <= most_s / ROUNDED_DOWN, (
        decision,
        waited_s,
    )
    assert decision.interval_steps * loop.step_s * 0.3 >= stalled_ms(decision) / 2e3


def increments(counted: list[float], last: float) -> list[float]:
    """Return by how much it has grown each time."""
    return [later - earlier for earlier, later in pairwise([*counted, last])]


def thread_times_s(run: Run) -> float:
    """Return what the training thread and the copy thread have had of the processor."""
    copier = run._snapshotter._copier._thread
    assert copier.ident is not None
    return time.thread_time() + time.clock_gettime(time.pthread_getcpuclockid(copier.ident))


def test_a_checkpoint_takes_one_core(storage: list[Path]) -> None:
    """Of the trainer: its copy thread works while the training thread waits, and nobody works for either of them.

    By the clock on the wall that is sharp only on a machine with nothing else to do; by those of the threads on any.
    """
    loop = Loop(megabytes=160)
    with (
        node_service(storage, "arena_max_bytes = 400_000_000\nreserve_bytes = 0\n") as names,
        attached(loop, names, every=10**6) as run,
    ):

        def take() -> None:
            before = run.report().checkpoints_complete
            while run.report().checkpoints_complete == before:
                run.checkpoint()
                run.step()
                assert run.wait(DEADLINE_S)

        for _ in range(3):
            take()  # slots are touched for the first time
        before, began_s, threads_began_s = run.report(), time.process_time(), thread_times_s(run)
        for _ in range(5):
            take()
        used_s, after = time.process_time() - began_s, run.report()
        threads_s = thread_times_s(run) - threads_began_s
        assert after.seal_s > before.seal_s
        active_s = sum(
            getattr(after, name) - getattr(before, name) for name in ("stall_s", "copy_s", "seal_s")
        )
        assert used_s <= CORES_MAX * active_s, (used_s, active_s)
        assert used_s <= CORES_MAX * threads_s, (used_s, threads_s)
