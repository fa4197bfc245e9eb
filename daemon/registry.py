"""What the daemon knows of runs and their ranks. Owned by the event loop; every value here lives in memory only."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from ..checkpoint.manifest_types import Manifest
from ..checkpoint.run_store import RunStore
from ..core.errors import FencedError, NotFoundError, UsageError
from ..core.ids import CheckpointId
from ..proto.frames import Reply
from .arena import Arena
from .slot_machine import SlotState
from .stores import OpenStore


class Lessee(Protocol):
    """A connected trainer, as the registry sees it."""

    @property
    def alive(self) -> bool:
        """Tell whether its process lives."""
        ...

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame for the trainer."""
        ...

    def end(self) -> None:
        """Give back what it holds."""
        ...

    def fence(self, reason: str) -> None:
        """Tell the trainer that it lost its lease, and end the connection."""
        ...


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A sealed snapshot in a slot."""

    checkpoint: CheckpointId
    world_size: int
    manifest: Manifest
    """What is or will be committed: complete with checksums, so that memory is verified like a disk."""
    offsets_bytes: tuple[int, ...]
    """Offset in the arena of each segment's first byte."""


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """One rank of a run: who holds its lease, and its arenas."""

    run: "RunRecord"
    rank: int
    world_size: int = 1
    attempt: int = 0
    """Attempt that this rank's lessee has begun; 0 before."""
    lessee: Lessee | None = None
    lost: bool = False
    """Its last lessee died or vanished: its snapshots wait for a restart."""
    step: int = 0
    """Newest boundary that was snapshotted."""
    arenas: dict[int, Arena] = field(default_factory=dict[int, Arena])
    current: int | None = None
    """The arena that new snapshots go to."""
    snapshots: dict[tuple[int, int], Snapshot] = field(default_factory=dict[tuple[int, int], Snapshot])
    """By (arena, slot)."""

    @property
    def persisting(self) -> bool:
        """Tell whether something is sealed and not yet settled, or being copied."""
        return any(arena.machine.busy for arena in self.arenas.values())

    @property
    def writing(self) -> bool:
        """Tell whether something sealed is not yet settled."""
        states = (SlotState.SEALED, SlotState.PERSISTING)
        return any(slot.state in states for arena in self.arenas.values() for slot in arena.machine.slots)

    def arena(self, number: int) -> Arena:
        """Return one of this rank's arenas; NotFoundError for any other number."""
        try:
            return self.arenas[number]
        except KeyError:
            raise NotFoundError(f"rank {self.rank} has no arena {number}") from None

    def check_attempt(self, attempt: int) -> None:
        """Raise FencedError unless `attempt` is the newest of the run and this rank has begun it."""
        if attempt != self.attempt or attempt < self.run.attempt:
            raise FencedError(
                f"attempt {attempt} of run {self.run.name!r} is over: attempt {self.run.attempt} has started",
                hint="stop this process",
            )


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run of one user on this node."""

    uid: int
    name: str
    run_id: str
    opened: OpenStore
    store: RunStore
    attempt: int = 0
    """Newest attempt begun, durable on all devices."""
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an attempt is being made durable: ranks that come meanwhile must wait for that."""
    ranks: dict[int, RankRecord] = field(default_factory=dict[int, RankRecord])

    def rank(self, rank: int) -> RankRecord:
        """Return the record of a rank, made now if it is new."""
        if rank < 0:
            raise UsageError(f"a rank is not negative, got {rank}")
        return self.ranks.setdefault(rank, RankRecord(run=self, rank=rank))


class Registry:
    """All runs, by owner and id."""

    def __init__(self) -> None:
        self.runs: dict[tuple[int, str], RunRecord] = {}
        self._arena_count = 0

    def next_arena_number(self) -> int:
        """Return a number that no arena of this daemon had."""
        self._arena_count += 1
        return self._arena_count

    def ranks(self) -> list[RankRecord]:
        """Return every rank of every run."""
        return [rank for run in self.runs.values() for rank in run.ranks.values()]

    def arena_size_bytes(self) -> int:
        """Return the bytes of all arenas."""
        return sum(arena.size_bytes for rank in self.ranks() for arena in rank.arenas.values())
