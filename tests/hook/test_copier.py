"""The copy thread and the guard: sources may change only when copied, and what must not change is compared."""

import threading
from collections.abc import Iterator

import pytest
import torch

from everstep.core.errors import EverstepError, UsageError
from everstep.hook.copier import Copier, CopyJob, Move, Unchanged


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


class Outcome:
    """What a job reported."""

    def __init__(self) -> None:
        self.sealed = False
        self.error: EverstepError | None = None

    def finish(self) -> None:
        self.sealed = True

    def fail(self, error: EverstepError) -> None:
        self.error = error


def job_of(source: torch.Tensor, target: torch.Tensor, outcome: Outcome, **changes: object) -> CopyJob:
    moves = [Move(target.data_ptr(), source.data_ptr(), source.nbytes)]
    job = CopyJob(
        moves=moves,
        unchanged=[],
        keep_alive=[source, target],
        wait_cuda=lambda: None,
        finish=outcome.finish,
        fail=outcome.fail,
    )
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def test_a_job_copies_and_seals(copier: Copier) -> None:
    source, target, outcome = torch.randn(3_000_000), torch.zeros(3_000_000), Outcome()
    copier.submit(job_of(source, target, outcome))
    copier.guard()
    assert torch.equal(source, target)
    assert copier.drain(10.0)
    assert outcome.sealed
    assert not copier.busy


def test_the_guard_holds_until_the_copy_has_ended(copier: Copier) -> None:
    source, target, outcome = torch.ones(1000), torch.zeros(1000), Outcome()
    copied = threading.Event()

    def finish() -> None:
        outcome.finish()
        copied.set()

    copier.submit(job_of(source, target, outcome, finish=finish))
    copier.guard()
    source.fill_(7.0)  # as an optimizer does behind the guard
    assert copied.wait(10.0)
    assert torch.equal(target, torch.ones(1000))


def test_a_frozen_leaf_that_changed_drops_the_snapshot_by_name(copier: Copier) -> None:
    frozen, outcome = torch.ones(10), Outcome()
    watched = Unchanged("model.head.weight", frozen, frozen.data_ptr(), frozen._version)
    frozen.add_(1.0)
    copier.submit(job_of(torch.ones(4), torch.zeros(4), outcome, unchanged=[watched]))
    assert copier.drain(10.0)
    assert not outcome.sealed
    assert isinstance(outcome.error, UsageError)
    assert "model.head.weight changed" in outcome.error.message
    assert "run.mutating()" in outcome.error.hint


def test_a_change_after_the_guard_is_no_fault(copier: Copier) -> None:
    frozen, outcome, hold = torch.ones(10), Outcome(), threading.Event()
    watched = Unchanged("model.head.weight", frozen, frozen.data_ptr(), frozen._version)

    def wait_cuda() -> None:
        assert hold.wait(10.0)

    copier.submit(job_of(torch.ones(4), torch.zeros(4), outcome, unchanged=[watched], wait_cuda=wait_cuda))
    copier.guard()  # compares, then lets writers in
    frozen.add_(1.0)
    hold.set()
    assert copier.drain(10.0)
    assert outcome.sealed


def test_an_error_of_the_seal_is_reported(copier: Copier) -> None:
    outcome = Outcome()

    def finish() -> None:
        raise EverstepError("no daemon")

    copier.submit(job_of(torch.ones(4), torch.zeros(4), outcome, finish=finish))
    assert copier.drain(10.0)
    assert outcome.error is not None
    assert outcome.error.message == "no daemon"


def test_without_a_job_the_guard_costs_nothing(copier: Copier) -> None:
    assert copier.guard() == 0.0
