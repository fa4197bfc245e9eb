"""What happened on the node, as values: the same in the daemon, in the client and in JSON. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

from ...core.ids import CheckpointId


class EventKind(Enum):
    """What happened. Each says which fields of Event it sets besides `text`."""

    MISSED = "missed"
    """Events between the one before and the next one are gone: `count` of them; 0: nobody knows how many."""
    RUN_ATTACHED = "run_attached"
    """A new attempt of a run began: `attempt`, `count` (its ranks)."""
    RUN_ENDED = "run_ended"
    """The last rank of a run on this node left cleanly: `attempt`."""
    RANK_LOST = "rank_lost"
    """A trainer died, vanished or failed: `rank`, `attempt`."""
    RANK_LEFT = "rank_left"
    """A trainer saved what it could and ended, as somebody had announced: `rank`, `attempt`."""
    SNAPSHOT_SEALED = "snapshot_sealed"
    """A rank's snapshot is complete in memory: `rank`, `checkpoint`."""
    SHARD_COMMITTED = "shard_committed"
    """A rank's shard is durable: `rank`, `checkpoint`, `size_bytes`, `elapsed_s` since it was sealed."""
    SHARD_FAILED = "shard_failed"
    """A rank's shard could not be committed: `rank`, `checkpoint`, `code`, `hint`."""
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    """All ranks have committed: `checkpoint`, `size_bytes` on this node, `elapsed_s` since the first rank sealed it."""
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    """A due checkpoint is not taken: `rank` (which says so), `checkpoint`, `code` (the reason's word)."""
    CHECKPOINT_GIVEN_UP = "checkpoint_given_up"
    """Some rank, here or elsewhere, could not commit: `checkpoint` will never be complete."""
    CHECKPOINT_REMOVED = "checkpoint_removed"
    """Somebody removed checkpoints by hand: `checkpoint` (None: all of the run), `count`, `size_bytes`."""
    RESTORED = "restored"
    """A rank has every byte of a shard, verified: `rank`, `checkpoint`, `elapsed_s`, `code` (memory or disk)."""
    INTERVAL_CHANGED = "interval_changed"
    """The controller takes checkpoints at another interval: `interval_steps`."""
    CONTROLLER_CHANGED = "controller_changed"
    """Somebody set the budget, paused or resumed checkpoints, or asked for one: `code` (which)."""
    DEVICE_CHANGED = "device_changed"
    """A device's state changed: `subject` (its directory), `code` (its state)."""
    SCRUB_ENDED = "scrub_ended"
    """All committed bytes of a store were read: `subject` (store id), `count` (checkpoints), `size_bytes`."""
    DAMAGE_FOUND = "damage_found"
    """A checkpoint is not what was committed: `checkpoint`."""
    CACHE_MADE = "cache_made"
    """`subject` (the dataset's fingerprint), `count` (its samples)."""
    CACHE_DROPPED = "cache_dropped"
    """`subject`, `count` (samples that it held)."""
    GROUP_JOINED = "group_joined"
    """A job takes part in shared preparation: `subject` (the group), `count` (jobs now)."""
    GROUP_LEFT = "group_left"
    """A job left it: `subject`, `count` (jobs left)."""
    CONFIG_RELOADED = "config_reloaded"
    """The daemon's configuration was read again: `code` (empty: it is in use; else why it is not)."""
    DRAINING = "draining"
    """The daemon persists what is sealed and takes nothing new."""
    DRAINED = "drained"
    """Everything that was sealed is settled: `count` (shards that could not be)."""


WARNINGS = frozenset(
    {
        EventKind.MISSED,
        EventKind.RANK_LOST,
        EventKind.SHARD_FAILED,
        EventKind.CHECKPOINT_GIVEN_UP,
        EventKind.CHECKPOINT_SKIPPED,
        EventKind.DAMAGE_FOUND,
    }
)
"""Kinds that somebody should look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. Which fields are set beside the first five, EventKind says."""

    kind: EventKind
    unix_s: float
    """When, by the daemon's clock: seconds since 1970-01-01 UTC. It may be set back; `sequence` never is."""
    text: str
    """The same for people, one sentence."""
    sequence: int = 0
    """Its number in the log of who asks, from 1."""
    log_id: str = ""
    """Which log: 32 hex digits, made anew when the daemon starts."""
    owner_uid: int | None = None
    """Whose it is; None: of the node, for everybody."""
    run_name: str = ""
    run_id: str = ""
    attempt: int = 0
    rank: int | None = None
    checkpoint: CheckpointId | None = None
    size_bytes: int = 0
    elapsed_s: float = 0.0
    count: int = 0
    interval_steps: int = 0
    subject: str = ""
    code: str = ""
    hint: str = ""
    """What to do; empty: nothing."""


class RunFacts(TypedDict, total=False):
    """Fields of an event that some kinds set, besides those that say whose it is."""

    attempt: int
    checkpoint: CheckpointId | None
    size_bytes: int
    elapsed_s: float
    count: int
    interval_steps: int
    subject: str
    code: str
    hint: str


class Facts(RunFacts, total=False):
    """Fields of an event that some kinds set."""

    owner_uid: int | None
    run_name: str
    run_id: str
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events somebody wants."""

    run: str = ""
    """Name or id; empty: all, and those of the node."""
    kinds: frozenset[EventKind] = frozenset()
    """Empty: all."""
    since: int | None = None
    """The number of the last event that is known: those after it. None: from now on, or all without `follow`."""
    log_id: str = ""
    """Of which log `since` is; empty: of this one."""
    follow: bool = False
    """Wait for more, until the daemon ends."""

    def wants(self, event: Event) -> bool:
        """Tell whether an event is one of these; that some are missing concerns everybody."""
        if event.kind is EventKind.MISSED:
            return True
        if self.kinds and event.kind not in self.kinds:
            return False
        return not self.run or self.run in (event.run_name, event.run_id)
