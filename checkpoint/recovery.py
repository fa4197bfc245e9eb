"""Opening a store after whatever happened: which checkpoints are there, and what was left half done.

Metadata only, so that it takes seconds: manifests are read and checked by their digest, segments by size and by
the stamp in their first block; data are verified when they are restored. Every step may be repeated, and may itself be
interrupted by a crash. Nothing is deleted but temporary files and, on a complete view of the store, generations that no
manifest refers to; what cannot be believed is moved to quarantine.

For a store that is opened read-only the same reading is done and nothing is written or removed.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..core.errors import (
    CorruptDataError,
    DataError,
    EverstepError,
    FormatVersionError,
    StorageError,
)
from ..core.ids import is_id, random_id, run_id_of
from .catalogue import shard_record
from .device import Device
from .durable import drop_temporaries, publish_new, publish_over
from .manifest_format import (
    MANIFEST_FILE_BYTES_MAX,
    ManifestHead,
    ManifestName,
    decode_manifest_head,
    manifest_name,
    parse_manifest_name,
)
from .manifest_types import SegmentRecord
from .run_store import (
    ATTEMPTS_NAME,
    COMMITS_NAME,
    DATA_NAME,
    FLOOR_NAME,
    RUN_NAME,
    RunStore,
    create_run_directories,
    run_path,
)
from .segment_check import check_segment_file
from .storage_ops import StorageOps
from .store import Store
from .store_format import (
    Attempt,
    Floor,
    RunId,
    decode_attempt,
    decode_floor,
    decode_run,
    encode_attempt,
    encode_floor,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_COPY_SUFFIX = ".copy"
"""Quarantined, but a whole copy was on another device."""
_LOST_SUFFIX = ".lost"
"""Quarantined, and what it said is known from nowhere: the run's orphans stay until somebody removes this file."""


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """What recovery found and did."""

    run_count: int = 0
    shard_count: int = 0
    temporary_count: int = 0
    """Unfinished files removed."""
    quarantined_count: int = 0
    """Files moved to quarantine."""
    copy_count: int = 0
    """Manifest, attempt and floor copies made again."""
    orphan_count: int = 0
    """Generations removed that no manifest refers to."""
    damaged_count: int = 0
    """Shards that are not offered."""
    problems: list[str] = field(default_factory=list[str])
    """One sentence for each thing that a user should know."""
    duration_s: float = 0.0


def recover(store: Store) -> RecoveryReport:
    """Fill the store's catalogue from its devices, mend what is half done, and say what was found.

    Called once after `open_store`, before anything else uses the store. A device that fails meanwhile is marked as
    suspect and left out; then nothing is deleted.

    Raises:
        StorageError: no device can be read.
    """
    started_s = time.perf_counter()
    report = RecoveryReport()
    recovery = _Recovery(store, report)
    for owner_uid, run_id in recovery.find_runs():
        recovery.recover_run(owner_uid, run_id)
    report.duration_s = time.perf_counter() - started_s
    _log.info(
        "store_recovered store=%s runs=%d shards=%d damaged=%d quarantined=%d orphans=%d seconds=%.3f",
        store.store_id,
        report.run_count,
        report.shard_count,
        report.damaged_count,
        report.quarantined_count,
        report.orphan_count,
        report.duration_s,
    )
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The copies of one small file: whole ones by content, and what was wrong with the others."""

    whole: Mapping[bytes, Sequence[Device]]
    bad: Mapping[Device, DataError]


class _Recovery:
    """Reads and mends; each method leaves the store in a state from which recovery could start again."""

    def __init__(self, store: Store, report: RecoveryReport) -> None:
        self._store = store
        self._ops: StorageOps = store.ops
        self._report = report
        self._writes = not store.is_read_only
        self._devices = list(store.devices)

    # --- the store ----------------------------------------------------------------------------------------------

    def find_runs(self) -> list[tuple[int, str]]:
        """Return (owner, run id) of every run on any device, and drop unfinished files of the devices."""
        found: set[tuple[int, str]] = set()
        for device in tuple(self._devices):
            try:
                with self._store.watching(device.device_id):
                    self._drop_temporaries(device.path)
                    found |= self._runs_on(device)
            except StorageError as exc:
                self._leave_out(device, exc)
        return sorted(found)

    def _runs_on(self, device: Device) -> set[tuple[int, str]]:
        return {
            (int(owner), run_id)
            for owner in self._ops.list_directory(device.runs_path)
            if owner.isascii() and owner.isdigit()
            for run_id in self._ops.list_directory(device.runs_path / owner)
            if is_id(run_id)
        }

    def _leave_out(self, device: Device, error: StorageError) -> None:
        """Go on without a device that cannot be read; with none left there is nothing to go on with."""
        self._problem(f"device {device.path} is left out: {error}")
        self._devices.remove(device)
        if not self._devices:
            raise error

    def _problem(self, text: str) -> None:
        _log.warning("recovery_problem %s", text)
        self._report.problems.append(text)

    def _drop_temporaries(self, directory: Path) -> None:
        if self._writes:
            self._report.temporary_count += drop_temporaries(self._ops, directory)

    # --- one run ------------------------------------------------------------------------------------------------

    def recover_run(self, owner_uid: int, run_id: str) -> None:
        """Take one run into the catalogue."""
        identity = self._identity(owner_uid, run_id)
        if identity is None:
            return
        run = RunStore(self._store, identity)
        for device in tuple(self._devices):
            try:
                with self._store.watching(device.device_id):
                    self._prepare(run, device, identity)
            except StorageError as exc:
                self._leave_out(device, exc)
        present = [device for device in self._devices if self._has_run(run, device)]
        run.load(attempts=self._attempts(run, present), floor=self._floor(run, present))
        self._shards(run, present)
        self._store.add_run(run)
        self._report.run_count += 1
        if self._writes:
            self._remove_orphans(run, present)

    def _has_run(self, run: RunStore, device: Device) -> bool:
        return self._writes or self._ops.stat(run.commits_path(device)) is not None

    def _prepare(self, run: RunStore, device: Device, identity: RunId) -> None:
        """Make the run's directories whole on a device, where a crash or a new device left them out."""
        if not self._writes:
            return
        create_run_directories(self._ops, device, identity)
        for directory in (
            run.path_on(device),
            run.path_on(device) / ATTEMPTS_NAME,
            run.commits_path(device),
        ):
            self._drop_temporaries(directory)

    def _identity(self, owner_uid: int, run_id: str) -> RunId | None:
        """Return whose run a directory holds, by run.json of any device, else by a manifest; None if nobody knows."""
        paths = {device: run_path(device, owner_uid, run_id) for device in self._devices}

        def decode(content: bytes, where: str) -> RunId:
            identity = decode_run(content, where)
            if (identity.owner_uid, identity.run_id) != (owner_uid, run_id):
                raise CorruptDataError(f"{where} belongs to another run")
            return identity

        found = self._read_copies({device: path / RUN_NAME for device, path in paths.items()}, decode)
        identity = next((decode(content, "") for content in found.whole), None)
        if identity is None:
            identity = self._identity_from_manifests(paths, owner_uid, run_id)
        for device, error in found.bad.items():
            self._quarantine(device, paths[device] / RUN_NAME, run_id, _COPY_SUFFIX, error)
        if identity is None and any(self._is_used(path) for path in paths.values()):
            self._problem(f"run {run_id} of uid {owner_uid} is not offered: its run.json is lost")
        return identity

    def _is_used(self, path: Path) -> bool:
        """Tell whether a run's directory holds anything: one that was just being made does not."""
        directories = [path / name for name in (COMMITS_NAME, ATTEMPTS_NAME, DATA_NAME)]
        return any(
            self._ops.stat(each) is not None and self._ops.list_directory(each) for each in directories
        )

    def _identity_from_manifests(
        self, paths: Mapping[Device, Path], owner_uid: int, run_id: str
    ) -> RunId | None:
        for path in paths.values():
            commits = path / COMMITS_NAME
            if self._ops.stat(commits) is None:
                continue
            for name in self._ops.list_directory(commits):
                try:
                    content = self._ops.read_small(
                        commits / name, MANIFEST_FILE_BYTES_MAX, owner_uid=self._store.uid
                    )
                    head = decode_manifest_head(content or b"")
                except DataError:
                    continue
                if (head.owner_uid, head.run_id) == (owner_uid, run_id) and run_id_of(
                    head.run_name
                ) == run_id:
                    return RunId.of(head.run_name, owner_uid)
        return None

    # --- attempts and floor -------------------------------------------------------------------------------------

    def _attempts(self, run: RunStore, devices: Sequence[Device]) -> list[Attempt]:
        """Return every attempt that any device knows, after making it durable on all."""
        names: set[str] = set()
        for device in devices:
            directory = run.path_on(device) / ATTEMPTS_NAME
            names.update(name for name in self._ops.list_directory(directory) if _is_number(name))
            self._sync(device, directory)
        return [self._attempt(run, devices, name) for name in sorted(names, key=int)]

    def _attempt(self, run: RunStore, devices: Sequence[Device], name: str) -> Attempt:
        def decode(content: bytes, where: str) -> Attempt:
            attempt = decode_attempt(content, where)
            if str(attempt.attempt) != name:
                raise CorruptDataError(f"{where} says attempt {attempt.attempt}")
            return attempt

        paths = {device: run.path_on(device) / ATTEMPTS_NAME / name for device in devices}
        found = self._read_copies(paths, decode)
        attempts = [decode(content, "") for content in found.whole]
        # The number counts as used even when nobody can say any more whether it started anew.
        attempt = Attempt(attempt=int(name), fresh=any(each.fresh for each in attempts))
        if not attempts:
            self._problem(f"run {run.name!r}: whether attempt {name} started anew is lost")
        for device, error in found.bad.items():
            self._quarantine(device, paths[device], run.run_id, _COPY_SUFFIX, error)
        good = {device for holders in found.whole.values() for device in holders}
        for device in devices:
            if device not in good:
                self._make_copy(device, paths[device], encode_attempt(attempt))
        return attempt

    def _floor(self, run: RunStore, devices: Sequence[Device]) -> Floor | None:
        """Return the newest floor that any device knows, after making it durable on all."""
        paths = {device: run.path_on(device) / FLOOR_NAME for device in devices}
        found = self._read_copies(paths, decode_floor)
        for device, error in found.bad.items():
            self._quarantine(device, paths[device], run.run_id, _COPY_SUFFIX, error)
        floors = [(decode_floor(content, ""), content) for content in found.whole]
        if not floors:
            return None
        floor = max((each for each, _ in floors), key=lambda each: each.newest)
        for device in devices:
            self._sync(device, run.path_on(device))
            if not any(each == floor and device in found.whole[content] for each, content in floors):
                self._mend(device, lambda d=device: publish_over(self._ops, paths[d], encode_floor(floor)))
        return floor

    # --- manifests ----------------------------------------------------------------------------------------------

    def _shards(self, run: RunStore, devices: Sequence[Device]) -> None:
        names: defaultdict[str, list[Device]] = defaultdict(list)
        durable: set[Device] = set()
        for device in devices:
            for name in self._ops.list_directory(run.commits_path(device)):
                names[name].append(device)
            # After the listing: every name in it is durable now.
            if self._sync(device, run.commits_path(device)):
                durable.add(device)
        for name in sorted(names):
            parsed = parse_manifest_name(name)
            if parsed is None:
                self._problem(
                    f"run {run.name!r}: {name!r} in {COMMITS_NAME} is no manifest's name; left alone"
                )
            else:
                self._shard(run, parsed, {device: device in durable for device in names[name]}, devices)

    def _shard(
        self, run: RunStore, name: ManifestName, holders: Mapping[Device, bool], devices: Sequence[Device]
    ) -> None:
        """Take one manifest into the catalogue, durable and with a copy on each device; or put it aside.

        `holders` are the devices that have the name, and whether it is durable there.
        """
        paths = {device: run.commits_path(device) / manifest_name(*name) for device in devices}
        try:
            found = self._read_copies(
                {device: paths[device] for device in holders},
                lambda content, _: _head_for(run, name, content),
            )
        except FormatVersionError as exc:
            run.unreadable = str(exc)
            run.lost[name.checkpoint] = f"rank {name.rank}: {manifest_name(*name)}: {exc}"
            self._problem(f"run {run.name!r}: {manifest_name(*name)} is not offered: {exc}")
            return
        if len(found.whole) > 1:
            self._put_aside_conflict(run, name, paths, found)
            return
        if found.bad and not found.whole and self._writes and not self._store.may_delete:
            reason = "; ".join(str(error) for error in found.bad.values())
            self._problem(
                f"run {run.name!r}: {manifest_name(*name)} is not offered, nor put aside while a device"
                f" that may have a whole copy is not there: {reason}"
            )
            return
        if found.bad and not found.whole:
            reason = "; ".join(str(error) for error in found.bad.values())
            run.lost[name.checkpoint] = f"rank {name.rank}: {manifest_name(*name)}: {reason}"
        for device, error in found.bad.items():
            suffix = _COPY_SUFFIX if found.whole else _LOST_SUFFIX
            self._quarantine(device, paths[device], run.run_id, suffix, error)
        for content, good in found.whole.items():
            synced = [self._sync(device, paths[device], is_file=True) and holders[device] for device in good]
            if not any(synced):
                self._problem(f"run {run.name!r}: {manifest_name(*name)} cannot be made durable; not offered")
                return
            for device in devices:
                if device not in good:
                    self._make_copy(device, paths[device], content)
            self._add(run, _head_for(run, name, content), content)

    def _put_aside_conflict(
        self, run: RunStore, name: ManifestName, paths: Mapping[Device, Path], found: _Found
    ) -> None:
        error = CorruptDataError(f"{manifest_name(*name)} has different contents on different devices")
        for device in (*found.bad, *(device for holders in found.whole.values() for device in holders)):
            self._quarantine(device, paths[device], run.run_id, _LOST_SUFFIX, error)

    def _add(self, run: RunStore, head: ManifestHead, content: bytes) -> None:
        problem = ""
        for record in head.segments:
            try:
                self._check_segment(run, head, record)
            except EverstepError as exc:
                problem = problem or str(exc)
        if problem:
            self._report.damaged_count += 1
            self._problem(
                f"run {run.name!r}: rank {head.rank} of {head.checkpoint} is not offered: {problem}"
            )
        self._report.shard_count += 1
        run.add_shard(shard_record(head, content, problem))

    def _check_segment(self, run: RunStore, head: ManifestHead, record: SegmentRecord) -> None:
        check_segment_file(self._ops, run.segment_path(record), head, record)

    # --- orphans ------------------------------------------------------------------------------------------------

    def _remove_orphans(self, run: RunStore, devices: Sequence[Device]) -> None:
        """Remove generations that no manifest refers to, if the view is complete."""
        kept = {ref.generation for shard in run.shards() for ref in shard.segments}
        kept |= {shard.generation for shard in run.shards()}
        orphans = [
            (device, name)
            for device in devices
            for name in self._ops.list_directory(run.data_path(device))
            if is_id(name) and name not in kept
        ]
        if not orphans or not self._store.may_delete:
            return
        if not run.unreadable:
            run.unreadable = self._quarantined(run)
        if run.unreadable:
            self._problem(f"run {run.name!r}: {len(orphans)} unreferenced generations stay: {run.unreadable}")
            return
        for device, name in orphans:
            self._mend(device, lambda d=device, n=name: self._remove_generation(run, d, n))

    def _quarantined(self, run: RunStore) -> str:
        for device in self._store.devices:
            for name in self._ops.list_directory(device.quarantine_path):
                if name.startswith(run.run_id) and name.endswith(_LOST_SUFFIX):
                    return f"{device.quarantine_path / name} may refer to them; remove it to free their space"
        return ""

    def _remove_generation(self, run: RunStore, device: Device, generation: str) -> None:
        remove_generation(self._ops, run, device, generation)
        self._report.orphan_count += 1

    # --- calls that mend ----------------------------------------------------------------------------------------

    def _read_copies(self, paths: Mapping[Device, Path], decode: Callable[[bytes, str], object]) -> _Found:
        """Return the copies of a small file; FormatVersionError passes, since a newer everstep knows what to do."""
        whole: defaultdict[bytes, list[Device]] = defaultdict(list)
        bad: dict[Device, DataError] = {}
        for device, path in paths.items():
            try:
                with self._store.watching(device.device_id):
                    content = self._ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=self._store.uid)
                if content is not None:
                    decode(content, str(path))
                    whole[content].append(device)
            except CorruptDataError as exc:
                bad[device] = exc
            except StorageError as exc:
                self._problem(str(exc))
        return _Found(whole=whole, bad=bad)

    def _quarantine(self, device: Device, path: Path, run_id: str, suffix: str, error: DataError) -> None:
        """Move a file that cannot be believed out of the way; it is never deleted."""
        self._problem(f"{path} is put aside: {error}")
        self._report.quarantined_count += 1
        target = device.quarantine_path / f"{run_id}.{path.name}.{random_id()}{suffix}"

        def move() -> None:
            self._ops.rename_noreplace(path, target)
            self._ops.sync_directory(device.quarantine_path)
            self._ops.sync_directory(path.parent)

        self._mend(device, move)

    def _make_copy(self, device: Device, path: Path, content: bytes) -> None:
        def copy() -> None:
            if publish_new(self._ops, path, content):
                self._report.copy_count += 1

        self._mend(device, copy)

    def _mend(self, device: Device, call: Callable[[], None]) -> None:
        """Do what makes the store whole again; a device that fails is marked, and recovery goes on."""
        if not self._writes:
            return
        try:
            with self._store.watching(device.device_id):
                call()
        except StorageError as exc:
            self._problem(str(exc))

    def _sync(self, device: Device, path: Path, *, is_file: bool = False) -> bool:
        """Make durable what is about to be trusted: after a crash of the daemon alone it may be in memory only."""
        if not self._writes:
            return True
        try:
            with self._store.watching(device.device_id):
                if is_file:
                    self._ops.sync_file(path)
                else:
                    self._ops.sync_directory(path)
        except StorageError as exc:
            self._problem(str(exc))
            return False
        return True


def remove_generation(ops: StorageOps, run: RunStore, device: Device, generation: str) -> None:
    """Remove a generation's directory with all its files; the caller knows that no manifest refers to it."""
    directory = run.generation_path(device, generation)
    for name in ops.list_directory(directory):
        ops.unlink(directory / name)
    ops.remove_directory(directory)
    ops.sync_directory(run.data_path(device))


def _head_for(run: RunStore, name: ManifestName, content: bytes) -> ManifestHead:
    """Return the head of a manifest found under this name in this run; another's is not believed."""
    head = decode_manifest_head(content)
    if (head.run_id, head.owner_uid, head.checkpoint, head.rank) != (
        run.run_id,
        run.owner_uid,
        name.checkpoint,
        name.rank,
    ):
        raise CorruptDataError(
            f"the manifest is of rank {head.rank}, checkpoint {head.checkpoint}, run {head.run_name!r}"
        )
    return head


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0")
