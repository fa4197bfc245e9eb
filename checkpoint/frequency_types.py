"""What the frequency controller is told, what it keeps, and what it decides, as values. Times in seconds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from ..core.errors import UsageError
from .drift_machine import Spread

BUDGET_DEFAULT = 0.035
DRIVE_WRITES_PER_DAY_DEFAULT = 1.0
BUDGET_LEAST, DRIVE_WRITES_LEAST, MOST_S = 1e-9, 1e-6, 1e12
"""Below and above nothing can be meant (30,000 years), and numbers overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user asks of the controller that decides how often a checkpoint is taken (docs/frequency.md).

        everstep.attach("my-run", ..., limits=everstep.Limits(budget=0.02, most_s=600.0))

    Raises:
        UsageError: a value that no interval can meet; the message names it.
    """

    budget: float = BUDGET_DEFAULT
    """Share of the time that training takes without checkpoints."""
    least_steps: int = 1
    least_s: float = 0.0
    """Never more often than that."""
    most_steps: int | None = None
    most_s: float | None = None
    """Work that a crash may cost at most: done since the checkpoint that is restored, until that was committed."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole job; None: learnt."""
    drive_writes_per_day: float = DRIVE_WRITES_PER_DAY_DEFAULT
    """How often a day this run may write the drives full; of n runs on the same drives each takes as much."""

    def __post_init__(self) -> None:
        _check("budget", self.budget, BUDGET_LEAST <= self.budget < 1, "a share of the time, such as 0.035")
        _check("least_steps", self.least_steps, 1 <= self.least_steps <= MOST_S, f"1 to {MOST_S:g}")
        _check("least_s", self.least_s, 0 <= self.least_s <= MOST_S, f"0 to {MOST_S:g}")
        for name in ("most_steps", "most_s", "mtbf_s"):
            value: float | None = getattr(self, name)
            holds = value is None or 0 < value <= MOST_S
            _check(name, value, holds, f"more than 0, at most {MOST_S:g}, or leave it out")
        writes = self.drive_writes_per_day
        _check(
            "drive_writes_per_day",
            writes,
            DRIVE_WRITES_LEAST <= writes < math.inf,
            "what the drives are made for, often 1 to 3",
        )


def _check(name: str, value: object, holds: bool, hint: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}", hint=hint)


class FailureKind(Enum):
    """What died."""

    TRAINER = "trainer"
    """A restart finds its snapshot in the node's memory."""
    NODE = "node"
    """A restart reads from the devices."""


# --- observations: what one rank tells of itself ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A boundary was reached: the step before it is over."""

    at_s: float
    """Of any steady clock."""
    step_s: float
    """Less what checkpointing took of it at the boundary and in the guard."""
    is_busy: bool
    """A snapshot was copied or written beside it, or memory for one allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTaken:
    """The boundary that was reached last got a checkpoint."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped:
    """The boundary should have got one, but there was no slot, no memory or no daemon for it."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStalled:
    """What one checkpoint has cost by itself: eager copy, guard, waits at the boundary. Known at the next one."""

    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPersisted:
    """A snapshot of this rank is durable."""

    size_bytes: int
    persist_s: float
    """That the devices needed for it and for what was written at the same time."""
    held_s: float
    """From the begin of its copy until its slot was not needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKnown:
    """What snapshots of this rank go to; told again when it changes."""

    slot_count: int
    node: str
    """Which ranks share these devices: any name of the node."""
    capacity_bytes: int
    """Written to the devices until the first of them is full; 0 where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Attempts since the restored checkpoint did not end by themselves."""

    kind: FailureKind
    """Of the newest one."""
    attempts: int = 1
    """More than one where some died before their first checkpoint: in none lies a count of them."""

    def __post_init__(self) -> None:
        assert self.attempts >= 1


Observation = (
    StepEnded
    | CheckpointTaken
    | CheckpointSkipped
    | CheckpointStalled
    | CheckpointPersisted
    | StorageKnown
    | Failed
)


# --- figures: what a rank knows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one rank has measured, or all of them together; None: nothing yet."""

    step: Spread | None = None
    """Time of a step with nothing beside it."""
    stall: Spread | None = None
    """Directly measured cost of one checkpoint."""
    slower: Spread | None = None
    """What the steps beside one checkpoint took longer, altogether."""
    persist: Spread | None = None
    held: Spread | None = None
    slot_count: int = 2
    fill: Mapping[str, float] = field(default_factory=dict[str, float])
    """Node -> share of its devices' capacity that one checkpoint writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerSteps:
    """What checkpoints of this attempt made its steps longer than the quiet ones of their own cycle, altogether."""

    steps: int = 0
    """Busy ones that had quiet ones beside them."""
    total_s: float = 0.0
    """What those took longer, with the first ones after them."""


# --- decisions --------------------------------------------------------------------------------------------------------


class BoundKind(Enum):
    """What an interval is bound by, in the order in which they are named when several are equal."""

    FIXED = "fixed"
    PROFILE = "profile"
    """Nothing yet: what a checkpoint costs is not known."""
    BUDGET = "budget"
    BANDWIDTH = "persist bandwidth"
    SLOTS = "slots"
    ENDURANCE = "endurance"
    LEAST = "least"
    FAILURES = "failures"
    MOST = "most"
    PAUSED = "paused"
    """Nobody takes any: an operator asked for that."""
    LOST = "lost"
    """Nobody takes any: the ranks cannot agree any more."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):  # a handful are made for each decision
    """One reason for an interval."""

    kind: BoundKind
    need_s: float
    """Least time between two checkpoints that it allows."""
    sure_s: float
    """The same, by the end of the interval of confidence that asks least; below 0 where nothing is sure."""
    aim_s: float
    """What to choose, so that what is measured may vary a little."""
    text: str
    """For people: `persist bandwidth: 824 ms / 2 slots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How often, and why."""

    interval_steps: int
    kind: BoundKind
    reason: str
    """`bound by persist bandwidth: 824 ms / 2 slots`."""
    goal_missed: str = ""
    """Why the lost work that the user allows cannot be kept; empty when it can."""
    cost_share: float | None = None
    """Whole cost at this interval as a share of the time without; None while it is unknown."""
    cost_half_width: float | None = None
    """Half of its interval of confidence."""
    cost_least: float = 0.0
    """It is no less: the lower end of what was measured of stalls alone, for no checkpoint makes steps faster."""
    steps_undecided: int = 0
    """Steps, about, until it is known whether slower steps keep the budget; 0: it is known."""
    budget: float | None = None
    """Share of the time that training takes without checkpoints; None: there is none, the interval is fixed."""
    budget_asked_unix_s: float = 0.0
    """When an operator asked for a budget last, as far as this follows it; 0: never."""
    paused_until_unix_s: float = 0.0
    """As an operator asked; 0: it is not paused."""
    pause_asked_unix_s: float = 0.0
    """When an operator asked for a pause or for its end last, as far as this follows it; 0: never."""
