"""Writing one shard: from a sealed slot to a manifest that a power loss cannot take back.

The order, for a shard striped over D devices (docs/format.md, docs/assumptions.md say what of the disk it relies on):

    on each device, in a thread of its own:
        mkdir generation -> create segments exclusively -> reserve -> write all, every completion checked
        -> cut to the exact length -> fdatasync -> close -> fsync generation directory -> fsync data directory
    barrier: all devices
    on each device: write manifest under a temporary name, fsync -> rename, never over an existing one -> fsync commits
    one such copy is the commit

Nothing refers to a generation before the barrier, so a failure until then leaves no trace but an orphan. A failed
fsync is never repeated: the generation is dropped, and the slot still has the bytes for another try.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from itertools import repeat
from typing import NoReturn, TypeVar

from ..core.errors import DeadlineError, DeviceMissingError, FencedError, NodeError, StorageError
from ..core.ids import random_id
from .catalogue import shard_record
from .checksum import block_checksums
from .device import Device
from .draft_format import draft_pieces_of
from .durable import discard, temporary_path
from .engine import Engine
from .manifest_format import encode_manifest, manifest_name
from .manifest_types import Draft, Manifest, SegmentPlan, SegmentRecord
from .run_store import SEGMENT_SUFFIX, RunStore
from .segment_format import SegmentStamp, align_up, build_header
from .shard_rules_plan import check_draft
from .space_ledger import Reservation
from .storage_ops import ArenaRange, SegmentHandle

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWrite:
    """What one device did for a shard."""

    device_id: str
    size_bytes: int
    write_s: float
    """Busy time of the engine."""
    sync_s: float
    """Cutting, fdatasync and fsync of directories."""
    is_direct: bool
    """All of its segments were written with O_DIRECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistResult:
    """A committed shard."""

    manifest: Manifest
    manifest_size_bytes: int
    copy_count: int
    """Devices on which the manifest is durable; at least one."""
    device_count: int
    problems: tuple[str, ...]
    """Why a device has no copy."""
    writes: tuple[DeviceWrite, ...]
    persist_s: float
    """From the call to the last fsync."""

    @property
    def is_under_replicated(self) -> bool:
        """Tell whether a present device has no copy of the manifest; recovery makes it again."""
        return self.copy_count < self.device_count


def persist_shard(
    run: RunStore, draft: Draft, arena: ArenaRange, *, engines: Mapping[str, Engine]
) -> PersistResult:
    """Return when the shard in this slot is durable and committed, and in the run's catalogue.

    `draft` is checked first. The slot must not change meanwhile, except that this call writes headers and zero
    padding into it. `engines` holds one engine per device id that nobody else uses during the call.

    Raises:
        CorruptDataError: the draft does not hold together.
        FencedError: the shard has another writer; nothing of this call remains.
        NoSpaceError: it does not fit; checked before any byte is written, and again by the reservation of files.
        DeviceMissingError: the layout names a device that is not there.
        StorageError: a device failed; the message names it, and says so when the outcome is unknown.
        DeadlineError: a device hangs in the kernel and may still read from the slot: do not use it again.
    """
    check_draft(draft, arena.slot_size_bytes)
    started_s = time.perf_counter()
    with run.writing(draft.checkpoint, draft.rank):
        write = _ShardWrite(run, draft, arena, engines)
        with run.store.space.reserve(write.needs()) as reservation:
            records = write.segments(reservation)
        manifest = manifest_of(run, draft, write.generation, records)
        return write.publish(manifest, started_s)


class _StoppedError(Exception):
    """Another device failed: this one need not go on."""


class _Copy(Enum):
    """How far a manifest's copy got on one device."""

    DURABLE = auto()
    TAKEN = auto()
    """The name exists already: another writer."""
    NONE = auto()
    """Failed before the rename."""
    UNKNOWN = auto()
    """Renamed, but not known to be durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyResult:
    device: Device
    copy: _Copy
    error: NodeError | None = None


class _ShardWrite:
    """One generation being written; used by the thread that called `persist_shard`, which starts the others."""

    def __init__(self, run: RunStore, draft: Draft, arena: ArenaRange, engines: Mapping[str, Engine]) -> None:
        self.generation = random_id()
        self._run = run
        self._ops = run.store.ops
        self._draft = draft
        self._arena = arena
        self._engines = engines
        self._plans = _plans_by_device(run, draft)
        self._stop = threading.Event()
        self._writes: list[DeviceWrite] = []

    def needs(self) -> dict[str, int]:
        """Return the bytes that each device must have room for."""
        return {
            device.device_id: sum(align_up(plan.file_size_bytes) for plan in plans)
            for device, plans in self._plans.items()
        }

    def segments(self, reservation: Reservation) -> tuple[SegmentRecord, ...]:
        """Return the records of all segments, durable on all devices; otherwise nothing of them remains."""
        self._seal_headers()
        plans = self._draft.segments
        # A device's thread mostly waits for the kernel, so the checksums have threads of their own.
        with ThreadPoolExecutor(2 * len(self._plans) or 1, thread_name_prefix="everstep-persist") as pool:
            checksums = [pool.submit(self._checksums, plan) for plan in plans]
            writes = {
                device: pool.submit(self._write_device, device, device_plans, reservation)
                for device, device_plans in self._plans.items()
            }
        failure = self._first_failure(writes)
        if failure is not None:
            self.abandon()
            raise failure
        alignments: dict[int, int] = {}
        for written in writes.values():
            write, device_alignments = written.result()
            self._writes.append(write)
            alignments |= device_alignments
        return tuple(
            SegmentRecord(
                segment=plan.segment,
                device_id=plan.device_id,
                generation=self.generation,
                file_size_bytes=plan.file_size_bytes,
                header_size_bytes=plan.header_size_bytes,
                dio_alignment_bytes=alignments[plan.segment],
                block_checksums=checksum.result(),
            )
            for plan, checksum in zip(plans, checksums, strict=True)
        )

    def _seal_headers(self) -> None:
        """Write each segment's header into the slot, and zeros behind its end: direct I/O writes whole blocks."""
        for plan in self._draft.segments:
            stamp = SegmentStamp(
                generation=self.generation,
                run_id=self._run.run_id,
                checkpoint=self._draft.checkpoint,
                rank=self._draft.rank,
                segment=plan.segment,
            )
            header = build_header(plan.entries, stamp)
            self._arena.view(plan.slot_offset_bytes, len(header))[:] = header
            padding_bytes = align_up(plan.file_size_bytes) - plan.file_size_bytes
            tail_offset = plan.slot_offset_bytes + plan.file_size_bytes
            self._arena.view(tail_offset, padding_bytes)[:] = bytes(padding_bytes)

    def _checksums(self, plan: SegmentPlan) -> tuple[int, ...]:
        with self._arena.view(plan.slot_offset_bytes, plan.file_size_bytes) as view:
            return block_checksums(view, plan.file_size_bytes)

    def _write_device(
        self, device: Device, plans: Sequence[SegmentPlan], reservation: Reservation
    ) -> tuple[DeviceWrite, dict[int, int]]:
        try:
            with self._run.store.watching(device.device_id):
                return self._write_segments(device, plans, reservation)
        except BaseException:
            self._stop.set()
            raise

    def _write_segments(
        self, device: Device, plans: Sequence[SegmentPlan], reservation: Reservation
    ) -> tuple[DeviceWrite, dict[int, int]]:
        ops, directory = self._ops, self._run.generation_path(device, self.generation)
        ops.make_directory(directory)
        handles: list[SegmentHandle] = []
        with contextlib.ExitStack() as files:
            for plan in plans:
                handle = ops.open_new_segment(directory / f"{plan.segment}{SEGMENT_SUFFIX}")
                files.callback(ops.close, handle)
                handles.append(handle)
                ops.reserve(handle, plan.file_size_bytes)
            reservation.settle(device.device_id)
            write_s = 0.0
            for plan, handle in zip(plans, handles, strict=True):
                self._check_stop()
                write_s += ops.write_segment(
                    handle,
                    self._arena,
                    plan.slot_offset_bytes,
                    plan.file_size_bytes,
                    self._engines[device.device_id],
                )
            self._check_stop()
            sync_started_s = time.perf_counter()
            for plan, handle in zip(plans, handles, strict=True):
                ops.truncate(handle, plan.file_size_bytes)
                ops.sync_data(handle)
        ops.sync_directory(directory)
        ops.sync_directory(self._run.data_path(device))
        write = DeviceWrite(
            device_id=device.device_id,
            size_bytes=sum(plan.file_size_bytes for plan in plans),
            write_s=write_s,
            sync_s=time.perf_counter() - sync_started_s,
            is_direct=all(handle.is_direct for handle in handles),
        )
        return write, {
            plan.segment: handle.alignment_bytes for plan, handle in zip(plans, handles, strict=True)
        }

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _first_failure(self, writes: Mapping[Device, Future[_T]]) -> BaseException | None:
        """Return what to raise: a hanging device before all (the slot is lost), else the first that failed itself."""
        failures = [
            (device, error)
            for device, written in writes.items()
            if (error := written.exception()) is not None
        ]
        causes = [(device, error) for device, error in failures if not isinstance(error, _StoppedError)]
        causes.sort(key=lambda cause: not isinstance(cause[1], DeadlineError))
        for device, error in causes:
            _log.warning(
                "persist_failed run=%s checkpoint=%s rank=%d device=%s error=%s",
                self._run.run_id,
                self._draft.checkpoint,
                self._draft.rank,
                device.path,
                error,
            )
        return self._named(*causes[0]) if causes else None

    def _named(self, device: Device, error: BaseException) -> BaseException:
        if not isinstance(error, NodeError):
            return error
        what = f"rank {self._draft.rank} of checkpoint {self._draft.checkpoint}"
        named = type(error)(f"{what} was not saved: device {device.path}: {error.message}", hint=error.hint)
        named.__cause__ = error
        return named

    def abandon(self) -> None:
        """Remove what was written, as far as the devices let us; recovery removes the rest as an orphan."""
        for device, plans in self._plans.items():
            directory = self._run.generation_path(device, self.generation)
            with contextlib.suppress(StorageError):
                for plan in plans:
                    self._ops.unlink(directory / f"{plan.segment}{SEGMENT_SUFFIX}")
                self._ops.remove_directory(directory)

    def publish(self, manifest: Manifest, started_s: float) -> PersistResult:
        """Commit: put the manifest on every present device; one durable copy is enough."""
        try:
            content = encode_manifest(manifest)
        except BaseException:
            self.abandon()
            raise
        devices = self._run.store.devices
        with ThreadPoolExecutor(len(devices), thread_name_prefix="everstep-commit") as pool:
            results = list(pool.map(self._publish_on, devices, repeat(content)))
        durable = [result for result in results if result.copy is _Copy.DURABLE]
        if any(result.copy is _Copy.TAKEN for result in results):
            self._take_back(results)
        if not durable:
            self._fail_uncommitted(results)
        self._run.add_shard(shard_record(manifest, content))
        self._refuse_retired()
        return PersistResult(
            manifest=manifest,
            manifest_size_bytes=len(content),
            copy_count=len(durable),
            device_count=len(devices),
            problems=tuple(f"{result.device.path}: {result.error}" for result in results if result.error),
            writes=tuple(self._writes),
            persist_s=time.perf_counter() - started_s,
        )

    def _refuse_retired(self) -> None:
        """Raise where a device was retired while it was written to: what lies on it is lost, and not acknowledged.

        After the shard is in the catalogue: whoever retires a device first takes it out, then looks there.
        """
        for device in self._plans:
            if self._run.store.device(device.device_id) is None:
                self._run.lose_device(device.device_id)
                raise StorageError(
                    f"rank {self._draft.rank} of checkpoint {self._draft.checkpoint} was not saved: device"
                    f" {device.path} was retired meanwhile",
                    hint="the next checkpoint goes to the others",
                )

    def _publish_on(self, device: Device, content: bytes) -> _CopyResult:
        commits = self._run.commits_path(device)
        temporary = temporary_path(commits)
        target = commits / manifest_name(self._draft.checkpoint, self._draft.rank)
        progress = _Copy.NONE
        try:
            with self._run.store.watching(device.device_id):
                self._ops.write_small_new(temporary, content)
                progress = _Copy.UNKNOWN
                if not self._ops.rename_noreplace(temporary, target):
                    discard(self._ops, temporary)
                    return _CopyResult(device=device, copy=_Copy.TAKEN)
                self._ops.sync_directory(commits)
        except StorageError as exc:
            discard(self._ops, temporary)
            return _CopyResult(device=device, copy=progress, error=exc)
        return _CopyResult(device=device, copy=_Copy.DURABLE)

    def _take_back(self, results: Sequence[_CopyResult]) -> NoReturn:
        """Remove our copies, since another writer's manifest has the name, and raise FencedError.

        Our data stay if a copy of ours may stay: recovery sorts that out (two contents under one name).
        """
        ours = [result.device for result in results if result.copy in (_Copy.DURABLE, _Copy.UNKNOWN)]
        taken = next(result.device for result in results if result.copy is _Copy.TAKEN)
        note = ""
        try:
            for device in ours:
                commits = self._run.commits_path(device)
                self._ops.unlink(commits / manifest_name(self._draft.checkpoint, self._draft.rank))
                self._ops.sync_directory(commits)
            self.abandon()
        except StorageError as exc:
            note = f"; its own copy could not be taken back: {exc}"
        raise FencedError(
            f"rank {self._draft.rank} of checkpoint {self._draft.checkpoint} of run {self._run.name!r} was committed"
            f" by another writer (seen on {taken.path}){note}",
            hint="stop one of the two processes that train this run",
        )

    def _fail_uncommitted(self, results: Sequence[_CopyResult]) -> NoReturn:
        unknown = [result for result in results if result.copy is _Copy.UNKNOWN]
        failed = unknown[0] if unknown else results[0]
        assert failed.error is not None
        if not unknown:
            self.abandon()
            raise self._named(failed.device, failed.error) from failed.error
        raise StorageError(
            f"whether rank {self._draft.rank} of checkpoint {self._draft.checkpoint} was saved is unknown:"
            f" device {failed.device.path}: {failed.error.message}",
            hint="the next checkpoint stands for it; a restart of the daemon finds out",
        ) from failed.error


def _plans_by_device(run: RunStore, draft: Draft) -> dict[Device, list[SegmentPlan]]:
    found: dict[Device, list[SegmentPlan]] = {}
    for plan in draft.segments:
        device = run.store.device(plan.device_id)
        if device is None:
            raise DeviceMissingError(
                f"the layout names device {plan.device_id}: {run.store.device_name(plan.device_id)}",
                hint="make a new layout over the devices that are there",
            )
        found.setdefault(device, []).append(plan)
    return found


def manifest_of(run: RunStore, draft: Draft, generation: str, records: tuple[SegmentRecord, ...]) -> Manifest:
    """Return the manifest of a draft whose segments `records` describes, made now."""
    return Manifest(
        run_id=run.run_id,
        run_name=run.name,
        owner_uid=run.owner_uid,
        checkpoint=draft.checkpoint,
        rank=draft.rank,
        world_size=draft.world_size,
        parent=draft.parent,
        generation=generation,
        created_unix_s=time.time(),
        layout_digest=draft.layout_digest,
        leaves=draft.leaves,
        aliases=draft.aliases,
        pieces=draft_pieces_of(draft, generation),
        segments=records,
        values=draft.values,
        notes=draft.notes,
    )
