"""What a run's controller says, as values: the same in the daemon, in the client and in JSON."""

from dataclasses import dataclass
from enum import Enum


class ControllerState(Enum):
    """What a run's controller does."""

    UNKNOWN = "unknown"
    """No trainer has said anything since it attached."""
    ADAPTIVE = "adaptive"
    """It chooses the interval by the budget and what it measures."""
    FIXED = "fixed"
    """The training script gave the interval."""
    PAUSED = "paused"
    """An operator asked for no checkpoints; those that are forced are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerView:
    """The controller of one run, as its rank with the highest cost says."""

    run_name: str
    run_id: str
    owner_uid: int
    state: ControllerState
    attached_count: int
    """Trainers of the run that are attached to this daemon."""
    step: int
    """Boundaries passed."""
    step_s: float
    """What a step takes on average, without pauses; 0: not known."""
    interval_steps: int
    bound: str
    """What bounds the interval: `budget`, `persist bandwidth`, `slots`, …"""
    reason: str
    """The last decision, for people."""
    goal_missed: str
    """Why the work that may be lost at most cannot be kept; empty: it can, or nobody asked."""
    budget: float | None
    """Share of the time that training takes without checkpoints; None: the interval is fixed, or nobody has said."""
    asked_budget: float | None
    """What an operator has asked for and no trainer has confirmed yet; None: nothing, or another one holds by now."""
    cost_share: float | None
    """What checkpoints cost at this interval, as such a share; None: not known."""
    cost_half_width: float | None
    """Half of its interval of confidence (95 %); None: not known."""
    steps_undecided: int
    """Steps, about, until the cost is known well enough; 0: it is."""
    paused_until_unix_s: float
    """0: it is not paused."""
    forced_count: int
    """Calls that wait for a checkpoint that they asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedView:
    """A checkpoint that was asked for and is complete."""

    run_name: str
    checkpoint: str
    """`<attempt>.<step>`"""
    size_bytes: int
    """On this node."""
    waited_s: float
    """From the call until it was complete on all ranks."""
