"""The data socket's language: typed frames between a trainer's hook (or a tool) and the node daemon.

Every request that wants an answer carries a `request_id` chosen by the client; its answer carries the same number in
`re`. Frames without `re` are events. File descriptors travel beside `ArenaReady`, `Fetched`, `Streaming`,
`CacheOpened`, `StagingReady` and `InboxReady` (SCM_RIGHTS), never to the daemon. Sizes and offsets are bytes; times
are seconds. Neither tensor nor sample bytes ever travel here.
"""

from enum import Enum
from typing import Annotated

import msgspec

from .peer_frames import MEMBERS_MAX, Address, PeerReply, PeerRequest
from .share_frames import ShareReply, ShareRequest

PROTOCOL = 10
"""Raised on every incompatible change; both sides must have the same number. `Hello` and `Failure` never change."""

FRAME_SIZE_BYTES_MAX = 72 * 1024 * 1024
"""A manifest holds at most 64 MiB of values; everything else is far smaller."""

HELLO_SIZE_BYTES_MAX = 4096
"""What an unknown peer may make the daemon buffer."""

SHORT_TEXT_MAX = 500
ShortText = Annotated[str, msgspec.Meta(max_length=SHORT_TEXT_MAX)]
"""For people, kept by the daemon."""


class Role(Enum):
    """Why somebody connects."""

    TRAINER = "trainer"
    CONTROL = "control"
    DAEMON = "daemon"


class DeviceCondition(Enum):
    """How a device of a store is."""

    OK = "ok"
    SLOW = "slow"
    """It gets fewer segments."""
    SUSPECT = "suspect"
    """A call on it failed: it gets nothing new."""
    MISSING = "missing"
    DRAINING = "draining"
    """It gets nothing new, as somebody asked."""
    RETIRED = "retired"
    """No member any more."""


class SkipReason(Enum):
    """Why a due checkpoint was not taken."""

    ARENA = "arena"
    """It is being allocated, or its memory is not free yet."""
    SLOT = "slot"
    """None is free: the devices are slower than the interval."""
    COPYING = "copying"
    """The snapshot before it is still being copied."""
    DAEMON = "daemon"
    """There is none."""
    CAPTURING = "capturing"
    """A CUDA graph is being captured."""
    PEER = "peer"
    """Another rank could not take its part."""
    ERROR = "error"
    """Memory was refused, or something failed; the trainer's log says what."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of every connection."""

    protocol: int
    version: str
    role: Role


class KeepRules(msgspec.Struct, frozen=True):
    """What shall stay of a run's checkpoints; see checkpoint/keep.py."""

    last: int
    every_steps: int | None = None
    every: str | None = None


class OpenRun(msgspec.Struct, frozen=True, tag="open_run"):
    """Take the lease of (run, rank) and open its storage: directories, or device names with a node's daemon."""

    request_id: int
    name: str
    rank: int
    world_size: int
    storage: list[str]
    takeover: bool
    keep: KeepRules | None = None
    """None: what the daemon's configuration says."""


class BeginAttempt(msgspec.Struct, frozen=True, tag="begin_attempt"):
    """Make `attempt` durable on all devices; from then on older attempts start nothing new."""

    request_id: int
    attempt: int
    fresh: bool
    again: bool = False
    """This very trainer has begun it before, by a connection or with a daemon that it has lost."""


class ListOffers(msgspec.Struct, frozen=True, tag="list_offers"):
    """Ask what this rank could restore."""

    request_id: int


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Bring one shard into an arena of this client: from the devices verified, in memory as it lies there."""

    request_id: int
    attempt: int
    step: int
    rank: int
    from_devices: bool = False
    """What is in memory was found damaged: pass it over."""


class Stream(msgspec.Struct, frozen=True, tag="stream"):
    """Read a shard once through its ring: all of it, or the blocks that hold these ranges."""

    arena: int
    ranges: list[tuple[int, int, int]]
    """Segment, begin and end in its file; empty: everything."""


class ChunkTaken(msgspec.Struct, frozen=True, tag="chunk_taken"):
    """The client has copied a delivered chunk: its slot in the ring may be used for another."""

    arena: int
    slot: int


class GetManifest(msgspec.Struct, frozen=True, tag="get_manifest"):
    """Ask for the manifest of one shard, without its bytes."""

    request_id: int
    attempt: int
    step: int
    rank: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The client has unmapped the ring of a stream, which ends there, complete or not."""

    arena: int


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """The client has every byte of the shard that it fetched last, verified, and so has every rank."""

    in_memory: bool
    """It lay in memory; else it came from the devices."""
    checkpoint: tuple[int, int] | None = None
    """Attempt and step; None: a client of before does not say."""
    goes_back: bool = False
    """By the user's wish: what is newer is left only once a checkpoint after this one is complete."""


class MakeArena(msgspec.Struct, frozen=True, tag="make_arena"):
    """Ask for an arena; it is admitted and allocated in the background and answered when it is ready.

    Where memory is short it gets fewer slots; where not even one fits, one that is smaller: a ring. Snapshots of any
    layout may go into a slot that is large enough: each is described by its draft.
    """

    request_id: int
    layout_digest: str
    """Of the structure that it is made for."""
    slot_size_bytes: int
    slot_count: int
    ring_size_bytes: int = 0
    """The least that a slot must have for a snapshot to stream through it; 0: a ring would be of no use."""
    files_size_bytes: int = 0
    """What a snapshot takes on the devices; 0: not said."""
    spare_size_bytes: int = 0
    """So much more in each slot where there is room, for a structure that grows; whole pages."""


class BeginSnapshot(msgspec.Struct, frozen=True, tag="begin_snapshot"):
    """The client starts to copy into a free slot."""

    arena: int
    slot: int
    attempt: int
    step: int


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """The draft of a snapshot that is still being copied lies in the slot: its segments may be written as they come."""

    arena: int
    slot: int
    attempt: int
    step: int
    draft_offset_bytes: int
    draft_size_bytes: int
    draft_sha256: str


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """A segment of an announced snapshot is whole; the client no longer writes to that part of the slot."""

    arena: int
    slot: int
    segment: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """The client gives up the snapshot it was copying."""

    arena: int
    slot: int
    reason: str


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """The copy is finished and holds; the draft of the manifest lies in the slot, the same as announced if it was.

    The client no longer writes to the slot.
    """

    arena: int
    slot: int
    attempt: int
    step: int
    draft_offset_bytes: int
    draft_size_bytes: int
    draft_sha256: str


class SealedEverywhere(msgspec.Struct, frozen=True, tag="sealed_everywhere"):
    """Every rank has sealed (attempt, step): an older kept snapshot may be overwritten."""

    attempt: int
    step: int


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """Some rank has no durable shard of (attempt, step), which will never be complete: this rank's may go."""

    attempt: int
    step: int
    in_memory: bool = False
    """Every rank has it sealed: memory can still be restored, and is not overwritten for this."""


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """Every rank has committed (attempt, step): the complete floor."""

    attempt: int
    step: int


class Costs(msgspec.Struct, frozen=True, tag="costs"):
    """What checkpoints have cost this rank since it attached, in seconds, and how often they are taken now, and why."""

    train_s: float
    boundary_s: float
    """Training stood still at boundaries; `eager_s` and `wait_s` are parts of it."""
    eager_s: float
    """The state was walked, and what may change at once copied."""
    wait_s: float
    """Other ranks' decision was waited for."""
    guard_s: float
    """Optimizers waited for a copy to end."""
    slower_s: float
    """Steps took longer beside a copy or a write than without, altogether; 0 while nobody knows."""
    skipped: dict[SkipReason, int]
    """Due checkpoints that were not taken."""
    interval_steps: int
    reason: ShortText
    goal_missed: ShortText
    """Why the work that may be lost at most cannot be kept; empty: it can, or nobody asked."""
    steps: int = 0
    """Boundaries passed in `train_s`; 0 from a trainer that does not say."""
    data_s: float = 0.0
    """Of `train_s`, waits of the loop for batches of everstep's loaders: data, not checkpoints."""
    bound: ShortText = ""
    """What bounds the interval, one word or two; `paused`: an operator asked for no checkpoints; `lost`: ranks are."""
    budget: float | None = None
    """Share of the time that training takes without checkpoints; None: the interval is fixed."""
    cost_share: float | None = None
    """What checkpoints cost at this interval, by what is known now, as such a share; None while nobody knows."""
    cost_half_width: float | None = None
    """Half of its interval of confidence."""
    steps_undecided: int = 0
    """Steps, about, until that is known well enough; 0: it is."""
    step: int = 0
    """Boundaries passed along the lineage of the run."""
    step_s: float = 0.0
    """What a step takes on average, without pauses; 0 while nobody knows."""
    cuda_wait_s: float = 0.0
    """CUDA devices waited for a copy to end while the host went on; in no other part."""
    paused_until_unix_s: float = 0.0
    """As an operator asked, perhaps of another daemon, or of one before this; 0: it is not paused."""
    plain_s: float = 0.0
    """Of `boundary_s`, boundaries at which no checkpoint was due: no interval makes that less, no budget counts it."""
    budget_asked_unix_s: float = 0.0
    """What operators asked of `budget` until then is in it; 0: nothing, or from a trainer that does not say."""
    pause_asked_unix_s: float = 0.0
    """The same of `paused_until_unix_s`."""

    @property
    def added_s(self) -> float:
        """What checkpoints have added to training."""
        return self._whole_s - self.plain_s

    @property
    def added_share(self) -> float:
        """The same as a share of training without checkpoints, and without what other boundaries took."""
        return self.added_s / (self.train_s - self._whole_s) if self.train_s > self._whole_s else 0.0

    @property
    def _whole_s(self) -> float:
        return self.boundary_s + self.guard_s + self.cuda_wait_s + max(self.slower_s, 0.0)


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A due checkpoint is not taken: this rank could not, or has heard of one that could not."""

    attempt: int
    step: int
    reason: SkipReason
    text: ShortText


class ForceHeard(msgspec.Struct, frozen=True, tag="force_heard"):
    """Answer to Force: the ranks are asked for a checkpoint at one of their next boundaries."""

    number: int
    attempt: int
    step: int
    """The first boundary whose checkpoint is one that was asked for."""


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """The client ends cleanly; answered when everything it sealed is committed or has failed."""

    request_id: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The client is about to end and waits for nothing: what it sealed is persisted and kept, as if it had died."""

    request_id: int
    reason: ShortText
    is_failure: bool
    """An exception ends it, and not what somebody has announced."""


class ReadManifest(msgspec.Struct, frozen=True, tag="read_manifest"):
    """Ask for the manifest of a committed shard of a run of this user, without a lease; see `OpenSegment`."""

    request_id: int
    run: str
    """Name or id."""
    attempt: int
    step: int
    rank: int


class OpenSegment(msgspec.Struct, frozen=True, tag="open_segment"):
    """Ask for the file of one segment of such a shard, to read: who exports what a node's daemon has saved for them."""

    request_id: int
    run: str
    """Name or id."""
    attempt: int
    step: int
    rank: int
    segment: int
    """As the manifest numbers them."""


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """Another daemon wants the devices: an idle private daemon ends, any other refuses."""

    request_id: int


class CacheContent(Enum):
    """What the bytes of a cached sample are."""

    RAW = "raw"
    """As the source stores them."""
    PREPARED = "prepared"
    """A prepared sample, encoded by dataloader/tree_format.py."""


class OpenCache(msgspec.Struct, frozen=True, tag="open_cache"):
    """Use the cache of a dataset, which is made if this user has none of this fingerprint; once for a connection.

    The largest budget of its clients is the one that counts.
    """

    request_id: int
    fingerprint: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    content: CacheContent
    sample_count: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    budget_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
    """Bytes that the cache may take, its index included (dataloader/cache/arena_format.py)."""
    members: Annotated[list[Address], msgspec.Meta(max_length=MEMBERS_MAX)] = []
    """The nodes that share this dataset, as the trainer found them; empty: those of the daemon's configuration."""


class StageCache(msgspec.Struct, frozen=True, tag="stage_cache"):
    """Ask for memory to put samples into that were missing; it takes the place of what this client had before."""

    request_id: int
    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


FILL_ITEMS_MAX = 4096


class FillCache(msgspec.Struct, frozen=True, tag="fill_cache"):
    """Samples that were missing lie in the client's staging: the daemon copies, checks and publishes them."""

    request_id: int
    items: Annotated[list[tuple[int, int, int, int]], msgspec.Meta(max_length=FILL_ITEMS_MAX)]
    """Sample id, offset in the staging, length, XXH3-64 of the bytes."""


class CacheUse(msgspec.Struct, frozen=True, tag="cache_use"):
    """What this client has read since it told it last."""

    hit_count: Annotated[int, msgspec.Meta(ge=0)]
    hit_bytes: Annotated[int, msgspec.Meta(ge=0)]
    miss_count: Annotated[int, msgspec.Meta(ge=0)]
    miss_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Read from the source."""
    oversized_count: Annotated[int, msgspec.Meta(ge=0)]
    """Of the misses, samples larger than the whole budget."""
    peer_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Read from other nodes' memory."""
    peer_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


Request = (
    Hello
    | OpenRun
    | BeginAttempt
    | ListOffers
    | Fetch
    | Stream
    | ChunkTaken
    | GetManifest
    | Release
    | Restored
    | MakeArena
    | BeginSnapshot
    | Announce
    | Copied
    | Abandon
    | Seal
    | SealedEverywhere
    | GiveUp
    | Complete
    | Costs
    | Skipped
    | ForceHeard
    | Detach
    | Leave
    | ReadManifest
    | OpenSegment
    | HandOver
    | OpenCache
    | StageCache
    | FillCache
    | CacheUse
    | PeerRequest
    | ShareRequest
)


class DeviceInfo(msgspec.Struct, frozen=True):
    """One present device of the run's store."""

    device_id: str
    path: str
    condition: DeviceCondition
    reason: str
    """Why it is not well; empty when it is."""
    write_bytes_per_s: float
    """As measured; 0 while nobody knows."""
    capacity_bytes: int
    """Of its file system, divided among the devices on it; 0 where nobody knows."""


class Offer(msgspec.Struct, frozen=True):
    """One checkpoint as this daemon sees it."""

    attempt: int
    step: int
    world_size: int
    shards: list[int]
    """Ranks whose shard is committed on this daemon's devices."""
    in_memory: bool
    """The asking rank's own shard is sealed in this daemon's memory."""
    problem: str
    """Why it cannot be restored here; empty when nothing is known against it."""
    turns: str = ""
    """Where the run went back along its lineage, as its notes say (checkpoint/lineage_plan.py)."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. The token opens the control API for as long as this process lives."""

    version: str
    protocol: int
    token: str
    private: bool
    pid: int
    control_socket: str


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A request was refused; `code` is the class of core/errors.py."""

    re: int
    code: str
    message: str
    hint: str


class RunOpened(msgspec.Struct, frozen=True, tag="run_opened"):
    """The lease is given."""

    re: int
    run_id: str
    highest_attempt: int
    new_store: bool
    devices: list[DeviceInfo]
    notes: list[str]
    """What the user should know: a missing device, two directories on one file system, no direct I/O, …"""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""

    re: int


class Offers(msgspec.Struct, frozen=True, tag="offers"):
    """What can be restored, newest first."""

    re: int
    items: list[Offer]
    had_complete: bool = True
    """One of this run was complete on all ranks, as far as this daemon knows; one of before does not say."""
    set_aside: list[Offer] = []
    """What the run has left by starting anew or going back: restored only where it is asked for by name."""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """A verified shard that was in memory lies in an arena (fd beside this frame)."""

    re: int
    arena: int
    arena_size_bytes: int
    slot_size_bytes: int
    slot_count: int
    layout_digest: str
    manifest: bytes
    segment_offsets_bytes: list[int]
    """Offset in the arena of each segment's first byte, in the order of the manifest's segments."""
    free_slots: list[int]
    """Slots of this arena that may be used for new snapshots."""


class Streaming(msgspec.Struct, frozen=True, tag="streaming"):
    """A shard is ready to be read from the devices, through a ring of shared memory (fd beside this frame).

    `Stream` begins it. Each chunk is announced by a `Chunk` and answered by `ChunkTaken`; then comes `StreamEnd`.
    """

    re: int
    arena: int
    slot_size_bytes: int
    slot_count: int
    manifest: bytes
    headers: list[bytes]
    """Of the segments, in the order of the manifest's: where each piece lies. Compared with what is read."""


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Verified bytes [file_offset, file_offset + size) of a segment file lie at the beginning of a slot."""

    arena: int
    slot: int
    segment: int
    file_offset_bytes: int
    size_bytes: int


class StreamEnd(msgspec.Struct, frozen=True, tag="stream_end"):
    """Every chunk asked for was announced, if `code` is empty; else the class of the error that ended the reading."""

    arena: int
    code: str
    message: str
    hint: str


class ManifestBytes(msgspec.Struct, frozen=True, tag="manifest_bytes"):
    """A shard's manifest as it is on the devices (manifest_format.py)."""

    re: int
    manifest: bytes


class SegmentOpened(msgspec.Struct, frozen=True, tag="segment_opened"):
    """A segment's file (its descriptor, for reading only, beside this frame)."""

    re: int


class ArenaReady(msgspec.Struct, frozen=True, tag="arena_ready"):
    """The arena asked for (fd beside this frame); all its slots are free."""

    re: int
    arena: int
    slot_size_bytes: int
    slot_count: int
    allocation_s: float
    is_ring: bool = False
    """Its one slot is smaller than asked for: segments of a snapshot take turns in it, and it is always announced."""
    reason: str = ""
    """Why it is less than asked for, and what to do; empty: it is not."""


class SlotFree(msgspec.Struct, frozen=True, tag="slot_free"):
    """The slot may be used for a new snapshot."""

    arena: int
    slot: int


class SegmentWritten(msgspec.Struct, frozen=True, tag="segment_written"):
    """A segment of a snapshot that streams through a ring is in its file: its place in the slot may be filled again."""

    arena: int
    slot: int
    segment: int


class Persisted(msgspec.Struct, frozen=True, tag="persisted"):
    """This rank's shard is committed."""

    attempt: int
    step: int
    size_bytes: int
    persist_s: float
    """From sealed to acknowledged, every fsync and manifest included."""
    devices_s: float
    """From first byte to last sync on the slowest of its devices: for it and for what was written at the same time."""
    under_replicated: bool
    """The manifest could not be written to every device; recovery repairs it."""


class PersistFailed(msgspec.Struct, frozen=True, tag="persist_failed"):
    """This rank's shard could not be committed; nothing older was touched."""

    attempt: int
    step: int
    code: str
    message: str
    hint: str


class DevicesChanged(msgspec.Struct, frozen=True, tag="devices_changed"):
    """A device of the run's store failed, became slow or is well again. The state is cut as before."""

    devices: list[DeviceInfo]
    """All that the run's new bytes may go to."""


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """What whoever looks after the run should know, and what needs no answer."""

    code: str
    """Class of core/errors.py, or empty: nothing went wrong."""
    message: str


class RankGone(msgspec.Struct, frozen=True, tag="rank_gone"):
    """The trainer of another rank of the same attempt, on this node, has died or let go of the daemon."""

    rank: int


class Force(msgspec.Struct, frozen=True, tag="force"):
    """An operator wants a checkpoint: at one of the next boundaries, the same on all ranks."""

    number: int
    """For the answer."""


class Steer(msgspec.Struct, frozen=True, tag="steer"):
    """What operators have asked of the run's controller so far; of each wish the one asked last holds on all ranks.

    Times in seconds since 1970-01-01 UTC; 0: never.
    """

    budget: float | None = None
    """Share of the time that training takes without checkpoints."""
    budget_asked_unix_s: float = 0.0
    paused_until_unix_s: float = 0.0
    pause_asked_unix_s: float = 0.0


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """Somebody took the run over; this client can start nothing new."""

    message: str


class CacheOpened(msgspec.Struct, frozen=True, tag="cache_opened"):
    """The cache (its arena's descriptor, for reading only, beside this frame) may be read."""

    re: int
    size_bytes: int
    """To map: the memfd is as long as it has pages, and may become so long."""
    budget_bytes: int
    """The one that counts."""
    reason: str = ""
    """Why it is not what was asked for, and what to do; empty: it is."""
    members: list[str] = []
    """The nodes that share it; empty: this one alone. A `CacheMembers` tells of changes."""
    me: str = ""
    """The member that this node is; empty: it is none."""
    peer_deadline_s: float = 0.0
    """How long a peer may take to answer."""


class StagingReady(msgspec.Struct, frozen=True, tag="staging_ready"):
    """Memory of this client's own to put samples into (its descriptor beside this frame)."""

    re: int
    size_bytes: int


class CacheFilled(msgspec.Struct, frozen=True, tag="cache_filled"):
    """What became of a FillCache, whose place in the staging may be used again."""

    re: int
    published_count: int
    known_count: int
    """They were there already."""
    corrupt: list[int]
    """Sample ids whose bytes in the staging were not those that the digest was taken of."""
    differing: list[int]
    """Sample ids that are there with other bytes: the fingerprint does not follow the content."""
    reason: str = ""
    """Why others were not admitted; empty: all were."""
    forwarded_count: int = 0
    """On their way to the nodes that own them."""


Reply = (
    Welcome
    | Failure
    | RunOpened
    | Done
    | Offers
    | Fetched
    | Streaming
    | Chunk
    | StreamEnd
    | ManifestBytes
    | SegmentOpened
    | ArenaReady
    | SlotFree
    | SegmentWritten
    | Persisted
    | PersistFailed
    | DevicesChanged
    | Notice
    | RankGone
    | Force
    | Steer
    | Fenced
    | CacheOpened
    | StagingReady
    | CacheFilled
    | PeerReply
    | ShareReply
)
