"""When a checkpoint that was asked for is there, or will not be."""

import pytest

from everstep.core.errors import DeadlineError, EverstepError, NoSpaceError, RanksLostError
from everstep.core.ids import CheckpointId
from everstep.daemon.controller.force_machine import ForceMachine, Next
from everstep.daemon.events.event_types import Event, EventKind

FIRST = CheckpointId(2, 10)


def event(kind: EventKind, step: int | None = None, *, code: str = "", attempt: int = 2) -> Event:
    checkpoint = None if step is None else CheckpointId(attempt, step)
    return Event(kind=kind, unix_s=0.0, text=f"it is {kind.value}", checkpoint=checkpoint, code=code)


def machine() -> ForceMachine:
    return ForceMachine("demo", FIRST)


def test_the_first_complete_one_from_the_boundary_on_counts() -> None:
    force = machine()
    assert force.take(event(EventKind.CHECKPOINT_COMPLETE, 9)) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_COMPLETE, 90, attempt=1)) is Next.WAIT
    assert force.take(event(EventKind.SNAPSHOT_SEALED, 10)) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_COMPLETE, 12)) is Next.DONE


def test_one_that_was_skipped_is_asked_for_again_once() -> None:
    force = machine()
    assert force.take(event(EventKind.CHECKPOINT_SKIPPED, 9, code="slot")) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_SKIPPED, 10, code="slot")) is Next.ASK_AGAIN
    assert force.take(event(EventKind.CHECKPOINT_SKIPPED, 10, code="peer")) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_GIVEN_UP, 10)) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_SKIPPED, 11, code="arena")) is Next.ASK_AGAIN
    assert "checkpoint_skipped" in str(force.late(5.0))


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (event(EventKind.SHARD_FAILED, 10, code="NoSpaceError"), NoSpaceError),
        (event(EventKind.CHECKPOINT_GIVEN_UP, 11), EverstepError),
        (event(EventKind.CHECKPOINT_SKIPPED, 11, code="error"), EverstepError),
        (event(EventKind.RANK_LOST), RanksLostError),
        (event(EventKind.RUN_ENDED), RanksLostError),
    ],
)
def test_what_ends_it_is_said(told: Event, error: type[EverstepError]) -> None:
    with pytest.raises(error) as caught:
        machine().take(told)
    assert type(caught.value) is error
    assert caught.value.message


def test_failures_of_older_ones_do_not_matter() -> None:
    force = machine()
    assert force.take(event(EventKind.SHARD_FAILED, 9, code="NoSpaceError")) is Next.WAIT
    assert force.take(event(EventKind.CHECKPOINT_GIVEN_UP, 9)) is Next.WAIT
    assert isinstance(force.late(1.0), DeadlineError)
