"""Who belongs to a store: members, those that drain, those that were retired; and how the copies of that are merged.

Every member's disk.id holds a copy. A change reaches them one by one, so that a crash leaves copies that differ; the
merge makes one answer of them, the same in whatever order they are read:

    retired      when a copy that counts says so: retiring cannot be taken back, so a crash in the middle finishes it
    draining     when a copy that counts says so: that only forbids new segments
    a copy counts unless its device is retired by one that counts, or by itself
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..core.errors import ConfigError
from .store_format import DiskId, RetiredDevice

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What every disk.id of a store says alike. A value; each method returns the next one."""

    members: Mapping[str, str] = field(default_factory=dict[str, str])
    """device_id -> path where that device was last seen."""
    draining: frozenset[str] = frozenset()
    retired: Mapping[str, RetiredDevice] = field(default_factory=dict[str, RetiredDevice])
    missing_since_unix_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        assert not self.members.keys() & self.retired.keys(), "a retired device is no member"
        assert self.draining <= self.members.keys(), "only a member drains"
        assert self.missing_since_unix_s.keys() <= self.members.keys(), "only a member is missing"

    def disk_id(self, device_id: str, *, store_id: str, is_ready: bool = True) -> DiskId:
        """Return the copy of one device."""
        return DiskId(
            device_id=device_id,
            store_id=store_id,
            members=self.members,
            is_ready=is_ready,
            draining=self.draining,
            retired=self.retired,
            missing_since_unix_s=self.missing_since_unix_s,
        )

    def seen(self, present: Mapping[str, str]) -> "Membership":
        """Return it with these devices (id -> path) as members that are there."""
        away = {key: at for key, at in self.missing_since_unix_s.items() if key not in present}
        return replace(self, members={**self.members, **present}, missing_since_unix_s=away)

    def missed(self, device_ids: Iterable[str], now_unix_s: float) -> "Membership":
        """Return it with the time at which these members were first seen missing."""
        return replace(
            self, missing_since_unix_s=dict.fromkeys(device_ids, now_unix_s) | dict(self.missing_since_unix_s)
        )

    def drain(self, device_id: str) -> "Membership":
        """Return it with a member that gets no new segments."""
        return replace(self, draining=self.draining | {device_id})

    def cancel_drain(self, device_id: str) -> "Membership":
        """Return it with a member that gets new segments again."""
        return replace(self, draining=self.draining - {device_id})

    def retire(self, device_id: str, record: RetiredDevice) -> "Membership":
        """Return it without a member, which is remembered as retired."""
        return replace(
            self,
            members=_without(self.members, device_id),
            draining=self.draining - {device_id},
            retired={**self.retired, device_id: record},
            missing_since_unix_s=_without(self.missing_since_unix_s, device_id),
        )


def merge(copies: Sequence[DiskId]) -> Membership:
    """Return what these copies, one of each present device, say together.

    Raises:
        ConfigError: all are retired, or two parts of the store have each retired the other.
    """
    out = retired_here(copies)
    counted = sorted((copy for copy in copies if copy.device_id not in out), key=lambda copy: copy.device_id)
    if copies and not counted:
        names = ", ".join(copy.retired[copy.device_id].path for copy in copies)
        raise ConfigError(
            f"nothing but retired devices was named: {names}", hint="name the devices that are still members"
        )
    # What a device says of its own end counts, too: those that are there may have missed it.
    said = [(key, record) for copy in counted for key, record in copy.retired.items()]
    said += [(copy.device_id, copy.retired[copy.device_id]) for copy in copies if _knows_its_end(copy)]
    retired: dict[str, RetiredDevice] = {}
    for key, record in said:
        retired[key] = min(record, retired.get(key, record), key=_order)
    members = {key: path for copy in counted for key, path in copy.members.items() if key not in retired}
    since: dict[str, float] = {}
    for copy in counted:
        for key, at in copy.missing_since_unix_s.items():
            since[key] = min(at, since.get(key, at))
    return Membership(
        members=members,
        draining=frozenset(key for copy in counted for key in copy.draining if key in members),
        retired=retired,
        missing_since_unix_s={key: at for key, at in since.items() if key in members},
    )


def retired_here(copies: Sequence[DiskId]) -> set[str]:
    """Return which of these devices are retired: by their own word, or by that of one that nobody accuses."""
    out = {copy.device_id for copy in copies if _knows_its_end(copy)}
    while True:
        speaking = [copy for copy in copies if copy.device_id not in out]
        accused = {key for copy in speaking for key in copy.retired} & {copy.device_id for copy in speaking}
        if not accused:
            return out
        free = [copy for copy in speaking if copy.device_id not in accused]
        found = accused & {key for copy in free for key in copy.retired}
        if not found:
            names = ", ".join(sorted(copy.members[copy.device_id] for copy in speaking))
            raise ConfigError(
                f"the devices {names} have retired each other: the store was used in two parts",
                hint="name the devices of the part that is to go on",
            )
        out |= found


def _knows_its_end(copy: DiskId) -> bool:
    return copy.device_id in copy.retired


def _order(record: RetiredDevice) -> tuple[float, str, list[tuple[str, int, int]]]:
    highest = sorted((key, each.attempt, each.step) for key, each in record.highest.items())
    return record.retired_unix_s, record.path, highest


def _without(values: Mapping[str, _V], gone: str) -> dict[str, _V]:
    return {key: value for key, value in values.items() if key != gone}
