"""What is known of a run's checkpoints: a record per shard, and what follows from them for a checkpoint."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..core.errors import NotFoundError
from ..core.ids import CheckpointId
from .manifest_types import ManifestHead

FINISHED_NOTE = "finished"
"""A shard whose notes say `finished: true` was taken at the end of the run."""

BOUNDARY_NOTE = "boundary"
"""After how many boundaries of its lineage a rank took a shard: all ranks of a checkpoint after as many."""

NEWEST_SHOWN = 3
"""In a message."""


class CheckpointState(Enum):
    """What a store says of a checkpoint."""

    COMPLETE = "complete"
    """Every rank's shard is here, or the trainer said that all ranks have committed; what is here is intact."""
    LOCAL = "local"
    """What is here is intact; whether other ranks have committed is not known."""
    DAMAGED = "damaged"
    """A shard here is not intact; not offered, not deleted by recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """Names one segment file."""

    device_id: str
    generation: str
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """What is kept in memory of one manifest; the manifest itself stays on the devices."""

    checkpoint: CheckpointId
    rank: int
    world_size: int
    parent: CheckpointId | None
    generation: str
    size_bytes: int
    created_unix_s: float
    notes: Mapping[str, str]
    segments: tuple[SegmentRef, ...]
    manifest_sha256: str
    """Of the whole file: copies on several devices are the same bytes."""
    device_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes of its segments by device."""
    problem: str = ""
    """Why the shard is not offered; empty when it is intact as far as metadata tell."""
    bad_content: str = ""
    """What reading its bytes has shown and nobody has disproved since: it is not offered either. Empty: nothing."""
    unread: str = ""
    """Why its bytes could not be read when somebody tried; they may be well, so it is not offered and not let go."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Return what is wrong with the shard as far as anybody knows, but for what could not be read."""
        return tuple(filter(None, (self.problem, self.bad_content)))

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why the shard is not offered; none when it is intact as far as anybody knows."""
        return tuple(filter(None, (*self.faults, self.unread)))


def shard_record(manifest: ManifestHead, content: bytes, problem: str = "") -> ShardRecord:
    """Return the record of a manifest whose file holds `content`."""
    device_bytes: Counter[str] = Counter()
    for record in manifest.segments:
        device_bytes[record.device_id] += record.file_size_bytes
    return ShardRecord(
        checkpoint=manifest.checkpoint,
        rank=manifest.rank,
        world_size=manifest.world_size,
        parent=manifest.parent,
        generation=manifest.generation,
        size_bytes=sum(record.file_size_bytes for record in manifest.segments),
        created_unix_s=manifest.created_unix_s,
        notes=manifest.notes,
        segments=tuple(
            SegmentRef(device_id=record.device_id, generation=record.generation, segment=record.segment)
            for record in manifest.segments
        ),
        manifest_sha256=hashlib.sha256(content).hexdigest(),
        device_bytes=device_bytes,
        problem=problem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint as far as this store knows it."""

    checkpoint: CheckpointId
    parent: CheckpointId | None
    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose shard is here."""
    state: CheckpointState
    is_set_aside: bool
    """The run has started anew since, or gone back behind it (lineage_plan.py)."""
    is_finished: bool
    """Taken at the end of the run."""
    size_bytes: int
    created_unix_s: float
    """When the last of its shards was committed."""
    notes: Mapping[str, str]
    """Of the lowest rank here."""
    problems: tuple[str, ...]
    """Why it is damaged."""
    tags: tuple[str, ...]
    """Names that a person gave it, sorted: while it has one it is not collected."""
    unread_state: CheckpointState | None = None
    """Of a damaged one of which nothing is known but that it could not be read: what it is if its bytes are well."""

    @property
    def is_offered(self) -> bool:
        """Tell whether it may be restored."""
        return self.state is not CheckpointState.DAMAGED and not self.is_set_aside


def describe(
    shards: Mapping[int, ShardRecord],
    *,
    known_complete: Collection[CheckpointId],
    is_set_aside: bool,
    tags: Iterable[str],
) -> CheckpointInfo:
    """Return what the shards (by rank, at least one) of one checkpoint say of it."""
    ranks = tuple(sorted(shards))
    first = shards[ranks[0]]
    problems = [f"rank {rank}: {problem}" for rank in ranks for problem in shards[rank].problems]
    disagreeing = disagreements(shards.values())
    problems += disagreeing
    is_complete = len(ranks) == first.world_size or first.checkpoint in known_complete
    sound = CheckpointState.COMPLETE if is_complete else CheckpointState.LOCAL
    is_faulty = bool(disagreeing) or any(shard.faults for shard in shards.values())
    state = CheckpointState.DAMAGED if problems else sound
    return CheckpointInfo(
        checkpoint=first.checkpoint,
        parent=first.parent,
        world_size=first.world_size,
        ranks=ranks,
        state=state,
        is_set_aside=is_set_aside,
        is_finished=first.notes.get(FINISHED_NOTE) == "true",
        size_bytes=sum(shard.size_bytes for shard in shards.values()),
        created_unix_s=max(shard.created_unix_s for shard in shards.values()),
        notes=first.notes,
        problems=tuple(problems),
        tags=tuple(sorted(tags)),
        unread_state=sound if problems and not is_faulty else None,
    )


def disagreements(shards: Collection[ShardRecord]) -> list[str]:
    """Return what keeps shards of one checkpoint, each of them whole, from being one state."""
    found: list[str] = []
    if len({shard.world_size for shard in shards}) > 1:
        found.append("its shards name different world sizes")
    boundaries = sorted({shard.notes.get(BOUNDARY_NOTE, "") for shard in shards})
    if len(boundaries) > 1:
        found.append(f"its shards were taken after different boundaries: {', '.join(boundaries)}")
    return found


def no_such_checkpoint(
    run: str, checkpoint: CheckpointId | None, known: Iterable[CheckpointId]
) -> NotFoundError:
    """Return the error for a checkpoint that is not among the known ones; its hint names the newest of them."""
    newest = ", ".join(map(str, sorted(known, reverse=True)[:NEWEST_SHOWN]))
    there = f"the newest are {newest}" if newest else "there is none"
    return NotFoundError(
        f"run {run!r} has no checkpoint {checkpoint} in this store",
        hint=f"{there}; `everstep ls {run}` lists them",
    )
