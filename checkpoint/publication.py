"""The manifest of a written shard on its way to the devices: the commit itself. The order of calls is commit.py's."""

import contextlib
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

from ..core.errors import DataError, FencedError, NodeError, StorageError
from .catalogue import shard_record
from .device import Device
from .device_round import on_each
from .durable import discard, temporary_path
from .manifest_format import MANIFEST_FILE_BYTES_MAX, ManifestEncoder, decode_manifest_head, manifest_name
from .manifest_types import Draft, Manifest, ManifestHead
from .run_store import RunStore
from .shard_write import DeviceWrite
from .succession_plan import takes_place_of
from .written_shard import WrittenShard


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistResult:
    """A committed shard."""

    manifest: ManifestHead
    content: bytes
    """The manifest's file."""
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


def check_committed(run: RunStore, committed: Manifest) -> None:
    """Return if on no trusted device another content than this committed manifest's has the shard's name.

    Raises:
        FencedError: the catalogue or a device knows another one.
    """
    name, rank = manifest_name(committed.checkpoint, committed.rank), committed.rank
    record = run.shard(committed.checkpoint, rank)
    known = record.generation == committed.generation
    for device in run.store.trusted:
        path = run.commits_path(device) / name
        with contextlib.suppress(StorageError), run.store.watching(device.device_id):
            content = run.store.ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=run.store.uid)
            known &= content is None or _is_of(committed, content, record.manifest_sha256)
    if not known:
        raise FencedError(f"rank {rank} of checkpoint {committed.checkpoint} was committed by another writer")


def _is_of(committed: ManifestHead, content: bytes, sha256: str) -> bool:
    """Tell whether a manifest is the committed one, or one of those before it, on a device that was away meanwhile."""
    if hashlib.sha256(content).hexdigest() == sha256:
        return True
    try:
        return takes_place_of(committed, decode_manifest_head(content))
    except DataError:
        return False


class _Copy(Enum):
    """How far a manifest's copy got on one device."""

    DURABLE = auto()
    TAKEN = auto()
    """Under the name stands what is not ours: another writer."""
    NONE = auto()
    """Failed before the rename."""
    UNKNOWN = auto()
    """Renamed, but not known to be durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyResult:
    device: Device
    copy: _Copy
    error: NodeError | None = None


def _may_leave(copies: Sequence[Future[_CopyResult]]) -> bool:
    """Tell whether the shard is committed, as far as is known: then it need not be on the others, too."""
    found = {copy.result().copy for copy in copies}
    return _Copy.DURABLE in found and _Copy.TAKEN not in found


class Publication:
    """One manifest; with `is_over_committed` it takes the place of the one that `check_committed` has seen."""

    def __init__(
        self,
        run: RunStore,
        manifest: ManifestHead,
        draft: Draft,
        written: WrittenShard,
        started_s: float,
        *,
        encoder: ManifestEncoder | None = None,
        is_over_committed: bool = False,
    ) -> None:
        self._run = run
        self._ops = run.store.ops
        self._manifest, self._draft = manifest, draft
        self._encoder = encoder or ManifestEncoder()
        self._written = written
        self._started_s = started_s
        self._is_over_committed = is_over_committed
        self._name = manifest_name(manifest.checkpoint, manifest.rank)
        self._what = f"rank {manifest.rank} of checkpoint {manifest.checkpoint}"

    def publish(self) -> PersistResult:
        """Commit: put the manifest on every device that is trusted; one durable copy is enough."""
        try:
            content = self._encoder.encode(self._manifest, self._draft)
        except BaseException:
            self._written.abandon()
            raise
        devices = self._run.store.trusted
        copies = on_each(
            self._run.store,
            devices,
            lambda device: self._publish_on(device, content),
            what=f"writing the manifest of {self._what}",
            may_leave=_may_leave,
            on_late_end=self._late_copy,
        )
        results = [copy.result() for copy in copies.values()]
        durable = [result for result in results if result.copy is _Copy.DURABLE]
        if any(result.copy is _Copy.TAKEN for result in results):
            self._take_back(results)
        if not durable:
            self._fail_uncommitted(results)
        self._run.add_shard(shard_record(self._manifest, content))
        self._refuse_retired()
        self._refuse_leaving([result.device for result in durable])
        return PersistResult(
            manifest=self._manifest,
            content=content,
            copy_count=len(durable),
            device_count=len(self._run.store.devices),
            problems=self._problems(results),
            writes=self._written.writes,
            persist_s=time.perf_counter() - self._started_s,
        )

    def _late_copy(self, device: Device, copy: Future[_CopyResult]) -> None:
        """Look at a copy that nobody waited for: another writer's is for recovery, now that ours is committed."""
        if copy.exception() is None and copy.result().copy is _Copy.TAKEN:
            error = StorageError(f"another writer's manifest of {self._what} is there")
            self._run.store.mark_suspect(device.device_id, error)

    def _problems(self, results: Sequence[_CopyResult]) -> tuple[str, ...]:
        failed = [f"{result.device.path}: {result.error}" for result in results if result.error]
        tried = {result.device for result in results}
        skipped = [
            f"{device.path}: {self._run.store.device_state(device.device_id)[1]}"
            for device in self._run.store.devices
            if device not in tried
        ]
        return (*failed, *skipped)

    def _refuse_retired(self) -> None:
        """Raise where a device was retired while it was written to: what lies on it is lost, and not acknowledged.

        After the shard is in the catalogue: whoever retires a device first takes it out, then looks there.
        """
        for device_id in dict.fromkeys(record.device_id for record in self._manifest.segments):
            if self._run.store.device(device_id) is None:
                self._run.lose_device(device_id)
                raise StorageError(
                    f"{self._what} was not saved: device {self._run.store.device_name(device_id)} was retired"
                    " meanwhile",
                    hint="the next checkpoint goes to the others",
                )

    def _refuse_leaving(self, durable: Sequence[Device]) -> None:
        """Raise where only a device that is being retired has a copy.

        After the shard is in the catalogue, too: whoever retires a device first lets it drain and says that the store
        changes, then copies what is in the catalogue to the others.
        """
        store, manifest = self._run.store, self._manifest
        members = store.membership.members
        leaving = store.membership.draining if store.is_changing else frozenset[str]()
        if any(device.device_id in members and device.device_id not in leaving for device in durable):
            return
        where = f"its manifest is only on {durable[0].path}, which leaves the store"
        self._run.mark_damaged(manifest.checkpoint, manifest.rank, where, generation=manifest.generation)
        raise StorageError(
            f"{self._what} was not saved: {where}", hint="the next checkpoint goes to the others"
        )

    def _publish_on(self, device: Device, content: bytes) -> _CopyResult:
        commits = self._run.commits_path(device)
        temporary = temporary_path(commits)
        target = commits / self._name
        progress = _Copy.NONE
        try:
            with self._run.store.watching(device.device_id):
                self._run.complete_what_it_missed(device)
                self._ops.write_small_new(temporary, content)
                progress = _Copy.UNKNOWN
                if self._is_over_committed:
                    self._ops.replace(temporary, target)
                elif not self._ops.rename_noreplace(temporary, target):
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
                self._ops.unlink(commits / self._name)
                self._ops.sync_directory(commits)
            self._written.abandon()
        except StorageError as exc:
            note = f"; its own copy could not be taken back: {exc}"
        raise FencedError(
            f"{self._what} of run {self._run.name!r} was committed by another writer"
            f" (seen on {taken.path}){note}",
            hint="stop one of the two processes that train this run",
        )

    def _fail_uncommitted(self, results: Sequence[_CopyResult]) -> NoReturn:
        unknown = [result for result in results if result.copy is _Copy.UNKNOWN]
        failed = unknown[0] if unknown else results[0]
        assert failed.error is not None
        if not unknown:
            self._written.abandon()
            raise type(failed.error)(
                f"{self._what} was not saved: device {failed.device.path}: {failed.error.message}",
                hint=failed.error.hint,
            ) from failed.error
        raise StorageError(
            f"whether {self._what} was saved is unknown: device {failed.device.path}: {failed.error.message}",
            hint="the next checkpoint stands for it; a restart of the daemon finds out",
        ) from failed.error
