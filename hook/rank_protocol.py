"""What a run asks of its ranks, and what it hears of them."""

from collections.abc import Callable, Mapping
from typing import Protocol

from ..checkpoint.frequency_types import Decision
from ..core.errors import EverstepError
from ..core.ids import CheckpointId
from .end_machine import Ask
from .steering_machine import Steering

DAEMON_LOST = "the daemon went away before it was committed"
"""Why a rank's part failed for which there is hope: all ranks take their last boundary again."""


class Listener(Protocol):
    """Who hears what all ranks did; called on the agreement's thread."""

    def saves_last_boundary(self) -> bool:
        """Tell whether the last boundary gets a checkpoint, or only those under way are waited for.

        Asked when an end was announced, on the training thread; of several ranks on rank 0, which decides for all.
        """
        ...

    def end_heard(self, left_s: float) -> None:
        """Somebody ends a rank of the run in so many seconds: the least that any rank knows, a poll or two old."""
        ...

    def end_confirmed(self) -> None:
        """All ranks were told by SIGTERM."""
        ...

    def ranks_lost(self, error: EverstepError) -> None:
        """Nothing can be agreed on any more; what is under way will not be known to be complete."""
        ...

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        """All ranks hold a sealed snapshot, in memory or on the devices."""
        ...

    def complete(self, checkpoint: CheckpointId) -> None:
        """All ranks have committed."""
        ...

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        """Some rank could not commit: it will never be complete. `in_memory`: but every rank holds it sealed."""
        ...


class Ranks(Protocol):
    """What a run asks of its peers."""

    rank: int
    world_size: int

    def agree_settings(self, settings: Mapping[str, str], error: EverstepError | None) -> None:
        """Meet the others, before anything else. `settings`: arguments of `attach` as text, by name.

        Raises:
            UsageError: not all ranks were given the same.
            EverstepError: `error`, or what another rank came with instead.
            DeadlineError: not all ranks attach.
        """
        ...

    def agree_attempt(self, known: int, error: EverstepError | None) -> int:
        """Return the attempt of all ranks, one above the largest known. Any rank's error is raised by all."""
        ...

    def agree_begun(self, error: EverstepError | None) -> None:
        """Return once all ranks have begun the attempt; raise what refused one of them."""
        ...

    def gather(self, topic: str, value: object, *, deadline_s: float | None = None) -> list[object]:
        """Return every rank's JSON-able value, in rank order, on every rank.

        They are waited for so long; None: as long as a rank may come late that has nothing to read.
        """
        ...

    def start(self, step: int, listener: Listener) -> None:
        """Begin to decide about the boundaries after `step`."""
        ...

    def is_due(self, step: int) -> bool:
        """Tell whether boundary `step` gets a checkpoint; the same on all ranks. May wait for rank 0."""
        ...

    def passed(self, step: int) -> tuple[int, ...]:
        """Return the boundaries before `step` that were to get a checkpoint, each once: whether it was begun here, too,
        knows who asks.
        """
        ...

    @property
    def lost(self) -> EverstepError | None:
        """Why nothing can be agreed on any more; None: it can."""
        ...

    @property
    def silent(self) -> str:
        """Which ranks do not answer, as far as this one knows: nothing of theirs is worth waiting for. Empty: none."""
        ...

    def gone(self, rank: int) -> None:
        """The daemon says that the trainer of this rank has died or let go of it; from any thread."""
        ...

    @property
    def decision(self) -> Decision:
        """How often, and why: as the newest boundary was decided, the same on all ranks."""
        ...

    def ask_for_checkpoint(self, ask: Ask) -> None:
        """Ask for a checkpoint at one of the next boundaries, maybe as the run's last; from any thread."""
        ...

    def steer(self, steering: Steering) -> None:
        """Let rank 0 hear what an operator asks of the controller; from any thread."""
        ...

    def end_after(self, step: int) -> str:
        """Return why the run ends with boundary `step`, asked after `is_due`; empty: it goes on.

        Once the ranks are lost each one ends for what it has asked for itself.
        """
        ...

    def ends_in(self, left_s: float) -> None:
        """Let all ranks hear that somebody ends this one in so many seconds, before they hear what it asks then."""
        ...

    def confirm_end(self, ask: Ask) -> None:
        """Ask so once all ranks have said the same; the listener hears of it."""
        ...

    def saves_after_all(self, has_time: bool, until_s: float) -> bool:
        """Tell whether the last boundary is saved, which had no time, once what was under way has come to its end.

        Rank 0 decides by `has_time`; the others wait for it until then, and save nothing if they do not hear it.
        """
        ...

    def sealed(self, checkpoint: CheckpointId) -> None:
        """This rank has sealed it, and memory holds it or the devices do."""
        ...

    def committed(self, checkpoint: CheckpointId) -> None:
        """This rank has committed."""
        ...

    def failed(self, checkpoint: CheckpointId, reason: str) -> None:
        """This rank skipped, dropped or could not write its part."""
        ...

    def ends(self) -> None:
        """This rank passes no boundary any more: others that pass one more or less are not waited for."""
        ...

    def close(self, *, stays: Callable[[], bool] | None = None) -> None:
        """End the agreement's thread.

        Who may serve the Store stays a while, until the others have left it, too, as long as `stays` says so.
        """
        ...
