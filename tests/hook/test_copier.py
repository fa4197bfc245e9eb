"""The copy thread: what the guard promises, what a changed leaf does, failures that are reported."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from everstep.core.errors import EverstepError, UsageError
from everstep.hook import copier as copier_module
from everstep.hook.copier import Copier, CopyJob
from everstep.hook.copy_plan import CopyPlan, Moves, Placed
from everstep.hook.gather import copy
from everstep.hook.lazy_leaves import NONE, LazyLeaves, noted


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds every copy back until it is set."""
    opened = threading.Event()

    def held(moves: Moves) -> None:
        assert opened.wait(20)
        copy(moves)

    monkeypatch.setattr(copier_module, "copy", held)
    return opened


class Outcome:
    """What became of a job."""

    def __init__(self) -> None:
        self.sealed = 0
        self.errors: list[EverstepError] = []
        self.copied: list[int] = []

    def seal(self) -> None:
        self.sealed += 1


def nothing() -> None: ...


def job(
    outcome: Outcome,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    lazy: LazyLeaves = NONE,
    *,
    enqueue: Callable[[], None] = nothing,
    wait_cuda: Callable[[], None] = nothing,
    finish: Callable[[float], None] | None = None,
    begin: Callable[[], None] = nothing,
    segments: list[int] | None = None,
) -> CopyJob:
    """Copy each first tensor into the second, in segments of their own unless said otherwise."""
    plan = CopyPlan(
        Placed(index, 0, of.nbytes, into.data_ptr(), segment)
        for index, ((of, into), segment) in enumerate(zip(pairs, segments or range(len(pairs)), strict=True))
    )
    return CopyJob(
        moves=plan.at(tuple(of.data_ptr() for of, _ in pairs), 0),
        enqueue=enqueue,
        begin=begin,
        copied=outcome.copied.append,
        lazy=lazy,
        keep_alive=[tensor for pair in pairs for tensor in pair],
        wait_cuda=wait_cuda,
        finish=finish or (lambda _: outcome.seal()),
        fail=outcome.errors.append,
    )


def watched(name: str, tensor: torch.Tensor) -> LazyLeaves:
    return LazyLeaves([name], [tensor], [tensor.data_ptr()], noted([tensor]))


def test_after_the_guard_the_sources_may_change(copier: Copier) -> None:
    """Without a guard that waits, 64 MiB of nines would be in the copy: the writer is as fast as the copier."""
    of, into, outcome = torch.ones(16 * 1024**2), torch.zeros(16 * 1024**2), Outcome()
    copier.submit(job(outcome, [(of, into)]))
    copier.guard()
    of.fill_(9)
    assert copier.drain(20)
    assert bool((into == 1).all())
    assert (outcome.sealed, outcome.errors) == (1, [])


def test_the_guard_waits_for_the_copy_and_says_how_long(copier: Copier, gate: threading.Event) -> None:
    of, into, outcome = torch.ones(4), torch.zeros(4), Outcome()
    copier.submit(job(outcome, [(of, into)]))
    began, waited = threading.Event(), list[float]()

    def wait() -> None:
        began.set()
        waited.append(copier.guard())

    guarding = threading.Thread(target=wait)
    guarding.start()
    assert began.wait(20)
    guarding.join(0.5)
    assert guarding.is_alive()
    assert copier.busy
    gate.set()
    guarding.join(20)
    assert waited[0] >= 0.2
    assert copier.drain(20)
    assert torch.equal(of, into)


def test_the_guard_does_not_wait_for_sealing(copier: Copier) -> None:
    sealing, outcome = threading.Event(), Outcome()
    copier.submit(job(outcome, [(torch.ones(4), torch.zeros(4))], finish=lambda _: assert_set(sealing)))
    copier.guard()
    assert copier.busy
    assert not copier.drain(0.0)
    sealing.set()
    assert copier.drain(20)


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_without_a_job_the_guard_is_free(copier: Copier) -> None:
    assert copier.guard() == 0.0
    assert not copier.busy
    assert copier.drain(0.0)


def test_a_copy_that_fails_waits_for_what_devices_still_write(copier: Copier) -> None:
    """Else they would write to a slot that is somebody else's by then, and their memory would never be let go."""

    def refuse() -> None:
        raise EverstepError("too large")

    outcome, waited = Outcome(), list[int]()
    copier.submit(
        job(outcome, [], begin=refuse, wait_cuda=lambda: waited.append(len(outcome.errors))),
    )
    assert copier.drain(20)
    assert waited == [0]  # before the failure was told
    assert [error.message for error in outcome.errors] == ["too large"]


class TestLazyLeaves:
    def test_a_leaf_that_changed_in_place_drops_the_snapshot_by_its_name(
        self, copier: Copier, gate: threading.Event
    ) -> None:
        frozen, outcome = torch.ones(4), Outcome()
        copier.submit(job(outcome, [(frozen, torch.zeros(4))], watched("model.frozen", frozen)))
        frozen.add_(1)
        gate.set()
        assert copier.drain(20)
        (error,) = outcome.errors
        assert isinstance(error, UsageError)
        assert "model.frozen changed while its snapshot was being copied" in error.message
        assert "run.mutating()" in error.hint
        assert outcome.sealed == 0

    def test_a_leaf_that_moved_drops_it_too(self, copier: Copier, gate: threading.Event) -> None:
        frozen, outcome = torch.ones(4), Outcome()
        copier.submit(job(outcome, [(frozen, torch.zeros(4))], watched("model.frozen", frozen)))
        frozen.data = torch.ones(4)
        gate.set()
        assert copier.drain(20)
        assert "model.frozen" in outcome.errors[0].message

    def test_what_changes_after_the_guard_is_no_matter(self, copier: Copier) -> None:
        """The guard compares before it lets the writer in; the end of the copy does not compare again."""
        sealing, outcome, frozen, into = threading.Event(), Outcome(), torch.ones(4), torch.zeros(4)
        copier.submit(
            job(
                outcome,
                [(frozen, into)],
                watched("model.frozen", frozen),
                wait_cuda=lambda: assert_set(sealing),
            )
        )
        copier.guard()
        frozen.add_(1)
        sealing.set()
        assert copier.drain(20)
        assert (outcome.sealed, outcome.errors) == (1, [])
        assert bool((into == 1).all())

    def test_what_changed_before_the_guard_is_found_by_it(self, copier: Copier) -> None:
        sealing, outcome, frozen = threading.Event(), Outcome(), torch.ones(4)
        copier.submit(
            job(
                outcome,
                [(frozen, torch.zeros(4))],
                watched("model.frozen", frozen),
                wait_cuda=lambda: assert_set(sealing),
            )
        )
        frozen.add_(1)
        copier.guard()
        sealing.set()
        assert copier.drain(20)
        assert "model.frozen" in outcome.errors[0].message
        assert outcome.sealed == 0


class TestFailures:
    def test_one_of_sealing_is_reported_and_the_thread_lives_on(self, copier: Copier) -> None:
        def fail(_: float) -> None:
            raise EverstepError("sealing failed")

        outcome = Outcome()
        copier.submit(job(outcome, [], finish=fail))
        assert copier.drain(20)
        assert [error.message for error in outcome.errors] == ["sealing failed"]
        copier.submit(job(outcome, []))
        assert copier.drain(20)
        assert outcome.sealed == 1

    def test_what_cuda_reports_is_reported(self, copier: Copier) -> None:
        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        outcome = Outcome()
        copier.submit(job(outcome, [], wait_cuda=fail))
        assert copier.drain(20)
        assert "the copy failed: CUDA error" in outcome.errors[0].message

    def test_sources_are_held_until_the_job_ends_and_not_longer(
        self, copier: Copier, gate: threading.Event
    ) -> None:
        outcome = Outcome()
        source = torch.ones(4)
        made = job(outcome, [(source, torch.zeros(4))], watched("model.frozen", source))
        copier.submit(made)
        assert len(made.keep_alive) == 2
        assert len(made.lazy.noted.storages) == 1
        gate.set()
        assert copier.drain(20)
        assert made.keep_alive == []
        assert made.lazy is NONE


def test_closing_ends_the_running_job_first(gate: threading.Event) -> None:
    copier, outcome = Copier(), Outcome()
    copier.submit(job(outcome, [(torch.ones(4), torch.zeros(4))]))
    threading.Timer(0.05, gate.set).start()
    copier.close()
    assert outcome.sealed == 1


def test_each_segment_is_told_when_its_last_piece_is_copied(copier: Copier) -> None:
    outcome, told = Outcome(), list[tuple[list[int], list[float]]]()
    pairs = [(torch.full((4,), float(index)), torch.zeros(4)) for index in range(1, 5)]
    work = job(outcome, pairs, segments=[0, 0, 2, 5], begin=lambda: told.append(([], [])))

    def copied(segment: int) -> None:
        outcome.copied.append(segment)
        told.append((list(outcome.copied), [float(into[0]) for _, into in pairs]))

    work.copied = copied
    copier.submit(work)
    assert copier.drain(20)
    assert told == [
        ([], []),
        ([0], [1.0, 2.0, 0.0, 0.0]),
        ([0, 2], [1.0, 2.0, 3.0, 0.0]),
        ([0, 2, 5], [1.0, 2.0, 3.0, 4.0]),
    ]


def test_what_fails_before_the_copy_lets_the_writers_go_on(copier: Copier) -> None:
    def refuse() -> None:
        raise UsageError("too large")

    of, into, outcome = torch.ones(4), torch.zeros(4), Outcome()
    copier.submit(job(outcome, [(of, into)], begin=refuse))
    copier.guard()
    assert copier.drain(20)
    assert outcome.sealed == 0
    assert [str(error) for error in outcome.errors] == ["too large"]


@pytest.mark.parametrize("bug", [MemoryError(), ValueError("too large")])
def test_after_a_failure_that_nobody_expected_the_next_job_is_copied(
    copier: Copier, bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise bug

    outcome = Outcome()
    copier.submit(job(outcome, [(torch.ones(4), torch.zeros(4))], begin=fail))
    assert copier.drain(5)
    (error,) = outcome.errors
    assert (str(bug) or "MemoryError") in error.message
    assert "Traceback" in caplog.text
    copier.submit(job(outcome, []))
    assert copier.drain(20)
    assert outcome.sealed == 1


class TestWhatCudaDevicesCopy:
    def test_writers_wait_until_it_is_enqueued_and_not_for_the_host_s_copies(
        self, copier: Copier, gate: threading.Event
    ) -> None:
        """Only then can a device be told to wait for it."""
        enqueuing, let = threading.Event(), threading.Event()

        def enqueue() -> None:
            enqueuing.set()
            assert let.wait(20)

        outcome, waited = Outcome(), list[float]()
        copier.submit(job(outcome, [(torch.ones(4), torch.zeros(4))], enqueue=enqueue))
        assert enqueuing.wait(20)
        writer = threading.Thread(target=lambda: waited.append(copier.guard_enqueuing()))
        writer.start()
        writer.join(0.5)
        assert writer.is_alive()
        let.set()
        writer.join(20)
        assert waited[0] > 0
        assert copier.busy
        gate.set()
        assert copier.drain(20)
        assert (copier.guard_enqueuing(), outcome.sealed) == (0.0, 1)

    def test_what_cannot_be_enqueued_fails_the_snapshot_and_holds_nobody(self, copier: Copier) -> None:
        """What was enqueued before is waited for: nothing may write to a slot that is given up."""
        waits, outcome = list[str](), Outcome()

        def enqueue() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        copier.submit(
            job(
                outcome,
                [(torch.ones(4), torch.zeros(4))],
                enqueue=enqueue,
                wait_cuda=lambda: waits.append("waited"),
            )
        )
        copier.guard_enqueuing()
        copier.guard()
        assert copier.drain(20)
        assert (outcome.sealed, outcome.copied, waits) == (0, [], ["waited"])
        assert "an illegal memory access" in outcome.errors[0].message
