"""Whether all is well, and if not, what is the matter and what to do: green, amber or red, in words. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ...core.durations import duration_text
from ..control.views import DeviceStatus, DeviceView, RankState, RunView, StatusView
from .history_machine import RECENT_S, History, Sums

LATE_FACTOR = 3.0
"""A checkpoint is late when the newest one is older than so many intervals."""
LATE_S_MIN = 120.0
"""And older than this: a young run measures its steps first."""
STALL_SHARE = 0.05
"""Of training time, above which somebody should know, where a run has no budget of its own."""
STALL_INTERVALS = 4
"""It is that of the last minute, or of so many intervals: within one there is a checkpoint, or none."""
DATA_SHARE = 0.2
"""The same of waits for data."""


class Level(Enum):
    """How bad it is."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a person should know."""

    level: Level
    subject: str
    """What it is about: `run gpt`, `device nvme0`."""
    text: str
    hint: str = ""
    """What to do; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run besides its view."""

    view: RunView
    newest_age_s: float | None
    """Of its newest checkpoint on the devices; None: there is none."""
    steps_per_s: float | None
    stall_share: float | None
    data_share: float | None
    """Of the last minute; None: nothing was told."""
    lately: Sums | None = None
    """What was done in the last minute, or in some intervals where these take longer; None: nothing was told."""

    @property
    def is_training(self) -> bool:
        """Tell whether a trainer holds any of its ranks."""
        return any(rank.state is RankState.ATTACHED for rank in self.view.ranks)

    @property
    def cost_share(self) -> float | None:
        """What stalls were lately, of the time without them, as budgets are; None: not known."""
        if self.lately is None:
            return None
        without_s = self.lately.train_s - self.lately.stall_s
        return self.lately.stall_s / without_s if without_s > 0 else math.inf

    @property
    def interval_s(self) -> float | None:
        """Seconds from one checkpoint to the next, at the present speed; None: not known."""
        pace = self.view.pace
        if pace is None or not self.steps_per_s or not pace.interval_steps:
            return None
        return pace.interval_steps / self.steps_per_s


def sums_of(view: RunView) -> Sums | None:
    """Return what a run's trainers have told so far; None: nothing."""
    pace = view.pace
    if pace is None:
        return None
    return Sums(steps=pace.steps, train_s=pace.train_s, stall_s=pace.stall_s, data_s=pace.data_s)


def facts_of(view: RunView, history: History, now_unix_s: float) -> RunFacts:
    """Return what is known of a run, with its speed of the last minute."""
    is_training = any(rank.state is RankState.ATTACHED for rank in view.ranks)
    past = history.of((view.owner_uid, view.run_id))
    recent = past.recent(now_unix_s) if is_training else None
    steps_per_s, stall_share, data_share = recent or (None, None, None)
    facts = RunFacts(
        view=view,
        newest_age_s=None if view.newest is None else max(0.0, now_unix_s - view.newest_unix_s),
        steps_per_s=steps_per_s,
        stall_share=stall_share,
        data_share=data_share,
    )
    over_s = max(RECENT_S, STALL_INTERVALS * (facts.interval_s or 0.0))
    return replace(facts, lately=past.done(now_unix_s, over_s) if is_training else None)


def level_of(findings: Sequence[Finding]) -> Level:
    """Return the worst of them."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.GREEN)


def findings_of(status: StatusView, runs: Sequence[RunFacts]) -> list[Finding]:
    """Return everything that is not as it should be, the worst first."""
    found = [
        *_daemon(status),
        *_devices(status),
        *(each for run in runs for each in run_findings(run)),
        *_rest(status),
    ]
    order = list(Level)
    return sorted(found, key=lambda finding: -order.index(finding.level))


def run_findings(run: RunFacts) -> Iterator[Finding]:
    """Yield what is not as it should be with one run."""
    view, subject = run.view, f"run {run.view.name}"
    lost = [rank.rank for rank in view.ranks if rank.state is RankState.LINGERING and not rank.left]
    if lost:
        names = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
        hint = "start it again: what it sealed waits in memory"
        yield Finding(level=Level.AMBER, subject=subject, text=f"rank {names} lost its trainer", hint=hint)
    if not run.is_training:
        return
    if view.pace is not None and view.pace.goal_missed:
        yield Finding(
            level=Level.AMBER, subject=subject, text=view.pace.goal_missed,
            hint="a larger budget, faster devices, or more work that may be lost",
        )  # fmt: skip
    if view.pace is not None and not view.pace.is_paused:
        yield from _late(run, subject)
    budget = view.pace.budget if view.pace is not None else None
    cost = run.cost_share
    if cost is not None and run.lately is not None and cost > (budget or STALL_SHARE):
        trained = duration_text(run.lately.train_s)
        text = f"checkpoints cost {100 * cost:.1f} % in the last {trained} of training"
        hint = view.pace.reason if view.pace is not None else ""
        yield Finding(level=Level.AMBER, subject=subject, text=text, hint=hint)
    if run.data_share is not None and run.data_share > DATA_SHARE:
        yield Finding(
            level=Level.AMBER, subject=subject,
            text=f"training waits for data {100 * run.data_share:.0f} % of the time",
            hint="everstep analyze says whether workers, the cache or storage would help",
        )  # fmt: skip


def _late(run: RunFacts, subject: str) -> Iterator[Finding]:
    interval_s = run.interval_s
    if run.newest_age_s is None or interval_s is None:
        return
    if run.newest_age_s > max(LATE_S_MIN, LATE_FACTOR * interval_s):
        yield Finding(
            level=Level.RED,
            subject=subject,
            text=f"the newest checkpoint is {duration_text(run.newest_age_s)} old,"
            f" although one is due every {duration_text(interval_s)}",
            hint="look at its failed and skipped checkpoints below, and at the devices",
        )


def _daemon(status: StatusView) -> Iterator[Finding]:
    daemon = status.daemon
    if daemon.is_draining:
        yield Finding(level=Level.AMBER, subject="daemon", text="it is draining: no new snapshots")
    if daemon.failed_count:
        noun = "shard" if daemon.failed_count == 1 else "shards"
        yield Finding(
            level=Level.AMBER, subject="daemon",
            text=f"{daemon.failed_count} {noun} could not be committed since it started",
            hint="the timeline shows when; the trainer was told why",
        )  # fmt: skip


def _devices(status: StatusView) -> Iterator[Finding]:
    for store in status.stores:
        for device in store.devices:
            finding = device_finding(device)
            if finding is not None:
                yield finding
        for problem in store.problems:
            is_damage = "is damaged" in problem
            yield Finding(level=Level.RED if is_damage else Level.AMBER, subject="store", text=problem)


def device_finding(device: DeviceView) -> Finding | None:
    """Return what is the matter with a device; None: nothing."""
    subject = f"device {device.name or device.path}"
    match device.state:
        case DeviceStatus.MISSING | DeviceStatus.SUSPECT:
            said = "is missing" if device.state is DeviceStatus.MISSING else "failed"
            hint = "`everstep device ls` says what lies on it; mount, replace or retire it"
            return Finding(level=Level.RED, subject=subject, text=f"it {said}: {device.reason}", hint=hint)
        case DeviceStatus.SLOW:
            text = f"it is slow: {device.reason or 'three times slower than it was or than its peers'}"
            return Finding(level=Level.AMBER, subject=subject, text=text, hint="it gets fewer segments")
        case DeviceStatus.DRAINING:
            return Finding(level=Level.AMBER, subject=subject, text="it is draining: no new segments")
        case DeviceStatus.RETIRED:
            return None
        case DeviceStatus.OK:
            if device.reason:
                return Finding(level=Level.AMBER, subject=subject, text=device.reason)
            return None


def _rest(status: StatusView) -> Iterator[Finding]:
    for cache in status.caches:
        if cache.reason:
            yield Finding(
                level=Level.AMBER, subject=f"cache {cache.number}", text=cache.reason,
                hint="a larger budget, or fewer caches",
            )  # fmt: skip
    for member in status.members:
        if member.problem:
            yield Finding(level=Level.AMBER, subject=f"node {member.address}", text=member.problem)
    for group in status.groups:
        if group.quarantined:
            text = f"{len(group.quarantined)} samples are left out, because they kill workers"
            yield Finding(level=Level.AMBER, subject=f"group {group.name}", text=text)
