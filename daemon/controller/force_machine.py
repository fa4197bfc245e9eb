"""When a checkpoint that somebody asked for is there, or will not be: told by the daemon's events. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from ...core.errors import DeadlineError, EverstepError, RanksLostError, error_from_code
from ...core.ids import CheckpointId
from ..events.event_types import Event, EventKind

_FINAL_SKIPS = frozenset({"error", "daemon"})
"""Reasons that the next boundary would have as well; for all others it is asked again."""


class Next(Enum):
    """What follows from an event."""

    WAIT = "wait"
    ASK_AGAIN = "ask again"
    DONE = "done"


@dataclass(slots=True)
class ForceMachine:
    """`first`: the oldest checkpoint that counts, known once a trainer has heard of it."""

    run_name: str
    first: CheckpointId
    _skipped: set[CheckpointId] = field(default_factory=set[CheckpointId])
    _why: str = ""

    def take(self, event: Event) -> Next:
        """Return what an event of the run means.

        Raises:
            EverstepError: there will be no such checkpoint.
        """
        match event.kind:
            case EventKind.CHECKPOINT_COMPLETE if self._counts(event):
                return Next.DONE
            case EventKind.CHECKPOINT_SKIPPED if self._counts(event):
                return self._skip(event)
            case EventKind.SHARD_FAILED if self._counts(event):
                raise error_from_code(event.code, event.text, event.hint)
            case EventKind.CHECKPOINT_GIVEN_UP if (
                self._counts(event) and event.checkpoint not in self._skipped
            ):
                raise EverstepError(event.text, hint="`everstep events` and the trainers' logs say why")
            case EventKind.RANK_LOST | EventKind.RANK_LEFT | EventKind.RUN_ENDED:
                raise RanksLostError(
                    f"{event.text} before the checkpoint was complete", hint="start it again, and ask again"
                )
            case _:
                return Next.WAIT

    def late(self, waited_s: float) -> DeadlineError:
        """Return what a caller is told whose deadline has come."""
        why = f"; {self._why}" if self._why else ": no boundary was reached, or writing it takes longer"
        return DeadlineError(
            f"run {self.run_name!r} has no complete checkpoint from {self.first} on within {waited_s:.0f} s{why}",
            hint="it may still be taken: `everstep events --follow` shows it",
        )

    def _counts(self, event: Event) -> bool:
        return event.checkpoint is not None and event.checkpoint >= self.first

    def _skip(self, event: Event) -> Next:
        self._why = event.text
        if event.code in _FINAL_SKIPS:
            raise EverstepError(event.text, hint="the trainer's log says more")
        assert event.checkpoint is not None
        if event.checkpoint in self._skipped:  # each rank says it
            return Next.WAIT
        self._skipped.add(event.checkpoint)
        return Next.ASK_AGAIN
