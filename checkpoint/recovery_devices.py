"""The devices of a store while it is recovered: reading what is trusted, mending what is not, and what was found."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..core.errors import CorruptDataError, DataError, StorageError
from ..core.ids import is_id, random_id
from .device import Device
from .device_set import DeviceSet
from .durable import publish_new, publish_over, temporaries
from .findings import Finding, Severity
from .manifest_format import MANIFEST_FILE_BYTES_MAX

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

COPY_SUFFIX = ".copy"
"""Quarantined, but a whole copy was on another device."""
LOST_SUFFIX = ".lost"
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
    findings: list[Finding] = field(default_factory=list[Finding])
    """Everything that was not as it should be, problems included."""
    put_aside: list[Path] = field(default_factory=list[Path])
    """Where the files lie now that were moved to quarantine."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The copies of one small file: whole ones by content, and what was wrong with the others."""

    whole: Mapping[bytes, Sequence[Device]]
    bad: Mapping[Device, DataError]

    def other_than(self, content: bytes, device: Device) -> list[bytes]:
        """Return what a device has that is whole and not this content."""
        return [each for each, holders in self.whole.items() if each != content and device in holders]


class RecoveryDevices:
    """The devices that can be read; whatever cannot be read or trusted marks its device, and nothing is deleted then.

    Calls that mend may fail: a full device is still read, and what could not be written is made up for by the next
    recovery. In a store that is open for reading only they do nothing.
    """

    def __init__(self, store: DeviceSet, report: RecoveryReport, *, looks_for_rests: bool) -> None:
        self.store = store
        self.ops = store.ops
        self.report = report
        self.writes = not store.is_read_only
        self.looks_for_rests = looks_for_rests
        """Look for unfinished files and orphans, although nothing can be removed."""
        self.present = list(store.devices)
        """Those that nothing was wrong with so far."""

    def problem(self, text: str, path: Path, *, severity: Severity = Severity.LOST, repair: str = "") -> None:
        """Report a sentence that a user should know."""
        self.tell(text)
        self.find(severity, path, text, repair)

    def tell(self, text: str) -> None:
        """Report a sentence about what is found elsewhere, too."""
        _log.warning("recovery_problem %s", text)
        self.report.problems.append(text)

    def find(self, severity: Severity, path: Path, problem: str, repair: str = "") -> None:
        """Take note of what is not as it should be."""
        self.report.findings.append(
            Finding(severity=severity, path=str(path), problem=problem, repair=repair)
        )

    # --- calls that read ----------------------------------------------------------------------------------------

    def each(self, devices: Sequence[Device], call: Callable[[Device], _T]) -> dict[Device, _T]:
        """Return what `call` reads on each of these devices; one that it fails on is left out from now on.

        Raises:
            StorageError: no device is left.
        """
        found: dict[Device, _T] = {}
        for device in [device for device in devices if device in self.present]:
            try:
                with self.store.reading(device.device_id):
                    found[device] = call(device)
            except StorageError as exc:
                self.problem(f"device {device.path} is left out: {exc}", device.path)
                self.present.remove(device)
                if not self.present:
                    raise
        return found

    def read_copies(self, paths: Mapping[Device, Path], decode: Callable[[bytes, str], object]) -> Found:
        """Return the copies of a small file; FormatVersionError passes, since a newer everstep knows what to do."""
        whole: defaultdict[bytes, list[Device]] = defaultdict(list)
        bad: dict[Device, DataError] = {}
        for device, path in paths.items():
            try:
                with self.store.reading(device.device_id):
                    content = self.ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=self.store.uid)
                if content is not None:
                    if content not in whole:  # copies are the same bytes: decoding one is enough
                        decode(content, str(path))
                    whole[content].append(device)
            except CorruptDataError as exc:
                bad[device] = exc
            except StorageError as exc:
                self.problem(str(exc), path)
        return Found(whole=whole, bad=bad)

    def sync(self, device: Device, directory: Path) -> bool:
        """Make durable the names that are about to be trusted: after a crash of the daemon alone they may not be.

        What stands under them is: no file gets its name before its content is durable (ADR 0049).
        """
        if not self.writes:
            return True
        try:
            with self.store.reading(device.device_id):
                self.ops.sync_directory(directory)
        except StorageError as exc:
            self.problem(str(exc), directory)
            return False
        return True

    # --- calls that mend ----------------------------------------------------------------------------------------

    def drop_temporaries(self, directory: Path) -> None:
        """Remove what unfinished writes left in a directory; StorageError when that fails."""
        if not (self.writes or self.looks_for_rests) or self.ops.stat(directory) is None:
            return
        for path in temporaries(self.ops, directory):
            self.find(Severity.REPAIRABLE, path, "a file whose writing never ended", "removes it")
            if self.writes and self.ops.unlink(path):
                self.report.temporary_count += 1

    def empty_pool(self, device: Device) -> None:
        """Remove the files that an earlier process wanted to write again; StorageError when that fails.

        They are not used: only who has moved a file there knows that nobody else has it.
        """
        if not (self.writes or self.looks_for_rests) or self.ops.stat(device.pool_path) is None:
            return
        paths = [device.pool_path / name for name in self.ops.list_directory(device.pool_path) if is_id(name)]
        if paths:
            problem = f"{len(paths)} files of deleted checkpoints that a daemon kept to write them again"
            self.find(Severity.REPAIRABLE, device.pool_path, problem, "removes them")
        for path in paths if self.writes else ():
            self.ops.unlink(path)

    def mend(self, device: Device, call: Callable[[], object]) -> None:
        """Do what makes the store whole again; a device that fails is marked, a full one is not, and both go on."""
        if not self.writes:
            return
        try:
            with self.store.watching(device.device_id):
                call()
        except StorageError as exc:
            self.problem(str(exc), device.path, severity=Severity.NOTE)

    def make_copy(self, device: Device, path: Path, content: bytes) -> None:
        """Put a whole copy of a small file where it is missing."""
        self.find(Severity.REPAIRABLE, path, "a copy is missing here", "makes it again from another device's")

        def copy() -> None:
            if publish_new(self.ops, path, content):
                self.report.copy_count += 1

        self.mend(device, copy)

    def replace_copy(self, device: Device, path: Path, content: bytes) -> None:
        """Put a whole copy of a small file where an outdated one stands."""

        def replace() -> None:
            publish_over(self.ops, path, content)
            self.report.copy_count += 1

        self.mend(device, replace)

    def quarantine(self, device: Device, path: Path, run_id: str, suffix: str, error: DataError) -> None:
        """Report a file that cannot be believed, and move it out of the way; it is never deleted."""
        self.problem(
            f"{path} is put aside: {error}",
            path,
            severity=Severity.LOST if suffix == LOST_SUFFIX else Severity.REPAIRABLE,
            repair=f"moves it to {device.quarantine_path}",
        )
        self.put_aside(device, path, run_id, suffix)

    def put_aside(self, device: Device, path: Path, run_id: str, suffix: str) -> None:
        """Move a file that was reported to quarantine.

        Where it cannot be moved the device is marked, whatever the reason: what stands in quarantine is what keeps
        the data that the file may refer to.
        """
        self.report.quarantined_count += 1
        target = device.quarantine_path / f"{run_id}.{path.name}.{random_id()}{suffix}"

        def move() -> None:
            with self.store.reading(device.device_id):
                self.ops.rename_noreplace(path, target)
                self.report.put_aside.append(target)
                self.ops.sync_directory(device.quarantine_path)
                self.ops.sync_directory(path.parent)

        self.mend(device, move)
