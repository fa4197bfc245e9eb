"""What the directories named to fsck are to each other: unlike store_plan.py it goes on where something is wrong."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePath

from .device import DISK_ID_NAME, Survey
from .findings import Finding, Severity
from .membership_plan import Membership, merge
from .store_format import DiskId


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckPlan:
    """The directories sorted out."""

    devices: tuple[Survey, ...]
    """Present members of one store, to be inspected together; none when no directory is a device."""
    findings: tuple[Finding, ...]
    is_certain: bool
    """Nothing was named that might belong here and cannot be told: only then may anything be changed."""


def sort_out(surveys: Sequence[Survey]) -> FsckPlan:
    """Return which directories are inspected, and what is wrong with them as devices.

    Raises:
        ConfigError: none of them is a member any more, or they have retired each other (membership_plan.merge).
    """
    members, findings, is_certain = _members(surveys)
    if not members:
        return FsckPlan(devices=(), findings=tuple(findings), is_certain=False)
    return FsckPlan(
        devices=tuple(survey for survey, _ in members),
        findings=(*findings, *_disagreements(members)),
        is_certain=is_certain,
    )


_Member = tuple[Survey, DiskId]


def _members(surveys: Iterable[Survey]) -> tuple[list[_Member], list[Finding], bool]:
    members: list[_Member] = []
    findings: list[Finding] = []
    is_certain = True
    for survey in surveys:
        disk_id = survey.disk_id
        if disk_id is None:
            findings.append(_no_device(survey))
            is_certain = is_certain and not survey.has_runs
            continue
        problem = _stranger(survey, disk_id, members)
        if problem:
            findings.append(_finding(Severity.LOST, survey, problem))
            is_certain = False
        elif not any(survey.path == known.path for known, _ in members):
            members.append((survey, disk_id))
    return members, findings, is_certain


def _no_device(survey: Survey) -> Finding:
    if not survey.exists:
        return _finding(Severity.NOTE, survey, "there is no such directory")
    if survey.has_runs:
        return _finding(
            Severity.LOST, survey, "it holds runs, but its disk.id is lost: put it back to have them again"
        )
    return _finding(Severity.NOTE, survey, "it is no device of a store")


def _stranger(survey: Survey, disk_id: DiskId, members: Sequence[_Member]) -> str:
    """Return why a device cannot be inspected with those before it; empty when it can."""
    for known, known_id in members:
        if known_id.store_id != disk_id.store_id:
            return f"it belongs to another store than {known.path}: inspect it by itself"
        if known_id.device_id == disk_id.device_id and known.path != survey.path:
            return (
                f"it carries the same device id as {known.path}: one is a copy of the other, remove the copy"
            )
    return ""


def _disagreements(members: Sequence[_Member]) -> Iterable[Finding]:
    """Yield what is missing, who was retired, and each disk.id that does not say what all of them together say."""
    together = merge([disk_id for _, disk_id in members if disk_id.is_ready])
    staying = [(survey, disk_id) for survey, disk_id in members if disk_id.device_id not in together.retired]
    present = {disk_id.device_id: str(survey.path) for survey, disk_id in staying}
    for device_id in sorted(together.members.keys() - present.keys()):
        yield Finding(
            severity=Severity.LOST,
            path=together.members[device_id],
            problem=f"device {device_id} is missing: what lies on it cannot be restored until it is back",
        )
    for survey, disk_id in members:
        if disk_id.device_id in together.retired:
            yield _finding(Severity.NOTE, survey, "it was retired: what it still holds is ignored")
    wanted = together.seen(present)
    for survey, disk_id in staying:
        if not disk_id.is_ready or _said(disk_id) != _said(wanted):
            yield Finding(
                severity=Severity.REPAIRABLE,
                path=str(survey.path / DISK_ID_NAME),
                problem="it does not list all members where they are now, or its making never ended",
                repair="writes it again",
            )


def _said(of: DiskId | Membership) -> tuple[Mapping[str, str], frozenset[str], Set[str]]:
    """Return who belongs to the store, who drains and who was retired."""
    return of.members, of.draining, of.retired.keys()


def _finding(severity: Severity, survey: Survey, problem: str) -> Finding:
    return Finding(severity=severity, path=str(PurePath(survey.path)), problem=problem)
