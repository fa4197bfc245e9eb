"""Inspecting a closed store, and making whole what can be made whole, without a daemon.

Recovery finds and mends (recovery.py); here the directories are sorted out first, and with `repair` what recovery
leaves lying goes to quarantine: damaged checkpoints, and tags on checkpoints that are not there. Nothing is deleted
but what recovery deletes.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CorruptDataError, DataError, NotFoundError
from ..core.ids import CheckpointId
from .catalogue import CheckpointState
from .device import DISK_ID_NAME, Device, Survey, survey_directory
from .device_set import DeviceState
from .device_survey import lock_all, survey_all
from .findings import Finding, Severity
from .fsck_plan import sort_out
from .manifest_format import manifest_name
from .recovery import recover
from .recovery_devices import COPY_SUFFIX, LOST_SUFFIX, RecoveryDevices, RecoveryReport
from .run_store import COMMITS_NAME, TAGS_NAME, RunStore
from .storage_ops import LockHandle, StorageOps
from .store import Store, open_store
from .store_format import LockHolder, Tag
from .verify import verify_checkpoint

_ASIDE = "moves its manifests to quarantine; its segments stay until those are removed there"

_Damaged = set[tuple[RunStore, CheckpointId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckReport:
    """What an inspection found, and whether it mended."""

    findings: tuple[Finding, ...]
    is_repaired: bool
    """What is repairable was repaired; else nothing was changed."""
    run_count: int
    shard_count: int
    put_aside: tuple[str, ...] = ()
    """Where the files lie now that the repair moved to quarantine."""

    @property
    def worst(self) -> Severity:
        """The worst of all; NOTE when there is none."""
        found = {finding.severity for finding in self.findings}
        return next((each for each in (Severity.LOST, Severity.REPAIRABLE) if each in found), Severity.NOTE)


def fsck(
    directories: Sequence[Path],
    *,
    ops: StorageOps,
    holder: LockHolder,
    uid: int,
    repair: bool = False,
    data: bool = False,
) -> FsckReport:
    """Inspect the store that these directories are, its devices locked meanwhile; with `repair` make it whole.

    `data`: also read every block. Where it is not sure which directories belong together nothing is repaired.

    Raises:
        NotFoundError: no directory is a device.
        DeviceLockedError: another process holds a device; the message says which.
        StorageError: no device can be read.
    """
    surveys, unreadable = _survey(directories, ops, uid)
    plan = sort_out(surveys)
    if not plan.devices:
        if unreadable or any(finding.severity is Severity.LOST for finding in plan.findings):
            found = (*unreadable, *plan.findings)
            return FsckReport(findings=found, is_repaired=False, run_count=0, shard_count=0)
        raise NotFoundError("there is no store in these directories", hint="check the paths")
    repair = repair and plan.is_certain and not unreadable
    with _opened([survey.path for survey in plan.devices], ops, holder, uid, repair=repair) as store:
        report = recover(store, looks_for_rests=True)
        damaged = _damaged(store, report)
        if data:
            damaged |= _bad_blocks(store, report)
        if repair and store.may_delete:
            _put_aside(store, report, damaged)
        _tell_failures(store, report)
    return _report(report, (*unreadable, *plan.findings), is_repaired=repair)


def inspect_beside(
    directories: Sequence[Path], *, ops: StorageOps, holder: LockHolder, uid: int
) -> FsckReport:
    """Inspect a store that a daemon holds, without a lock, and change nothing.

    Unfinished files and orphans are not looked for: a daemon at work always has some.
    """
    with open_store(directories, ops=ops, holder=holder, uid=uid, read_only=True) as store:
        report = recover(store)
        _damaged(store, report)
    return _report(report, (), is_repaired=False)


def _report(report: RecoveryReport, before: Sequence[Finding], *, is_repaired: bool) -> FsckReport:
    return FsckReport(
        findings=tuple(dict.fromkeys((*before, *report.findings))),
        is_repaired=is_repaired,
        run_count=report.run_count,
        shard_count=report.shard_count,
        put_aside=tuple(map(str, report.put_aside)),
    )


def _survey(
    directories: Sequence[Path], ops: StorageOps, uid: int
) -> tuple[list[Survey], tuple[Finding, ...]]:
    surveys: list[Survey] = []
    unreadable: list[Finding] = []
    paths = list(dict.fromkeys(directory.absolute().resolve() for directory in directories))
    for survey in survey_all(ops, paths, lambda path: _survey_one(path, ops, uid)):
        if survey.error is None:
            surveys.append(survey)
        else:
            place = str(survey.path / DISK_ID_NAME)
            unreadable.append(Finding(severity=Severity.LOST, path=place, problem=str(survey.error)))
    return surveys, tuple(unreadable)


def _survey_one(path: Path, ops: StorageOps, uid: int) -> Survey:
    try:
        return survey_directory(ops, path, uid=uid)
    except DataError as exc:
        return Survey(path=path, exists=True, error=exc)


@contextmanager
def _opened(
    paths: Sequence[Path], ops: StorageOps, holder: LockHolder, uid: int, *, repair: bool
) -> Generator[Store]:
    """Give the store of these devices, locked: for reading only unless it is repaired."""
    with ExitStack() as held:
        if not repair:  # else opening takes the locks
            locks: dict[Path, LockHandle] = {}
            held.callback(_release, locks)
            if hanging := lock_all(ops, paths, holder, locks):
                raise next(each.error for each in hanging.values() if each.error)
        yield held.enter_context(open_store(paths, ops=ops, holder=holder, uid=uid, read_only=not repair))


def _release(locks: Mapping[Path, LockHandle]) -> None:
    for lock in locks.values():
        lock.release()


def _damaged(store: Store, report: RecoveryReport) -> _Damaged:
    """Return the checkpoints that recovery found damaged; nothing is damaged for good while a device is missing."""
    found: _Damaged = set()
    for run in store.runs():
        for info in run.checkpoints():
            if info.state is CheckpointState.DAMAGED:
                found.add((run, info.checkpoint))
                report.findings.append(
                    Finding(
                        severity=Severity.LOST,
                        path=str(
                            run.commits_path(store.devices[0]) / manifest_name(info.checkpoint, info.ranks[0])
                        ),
                        problem=f"{run.name}@{info.checkpoint} is damaged: {'; '.join(info.problems)}",
                        repair=_ASIDE if store.is_whole else "",
                    )
                )
    return found if store.is_whole else set()


def _bad_blocks(store: Store, report: RecoveryReport) -> _Damaged:
    """Read every block, and return the checkpoints in which one is not what was committed."""
    found: _Damaged = set()
    for run in store.runs():
        for info in run.checkpoints():
            if info.state is CheckpointState.DAMAGED:
                continue
            verdict = verify_checkpoint(run, info.checkpoint)
            if any(segment.bad_block is not None for segment in verdict.segments):
                found.add((run, info.checkpoint))
            problems = {segment.path: segment.problem for segment in verdict.segments if segment.problem}
            problems |= {str(run.commits_path(store.devices[0])): text for text in verdict.problems}
            for path, problem in problems.items():
                repair = _ASIDE if (run, info.checkpoint) in found else ""
                text = f"{run.name}@{info.checkpoint} is damaged: {problem.removeprefix(f'{path}: ')}"
                report.findings.append(
                    Finding(severity=Severity.LOST, path=path, problem=text, repair=repair)
                )
    return found


def _put_aside(store: Store, report: RecoveryReport, damaged: _Damaged) -> None:
    """Move the manifests of damaged checkpoints, and every tag on what is not there then, to quarantine.

    That a checkpoint is damaged is a finding already: its manifests are none of their own.
    """
    devices = RecoveryDevices(store, report, looks_for_rests=False)
    for run, checkpoint in sorted(damaged, key=lambda each: (each[0].run_id, each[1])):
        for rank in run.info(checkpoint).ranks:
            for device, path in _copies(devices, run, Path(COMMITS_NAME) / manifest_name(checkpoint, rank)):
                devices.put_aside(device, path, run.run_id, LOST_SUFFIX)
    gone = CorruptDataError("its checkpoint is not here")
    for run in store.runs():
        left = {info.checkpoint for info in run.checkpoints() if (run, info.checkpoint) not in damaged}
        for name, checkpoint in run.tags().items():
            if checkpoint not in left:
                file_name = Tag(name=name, checkpoint=checkpoint).file_name
                for device, path in _copies(devices, run, Path(TAGS_NAME) / file_name):
                    devices.quarantine(device, path, run.run_id, COPY_SUFFIX, gone)


def _tell_failures(store: Store, report: RecoveryReport) -> None:
    """Take note of each device that failed without a finding that says so: nothing is removed or put aside then."""
    states = [(str(device.path), store.device_state(device.device_id)) for device in store.devices]
    failed = [(path, reason) for path, (state, reason) in states if state is DeviceState.SUSPECT]
    failed += [
        (each.path, each.reason) for each in store.missing if each.reason
    ]  # it answered a moment before
    for path, reason in failed:
        if not any(reason in each.problem for each in report.findings):
            problem = f"the device failed, so that nothing is removed or put aside: {reason}"
            report.findings.append(Finding(severity=Severity.NOTE, path=path, problem=problem))


def _copies(devices: RecoveryDevices, run: RunStore, file: Path) -> list[tuple[Device, Path]]:
    """Return the devices that have a file of the run, and where."""
    places = [(device, run.path_on(device) / file) for device in devices.present]
    return [(device, path) for device, path in places if devices.ops.stat(path) is not None]
