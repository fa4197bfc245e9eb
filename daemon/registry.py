"""What the daemon knows of runs and their ranks. Owned by the event loop; every value here lives in memory only."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from msgspec import structs

from ..checkpoint.catalogue import ShardRecord
from ..checkpoint.copy_gate import CopyGate
from ..checkpoint.draft_format import DraftReader
from ..checkpoint.keep import Keep
from ..checkpoint.manifest_format import ManifestEncoder
from ..checkpoint.manifest_types import Draft, ManifestHead, SegmentRecord
from ..checkpoint.run_store import RunStore
from ..core.errors import FencedError, NotFoundError, UsageError
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import Reply
from .arena import Arena
from .commit_times import CommitTimes
from .courtesy import Courtesy, trainers_courtesy
from .devices.stores import OpenStore
from .slot_machine import SlotState


class Lessee(Protocol):
    """A connected trainer, as the registry sees it."""

    @property
    def has_ended(self) -> bool:
        """Tell whether it is gone for the daemon, which gives back what it held exactly once."""
        ...

    @property
    def alive(self) -> bool:
        """Tell whether its process lives, even before the event loop has heard of its death."""
        ...

    @property
    def pid(self) -> int:
        """Process id for messages to people."""
        ...

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame for the trainer."""
        ...

    def died(self) -> None:
        """Serve what its dead process has sent, then end."""
        ...

    def end(self) -> None:
        """Give back what it holds."""
        ...

    def fence(self, reason: str) -> None:
        """Tell the trainer that it lost its lease, and end the connection."""
        ...


class Stream(Protocol):
    """A shard on its way to a trainer."""

    def begin(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Read (segment, begin, end) of the files, or everything."""
        ...

    def taken(self, slot: int) -> None:
        """The trainer has copied a chunk."""
        ...

    def end(self) -> None:
        """Stop it and forget it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """One grant. `RankRecord.lease` alone says which is valid, so that one assignment ends it for everybody."""

    rank: "RankRecord"
    holder: Lessee

    @property
    def is_valid(self) -> bool:
        """Tell whether the holder still has the rank."""
        return self.rank.lease is self

    def check(self) -> None:
        """Raise FencedError unless it is valid: to be asked after every wait of work done for its holder."""
        if not self.is_valid:
            raise FencedError(
                f"the lease of rank {self.rank.rank} of run {self.rank.run.name!r} is over",
                hint="the trainer has left, or another has taken the run over",
            )


class KeptManifest(NamedTuple):
    """A manifest as a restart will ask for it."""

    content: bytes
    """Of its file."""
    segments: tuple[SegmentRecord, ...]

    @classmethod
    def of(cls, head: ManifestHead, draft: Draft) -> Self:
        """Encode it."""
        return cls(ManifestEncoder().encode(head, draft), head.segments)


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A sealed snapshot in a slot."""

    checkpoint: CheckpointId
    world_size: int
    manifest: KeptManifest
    """What is or will be committed: complete with checksums, so that memory is verified like a disk."""
    draft: Draft
    """What the manifest was made of, to write it again."""
    again_failed_for: tuple[int, ...] = ()
    """Lost segments that could not be written again: not tried once more for the same ones."""
    offsets_bytes: tuple[int, ...]
    """Offset in the arena of each segment's first byte."""


@dataclass(slots=True, kw_only=True, eq=False)
class Overlap:
    """A snapshot that is written while it is being copied."""

    checkpoint: CheckpointId
    draft_sha256: str
    gate: CopyGate = field(default_factory=CopyGate)
    sealed_at_s: float | None = None
    """By the monotonic clock; None: it is still being copied."""


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """One rank of a run: who holds it, and its arenas."""

    run: "RunRecord"
    rank: int
    world_size: int = 1
    attempt: int = 0
    """Attempt that this rank's lessee has begun; 0 before."""
    gone_back_from: frozenset[CheckpointId] = frozenset()
    """What memory alone has of it: it stays while there is room for all that this lessee wishes for."""
    lease: Lease | None = None
    """Who holds the rank; None: nobody."""
    device_ids: frozenset[str] = frozenset()
    """Devices that its new bytes may go to, as chosen when it was opened last."""
    kept_until_s: float | None = None
    """Its last holder died or vanished: until then (the loop's clock) its snapshots wait for a restart."""
    leave: frames.Leave | None = None
    """What its last holder has said of its end; None: nothing, it died, or is here and goes on."""
    step: int = 0
    """Newest boundary that its holder has snapshotted; 0: none."""
    files_size_bytes: int = 0
    """What a snapshot takes on the devices, as its trainer has said with the newest arena that it wanted; 0 before."""
    arenas: dict[int, Arena] = field(default_factory=dict[int, Arena])
    current: int | None = None
    """The arena that its lessee's new snapshots go to; None: it has none yet."""
    is_making: bool = False
    """An arena is being allocated for it."""
    snapshots: dict[tuple[int, int], Snapshot] = field(default_factory=dict[tuple[int, int], Snapshot])
    """By (arena, slot)."""
    overlaps: dict[tuple[int, int], Overlap] = field(default_factory=dict[tuple[int, int], Overlap])
    """Snapshots that are written while they are being copied, by (arena, slot)."""
    costs: frames.Costs | None = None
    """What its trainer has said last; None: nothing since it attached."""
    counted: frames.Costs | None = None
    """Up to what the costs of its attempt are counted, which go on though its trainer attaches anew."""
    budget_from: frames.Costs | None = None
    """What it had said before it followed the budget that an operator asked for last; None: nobody has asked."""
    is_told_again: bool = False
    """A daemon before this one has counted what its trainer tells first."""
    commits: CommitTimes = field(default_factory=CommitTimes)
    """When its shards were committed, for the metrics."""
    drafts: DraftReader = field(default_factory=DraftReader)
    """Reads what its trainer says of its snapshots."""
    manifests: ManifestEncoder = field(default_factory=ManifestEncoder)
    """Encodes what is committed of them."""
    for_drafts: Courtesy = field(default_factory=trainers_courtesy)
    for_manifests: Courtesy = field(default_factory=trainers_courtesy)
    """Of what its trainer asks to be read. Apart, so that no draft waits behind manifests."""
    unheard: list[frames.Persisted] = field(default_factory=list[frames.Persisted])
    """Of the newest attempt, committed while nobody held the rank: its trainer may live, and think that they failed."""
    streams: dict[int, Stream] = field(default_factory=dict[int, Stream])
    """Shards on their way to the lessee, by the arena of their ring."""

    @property
    def lessee(self) -> Lessee | None:
        """The trainer that holds the rank."""
        return None if self.lease is None else self.lease.holder

    def grant(self, client: Lessee) -> Lease:
        """Give the free rank to a client, whose end will give it back: so it must not have ended already."""
        assert self.lease is None, "a lease is granted only once the one before it is over"
        assert not client.has_ended, "nobody would ever give this lease back"
        self.lease = Lease(rank=self, holder=client)
        self.kept_until_s = self.costs = self.leave = self.current = None
        self.is_making, self.step = False, 0  # it may go on from an older one
        for arena in self.arenas.values():
            arena.look_for_mappers()
        return self.lease

    def costs_begin(self, *, again: bool) -> None:
        """An attempt begins; `again`: with the same trainer, which goes on to tell what all of it has cost."""
        self.counted, self.is_told_again = (self.counted, self.counted is None) if again else (None, False)
        if not again:
            self.budget_from = None

    def costs_told(self, costs: frames.Costs) -> None:
        """Its trainer says what its checkpoints have cost so far."""
        known = self.counted
        if costs.budget_asked_unix_s > (known.budget_asked_unix_s if known is not None else 0.0):
            self.budget_from = known if known is not None else costs
        self.costs = self.counted = costs
        self.is_told_again = False

    @property
    def exceeds_budget(self) -> bool:
        """Tell whether checkpoints have cost more than their budget since it attached, or since that was changed."""
        costs, since = self.costs, self.budget_from
        if costs is None or costs.budget is None:
            return False
        return (costs if since is None else _costs_after(since, costs)).added_share > costs.budget

    @property
    def is_without_arena(self) -> bool:
        """Tell whether its trainer has no arena yet, or there is no trainer: nobody uses those that the rank has."""
        return self.lease is None or (self.current is None and not self.is_making)

    @property
    def left(self) -> str:
        """What was announced and ended its last holder; empty: it died, failed or vanished, or is here."""
        if self.lease is not None or self.leave is None or self.leave.is_failure:
            return ""
        return self.leave.reason

    @property
    def given_back_at_s(self) -> float | None:
        """When the memory of a rank without a holder is given back (the loop's clock): at once if nothing is in it."""
        if self.kept_until_s is None or any(not arena.machine.is_free() for arena in self.arenas.values()):
            return self.kept_until_s
        return 0.0

    @property
    def persisting(self) -> bool:
        """Tell whether something is sealed and not yet settled, or being copied."""
        return any(arena.machine.busy for arena in self.arenas.values())

    @property
    def writing(self) -> bool:
        """Tell whether something sealed is not yet settled."""
        return bool(self.writing_slots)

    @property
    def writing_slots(self) -> set[tuple[int, int]]:
        """Return the (arena, slot) of everything sealed that is not yet settled."""
        states = (SlotState.SEALED, SlotState.PERSISTING, SlotState.ABANDONED)
        return {
            (number, index)
            for number, arena in self.arenas.items()
            for index, slot in enumerate(arena.machine.slots)
            if slot.state in states
        }

    @property
    def writing_world_sizes(self) -> set[int]:
        """Return of how many ranks that is: of trainers that were, perhaps, whoever holds the rank by now."""
        return {self.arenas[number].machine.slots[index].world_size for number, index in self.writing_slots}

    @property
    def unwritten(self) -> CheckpointId | None:
        """The newest snapshot that a restart could take from memory, if it is on no device."""
        newest = self._newest_in_memory
        return newest if newest is not None and self._shard(newest) is None else None

    @property
    def in_memory_only(self) -> CheckpointId | None:
        """The same, if the devices cannot give it back: it is not there, not whole, or about to be collected."""
        newest = self._newest_in_memory
        return None if newest is None or self.can_be_read(newest) else newest

    def unsaved_after(self, checkpoint: CheckpointId) -> frozenset[CheckpointId]:
        """Return what is newer, and could be restored from memory alone."""
        newer = (each for each in self._in_memory if each > checkpoint)
        return frozenset(each for each in newer if not self.can_be_read(each))

    @property
    def _newest_in_memory(self) -> CheckpointId | None:
        return max(self._in_memory, default=None)

    @property
    def _in_memory(self) -> list[CheckpointId]:
        return [
            snapshot.checkpoint
            for (number, _), snapshot in self.snapshots.items()
            if self.arenas[number].may_serve
        ]

    def unsaved_arenas(self, *, besides: frozenset[CheckpointId] = frozenset()) -> set[int]:
        """Return the numbers of arenas with anything, `besides` these, that memory alone has."""
        return {
            number
            for (number, _), each in self.snapshots.items()
            if self.arenas[number].may_serve
            and each.checkpoint not in besides
            and not self.can_be_read(each.checkpoint)
        }

    def _shard(self, checkpoint: CheckpointId) -> ShardRecord | None:
        try:
            return self.run.store.shard(checkpoint, self.rank)
        except NotFoundError:
            return None

    def can_be_read(self, checkpoint: CheckpointId) -> bool:
        """Tell whether the devices can give this rank's part back, and none of it is about to be collected."""
        run, shard = self.run.store, self._shard(checkpoint)
        if shard is None or shard.problems or checkpoint in run.given_up():  # which goes however new it is
            return False
        well = {each.device_id for each in run.store.answering if not run.store.has_failed(each)}
        return well.issuperset(each.device_id for each in shard.segments)

    def share_with_dead(self) -> None:
        """Its trainer is thrown out and may live on, with all arenas mapped: none of them is given to another."""
        for arena in self.arenas.values():
            arena.shared_with_dead = True

    def arena(self, number: int) -> Arena:
        """Return one of this rank's arenas; NotFoundError for any other number."""
        try:
            return self.arenas[number]
        except KeyError:
            raise NotFoundError(f"rank {self.rank} has no arena {number}") from None

    def stream(self, number: int) -> Stream:
        """Return the stream through one of this rank's rings; NotFoundError for any other number."""
        try:
            return self.streams[number]
        except KeyError:
            raise NotFoundError(f"nothing streams through arena {number} of rank {self.rank}") from None

    def overlap(self, arena: int, slot: int) -> Overlap:
        """Return the announced snapshot in a slot; NotFoundError when there is none."""
        try:
            return self.overlaps[arena, slot]
        except KeyError:
            raise NotFoundError(f"slot {slot} of arena {arena} holds no announced snapshot") from None

    def end_streams(self) -> None:
        """Stop what is on its way: its taker is gone."""
        for stream in list(self.streams.values()):
            stream.end()

    def check_attempt(self, attempt: int) -> None:
        """Raise FencedError unless `attempt` is the newest of the run and this rank has begun it."""
        if attempt != self.attempt or attempt < self.run.attempt:
            raise FencedError(
                f"attempt {attempt} of run {self.run.name!r} is over: attempt {self.run.attempt} has started",
                hint="stop this process",
            )


@dataclass(slots=True, kw_only=True, eq=False)
class RunRecord:
    """One run of one user on this node, in one store: where that is another one later, the record is another one."""

    uid: int
    name: str
    run_id: str
    opened: OpenStore
    store: RunStore
    attempt: int = 0
    """Newest attempt begun, durable on all devices."""
    room_judged: int = 0
    """The newest attempt that was told that its state fits on no device."""
    keep: Keep | None = None
    """What its newest trainer wants kept; None: what the daemon's configuration says."""
    is_adopted: bool = False
    """Left by a daemon before this one, and opened by no trainer since: what is to be kept of it is not known."""
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an attempt is being made durable: ranks that come meanwhile must wait for that."""
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while what is outdated is removed."""
    ranks: dict[int, RankRecord] = field(default_factory=dict[int, RankRecord])

    @property
    def is_only_of_its_user(self) -> bool:
        """Tell whether its user has no other run in this store; what others have is nothing to them."""
        return sum(run.owner_uid == self.uid for run in self.opened.store.runs()) == 1

    def rank(self, rank: int) -> RankRecord:
        """Return the record of a rank, made now if it is new."""
        if rank < 0:
            raise UsageError(f"a rank is not negative, got {rank}")
        return self.ranks.setdefault(rank, RankRecord(run=self, rank=rank))

    @property
    def present(self) -> list[RankRecord]:
        """Return the attached ranks in order, all ranks where none is: what others have left says is over.

        An attempt of fewer ranks leaves the records of those that it has no more, with the memory that they hold.
        """
        ranks = [self.ranks[number] for number in sorted(self.ranks)]
        return [rank for rank in ranks if rank.lease is not None] or ranks

    def waiting(self, has: Callable[[RankRecord], bool], *, besides: RankRecord) -> int:
        """Return how many other attached ranks are going to ask for memory, too: those that have none."""
        others = (rank for rank in self.ranks.values() if rank is not besides and rank.lease is not None)
        return sum(not has(rank) for rank in others)

    def without_arena(self, *, besides: RankRecord) -> list[RankRecord]:
        """Return the other ranks whose arenas nobody uses: their trainers have none yet, or are gone."""
        return [rank for rank in self.ranks.values() if rank is not besides and rank.is_without_arena]


class Registry:
    """All runs, by owner and id."""

    def __init__(self) -> None:
        self.runs: dict[tuple[int, str], RunRecord] = {}

    def ranks(self) -> list[RankRecord]:
        """Return every rank of every run."""
        return [rank for run in self.runs.values() for rank in run.ranks.values()]


def _costs_after(since: frames.Costs, costs: frames.Costs) -> frames.Costs:
    """Return what was added since then."""
    return structs.replace(
        costs,
        train_s=costs.train_s - since.train_s,
        boundary_s=costs.boundary_s - since.boundary_s,
        guard_s=costs.guard_s - since.guard_s,
        cuda_wait_s=costs.cuda_wait_s - since.cuda_wait_s,
        slower_s=costs.slower_s - since.slower_s,
        plain_s=costs.plain_s - since.plain_s,
    )
