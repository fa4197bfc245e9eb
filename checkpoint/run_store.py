"""One run in a store: its attempts, its floor, and the catalogue of its checkpoints.

A RunStore may be used from any thread; one lock guards the catalogue and is never held during I/O. Calls that
change what is on the devices (attempts, floor) take turns by a second lock.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ..core.errors import (
    CorruptDataError,
    FencedError,
    IncompleteError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ..core.ids import CheckpointId
from .catalogue import CheckpointInfo, SegmentRef, ShardRecord, describe, no_such_checkpoint
from .device import RUNS_NAME, Device
from .device_round import on_trusted
from .device_set import DeviceSet
from .durable import make_directories, publish_new, publish_over
from .lineage_plan import is_left, turns_of
from .manifest_format import MANIFEST_FILE_BYTES_MAX, decode_manifest, manifest_name
from .manifest_types import Manifest, SegmentRecord
from .storage_ops import StorageOps
from .store_format import (
    Attempt,
    DamagedShard,
    DamageList,
    Floor,
    RunId,
    Tag,
    encode_attempt,
    encode_floor,
    encode_run,
)

ATTEMPTS_NAME = "attempts"
COMMITS_NAME = "commits"
DAMAGED_NAME = "damaged.json"
DATA_NAME = "data"
FLOOR_NAME = "floor.json"
RUN_NAME = "run.json"
TAGS_NAME = "tags"
SEGMENT_SUFFIX = ".safetensors"


_PLACES_KEPT = 4096
"""Of so many folders the path is made once: recovery and a restore ask for a run's some times for each segment."""


@lru_cache(_PLACES_KEPT)
def run_path(device: Device, owner_uid: int, run_id: str, name: str = "") -> Path:
    """Return a run's directory on a device, or the one of this name in it."""
    path = device.runs_path / str(owner_uid) / run_id
    return path / name if name else path


def create_run_directories(ops: StorageOps, device: Device, run: RunId) -> None:
    """Make a run's directories and run.json durable on a device; what is there stays."""
    path = make_directories(ops, device.path, RUNS_NAME, str(run.owner_uid), run.run_id)
    for name in (ATTEMPTS_NAME, COMMITS_NAME, DATA_NAME):
        ops.make_directory(path / name)
    # run.json last: a directory that has one has everything.
    ops.sync_directory(path)
    if not publish_new(ops, path / RUN_NAME, encode_run(run)):
        ops.sync_directory(path)


class RunStore:
    """A run as its store knows it; made by `Store.run` or by recovery."""

    def __init__(self, store: DeviceSet, run: RunId) -> None:
        self.store = store
        self._identity = run
        self.run_id = run.run_id
        self.name = run.name
        self.owner_uid = run.owner_uid
        self.unreadable = ""
        """Why the references of some manifest are unknown (a newer format, a quarantined one): then no segment
        that the catalogue does not list is removed."""
        self.lost: dict[CheckpointId, str] = {}
        """Checkpoints of which recovery could not use a manifest, with the reason; so that a restore can say it."""
        self.damage_change = 0
        """Version of damaged.json that the devices have."""
        self.changing = threading.Lock()
        """Held by who changes small files of the run on the devices: they take turns."""
        self.tagging = threading.Lock()
        """The same for tags: a removal waits for each device, and no attempt for that."""
        self.pinning = threading.Lock()
        """Held by who changes pins, before `tagging`: a label is on one checkpoint, and a pin is several steps."""
        self._lock = threading.Lock()
        self._attempts: dict[int, bool] = {}
        self._floor: Floor | None = None
        self._known_complete: set[CheckpointId] = set()
        self._shards: dict[CheckpointId, dict[int, ShardRecord]] = {}
        self._writing: set[tuple[CheckpointId, int]] = set()
        self._pins: Counter[CheckpointId] = Counter()
        self._tags: dict[str, CheckpointId] = {}
        self._given_up: set[CheckpointId] = set()
        self._origin: CheckpointId | None = None

    # --- places -------------------------------------------------------------------------------------------------

    def path_on(self, device: Device) -> Path:
        """Return the run's directory on a device."""
        return run_path(device, self.owner_uid, self.run_id)

    def commits_path(self, device: Device) -> Path:
        """Return the directory of manifests on a device."""
        return run_path(device, self.owner_uid, self.run_id, COMMITS_NAME)

    def data_path(self, device: Device) -> Path:
        """Return the directory of generations on a device."""
        return run_path(device, self.owner_uid, self.run_id, DATA_NAME)

    def generation_path(self, device: Device, generation: str) -> Path:
        """Return the directory of one generation's segments on a device."""
        return self.data_path(device) / generation

    def segment_path(self, segment: SegmentRef | SegmentRecord) -> Path:
        """Return the file of a segment.

        Raises:
            IncompleteError: its device is missing.
        """
        device = self.store.device(segment.device_id)
        if device is None:
            is_missing = segment.device_id in self.store.membership.members
            raise IncompleteError(
                self._why_absent(segment),
                hint=f"{'mount the device, or ' if is_missing else ''}restore an older checkpoint",
            )
        return self.generation_path(device, segment.generation) / f"{segment.segment}{SEGMENT_SUFFIX}"

    # --- attempts -----------------------------------------------------------------------------------------------

    def attempts(self) -> tuple[Attempt, ...]:
        """Return all attempts, the oldest first."""
        with self._lock:
            return tuple(Attempt(attempt=each, fresh=fresh) for each, fresh in sorted(self._attempts.items()))

    def highest_attempt(self) -> int:
        """Return the number of the newest attempt, 0 before the first."""
        with self._lock:
            return max(self._attempts, default=0)

    def fresh_floor(self) -> int:
        """Return the newest attempt that started anew, or 0; checkpoints of older attempts are not offered."""
        with self._lock:
            return self._fresh_floor()

    def _fresh_floor(self) -> int:
        return max((attempt for attempt, fresh in self._attempts.items() if fresh), default=0)

    def is_set_aside(self, checkpoint: CheckpointId) -> bool:
        """Tell whether the run has started anew since, or gone back and completed a checkpoint from there on."""
        with self._lock:
            return self._is_set_aside(checkpoint)

    def _is_set_aside(self, checkpoint: CheckpointId) -> bool:
        floor = self._shards.get(self._floor.newest, {}) if self._floor is not None else {}
        turns = next((turns_of(shard.notes) for shard in floor.values()), ())
        return checkpoint.attempt < self._fresh_floor() or is_left(checkpoint, turns)

    def begin_attempt(self, attempt: int, *, fresh: bool) -> None:
        """Return when the attempt is durable on all trusted devices: from then on older ones start nothing new.

        A device that fails is left out. A failed call has used the number up: take a larger one.

        Raises:
            FencedError: this attempt or a newer one has begun.
            StorageError: a device is full, or all have failed.
        """
        with self.changing:
            with self._lock:
                highest = max(self._attempts, default=0)
                if attempt > highest:
                    self._attempts[attempt] = fresh
            if attempt <= highest:
                raise FencedError(
                    f"attempt {attempt} of run {self.name!r} cannot begin: attempt {highest} has begun",
                    hint="stop this process, a newer one is running",
                )
            content = encode_attempt(Attempt(attempt=attempt, fresh=fresh))

            def publish(device: Device) -> None:
                self.complete_directories(device)
                if not publish_new(
                    self.store.ops, self.path_on(device) / ATTEMPTS_NAME / str(attempt), content
                ):
                    raise FencedError(
                        f"attempt {attempt} of run {self.name!r} has begun on {device.path} by another writer",
                        hint="stop this process, a newer one is running",
                    )

            on_trusted(self.store, publish, what=f"beginning attempt {attempt}")

    def complete_directories(self, device: Device) -> None:
        """Make the run's directories where the device was too full for them, or late, when they were made."""
        if self.store.ops.stat(self.path_on(device) / RUN_NAME) is None:
            self.store.check_in_place(device)
            create_run_directories(self.store.ops, device, self._identity)

    def complete_what_it_missed(self, device: Device) -> None:
        """The same where it was late; on another one that lacks them somebody has removed them, which is to be seen."""
        if self.store.was_late(device.device_id):
            self.complete_directories(device)

    def check_admission(self, attempt: int) -> None:
        """Return if the attempt may start something new; FencedError when a newer one has begun, or it has not."""
        highest = self.highest_attempt()
        if attempt != highest:
            raise FencedError(
                f"attempt {attempt} of run {self.name!r} can start nothing new: attempt {highest} has begun",
                hint="stop this process, a newer one is running",
            )

    # --- floor --------------------------------------------------------------------------------------------------

    def complete_floor(self) -> CheckpointId | None:
        """Return the newest checkpoint known complete on all ranks, as last told."""
        with self._lock:
            return self._floor.newest if self._floor else None

    def floor(self) -> Floor | None:
        """Return what was last made durable of it."""
        with self._lock:
            return self._floor

    def set_complete_floor(self, *complete: CheckpointId) -> None:
        """Return when it is durable on all trusted devices that all ranks have committed these checkpoints.

        Older ones than are known are remembered in memory only, while they are here. The newest but one stays
        recorded: collection keeps both.

        A device that fails is left out.

        Raises:
            StorageError: a device is full, or all have failed; others may know.
        """
        newest = max(complete)
        with self.changing:
            with self._lock:
                here = (
                    self._shards.keys() & complete
                )  # of what was collected meanwhile nothing would let go any more
                before = self._floor
                if before is not None and newest <= before.newest:
                    self._known_complete |= here
                    return
                others = {*complete, *([before.newest] if before else [])} - {newest}
                self._floor = Floor(newest=newest, previous=max(others, default=None))
                self._known_complete = (self._known_complete & self._shards.keys()) | here | {newest}
                self._given_up = {each for each in self._given_up if each > newest}  # older ones go anyway
                content = encode_floor(self._floor)

            def publish(device: Device) -> None:
                self.complete_what_it_missed(device)
                publish_over(self.store.ops, self.path_on(device) / FLOOR_NAME, content)

            on_trusted(self.store, publish, what=f"writing that {newest} is complete")

    def goes_on_from(self, checkpoint: CheckpointId) -> None:
        """Remember, in memory only, what the newest attempt has restored."""
        with self._lock:
            self._origin = checkpoint

    @property
    def origin(self) -> CheckpointId | None:
        """What the newest attempt goes on from, until a checkpoint of it is complete: nothing else may be there."""
        with self._lock:
            highest = max(self._attempts, default=0)
            is_past = self._floor is not None and self._floor.newest.attempt == highest
            return None if is_past else self._origin

    def give_up(self, checkpoint: CheckpointId) -> None:
        """Remember, in memory only, that some rank has no durable shard of this checkpoint and never will."""
        with self._lock:
            self._given_up.add(checkpoint)

    def given_up(self) -> set[CheckpointId]:
        """Return the checkpoints that will never be complete."""
        with self._lock:
            return set(self._given_up)

    # --- catalogue ----------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return what is known of each checkpoint, the newest first."""
        with self._lock:
            return [self._describe(checkpoint) for checkpoint in sorted(self._shards, reverse=True)]

    def newest_offered(self) -> CheckpointInfo | None:
        """Return the newest checkpoint that may be restored; None: there is none."""
        with self._lock:
            found = (self._describe(checkpoint) for checkpoint in sorted(self._shards, reverse=True))
            return next((info for info in found if info.is_offered), None)

    def _describe(self, checkpoint: CheckpointId) -> CheckpointInfo:
        return describe(
            self._shards[checkpoint],
            known_complete=self._known_complete,
            is_set_aside=self._is_set_aside(checkpoint),
            tags=[name for name, tagged in self._tags.items() if tagged == checkpoint],
        )

    def info(self, checkpoint: CheckpointId) -> CheckpointInfo:
        """Return what is known of one checkpoint; NotFoundError when it is not here."""
        with self._lock:
            if checkpoint not in self._shards:
                raise no_such_checkpoint(self.name, checkpoint, self._shards)
            return self._describe(checkpoint)

    def offered(self, rank: int | None = None) -> list[CheckpointId]:
        """Return the checkpoints that may be restored (by this rank's own shard, if given), the newest first."""
        return [
            info.checkpoint
            for info in self.checkpoints()
            if info.is_offered and (rank is None or rank in info.ranks)
        ]

    def shard(self, checkpoint: CheckpointId, rank: int) -> ShardRecord:
        """Return what is known of one shard; NotFoundError when it is not here."""
        with self._lock:
            found = self._shards.get(checkpoint, {}).get(rank)
        if found is None:
            raise NotFoundError(
                f"run {self.name!r} has no shard of rank {rank} at checkpoint {checkpoint} here"
            )
        return found

    def shards(self) -> list[ShardRecord]:
        """Return all shards, by checkpoint and rank."""
        with self._lock:
            return [
                self._shards[checkpoint][rank]
                for checkpoint in sorted(self._shards)
                for rank in sorted(self._shards[checkpoint])
            ]

    def manifest(self, checkpoint: CheckpointId, rank: int) -> Manifest:
        """Return a shard's manifest, read from the first device whose copy is whole; see `manifest_content`."""
        return decode_manifest(self.manifest_content(checkpoint, rank))

    def manifest_content(self, checkpoint: CheckpointId, rank: int) -> bytes:
        """Return the bytes of a shard's manifest, as they were committed.

        Raises:
            NotFoundError: there is no such shard here.
            CorruptDataError: no copy is whole any more.
            StorageError: none that can be read is whole, and one cannot be read.
        """
        record = self.shard(checkpoint, rank)
        reasons: list[str] = []
        unread: StorageError | None = None
        for device in self.store.devices:
            path = self.commits_path(device) / manifest_name(checkpoint, rank)
            try:
                content = self.store.ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=self.store.uid)
                if content is not None and hashlib.sha256(content).hexdigest() == record.manifest_sha256:
                    return content
                reasons.append(f"{path} is {'gone' if content is None else 'not what was committed'}")
            except CorruptDataError as exc:
                reasons.append(str(exc))
            except StorageError as exc:
                unread = unread or exc
        if unread is not None:
            raise unread
        raise CorruptDataError(
            f"no whole manifest of rank {rank} at checkpoint {checkpoint}: {'; '.join(reasons)}",
            hint="restore an older checkpoint",
        )

    def add_shard(self, record: ShardRecord) -> None:
        """Take a durable shard into the catalogue."""
        with self._lock:
            self._shards.setdefault(record.checkpoint, {})[record.rank] = record

    def mark_damaged(
        self,
        checkpoint: CheckpointId,
        rank: int,
        problem: str,
        *,
        generation: str,
        is_content: bool = False,
    ) -> bool:
        """Remember that a shard does not hold, so that its checkpoint is not offered again.

        Nothing where another generation has taken the place of the one that was looked at. `is_content`: its bytes were
        read and are not what was committed; tell whether that is new, for damage.py to make it durable.
        """
        with self._lock:
            found = self._shards.get(checkpoint, {}).get(rank)
            if found is None or found.generation != generation:
                return False
            marked = replace(found, bad_content=problem) if is_content else replace(found, problem=problem)
            self._shards[checkpoint][rank] = marked
            return is_content and not found.bad_content

    def mark_unread(self, checkpoint: CheckpointId, rank: int, problem: str, *, generation: str) -> None:
        """Remember that a shard's bytes could not be read, so that its checkpoint is not offered until they are.

        Nothing where another generation has taken the place of the one that was looked at.
        """
        with self._lock:
            found = self._shards.get(checkpoint, {}).get(rank)
            if found is not None and found.generation == generation:
                self._shards[checkpoint][rank] = replace(found, unread=problem)

    def mark_intact(self, checkpoint: CheckpointId, rank: int, *, generation: str) -> bool:
        """Forget what was wrong with a shard of which every byte was read now; tell whether there was something."""
        with self._lock:
            found = self._shards.get(checkpoint, {}).get(rank)
            if found is None or found.generation != generation or not found.problems:
                return False
            self._shards[checkpoint][rank] = replace(found, problem="", bad_content="", unread="")
            return True

    def next_damage(self) -> DamageList:
        """Return what reading has shown of the shards that are here, as the next version of damaged.json."""
        with self._lock:
            self.damage_change += 1
        return self.damage()

    def damage(self) -> DamageList:
        """Return it as the version that was made last."""
        shards = self.shards()
        with self._lock:
            return DamageList(
                change=self.damage_change,
                shards=tuple(
                    DamagedShard(
                        checkpoint=shard.checkpoint,
                        rank=shard.rank,
                        generation=shard.generation,
                        problem=shard.bad_content,
                    )
                    for shard in shards
                    if shard.bad_content
                ),
            )

    def held_bytes(self, device_id: str) -> dict[CheckpointId, int]:
        """Return the bytes of each checkpoint on a device, where there are any."""
        held: Counter[CheckpointId] = Counter()
        for shard in self.shards():
            if device_id in shard.device_bytes:
                held[shard.checkpoint] += shard.device_bytes[device_id]
        return held

    def lose_device(self, device_id: str) -> tuple[CheckpointId, ...]:
        """Mark what has a segment on a device that was just retired as damaged; return what was intact before."""
        lost: set[CheckpointId] = set()
        for shard in self.shards():
            ref = next((each for each in shard.segments if each.device_id == device_id), None)
            if ref is not None and not shard.faults:
                problem = self._why_absent(ref)
                self.mark_damaged(shard.checkpoint, shard.rank, problem, generation=shard.generation)
                lost.add(shard.checkpoint)
        return tuple(sorted(lost))

    def _why_absent(self, segment: SegmentRef | SegmentRecord) -> str:
        return (
            f"segment {segment.segment} of generation {segment.generation} is on device {segment.device_id},"
            f" {self.store.device_name(segment.device_id)}"
        )

    def forget(self, checkpoint: CheckpointId, *, with_tags: bool = False) -> list[ShardRecord]:
        """Take a checkpoint out of the catalogue and return its shards; none, and it stays, with a tag or in use.

        `with_tags`: its tags go with it, or stay with it; to be asked under `changing`.
        """
        with self._lock:
            tags = [name for name, place in self._tags.items() if place == checkpoint]
            if (tags and not with_tags) or checkpoint in self._pinned():
                return []
            for name in tags:
                del self._tags[name]
            self._known_complete.discard(checkpoint)
            self._given_up.discard(checkpoint)
            return list(self._shards.pop(checkpoint, {}).values())

    # --- tags (tags.py makes them durable) ------------------------------------------------------------------------

    def tags(self) -> dict[str, CheckpointId]:
        """Return the checkpoint of each tag, by name."""
        with self._lock:
            return dict(sorted(self._tags.items()))

    def take_tag(self, tag: Tag) -> None:
        """Keep a checkpoint from being collected from now on; again is nothing.

        Raises:
            NotFoundError: it is not here.
            UsageError: the name is another checkpoint's.
        """
        with self._lock:
            if tag.checkpoint not in self._shards:
                raise no_such_checkpoint(self.name, tag.checkpoint, self._shards)
            taken = self._tags.setdefault(tag.name, tag.checkpoint)
        if taken != tag.checkpoint:
            raise UsageError(
                f"tag {tag.name!r} of run {self.name!r} is on checkpoint {taken}",
                hint="untag it first, or choose another name",
            )

    def load_tag(self, tag: Tag) -> None:
        """Take a tag that recovery found."""
        with self._lock:
            self._tags[tag.name] = tag.checkpoint

    def drop_tag(self, name: str) -> None:
        """Forget a tag that is gone from all devices."""
        with self._lock:
            self._tags.pop(name, None)

    def load(self, *, attempts: Iterable[Attempt], floor: Floor | None) -> None:
        """Set what recovery found on the devices."""
        with self._lock:
            self._attempts |= {attempt.attempt: attempt.fresh for attempt in attempts}
            self._floor = floor
            if floor is not None:
                self._known_complete |= {floor.newest, floor.previous or floor.newest}

    @contextmanager
    def writing(self, checkpoint: CheckpointId, rank: int, *, again: bool = False) -> Generator[None]:
        """Hold the right to write this shard, which one writer gets once, or `again` when it is committed.

        Raises:
            FencedError: it is being written, it is committed (with `again`: is not), or its attempt has not begun here.
        """
        with self._lock:
            if checkpoint.attempt not in self._attempts:
                raise FencedError(
                    f"attempt {checkpoint.attempt} of run {self.name!r} has not begun in this store"
                )
            is_committed = rank in self._shards.get(checkpoint, {})
            if (checkpoint, rank) in self._writing or is_committed != again:
                raise FencedError(
                    f"rank {rank} of checkpoint {checkpoint} of run {self.name!r} has another writer",
                    hint="stop one of the two processes that train this run",
                )
            self._writing.add((checkpoint, rank))
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard((checkpoint, rank))

    @contextmanager
    def reading(self, checkpoint: CheckpointId) -> Generator[None]:
        """Keep a checkpoint from being collected while the block runs."""
        with self._lock:
            self._pins[checkpoint] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[checkpoint] -= 1
                if not self._pins[checkpoint]:
                    del self._pins[checkpoint]

    def pinned(self) -> set[CheckpointId]:
        """Return the checkpoints that are being read or written."""
        with self._lock:
            return self._pinned()

    def _pinned(self) -> set[CheckpointId]:
        return self._pins.keys() | {checkpoint for checkpoint, _ in self._writing}
