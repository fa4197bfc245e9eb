"""One generation of a shard: its segments made durable on the devices that they are dealt to, or none of them.

The order of calls is that of commit.py.
"""

import contextlib
import logging
import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..core.errors import DeadlineError, NodeError, NoSpaceError, StorageError
from ..core.ids import random_id
from .checksum import block_checksums
from .copy_gate import CopyGate
from .device import Device
from .engine import Engine
from .engine_lanes import LANE_COUNT
from .late_plan import LATE_CALL_S, LATE_LOOK_S, LATE_WRITE_S, Call, late_device
from .late_writes import LateWrites
from .manifest_types import Draft, SegmentPlan, SegmentRecord
from .run_store import SEGMENT_SUFFIX, RunStore
from .segment_dealer import SegmentDealer
from .segment_format import align_up
from .side_by_side import Here, side_by_side
from .slot_header import seal_header
from .space_ledger import Reservation
from .storage_ops import ArenaRange, SegmentHandle

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

WRITERS_PER_DEVICE = LANE_COUNT
"""One hands its next segment over while the other's is written, so that the device never waits."""

TOGETHER_S = 0.5
"""So long at most all else waits until each device has the file that it writes first: a drive that takes longer to make
one holds nobody up."""

DEVICES_PER_CHECKSUM_THREAD = 2
"""XXH3 reads memory at several times the speed of a drive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWrite:
    """What one device did for a shard."""

    device_id: str
    size_bytes: int
    write_s: float
    """From its first byte to its last."""
    sync_s: float
    """Cutting, fdatasync and fsync of directories."""
    is_direct: bool
    """All of its segments were written with O_DIRECT."""
    recycled_bytes: int
    """Of `size_bytes`, written over files of deleted checkpoints."""


class WriteFailedError(Exception):
    """Devices failed or are full: the generation is abandoned."""

    def __init__(self, failures: Mapping[Device, StorageError]) -> None:
        super().__init__("; ".join(f"{device.path}: {error}" for device, error in failures.items()))
        self.failures = failures


class _StoppedError(Exception):
    """Another device failed, or this one is not waited for: it need not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A call on a device that has not returned."""

    what: str
    since_s: float
    size_bytes: int
    patience_s: float


@dataclass(slots=True, eq=False)
class _Part:
    """What one device has of the generation; used by its threads alone, but for what says who waits for them."""

    device: Device
    dealt: set[int]
    """Segments that room was promised for here."""
    files: dict[int, SegmentHandle] = field(default_factory=dict[int, SegmentHandle])
    """Open files by segment."""
    written: dict[int, SegmentPlan] = field(default_factory=dict[int, SegmentPlan])
    recycled: set[int] = field(default_factory=set[int])
    """Segments that are written over files of deleted ones."""
    alignments_bytes: dict[int, int] = field(default_factory=dict[int, int])
    write_s: float = 0.0
    busy_s: float = 0.0
    """Of its engine: without what it waited for the copy, or for others."""
    calls: dict[int, _Begun] = field(default_factory=dict[int, _Begun])
    """By thread."""
    has_ended: bool = False
    is_left: bool = False
    """Nobody waits for it: what it has is its own to clear away when its calls have returned."""


class ShardWrite:
    """One generation being written; used by the thread that persists the shard, which starts the others."""

    def __init__(
        self,
        run: RunStore,
        draft: Draft,
        plans: Sequence[SegmentPlan],
        arena: ArenaRange,
        *,
        engines: Mapping[str, Engine],
        devices: Sequence[Device],
        late_writes: LateWrites,
        gate: CopyGate | None = None,
    ) -> None:
        self.late: dict[Device, StorageError] = {}
        """Devices that were not waited for."""
        self._late_writes = late_writes
        self._devices = devices
        size_bytes = max((plan.file_size_bytes for plan in plans), default=0)
        self._speeds = {each: run.store.speeds.at(each.device_id, size_bytes) for each in devices}
        """As it was before: who turns slow while this is written does not get time for it."""
        self.generation = random_id()
        self.writes: tuple[DeviceWrite, ...] = ()
        self._run = run
        self._ops = run.store.ops
        self._draft = draft
        self._plans = plans
        self._arena = arena
        self._engines = engines
        self._dealer = SegmentDealer(run.store, plans, devices)
        self._parts: list[_Part] = []
        self._stop = threading.Event()
        self._gate = gate
        self._passing = threading.Lock()
        self._whole: set[int] = set()
        """Segments that lie in the slot with their headers."""
        self._passed = Counter[int]()
        """How many have read a segment: who writes it, and who takes its checksums."""
        self._checksum_error: BaseException | None = None
        self._without_file: set[str] = set()
        """Devices that have not made the file yet that they write first."""
        self._all_have_files = threading.Event()
        self._idle_since_s = math.inf
        """Since when some device has had nothing to do."""

    def write(self) -> tuple[SegmentRecord, ...]:
        """Return the records of all segments, durable; of a device that was late none, see `late`.

        Raises:
            NoSpaceError: there is no room; nothing was written.
            WriteFailedError: devices failed; `abandon` removes what was written.
            DeadlineError: a device hangs and may still read from the slot.
            CopyAbandonedError: the snapshot, which was still being copied, was given up.
        """
        with self._dealer.reserve() as reservation:
            self._parts = [
                _Part(device, {plan.segment for plan in self._dealer.dealt_to(device)})
                for device in self._dealer.devices
            ]
            self._without_file = {part.device.device_id for part in self._parts}
            # A device's thread mostly waits for the kernel, so the checksums have threads of their own.
            hashing = ThreadPoolExecutor(
                _checksum_threads(len(self._parts)), thread_name_prefix="everstep-checksum"
            )
            try:
                checksums = [hashing.submit(self._checksums, plan) for plan in self._plans]
                self._on_each_device(self._prepare)
                if self.late:
                    raise WriteFailedError(self.late)
                self.writes = tuple(self._on_each_device(lambda part: self._write_part(part, reservation)))
                return self._records([checksum.result() for checksum in checksums])
            finally:
                hashing.shutdown(cancel_futures=True)
                self._let_go()

    def abandon(self) -> None:
        """Remove what was written, as far as the devices let us; recovery removes the rest as an orphan."""
        for part in self._parts:
            if not part.is_left:
                self._remove(part)

    def _remove(self, part: _Part) -> None:
        directory = self._directory(part)
        with contextlib.suppress(StorageError):
            for name in self._ops.list_directory(directory):
                self._ops.unlink(directory / name)
            self._ops.remove_directory(directory)

    def _directory(self, part: _Part) -> Path:
        return self._run.generation_path(part.device, self.generation)

    def _checksums(self, plan: SegmentPlan) -> tuple[int, ...]:
        try:
            self._all_have_files.wait(TOGETHER_S)  # until then every processor is needed for that
            self._wait_whole(plan)
            with _HASHING, self._arena.view(plan.slot_offset_bytes, plan.file_size_bytes) as view:
                found = block_checksums(view, plan.file_size_bytes)
            self._has_passed(plan)
        except BaseException as error:
            self._checksum_error = self._checksum_error or error
            self._stop_all()  # nobody would give the segment's place up
            raise
        return found

    def _wait_whole(self, plan: SegmentPlan) -> None:
        """Return when a segment lies in the slot as its file will be; _StoppedError when nobody needs it any more.

        Its header is written only now: in a ring another segment may have had its place until it was copied.
        """
        if self._gate is not None and not self._gate.wait_copied(plan.segment, self._stop.is_set):
            raise _StoppedError
        with self._passing:
            if plan.segment not in self._whole:
                run_id, generation = self._run.run_id, self.generation
                seal_header(self._arena, plan, self._draft, run_id=run_id, generation=generation)
                self._whole.add(plan.segment)

    def _has_passed(self, plan: SegmentPlan) -> None:
        """One of the two who read a segment needs it no more."""
        with self._passing:
            self._passed[plan.segment] += 1
            is_last = self._passed[plan.segment] == 2
        if is_last and self._gate is not None:
            self._gate.written(plan.segment)

    def _has_file(self, part: _Part) -> None:
        with self._passing:
            self._without_file.discard(part.device.device_id)
            if not self._without_file:
                self._all_have_files.set()

    def _stop_all(self) -> None:
        self._stop.set()
        self._all_have_files.set()
        if self._gate is not None:
            self._gate.wake()

    # --- one thread per device ----------------------------------------------------------------------------------

    def _on_each_device(self, call: Callable[[_Part], _T]) -> list[_T]:
        """Return what `call` says of each part, made at the same time; a failure stops the others."""
        pool = self._new_pool()
        for part in self._parts:
            part.has_ended = False
        begun: dict[_Part, Future[_T]] = {}
        self._idle_since_s = math.inf
        try:
            for part in self._parts:
                begun[part] = pool.submit(self._guarded, call, part)
            while wait([each for part, each in begun.items() if not part.is_left], LATE_LOOK_S).not_done:
                self._leave_late(begun)
        except BaseException:
            # No thread to be had, say: those that run must not write when the slot is given back.
            self._stop_all()
            raise
        finally:
            pool.shutdown(wait=not self.late)
        done = {part.device: each for part, each in begun.items() if not part.is_left}
        self._raise_failures(done)
        return [each.result() for each in done.values()]

    def _new_pool(self) -> Executor:
        """Return what works on all devices at once. An only one is waited for here: nobody could take over from it."""
        if len(self._devices) == 1:
            return Here()
        return ThreadPoolExecutor(len(self._parts) or 1, thread_name_prefix="everstep-persist")

    def _guarded(self, call: Callable[[_Part], _T], part: _Part) -> _T:
        try:
            with self._run.store.watching(part.device.device_id):
                return call(part)
        except BaseException:
            self._stop_with(part)
            raise
        finally:
            with self._passing:
                part.has_ended = True
                is_left = part.is_left
            if is_left:
                self._end_left(part)

    def _stop_with(self, part: _Part) -> None:
        """A part has failed; what one does that nobody waits for stops none of the others."""
        if not part.is_left:
            self._stop_all()

    # --- devices that are late ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(
        self, part: _Part, what: str, size_bytes: int = 0, patience_s: float = LATE_CALL_S
    ) -> Generator[None]:
        """Let it be seen how long the block takes. _StoppedError where nobody has waited for its end."""
        begun = _Begun(what=what, since_s=time.monotonic(), size_bytes=size_bytes, patience_s=patience_s)
        with self._passing:
            part.calls[threading.get_ident()] = begun
        try:
            with self._run.store.calls.call(part.device.device_id):
                yield
        finally:
            with self._passing:
                del part.calls[threading.get_ident()]
        if part.is_left:
            raise _StoppedError

    def _leave_late(self, begun: Mapping[_Part, Future[_T]]) -> None:
        """Wait no longer for a device that is late where another one could write its segments by now."""
        parts = [part for part in begun if not part.is_left]
        calls = [[] if begun[part].done() else self._calls(part) for part in parts]
        idle = {part.device for part, mine in zip(parts, calls, strict=True) if not mine}
        idle |= set(self._devices) - {part.device for part in begun}  # those were dealt nothing
        if not any(map(self._could_write, idle)):
            self._idle_since_s = math.inf
            return
        now_s = time.monotonic()
        self._idle_since_s = min(self._idle_since_s, now_s)
        found = late_device(calls, now_s - self._idle_since_s)
        if found is not None:
            self._leave(parts[found[0]], found[1])

    def _could_write(self, device: Device) -> bool:
        """Tell whether a device would write what another one does not: it may, and stands still for no other shard."""
        store = self._run.store
        return device in store.writable and not store.calls.stands_still(device.device_id)

    def _calls(self, part: _Part) -> list[Call]:
        now_s, speed = time.monotonic(), self._expected_speed(part.device)
        backlog_bytes = self._run.store.speeds.backlog_bytes(part.device.device_id)
        with self._passing:
            begun = list(part.calls.values())
        return [
            Call(
                what=each.what,
                running_s=now_s - each.since_s,
                expected_s=max(each.size_bytes, backlog_bytes) / speed if each.size_bytes and speed else 0.0,
                patience_s=each.patience_s if speed else LATE_CALL_S,
            )
            for each in begun
        ]

    def _expected_speed(self, device: Device) -> float | None:
        """Return what a device moved before, or else its peers do by now; None: nobody knows."""
        store, plans = self._run.store, self._plans
        size_bytes = max((plan.file_size_bytes for plan in plans), default=0)
        found = [store.speeds.at(each.device_id, size_bytes) for each in self._devices if each is not device]
        peers = [speed for speed in found if speed]
        return self._speeds[device] or (statistics.median(peers) if peers else None)

    def _leave(self, part: _Part, call: Call) -> None:
        device = part.device
        error = StorageError(call.text, hint="it gets segments again when that has ended")
        with self._passing:
            if part.has_ended:
                return
            # Before the call can see that it is left, and end.
            self._run.store.mark_late(device.device_id, error)
            part.is_left = True
            self._late_writes.begin()
        self.late[device] = error
        self._dealer.leave(device)
        self._has_file(part)
        if self._gate is not None and self._gate.is_ring:
            self._stop_all()  # the others wait for places in the slot that the late one does not give up

    def _end_left(self, part: _Part) -> None:
        """Nothing moves for a device any more that nobody waited for: its files go, which no manifest refers to."""
        try:
            while part.files:
                self._close_quietly(part.files.popitem()[1])
            self._remove(part)
        finally:
            self._late_writes.end()
            self._run.store.late_is_over(part.device.device_id)

    def _raise_failures(self, done: Mapping[Device, Future[_T]]) -> None:
        """Raise what the devices raised: a hanging one before all (the slot is lost), then what nobody expected."""
        errors = {device: error for device, each in done.items() if (error := each.exception()) is not None}
        for device, error in errors.items():
            if not isinstance(error, _StoppedError):
                _log.warning(
                    "persist_failed run=%s checkpoint=%s rank=%d device=%s error=%s",
                    self._run.run_id,
                    self._draft.checkpoint,
                    self._draft.rank,
                    device.path,
                    error,
                )
        for device, error in errors.items():
            if isinstance(error, DeadlineError):
                raise named(self._draft, device, error)
        failed = {device: error for device, error in errors.items() if isinstance(error, StorageError)}
        for error in errors.values():
            if not isinstance(error, StorageError | _StoppedError):
                raise error
        if failed or (errors and self.late):
            raise WriteFailedError(self.late | failed)
        if errors and self._checksum_error is not None:  # all of them were stopped by it
            raise self._checksum_error

    def _prepare(self, part: _Part) -> None:
        """Make the device's directory, before a byte moves anywhere."""
        with self._call(part, "making a directory"):
            self._run.complete_what_it_missed(part.device)
            self._ops.make_directory(self._directory(part))

    def _create(self, part: _Part, plan: SegmentPlan, reservation: Reservation) -> SegmentHandle:
        """Return a segment's file, allocated: while another lane writes, since on a full device it takes long."""
        store, device, size_bytes = self._run.store, part.device, plan.file_size_bytes
        path = self._directory(part) / f"{plan.segment}{SEGMENT_SUFFIX}"
        handle = store.pool.take(device, path, owner_uid=self._run.owner_uid, size_bytes=size_bytes)
        if handle is None:
            store.space.make_room(device, size_bytes)
            handle = self._ops.open_new_segment(path)
        else:
            part.recycled.add(plan.segment)
        part.files[plan.segment] = handle
        try:
            self._ops.reserve(handle, size_bytes)
        except NoSpaceError:
            # Free space may be less than it seems, or another write was faster.
            if not store.pool.give_back(device.file_system_id):
                raise
            self._ops.reserve(handle, size_bytes)
        if plan.segment in part.dealt:
            reservation.settle(device.device_id, align_up(size_bytes))
        return handle

    def _write_part(self, part: _Part, reservation: Reservation) -> DeviceWrite:
        started_s = time.perf_counter()
        lane_count = min(WRITERS_PER_DEVICE, len(self._plans))
        with side_by_side(lane_count, "everstep-writer") as pool:
            writers = [
                pool.submit(self._write_segments, part, reservation, is_first=lane == 0)
                for lane in range(lane_count)
            ]
        errors = [error for writer in writers if (error := writer.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, _StoppedError))
        part.write_s = time.perf_counter() - started_s
        self._run.store.space.make_room(part.device)  # for the manifest
        buffered_bytes = sum(
            part.written[segment].file_size_bytes
            for segment, handle in part.files.items()
            if not handle.is_direct and segment in part.written
        )
        with self._call(part, "making files durable", buffered_bytes):
            return self._sync(part)

    def _write_segments(self, part: _Part, reservation: Reservation, *, is_first: bool) -> None:
        try:
            if not is_first:
                self._all_have_files.wait(TOGETHER_S)
            self._write_until_none_is_left(part, reservation)
        except BaseException:
            self._stop_with(part)
            raise

    def _write_until_none_is_left(self, part: _Part, reservation: Reservation) -> None:
        self._check_stop(part)
        while (plan := self._dealer.take(part.device)) is not None:
            with self._call(part, "making a file"):
                handle = self._create(part, plan, reservation)
            self._has_file(part)
            self._wait_whole(plan)
            self._check_stop(part)
            self._dealer.began(part.device)
            self._written(part, plan, handle, self._write_segment(part, plan, handle))
            self._has_passed(plan)
            self._check_stop(part)
        self._has_file(part)  # others took its segments over

    def _write_segment(self, part: _Part, plan: SegmentPlan, handle: SegmentHandle) -> float:
        size_bytes = plan.file_size_bytes
        with self._call(part, f"writing segment {plan.segment}", size_bytes, LATE_WRITE_S):
            busy_s = self._ops.write_segment(
                handle,
                self._arena,
                plan.slot_offset_bytes,
                size_bytes,
                self._engines[part.device.device_id],
            )
            if handle.is_direct or part.is_left:
                self._run.store.measured(part.device.device_id, size_bytes, busy_s)
        return busy_s

    def _check_stop(self, part: _Part) -> None:
        if self._stop.is_set() or part.is_left:
            raise _StoppedError

    def _written(self, part: _Part, plan: SegmentPlan, handle: SegmentHandle, busy_s: float) -> None:
        self._dealer.written(part.device, plan)
        part.written[plan.segment] = plan
        part.alignments_bytes[plan.segment] = handle.alignment_bytes
        part.busy_s += busy_s

    def _sync(self, part: _Part) -> DeviceWrite:
        ops, device = self._ops, part.device
        started_s = time.perf_counter()
        buffered = [segment for segment, handle in part.files.items() if not handle.is_direct]
        for segment, plan in part.written.items():
            ops.truncate(part.files[segment], plan.file_size_bytes)
        for segment in part.written:
            ops.sync_data(part.files[segment])
        while part.files:
            ops.close(part.files.popitem()[1])
        ops.sync_directory(self._directory(part))
        ops.sync_directory(self._run.data_path(device))
        sync_s = time.perf_counter() - started_s
        # Through the page cache: how long that takes shows only in the sync.
        buffered_bytes = sum(part.written[segment].file_size_bytes for segment in buffered)
        busy_s = min(part.write_s, part.busy_s) + sync_s
        self._run.store.measured(device.device_id, buffered_bytes, busy_s)
        return DeviceWrite(
            device_id=device.device_id,
            size_bytes=sum(plan.file_size_bytes for plan in part.written.values()),
            write_s=part.write_s,
            sync_s=sync_s,
            is_direct=not buffered,
            recycled_bytes=sum(
                plan.file_size_bytes for segment, plan in part.written.items() if segment in part.recycled
            ),
        )

    # --- the end ------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Close what a failure left open."""
        self._dealer.close()
        with contextlib.ExitStack() as left:
            for part in self._parts:
                if part.is_left:
                    continue
                for handle in part.files.values():
                    left.callback(self._close_quietly, handle)
                part.files.clear()

    def _close_quietly(self, handle: SegmentHandle) -> None:
        with contextlib.suppress(StorageError):
            self._ops.close(handle)

    def _records(self, checksums: Iterable[tuple[int, ...]]) -> tuple[SegmentRecord, ...]:
        homes = {segment: part for part in self._parts if not part.is_left for segment in part.written}
        return tuple(
            SegmentRecord(
                segment=plan.segment,
                device_id=homes[plan.segment].device.device_id,
                generation=self.generation,
                file_size_bytes=plan.file_size_bytes,
                header_size_bytes=plan.header_size_bytes,
                dio_alignment_bytes=homes[plan.segment].alignments_bytes[plan.segment],
                block_checksums=block_sums,
            )
            for plan, block_sums in zip(self._plans, checksums, strict=True)
            if plan.segment in homes
        )


_HASHING_MAX = max(1, len(os.sched_getaffinity(0)) // 2)
"""Threads that hash at once, of all shards together: half of the cores are left to those who hand blocks to devices.

Hashing has time until the last block is written, handing over has none: with five threads on 2 cores the last of 8
drives began 0.2 s after the seal, with one 0.1 s (2026-11-22, rig of 8 x 100 MB/s).
"""
_HASHING = threading.BoundedSemaphore(_HASHING_MAX)


def _checksum_threads(device_count: int) -> int:
    """Return how many threads hash for one shard."""
    return min(-(-device_count // DEVICES_PER_CHECKSUM_THREAD) + 1, _HASHING_MAX)


def named(draft: Draft, device: Device, error: NodeError) -> NodeError:
    """Return the error with the shard and the device in its message, caused by it."""
    what = f"rank {draft.rank} of checkpoint {draft.checkpoint}"
    made = type(error)(f"{what} was not saved: device {device.path}: {error.message}", hint=error.hint)
    made.__cause__ = error
    return made
