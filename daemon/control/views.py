"""What operators see of a daemon and of stores, as values: the same whether the daemon answered or the disks were read.

The control API, the command line and its JSON speak these; nothing here does I/O or imports a wire format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ...checkpoint.keep import Keep
from ...core.ids import CheckpointId
from ..devices.scrub_plan import Scrub
from ..slot_machine import SlotState


class RankState(Enum):
    """Whether a trainer holds a rank."""

    ATTACHED = "attached"
    LINGERING = "lingering"
    """The trainer is gone; its snapshot in memory waits for the restart."""
    CLOSED = "closed"


class CheckpointStatus(Enum):
    """What is known of a checkpoint here (checkpoint/catalogue.py says when)."""

    COMPLETE = "complete"
    LOCAL = "local"
    DAMAGED = "damaged"


class DeviceStatus(Enum):
    """Whether a device can be relied on."""

    OK = "ok"
    SLOW = "slow"
    SUSPECT = "suspect"
    MISSING = "missing"
    DRAINING = "draining"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonView:
    """A daemon itself."""

    version: str
    pid: int
    is_private: bool
    uptime_s: float
    socket: str
    uid: int
    arena_bytes: int
    metrics_port: int
    """0: no metrics are served."""
    metrics_url: str = ""
    """Where, as this node reaches them; empty: nowhere, or the daemon does not say."""
    is_draining: bool
    persisted_count: int
    failed_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot of a rank's arenas."""

    state: SlotState
    checkpoint: CheckpointId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank that attached since the daemon started."""

    rank: int
    state: RankState
    step: int
    """Boundaries passed, as its trainer said last, and no fewer than at its newest snapshot; 0: not known yet."""
    slots: tuple[SlotView, ...]
    arena_bytes: int
    pid: int
    """0 when the trainer is gone or its pid is not known here."""
    left: str = ""
    """What was announced and ended its trainer, where that is gone; empty: it died, vanished or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceView:
    """How often a run takes checkpoints, and what they cost: as its rank with the highest cost says."""

    interval_steps: int
    reason: str
    goal_missed: str
    cost_share: float
    """Of training time."""
    skipped_count: int
    steps: int = 0
    """Boundaries since the trainer attached; 0: it does not say."""
    train_s: float = 0.0
    """Since then; what follows are parts of it."""
    stall_s: float = 0.0
    """That checkpoints cost."""
    data_s: float = 0.0
    """That the loop waited for batches."""
    budget: float | None = None
    """The share of the time that checkpoints may cost; None: a script fixes the interval, or nobody said."""
    paused_until_unix_s: float = 0.0
    """Until then none is taken, as an operator asked; 0: they are."""

    @property
    def is_paused(self) -> bool:
        """Tell whether none is taken now, whatever the interval."""
        return self.paused_until_unix_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run that attached since the daemon started."""

    name: str
    run_id: str
    owner_uid: int
    attempt: int
    world_size: int
    ranks: tuple[RankView, ...]
    complete_floor: CheckpointId | None
    keep: Keep
    is_own_keep: bool
    """Its newest trainer said what to keep; else the daemon's configuration does."""
    pace: PaceView | None
    """None: no trainer has said it yet."""
    newest: CheckpointId | None = None
    """The newest checkpoint on the devices that is not damaged."""
    newest_unix_s: float = 0.0
    """When the last of its shards was committed."""
    newest_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One member of a store."""

    device_id: str
    path: str
    free_bytes: int
    total_bytes: int
    engine: str
    engine_reason: str
    """Why this engine, and what it replaces."""
    is_direct: bool
    state: DeviceStatus
    reason: str
    """Why the state is not OK, or why nothing more fits."""
    pool_bytes: int
    """Of deleted checkpoints, not free: they wait to be written over, or to be given back when room is needed."""
    write_bytes_per_s: int
    """As measured by its own writes; 0 while nobody knows."""
    name: str = ""
    """In the node's configuration; empty where it has none."""
    queued_bytes: int = 0
    """Of transfers that wait for it or are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubView:
    """The reading of all committed bytes of a store."""

    newest: Scrub | None
    """The one that goes on, else the last one since the daemon started."""
    next_unix_s: float | None
    """When the next one begins by the schedule; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """One open store."""

    store_id: str
    devices: tuple[DeviceView, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    scrub: ScrubView


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """One cache of samples."""

    number: int
    uid: int
    fingerprint: str
    content: str
    sample_count: int
    published_count: int
    used_bytes: int
    allocated_bytes: int
    budget_bytes: int
    client_count: int
    idle_s: float
    """Since its last reader left; 0 while it has one."""
    reason: str
    """Why it has less memory than its budget; empty: it has what it needs."""
    hit_count: int = 0
    """Samples that readers found in it, as far as they have said it; since it was made."""
    miss_count: int = 0
    """Samples that they read from the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupView:
    """One group of jobs that prepare each batch once between them."""

    name: str
    uid: int
    job_count: int
    outside_count: int
    """Jobs that are outside of the window, and prepare for themselves."""
    window: tuple[int, int]
    """The batches [start, stop) that are shared now; numbered over all epochs."""
    ready_count: int
    """Batches that wait for jobs to take them."""
    leased_count: int
    """Batches that are being prepared."""
    prepared_count: int
    """Batches that one job prepared for all."""
    served_count: int
    """Times that a job was given one."""
    private_count: int
    """Times that a job, told so, prepared one for itself."""
    used_bytes: int
    budget_bytes: int
    slowest_pid: int
    slowest_behind: int
    """Batches that it is behind the fastest job."""
    quarantined: tuple[int, ...]
    """Samples that all jobs leave out, because they kill workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One of the nodes that share their caches."""

    address: str
    is_me: bool
    is_asked: bool
    """It is this node, or it may be asked now."""
    problem: str
    """Why it is left alone; empty: it is not."""
    fetched_count: int
    """Samples that this node has got from it."""
    offered_count: int
    """Samples that it has taken from this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """All that `everstep status` shows."""

    daemon: DaemonView
    runs: tuple[RunView, ...]
    stores: tuple[StoreView, ...]
    caches: tuple[CacheView, ...] = ()
    groups: tuple[ShareGroupView, ...] = ()
    members: tuple[MemberView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinView:
    """Why a checkpoint is not collected, and how long."""

    label: str
    expires_unix_s: float
    """0: it does not end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint in a list."""

    run_name: str
    run_id: str
    owner_uid: int
    checkpoint: CheckpointId
    parent: CheckpointId | None
    world_size: int
    ranks: tuple[int, ...]
    """Whose shards are here."""
    size_bytes: int
    created_unix_s: float
    state: CheckpointStatus
    is_in_memory: bool
    """The daemon also keeps it in memory, for every rank in `ranks`."""
    is_offered: bool
    """A restore would take it."""
    notes: Mapping[str, str]
    problems: tuple[str, ...]
    tags: tuple[str, ...]
    """Names that a person gave it: while it has one it is not collected."""
    missing_on: tuple[str, ...] = ()
    """Directories of missing members that hold parts of it; empty where anything else is wrong with it, too."""
    pins: tuple[PinView, ...] = ()
    """What keeps it from being collected besides its tags."""

    @property
    def title(self) -> str:
        """`<run>@<attempt>.<step>`, as commands name it."""
        return f"{self.run_name}@{self.checkpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafView:
    """One tensor of one rank's shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    size_bytes: int
    aliases: tuple[str, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One file of one rank's shard."""

    rank: int
    device_id: str
    device: str
    """Where that is, or was last seen, and then why it is not there."""
    file: str
    """Below the device's directory."""
    size_bytes: int
    block_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDetail:
    """All that `everstep show` shows."""

    summary: CheckpointView
    leaves: tuple[LeafView, ...]
    segments: tuple[SegmentView, ...]
    leaf_count: int
    """Of all ranks, whether listed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentVerdictView:
    """What reading one file showed."""

    rank: int
    path: str
    size_bytes: int
    bad_block: int | None
    problem: str
    """Empty: every byte is what was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRecord:
    """What one shard says of the data that its rank handed out through one loader."""

    rank: int
    place: str
    """Name of the loader in the state."""
    ledger: object
    state: object
    """JSON as it stands in the manifest (checkpoint/value_format.py), not checked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What reading a whole checkpoint showed."""

    summary: CheckpointView
    is_intact: bool
    segments: tuple[SegmentVerdictView, ...]
    problems: tuple[str, ...]
    """Of its manifests."""
    loaders: tuple[LoaderRecord, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What a removal gave back."""

    checkpoint_count: int
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubStarted:
    """What a scrub that was asked for is going to read."""

    checkpoint_count: int
    """0: nothing has begun."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How a daemon ended."""

    persisted_count: int
    lost_count: int
    attached_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How far the draining of a node is."""

    is_draining: bool
    unsettled_count: int
    """Shards that were not settled in time; 0: the node is drained."""
    attached_count: int
    """Trainers that go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporting:
    """What is needed to read a checkpoint from its devices."""

    summary: CheckpointView
    directories: tuple[Path, ...]
    """All devices of its store."""
    store_uid: int
    """Whom its files belong to."""


class Source(Protocol):
    """Where a command gets what it shows: a daemon (client.py) or directories (offline.py).

    Every method raises NotFoundError for what does not exist or belongs to somebody else.
    """

    @property
    def label(self) -> str:
        """What answers, for messages."""
        ...

    def checkpoints(self, run: str) -> list[CheckpointView]:
        """Return the checkpoints of a run (name or id; empty: of all runs), by run, the newest first."""
        ...

    def problems(self, run: str) -> tuple[str, ...]:
        """Return what opening the store found wrong with a run (empty: with anything), a sentence each."""
        ...

    def detail(self, run: str, checkpoint: CheckpointId | None, *, leaf_count_max: int) -> CheckpointDetail:
        """Return one checkpoint; None: the newest complete one, else the newest intact one."""
        ...

    def verify(self, run: str, checkpoint: CheckpointId) -> Verdict:
        """Return what every byte of a checkpoint is worth."""
        ...

    def remove(self, run: str, checkpoint: CheckpointId, *, force: bool) -> Removed:
        """Remove one checkpoint; ProtectedError for one that must stay, unless forced."""
        ...

    def remove_run(self, run: str, *, force: bool) -> Removed:
        """Remove all checkpoints of a run; ProtectedError for tags without `force`, RunBusyError: its trainer lives."""
        ...

    def tag(self, run: str, checkpoint: CheckpointId | None, name: str) -> CheckpointView:
        """Give a checkpoint a tag and return it; None: the one that `detail` shows."""
        ...

    def untag(self, run: str, name: str) -> CheckpointId:
        """Take a tag away and return the checkpoint that had it."""
        ...

    def pin(self, run: str, checkpoint: CheckpointId | None, label: str, *, ttl_s: float) -> CheckpointView:
        """Keep a checkpoint from being collected for so long (0: until it is unpinned); None: that of `detail`."""
        ...

    def unpin(self, run: str, label: str) -> CheckpointId:
        """Take a pin away and return the checkpoint that had it."""
        ...
