"""What a device holds that somebody may still need, and when it may be retired: pure rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..core.ids import CheckpointId
from .catalogue import CheckpointInfo, CheckpointState
from .device_set import DeviceState
from .store_format import RetiredDevice

HIGHEST_RUN_COUNT_MAX = 32
"""Runs that a retired device is remembered with: disk.id has a size limit, and devices are retired for years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The part of one checkpoint that lies on one device."""

    run: str
    run_key: str
    """`<uid>/<run_id>`."""
    owner_uid: int
    checkpoint: CheckpointId
    size_bytes: int
    created_unix_s: float
    is_offered: bool
    """A restore would take it; not so while the device is missing."""
    is_newest: bool
    """It is the one that a restart of its run would take."""
    newest_elsewhere: CheckpointId | None
    """The newest complete checkpoint of its run that a restart can have without this device."""


def holdings_of(
    *,
    run: str,
    owner_uid: int,
    run_id: str,
    infos: Sequence[CheckpointInfo],
    held: Mapping[CheckpointId, int],
) -> list[Holding]:
    """Return what of one run lies on a device, the newest first; `held`: bytes there by checkpoint."""
    newest = newest_restorable(infos)
    elsewhere = max(
        (
            info.checkpoint
            for info in infos
            if info.is_offered and info.state is CheckpointState.COMPLETE and info.checkpoint not in held
        ),
        default=None,
    )
    return [
        Holding(
            run=run,
            run_key=f"{owner_uid}/{run_id}",
            owner_uid=owner_uid,
            checkpoint=info.checkpoint,
            size_bytes=held[info.checkpoint],
            created_unix_s=info.created_unix_s,
            is_offered=info.is_offered,
            is_newest=info.checkpoint == newest,
            newest_elsewhere=elsewhere,
        )
        for info in sorted(infos, key=lambda each: each.checkpoint, reverse=True)
        if info.checkpoint in held
    ]


def newest_restorable(infos: Iterable[CheckpointInfo]) -> CheckpointId | None:
    """Return what a restart would take: the newest complete one that is offered, else the newest offered."""
    offered = [info for info in infos if info.is_offered]
    complete = [info.checkpoint for info in offered if info.state is CheckpointState.COMPLETE]
    return max(complete or [info.checkpoint for info in offered], default=None)


def is_drained(holdings: Iterable[Holding]) -> bool:
    """Tell whether no run would restart from what lies on the device."""
    return not any(holding.is_newest for holding in holdings)


def refusal(state: DeviceState, holdings: Iterable[Holding], *, is_last: bool, force: bool) -> str:
    """Return why a device must not be retired, or an empty string. `is_last`: no other one is well.

    Forced or not, the last one stays: nobody would remember that it was retired.
    """
    if is_last:
        return "no other device of the store is present and well"
    is_well = state not in (DeviceState.MISSING, DeviceState.SUSPECT)
    if is_well and not force and not (state is DeviceState.DRAINING and is_drained(holdings)):
        return "it is well, and not drained"
    return ""


def retired_device(path: str, holdings: Iterable[Holding], *, now_unix_s: float) -> RetiredDevice:
    """Return how a device is remembered: with the newest checkpoint of the runs that wrote to it last."""
    highest: dict[str, CheckpointId] = {}
    for holding in sorted(holdings, key=lambda each: each.created_unix_s, reverse=True):
        if holding.run_key in highest or len(highest) < HIGHEST_RUN_COUNT_MAX:
            known = highest.get(holding.run_key, holding.checkpoint)
            highest[holding.run_key] = max(known, holding.checkpoint)
    return RetiredDevice(path=path, retired_unix_s=now_unix_s, highest=highest)


class Verdict(Enum):
    """What policy says of a missing device."""

    WAIT = "it has not been missing for long enough"
    KEEP = "a restart may need what lies on it, should it come back"
    RETIRE = "nobody needs it"


def judge_missing(
    since_unix_s: float, holdings: Iterable[Holding], *, now_unix_s: float, missing_after_s: float
) -> Verdict:
    """Return what policy does with a missing device.

    It is needed unless each run with something there has a newer complete checkpoint elsewhere: what a restart would
    take if the drive came back is given up by a person, never by a clock.
    """
    if now_unix_s - since_unix_s < missing_after_s:
        return Verdict.WAIT
    is_needed = any(
        holding.newest_elsewhere is None or holding.newest_elsewhere < holding.checkpoint
        for holding in holdings
    )
    return Verdict.KEEP if is_needed else Verdict.RETIRE
