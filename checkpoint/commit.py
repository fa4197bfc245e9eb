"""Writing one shard: from a sealed slot to a manifest that a power loss cannot take back.

The order, for a shard dealt to D devices (docs/format.md, docs/assumptions.md say what of the disk it relies on):

    promise room for all segments on their devices, before a byte moves
    on each device, in threads of its own where there are several: mkdir generation
    barrier: all devices
    on each device:
        create each segment exclusively, allocate it, write it, every completion checked -> cut all to the exact length
        -> fdatasync all -> close -> fsync generation directory -> fsync data directory
    barrier: all devices
    on each device: write manifest under a temporary name, fsync -> rename, never over an existing one -> fsync commits
    one such copy is the commit

A snapshot that is still being copied is written the same way: each segment when it is copied, and the second barrier
waits for the seal too.

Nothing refers to a generation before the second barrier, so a failure until then leaves no trace but an orphan. A
failed fsync is never repeated: the generation is dropped, and the slot, which still has the bytes, is written at once
as a new generation to the devices that are left.

A committed shard of which a device was lost is written again the same way, but only the segments that were there, and
its manifest takes the place of the one before, which it names (docs/adr/0020-the-daemon-deals-segments.md).
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.errors import NoSpaceError, StorageError
from .catalogue import SegmentRef
from .copy_gate import CopyAbandonedError, CopyGate
from .device import Device
from .engine import Engine
from .late_writes import LateWrites
from .manifest_format import ManifestEncoder
from .manifest_types import Draft, Manifest, ManifestHead, SegmentPlan, SegmentRecord
from .publication import PersistResult, Publication, check_committed
from .run_store import RunStore
from .shard_rules_plan import check_draft
from .shard_write import ShardWrite, WriteFailedError, named
from .storage_ops import ArenaRange
from .succession_plan import REPLACES_NOTE, replaced_by
from .written_shard import WrittenShard

_NOT_IN_MEMORY = "it streamed through a ring, so that memory does not hold it to be written once more"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """A generation that was abandoned because devices failed or were full; another one is written to the rest."""

    device_paths: tuple[str, ...]
    code: str
    """Class of the first device's error."""
    message: str


def ignore_try(_: FailedTry) -> None:
    """Hear nothing of tries that failed: the log has them."""


def persist_shard(  # noqa: PLR0913  one call is the whole life of a shard on the devices
    run: RunStore,
    draft: Draft,
    arena: ArenaRange,
    *,
    engines: Mapping[str, Engine],
    device_ids: Collection[str] | None = None,
    on_failed_try: Callable[[FailedTry], object] = ignore_try,
    gate: CopyGate | None = None,
    late_writes: LateWrites | None = None,
    manifests: ManifestEncoder | None = None,
    is_checked: bool = False,
) -> PersistResult:
    """Return when the shard in this slot is durable and committed, and in the run's catalogue.

    `draft` is checked first, unless the caller has done so (`is_checked`). The slot must not change meanwhile,
    except that this call writes headers and zero padding into it. `engines` holds one engine per device id that
    takes transfers of several threads. The segments are dealt to the writable devices (of `device_ids`, if given).
    When some fail or are full, they are dealt anew to the rest, and `on_failed_try` hears of it in this thread.
    With a `gate` the slot is still being filled: each segment is written when it is copied, and the manifest when
    the snapshot is sealed. `manifests`, one for each rank, spares what manifests have in common. Where segments
    take turns in the slot (the gate's `is_ring`) nothing is dealt anew once one has given up its place: no error is
    a NoSpaceError from then on, after which the same call may go well, and a second call with that gate is refused.

    Raises:
        CopyAbandonedError: the snapshot was given up; nothing of this call remains.
        CorruptDataError: the draft does not hold together.
        FencedError: the shard has another writer; nothing of this call remains.
        NoSpaceError: it does not fit on the devices that are left.
        StorageError: no device is left; the message names the last, and says so when the outcome is unknown.
        DeadlineError: a device hangs in the kernel and may still read from the slot: do not use it again.
    """
    if not is_checked:
        check_draft(draft, arena.slot_size_bytes, is_ring=gate is not None and gate.is_ring)
    started_s = time.perf_counter()
    if gate is not None and gate.is_spent:
        raise StorageError(f"{_unsaved(draft)}: {_NOT_IN_MEMORY}", hint="the next checkpoint stands for it")
    with (
        _late_ones(late_writes) as late_ones,
        run.writing(draft.checkpoint, draft.rank),
        _only_once(draft, gate),
    ):
        writing = _Writing(run, draft, arena, engines, device_ids, late_writes=late_ones, gate=gate)
        written = writing.until_done(draft.segments, on_failed_try)
        if gate is not None:
            _wait_sealed(gate, written)
        head = head_of(run, draft, written.generation, written.records)
        return Publication(run, head, draft, written, started_s, encoder=manifests).publish()


@contextlib.contextmanager
def _late_ones(given: LateWrites | None) -> Generator[LateWrites]:
    """Give the caller's, who looks after them; else the call ends when they are over."""
    late_writes = given or LateWrites()
    try:
        yield late_writes
    finally:
        if given is None:
            late_writes.wait()


def _unsaved(draft: Draft) -> str:
    return f"rank {draft.rank} of checkpoint {draft.checkpoint} was not saved"


@contextlib.contextmanager
def _only_once(draft: Draft, gate: CopyGate | None) -> Generator[None]:
    """Turn an error that asks for room and a second try into one that does not, once the slot has other bytes."""
    try:
        yield
    except NoSpaceError as exc:
        if gate is None or not gate.is_spent:
            raise
        raise StorageError(f"{exc.message}; {_NOT_IN_MEMORY}", hint=exc.hint) from exc


def _wait_sealed(gate: CopyGate, written: WrittenShard) -> None:
    try:
        gate.wait_sealed()
    except CopyAbandonedError:
        written.abandon()
        raise


def lost_segments(run: RunStore, segments: Iterable[SegmentRef | SegmentRecord]) -> tuple[int, ...]:
    """Return the numbers of those of a committed shard's segments whose device is missing or suspect."""
    trusted = {device.device_id for device in run.store.trusted}
    return tuple(each.segment for each in segments if each.device_id not in trusted)


def persist_again(
    run: RunStore,
    draft: Draft,
    committed: Manifest,
    arena: ArenaRange,
    *,
    engines: Mapping[str, Engine],
    device_ids: Collection[str] | None = None,
    on_failed_try: Callable[[FailedTry], object] = ignore_try,
    late_writes: LateWrites | None = None,
) -> PersistResult:
    """Return when a committed shard whose bytes are still in their slot can do without the devices that were lost.

    Only the segments that were on those are written again; arguments and errors are those of `persist_shard`. Until
    the new manifest is durable on one device the committed one holds. Headers in the slot change also when it fails.

    Raises:
        FencedError: under the shard's name stands what is not `committed`.
    """
    started_s = time.perf_counter()
    with _late_ones(late_writes) as late_ones, run.writing(draft.checkpoint, draft.rank, again=True):
        check_committed(run, committed)
        lost = lost_segments(run, committed.segments)
        writing = _Writing(run, draft, arena, engines, device_ids, late_writes=late_ones)
        plans = [plan for plan in draft.segments if plan.segment in lost]
        written = writing.until_done(plans, on_failed_try)
        found = {record.segment: record for record in (*committed.segments, *written.records)}
        records = tuple(found[plan.segment] for plan in draft.segments)
        head = head_of(run, draft, written.generation, records)
        head = replace(head, notes=head.notes | {REPLACES_NOTE: replaced_by(committed)})
        return Publication(run, head, draft, written, started_s, is_over_committed=True).publish()


class _Writing:
    """Generation after generation, each on fewer devices, until all is durable."""

    def __init__(
        self,
        run: RunStore,
        draft: Draft,
        arena: ArenaRange,
        engines: Mapping[str, Engine],
        device_ids: Collection[str] | None,
        *,
        late_writes: LateWrites,
        gate: CopyGate | None = None,
    ) -> None:
        self._late_writes = late_writes
        self._run = run
        self._draft = draft
        self._arena = arena
        self._engines = engines
        self._device_ids = device_ids
        self._gate = gate
        self._left_out: dict[Device, StorageError] = {}

    def until_done(
        self, plans: Sequence[SegmentPlan], on_failed_try: Callable[[FailedTry], object]
    ) -> WrittenShard:
        """Return all of these segments, durable.

        What a device does not write in time the others write in a generation of its own, and what they have stays.
        Where one fails, all is written again.
        """
        written = WrittenShard()
        while True:
            try:
                write = self._next(plans, written)
                written.begin(write)
                written.add(write.write())
                if not write.late:
                    return written
                self._go_on_without(WriteFailedError(write.late), on_failed_try)
            except WriteFailedError as failed:
                written.abandon()
                written = WrittenShard()
                self._go_on_without(failed, on_failed_try)
            except NoSpaceError as exc:
                written.abandon()
                raise self._none_left(exc) from exc
            except BaseException:
                written.abandon()
                raise

    def _next(self, plans: Sequence[SegmentPlan], written: WrittenShard) -> ShardWrite:
        return ShardWrite(
            self._run,
            self._draft,
            [plan for plan in plans if plan.segment not in written.segments],
            self._arena,
            engines=self._engines,
            devices=self._devices(),
            late_writes=self._late_writes,
            gate=self._gate,
        )

    def _go_on_without(self, failed: WriteFailedError, on_failed_try: Callable[[FailedTry], object]) -> None:
        self._left_out |= failed.failures
        if self._gate is not None and self._gate.is_spent:
            raise self._spent(failed) from failed
        on_failed_try(_failed_try(failed))

    def _devices(self) -> list[Device]:
        """Return the devices to deal to; StorageError when none is left."""
        left = [
            device
            for device in self._run.store.writable
            if device not in self._left_out
            and (self._device_ids is None or device.device_id in self._device_ids)
        ]
        if left or not self._draft.segments:
            return left
        if self._left_out:
            device, error = next(reversed(self._left_out.items()))
            raise named(self._draft, device, error)
        raise StorageError(
            f"{_unsaved(self._draft)}: no device that this run may use can be written to",
            hint="name other devices in storage=",
        )

    def _spent(self, failed: WriteFailedError) -> StorageError:
        """Return what to raise where the bytes are gone that would be written to other devices."""
        device, error = next(iter(failed.failures.items()))
        return StorageError(
            f"{_unsaved(self._draft)}: device {device.path}: {error.message}; {_NOT_IN_MEMORY}",
            hint=error.hint,
        )

    def _none_left(self, error: NoSpaceError) -> NoSpaceError:
        before = "".join(
            f"; {device.path} failed before: {each.message}" for device, each in self._left_out.items()
        )
        return NoSpaceError(f"{_unsaved(self._draft)}: {error.message}{before}", hint=error.hint)


def _failed_try(failed: WriteFailedError) -> FailedTry:
    first = next(iter(failed.failures.values()))
    return FailedTry(
        device_paths=tuple(str(device.path) for device in failed.failures),
        code=first.code,
        message="; ".join(f"{device.path}: {error.message}" for device, error in failed.failures.items()),
    )


def head_of(run: RunStore, draft: Draft, generation: str, records: tuple[SegmentRecord, ...]) -> ManifestHead:
    """Return the head of the manifest of a draft whose segments `records` describes, made now."""
    return ManifestHead(
        run_id=run.run_id,
        run_name=run.name,
        owner_uid=run.owner_uid,
        checkpoint=draft.checkpoint,
        rank=draft.rank,
        world_size=draft.world_size,
        parent=draft.parent,
        generation=generation,
        created_unix_s=time.time(),
        notes={name: text for name, text in draft.notes.items() if name != REPLACES_NOTE},
        segments=records,
    )
