"""What the named directories are to each other: a new store, a known one, one with a device missing or added."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..core.errors import ConfigError, CorruptDataError, DeviceMissingError
from .device import Survey
from .membership_plan import Membership, merge, retired_here

_MISSING_HINT = "it looks like an unmounted drive: mount it, or `everstep device retire` it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The directories sorted out. `store_id` is None for a new store: the caller makes one."""

    store_id: str | None
    is_new: bool
    """Nothing was ever stored here."""
    known: Mapping[str, Survey]
    """Present members by id."""
    blank: tuple[Survey, ...]
    """Directories to be made devices."""
    missing: Mapping[str, str]
    """Ids of absent members, with the path where each was last seen."""
    unreadable: Mapping[str, str]
    """Ids of those among them whose directory is there and cannot be read, and why."""
    membership: Membership
    """What the present members say together; of a new store nothing yet."""
    notes: tuple[str, ...]

    @property
    def named(self) -> tuple[Survey, ...]:
        """The directories that are or become devices."""
        return (*self.known.values(), *self.blank)


def plan_store(surveys: Sequence[Survey], *, adopt: Collection[PurePath] = ()) -> StorePlan:
    """Return what the directories are.

    A member that has ever been ready is never made anew: where its directory is empty or gone, it is missing. A
    retired device is left alone, and so is a directory where one was last seen, unless it is one to `adopt`. A drive
    that does not answer is missing, too.

    Raises:
        StorageError: one does not answer, and was never seen there as a member; or only retired ones answer.
        ConfigError: a directory named twice or not there, a copied device, devices of two stores, only retired ones.
        DeviceMissingError: an unknown empty directory while a member is missing.
        CorruptDataError: a directory holds runs, but its disk.id is lost.
    """
    if not surveys:
        raise ConfigError("a store needs at least one directory", hint="name one: storage=[...]")
    _refuse_same_directory(surveys)
    known = _by_device_id(surveys)
    _refuse_two_stores(known)
    errors = {str(survey.path): survey.error for survey in surveys if survey.error is not None}
    copies = [each.disk_id for each in known.values() if each.disk_id is not None and each.disk_id.is_ready]
    if copies and errors and len(retired_here(copies)) == len(copies):
        raise next(iter(errors.values()))  # the members are those that do not answer
    membership = merge(copies)
    known = {key: survey for key, survey in known.items() if key not in membership.retired}
    missing = {key: path for key, path in membership.members.items() if key not in known}
    left_out = {device.path for device in membership.retired.values()} - {str(path) for path in adopt}
    blank: list[Survey] = []
    for survey in surveys:
        if survey.disk_id is None and str(survey.path) not in {*missing.values(), *left_out}:
            _check_blank(survey, missing)
            blank.append(survey)
    unreadable = {key: str(errors[path]) for key, path in missing.items() if path in errors}
    store_id = next((survey.disk_id.store_id for survey in known.values() if survey.disk_id), None)
    return StorePlan(
        store_id=store_id,
        is_new=not membership.members,
        known=known,
        blank=tuple(blank),
        missing=missing,
        unreadable=unreadable,
        membership=membership,
        notes=_shared_file_systems((*known.values(), *blank)),
    )


def _refuse_same_directory(surveys: Sequence[Survey]) -> None:
    seen: dict[tuple[int, int] | PurePath, Survey] = {}
    for survey in surveys:
        is_known = survey.exists and survey.error is None
        key = (survey.file_system_id, survey.inode) if is_known else survey.path
        if key in seen:
            raise ConfigError(
                f"{seen[key].path} and {survey.path} are the same directory", hint="name each drive once"
            )
        seen[key] = survey


def _by_device_id(surveys: Sequence[Survey]) -> dict[str, Survey]:
    found: dict[str, Survey] = {}
    for survey in surveys:
        if survey.disk_id is None:
            continue
        other = found.setdefault(survey.disk_id.device_id, survey)
        if other is not survey:
            raise ConfigError(
                f"{other.path} and {survey.path} carry the same device id {survey.disk_id.device_id}",
                hint="one is a copy of the other; remove the copy",
            )
    return dict(sorted(found.items()))


def _refuse_two_stores(known: Mapping[str, Survey]) -> None:
    first: Survey | None = None
    for survey in known.values():
        assert survey.disk_id is not None
        first = first or survey
        assert first.disk_id is not None
        if survey.disk_id.store_id != first.disk_id.store_id:
            raise ConfigError(
                f"{first.path} belongs to store {first.disk_id.store_id},"
                f" {survey.path} to store {survey.disk_id.store_id}",
                hint="name the directories of one store",
            )


def _check_blank(survey: Survey, missing: Mapping[str, str]) -> None:
    if survey.error is not None:
        raise survey.error
    if not survey.exists:
        raise ConfigError(
            f"the storage directory {survey.path} does not exist", hint="create it, or mount the drive"
        )
    if survey.has_runs:
        raise CorruptDataError(
            f"{survey.path} holds runs, but its disk.id is lost",
            hint="put disk.id back, or name another directory",
        )
    if missing:
        device_id, path = next(iter(missing.items()))
        raise DeviceMissingError(
            f"device {device_id} (last seen at {path}) is missing, and {survey.path} is an empty directory",
            hint=_MISSING_HINT,
        )


def members_notes(
    membership: Membership, missing: Mapping[str, str], unreadable: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what the user should know of members that are missing (their paths by id), and of those that were retired.

    `unreadable`: why nobody could tell what stands there.
    """
    return (
        *(
            f"device {device_id} (last seen at {path}) is missing: what lies on it cannot be restored, and nothing is"
            f" deleted anywhere until it is back; {unreadable.get(device_id) or _MISSING_HINT}"
            for device_id, path in missing.items()
        ),
        *(
            f"device {device_id} (last seen at {device.path}) was retired: what lay on it is lost, and what it still"
            f" holds is ignored"
            for device_id, device in membership.retired.items()
        ),
    )


def _shared_file_systems(surveys: Sequence[Survey]) -> tuple[str, ...]:
    groups: dict[int, list[str]] = {}
    for survey in surveys:
        groups.setdefault(survey.file_system_id, []).append(str(survey.path))
    return tuple(
        f"{' and '.join(paths)} are on one file system: that gives neither more speed nor more room"
        for paths in groups.values()
        if len(paths) > 1
    )
