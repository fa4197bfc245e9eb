"""Committing imported components as a checkpoint: through a daemon, as a trainer does, with everything that this gives:
admission of memory, checks of space, the fence of attempts, checksums, one durable commit."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import (
    DaemonUnavailableError,
    DeadlineError,
    EverstepError,
    MemoryRefusedError,
    UsageError,
    error_from_code,
)
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import Reply
from .environment import environment_notes
from .link import Link, RunAddress
from .report import CostBook
from .run_state import RunState
from .skip_reasons import skip_reason
from .snapshot import SnapshotFacts, Snapshotter
from .state_protocol import Captured
from .stored_state import IMPORTED_NOTE

COMMIT_DEADLINE_S = 3600.0
_POLL_S = 0.02


@dataclass(slots=True)
class _Outcome:
    """What the daemon has said of the one checkpoint; set on the reader thread."""

    settled: threading.Event
    error: EverstepError | None = None
    snapshotter: Snapshotter | None = None

    def __call__(self, event: Reply) -> None:
        """Take an event."""
        match event:
            case frames.Persisted():
                self.settled.set()
            case frames.SegmentWritten():
                if self.snapshotter is not None:
                    self.snapshotter.segment_written(event)
            case frames.PersistFailed() | frames.Failure():
                error = error_from_code(event.code, event.message, event.hint)
                self.fail(error)
                if isinstance(event, frames.PersistFailed) and self.snapshotter is not None:
                    self.snapshotter.given_up(CheckpointId(event.attempt, event.step), error)
            case _:
                return

    def fail(self, error: EverstepError) -> None:
        """There will be no checkpoint."""
        self.error = self.error or error
        self.settled.set()


def commit_components(
    components: Sequence[Captured], address: RunAddress, *, state: RunState, kind: str, notes: dict[str, str]
) -> CheckpointId:
    """Return the committed checkpoint of a run that had none. The daemon takes a slot as large as the state, or a ring.

    Raises:
        UsageError: the run has checkpoints already.
        RunBusyError: its trainer lives.
        MemoryRefusedError, NoSpaceError, StorageError, DaemonUnavailableError: it could not be done now.
    """
    outcome = _Outcome(threading.Event())
    link = Link(address, outcome)
    try:
        _refuse_known_run(link, address.name)
        checkpoint = CheckpointId(link.opened.highest_attempt + 1, state.step)
        link.begin_attempt(checkpoint.attempt, fresh=False)
        snapshotter = Snapshotter(
            link,
            [state, *components],
            rank=0,
            world_size=1,
            slot_count=1,
            replicated=False,
            debug=False,
            device_first=False,
            costs=CostBook(),
            on_sealed=lambda _: None,
            on_failed=lambda _, reason: outcome.fail(MemoryRefusedError(f"it was not copied: {reason}")),
        )
        outcome.snapshotter = snapshotter
        facts = SnapshotFacts(
            checkpoint=checkpoint,
            parent=None,
            notes=environment_notes()
            | notes
            | {IMPORTED_NOTE: kind, "epoch": str(state.epoch), "finished": str(state.finished).lower()},
        )
        try:
            _begin(snapshotter, facts)
            _wait(link, outcome)
            link.client.request(lambda number: frames.Detach(request_id=number), COMMIT_DEADLINE_S)
        finally:
            snapshotter.close()
    finally:
        link.close()
    return checkpoint


def _refuse_known_run(link: Link, name: str) -> None:
    reply, _ = link.client.request(lambda number: frames.ListOffers(request_id=number))
    assert isinstance(reply, frames.Offers)
    if reply.items:
        newest = CheckpointId(reply.items[0].attempt, reply.items[0].step)
        raise UsageError(
            f"run {name!r} has checkpoints already, the newest is {newest}",
            hint="import into a run of another name, or remove its checkpoints: everstep rm RUN --all",
        )


def _begin(snapshotter: Snapshotter, facts: SnapshotFacts) -> None:
    """Take the snapshot, once the arena is there."""
    until_s = time.monotonic() + COMMIT_DEADLINE_S
    while (reason := snapshotter.begin(facts)) is not None:
        if skip_reason(reason) is not frames.SkipReason.ARENA or time.monotonic() > until_s:
            raise MemoryRefusedError(
                f"nothing was imported: {reason}", hint="free memory, or see the daemon's log"
            )
        time.sleep(_POLL_S)


def _wait(link: Link, outcome: _Outcome) -> None:
    until_s = time.monotonic() + COMMIT_DEADLINE_S
    while not outcome.settled.wait(_POLL_S):
        if link.broken:
            raise DaemonUnavailableError(
                "the daemon went away before the import was committed", hint="try again"
            )
        if time.monotonic() > until_s:
            raise DeadlineError(f"the import was not committed within {COMMIT_DEADLINE_S:.0f} s")
    if outcome.error is not None:
        raise outcome.error
