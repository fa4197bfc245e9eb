"""Small JSON files of a store: disk.id, lock, scrub.json; of a run: run.json, attempts/<n>, floor.json, damaged.json,
tags/<id>.json.

Their only reader.

All are written whole under a temporary name and renamed, so a reader sees one version or the other. Each holds
`"format": 1` (disk.id 2 where it knows of a device that drains, is retired or has long been missing); a larger number
is a FormatVersionError, anything else unexpected a CorruptDataError.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..core.errors import ConfigError, CorruptDataError, FormatVersionError
from ..core.ids import CheckpointId, is_id, run_id_of, tag_id_of

STORE_FORMAT_VERSION = 1
DISK_ID_VERSION = 2
"""Written only where it says more than 1 can: an everstep that would take a retired device for a member must refuse."""
SMALL_FILE_BYTES_MAX = 1024 * 1024
TAG_SUFFIX = ".json"

_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_RunKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}/[0-9a-f]{32}\Z")]
_Time = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Point = tuple[_Positive, _Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredDevice:
    """A device that is no member any more. Its id is never used again; what it holds is never believed again."""

    path: str
    """Where it was last seen."""
    retired_unix_s: float
    highest: Mapping[str, CheckpointId] = field(default_factory=dict[str, CheckpointId])
    """`<uid>/<run_id>` -> the newest checkpoint that it held a part of; of some runs, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskId:
    """Content of disk.id: what makes a directory a device of a store, and who else belongs to it."""

    device_id: str
    store_id: str
    members: Mapping[str, str]
    """device_id -> path where that device was last seen; every copy lists all members, itself included."""
    is_ready: bool
    """False while a new store is being made: nothing was ever stored, so that its making may start again."""
    draining: frozenset[str] = frozenset()
    """Members that get no new segments."""
    retired: Mapping[str, RetiredDevice] = field(default_factory=dict[str, RetiredDevice])
    """Devices that were members once; a device that lists itself knows that it was retired."""
    missing_since_unix_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Members by the time at which a daemon first saw them missing; kept only where a policy asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """Who holds a device."""

    pid: int
    socket: str
    """Where that daemon listens; empty for a command."""
    uid: int
    kind: str
    """private, node, or the name of a command."""

    def __str__(self) -> str:
        if not self.socket:
            return f"`{self.kind}` (pid {self.pid}, uid {self.uid})"
        return f"a {self.kind} daemon (pid {self.pid}, uid {self.uid}, socket {self.socket})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunId:
    """Content of run.json: whose run a directory holds."""

    run_id: str
    name: str
    owner_uid: int

    @classmethod
    def of(cls, name: str, owner_uid: int) -> "RunId":
        """Return the id of the run of this name and owner; ValueError when the name is not allowed."""
        return cls(run_id=run_id_of(name), name=name, owner_uid=owner_uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Content of attempts/<attempt>."""

    attempt: int
    fresh: bool
    """The attempt started anew: checkpoints of older attempts are not offered for restore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Content of floor.json: the newest checkpoint known complete on all ranks, and the one known before it."""

    newest: CheckpointId
    previous: CheckpointId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Content of tags/<id>.json: a name that a person gave a checkpoint, which stays while it has one."""

    name: str
    checkpoint: CheckpointId

    @property
    def file_name(self) -> str:
        """Name of its file; ValueError when the tag's name is not allowed."""
        return f"{tag_id_of(self.name)}{TAG_SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedShard:
    """A shard of which somebody has read bytes that are not what was committed."""

    checkpoint: CheckpointId
    rank: int
    generation: str
    """Another one that takes its place is not meant."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageList:
    """Content of damaged.json: what is known of a run by reading it, and by nothing else."""

    change: int
    """Of several copies the one with the most changes counts."""
    shards: tuple[DamagedShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubPlace:
    """A checkpoint as a scrub comes to it."""

    owner_uid: int
    run_id: str
    checkpoint: CheckpointId

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Sorts as a scrub reads: run by run, the newest first, so that what is committed meanwhile is behind it."""
        return self.owner_uid, self.run_id, -self.checkpoint.attempt, -self.checkpoint.step


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubMark:
    """Content of scrub.json: how far the newest scheduled scrub of a store is."""

    store_id: str
    started_unix_s: float
    ended_unix_s: float | None = None
    """None: it was cut off, or goes on."""
    checkpoint_count: int = 0
    """Read so far."""
    place: ScrubPlace | None = None
    """The last checkpoint that was read; None before the first."""


class _VersionDoc(Struct):
    format: _Positive


class _RetiredDoc(Struct, forbid_unknown_fields=True):
    path: str
    retired_unix_s: _Time
    highest: dict[_RunKey, _Point]


class _DiskIdDoc(Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: _Positive
    device_id: _Id
    store_id: _Id
    members: dict[_Id, str]
    ready: bool
    draining: list[_Id] = []
    retired: dict[_Id, _RetiredDoc] = {}
    missing_since_unix_s: dict[_Id, _Time] = {}


class _LockDoc(Struct, forbid_unknown_fields=True):
    pid: _Count
    socket: str
    uid: _Count
    kind: str


class _RunDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    run_id: _Id
    name: str
    owner_uid: _Count


class _AttemptDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    attempt: _Positive
    fresh: bool


class _FloorDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    attempt: _Positive
    step: _Count
    previous: _Point | None


class _TagDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    name: str
    attempt: _Positive
    step: _Count


class _DamagedDoc(Struct, forbid_unknown_fields=True):
    attempt: _Positive
    step: _Count
    rank: _Count
    generation: _Id
    problem: Annotated[str, Meta(min_length=1)]


class _DamageDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    change: _Positive
    shards: list[_DamagedDoc]


class _ScrubDoc(Struct, forbid_unknown_fields=True):
    format: _Positive
    store_id: _Id
    started_unix_s: _Time
    ended_unix_s: _Time | None
    checkpoint_count: _Count
    run: _RunKey | None
    checkpoint: _Point | None


_Doc = TypeVar("_Doc", _DiskIdDoc, _LockDoc, _RunDoc, _AttemptDoc, _FloorDoc, _TagDoc, _DamageDoc, _ScrubDoc)

_VERSION = msgspec.json.Decoder(_VersionDoc)
_LOCK = msgspec.json.Decoder(_LockDoc)
_DISK_ID = msgspec.json.Decoder(_DiskIdDoc)
_RUN = msgspec.json.Decoder(_RunDoc)
_ATTEMPT = msgspec.json.Decoder(_AttemptDoc)
_FLOOR = msgspec.json.Decoder(_FloorDoc)
_TAG = msgspec.json.Decoder(_TagDoc)
_DAMAGE = msgspec.json.Decoder(_DamageDoc)
_SCRUB = msgspec.json.Decoder(_ScrubDoc)


def encode_disk_id(disk_id: DiskId) -> bytes:
    """Return the bytes of disk.id.

    Raises:
        ConfigError: they would be more than a reader takes.
    """
    says_more = disk_id.draining or disk_id.retired or disk_id.missing_since_unix_s
    content = _encode(
        _DiskIdDoc(
            format=DISK_ID_VERSION if says_more else STORE_FORMAT_VERSION,
            device_id=disk_id.device_id,
            store_id=disk_id.store_id,
            members=dict(sorted(disk_id.members.items())),
            ready=disk_id.is_ready,
            draining=sorted(disk_id.draining),
            retired={key: _retired_doc(device) for key, device in sorted(disk_id.retired.items())},
            missing_since_unix_s=dict(sorted(disk_id.missing_since_unix_s.items())),
        )
    )
    if len(content) > SMALL_FILE_BYTES_MAX:
        raise ConfigError(
            f"disk.id would have {len(content)} bytes, at most {SMALL_FILE_BYTES_MAX} are allowed",
            hint=f"{len(disk_id.retired)} devices were retired from this store: begin a new one",
        )
    return content


def _retired_doc(device: RetiredDevice) -> _RetiredDoc:
    highest = {key: (each.attempt, each.step) for key, each in sorted(device.highest.items())}
    return _RetiredDoc(path=device.path, retired_unix_s=device.retired_unix_s, highest=highest)


def decode_disk_id(content: bytes, where: str) -> DiskId:
    """Return what disk.id says; `where` names the file in errors."""
    document = _decode(content, _DISK_ID, where, version_max=DISK_ID_VERSION)
    says_more = document.draining or document.retired or document.missing_since_unix_s
    if says_more and document.format < DISK_ID_VERSION:
        raise CorruptDataError(f"{where} says more than its format version {document.format} can")
    if document.device_id not in document.members.keys() | document.retired.keys():
        raise CorruptDataError(f"{where} does not list its own device {document.device_id} as a member")
    both = document.members.keys() & document.retired.keys()
    strange = (set(document.draining) | document.missing_since_unix_s.keys()) - document.members.keys()
    if both or strange:
        raise CorruptDataError(f"{where} does not agree with itself on device {min(both | strange)}")
    return DiskId(
        device_id=document.device_id,
        store_id=document.store_id,
        members=document.members,
        is_ready=document.ready,
        draining=frozenset(document.draining),
        retired={key: _retired_device(each) for key, each in document.retired.items()},
        missing_since_unix_s=document.missing_since_unix_s,
    )


def _retired_device(document: _RetiredDoc) -> RetiredDevice:
    highest = {key: CheckpointId(*point) for key, point in document.highest.items()}
    return RetiredDevice(path=document.path, retired_unix_s=document.retired_unix_s, highest=highest)


def encode_lock(holder: LockHolder) -> bytes:
    """Return the bytes of lock."""
    return _encode(_LockDoc(pid=holder.pid, socket=holder.socket, uid=holder.uid, kind=holder.kind))


def decode_lock(content: bytes) -> LockHolder | None:
    """Return who holds the lock, or None when the holder has not finished writing it."""
    try:
        document = _LOCK.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return LockHolder(pid=document.pid, socket=document.socket, uid=document.uid, kind=document.kind)


def encode_run(run: RunId) -> bytes:
    """Return the bytes of run.json."""
    return _encode(
        _RunDoc(format=STORE_FORMAT_VERSION, run_id=run.run_id, name=run.name, owner_uid=run.owner_uid)
    )


def decode_run(content: bytes, where: str) -> RunId:
    """Return what run.json says; its id must be that of its name."""
    document = _decode(content, _RUN, where)
    try:
        expected = run_id_of(document.name)
    except ValueError as exc:
        raise CorruptDataError(f"{where}: {exc}") from exc
    if expected != document.run_id:
        raise CorruptDataError(f"{where}: run {document.name!r} does not have the id {document.run_id}")
    return RunId(run_id=document.run_id, name=document.name, owner_uid=document.owner_uid)


def encode_attempt(attempt: Attempt) -> bytes:
    """Return the bytes of an attempt's file."""
    return _encode(_AttemptDoc(format=STORE_FORMAT_VERSION, attempt=attempt.attempt, fresh=attempt.fresh))


def decode_attempt(content: bytes, where: str) -> Attempt:
    """Return what an attempt's file says."""
    document = _decode(content, _ATTEMPT, where)
    return Attempt(attempt=document.attempt, fresh=document.fresh)


def encode_floor(floor: Floor) -> bytes:
    """Return the bytes of floor.json."""
    previous = (floor.previous.attempt, floor.previous.step) if floor.previous else None
    return _encode(
        _FloorDoc(
            format=STORE_FORMAT_VERSION,
            attempt=floor.newest.attempt,
            step=floor.newest.step,
            previous=previous,
        )
    )


def decode_floor(content: bytes, where: str) -> Floor:
    """Return what floor.json says."""
    document = _decode(content, _FLOOR, where)
    return Floor(
        newest=CheckpointId(document.attempt, document.step),
        previous=CheckpointId(*document.previous) if document.previous else None,
    )


def encode_tag(tag: Tag) -> bytes:
    """Return the bytes of a tag's file."""
    checkpoint = tag.checkpoint
    return _encode(
        _TagDoc(format=STORE_FORMAT_VERSION, name=tag.name, attempt=checkpoint.attempt, step=checkpoint.step)
    )


def decode_tag(content: bytes, where: str, file_name: str) -> Tag:
    """Return what a tag's file says; `file_name` must be that of its name."""
    document = _decode(content, _TAG, where)
    tag = Tag(name=document.name, checkpoint=CheckpointId(document.attempt, document.step))
    try:
        expected = tag.file_name
    except ValueError as exc:
        raise CorruptDataError(f"{where}: {exc}") from exc
    if expected != file_name:
        raise CorruptDataError(f"{where} holds the tag {tag.name!r}, whose file is {expected}")
    return tag


def encode_damage(damage: DamageList) -> bytes:
    """Return the bytes of damaged.json."""
    shards = [
        _DamagedDoc(
            attempt=shard.checkpoint.attempt,
            step=shard.checkpoint.step,
            rank=shard.rank,
            generation=shard.generation,
            problem=shard.problem,
        )
        for shard in damage.shards
    ]
    return _encode(_DamageDoc(format=STORE_FORMAT_VERSION, change=damage.change, shards=shards))


def decode_damage(content: bytes, where: str) -> DamageList:
    """Return what damaged.json says."""
    document = _decode(content, _DAMAGE, where)
    shards = tuple(
        DamagedShard(
            checkpoint=CheckpointId(each.attempt, each.step),
            rank=each.rank,
            generation=each.generation,
            problem=each.problem,
        )
        for each in document.shards
    )
    return DamageList(change=document.change, shards=shards)


def encode_scrub_mark(mark: ScrubMark) -> bytes:
    """Return the bytes of scrub.json."""
    place = mark.place
    return _encode(
        _ScrubDoc(
            format=STORE_FORMAT_VERSION,
            store_id=mark.store_id,
            started_unix_s=mark.started_unix_s,
            ended_unix_s=mark.ended_unix_s,
            checkpoint_count=mark.checkpoint_count,
            run=f"{place.owner_uid}/{place.run_id}" if place else None,
            checkpoint=(place.checkpoint.attempt, place.checkpoint.step) if place else None,
        )
    )


def decode_scrub_mark(content: bytes, where: str) -> ScrubMark:
    """Return what scrub.json says."""
    document = _decode(content, _SCRUB, where)
    if (document.run is None) != (document.checkpoint is None):
        raise CorruptDataError(f"{where} names a run without a checkpoint, or a checkpoint without a run")
    place = None
    if document.run is not None and document.checkpoint is not None:
        owner_uid, _, run_id = document.run.partition("/")
        place = ScrubPlace(
            owner_uid=int(owner_uid), run_id=run_id, checkpoint=CheckpointId(*document.checkpoint)
        )
    return ScrubMark(
        store_id=document.store_id,
        started_unix_s=document.started_unix_s,
        ended_unix_s=document.ended_unix_s,
        checkpoint_count=document.checkpoint_count,
        place=place,
    )


def is_tag_file(name: str) -> bool:
    """Tell whether a name is that of a tag's file."""
    return name.endswith(TAG_SUFFIX) and is_id(name.removesuffix(TAG_SUFFIX))


def _encode(document: Struct) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def _decode(
    content: bytes,
    decoder: msgspec.json.Decoder[_Doc],
    where: str,
    *,
    version_max: int = STORE_FORMAT_VERSION,
) -> _Doc:
    try:
        version = _VERSION.decode(content).format
        if version > version_max:
            raise FormatVersionError(
                f"{where} has format version {version}, this everstep reads up to {version_max}",
                hint="upgrade everstep",
            )
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"{where} cannot be read: {exc}") from exc
