"""Which facts about a node refuse a job, and what a person is told. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

CHECK_PREFIX = "everstep"


class Ailment(Enum):
    """What can be wrong with a device."""

    MISSING = "missing"
    SUSPECT = "suspect"
    """A call on it failed, now or since its store was opened."""
    HANGING = "hanging"
    """It has not answered in time."""
    FULL = "full"
    SLOW = "slow"


_ACTIONS: Mapping[Ailment, str] = {
    Ailment.MISSING: "mount it where it was, or give it up: everstep device retire",
    Ailment.SUSPECT: "look at the kernel's log and at the drive; replace it, or restart the daemon once it is well",
    Ailment.HANGING: "look at the kernel's log and at the drive; one that hangs on needs a restart of the node",
    Ailment.FULL: "make room: everstep ls, everstep rm",
    Ailment.SLOW: "compare it with its peers: everstep bench io; replace it if it stays slow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One member of a store, as it is now."""

    name: str
    """In the configuration, else its path."""
    path: str
    ailments: Mapping[Ailment, str]
    """What is wrong with it, and why."""
    is_draining: bool = False
    """Somebody wants it to get no new segments, which is no ailment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """Its name: `everstep:suspect:nvme0`."""
    device: str
    """Its path; empty where it is about the daemon."""
    reason: str
    action: str

    @property
    def sentence(self) -> str:
        """Return it for people."""
        return f"{self.reason}; {self.action}" if self.action else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a job may start."""

    refused: tuple[Finding, ...]
    """Reasons against it; empty: it may."""
    noted: tuple[Finding, ...]
    """What is wrong, and does not refuse a job."""
    device_count: int

    @property
    def may_start(self) -> bool:
        """Tell whether a job may start here."""
        return not self.refused

    @property
    def error(self) -> str:
        """Return the reasons as sentences; empty if it may."""
        return ". ".join(finding.sentence for finding in self.refused)

    def document(self) -> dict[str, object]:
        """Return what is encoded as the answer's JSON."""
        findings = [(finding, True) for finding in self.refused] + [(each, False) for each in self.noted]
        return {
            "fail_count": len(self.refused),
            "failed_checks": [finding.check for finding in self.refused],
            "device_count": self.device_count,
            "findings": [
                {
                    "check": finding.check,
                    "device": finding.device,
                    "refuses": refuses,
                    "reason": finding.reason,
                    "action": finding.action,
                }
                for finding, refuses in findings
            ],
        }


def judge(devices: Sequence[DeviceFacts], *, is_ending: bool, refuse: Collection[Ailment]) -> Verdict:
    """Return whether a job may start on a node with these devices."""
    refused: list[Finding] = []
    noted: list[Finding] = []
    if is_ending:
        refused.append(
            Finding(
                check=f"{CHECK_PREFIX}:ending",
                device="",
                reason="the daemon is ending: a job would not find it",
                action="start it again, or take the node out",
            )
        )
    if devices and all(device.is_draining for device in devices):
        refused.append(
            Finding(
                check=f"{CHECK_PREFIX}:draining",
                device="",
                reason="all devices are draining: nothing can be saved here",
                action="end that: everstep device drain --cancel",
            )
        )
    for device in devices:
        for ailment in Ailment:  # in this order, whatever was found first
            if ailment in device.ailments:
                finding = _finding(device, ailment, device.ailments[ailment])
                (refused if ailment in refuse else noted).append(finding)
    return Verdict(refused=tuple(refused), noted=tuple(noted), device_count=len(devices))


def _finding(device: DeviceFacts, ailment: Ailment, why: str) -> Finding:
    title = device.path if device.name == device.path else f"{device.name} ({device.path})"
    return Finding(
        check=f"{CHECK_PREFIX}:{ailment.value}:{device.name}",
        device=device.path,
        reason=f"device {title} is {ailment.value}" + (f": {why}" if why else ""),
        action=_ACTIONS[ailment],
    )
