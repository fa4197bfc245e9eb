"""Policies of how often to checkpoint: those that others have published, and ours.

They differ in nothing else: the same snapshots, the same devices, the same restarts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from .drift_machine import exactly
from .frequency_machine import LOOKS_PER_INTERVAL, FrequencyMachine, FrequencyMemory
from .frequency_meter_machine import WARMUP_STEPS
from .frequency_plan import DEADLINE_ROOM, DEADLINE_STEPS, Target, find_target
from .frequency_types import (
    CheckpointPersisted,
    CheckpointSkipped,
    CheckpointStalled,
    CheckpointTaken,
    Decision,
    Failed,
    FailureKind,
    Figures,
    Limits,
    StepEnded,
    StorageKnown,
)
from .goodput_types import Costs, Job, Stretch

SHOWN_STEPS_MAX = 6
"""Of a stretch our controller is shown so many steps at most of each kind: in the mean they are the same."""


class Policy(Protocol):
    """Decides, and is told what became of it."""

    in_flight_max: int
    waits: bool
    """Where no place is free: for one, instead of skipping the checkpoint."""

    @property
    def before_end_s(self) -> Sequence[float]:
        """How long before an announced end of the machine it begins checkpoints, in this order; none: it heeds none.

        All but the last are left out where a checkpoint is under way, or was taken at this boundary.
        """
        ...

    def steps_until_look(self, step: int, idle_in_s: float) -> int:
        """Return how many steps to train before `is_due` is asked. `idle_in_s`: until everything is written."""
        ...

    def trained(self, stretch: Stretch) -> None:
        """Some steps were trained."""
        ...

    def is_due(self, step: int) -> bool:
        """Tell whether this boundary gets a checkpoint."""
        ...

    def taken(self, step: int, stall_s: float) -> object:
        """A checkpoint was taken and cost that (a wait included); return what it should remember."""
        ...

    def skipped(self, step: int) -> None:
        """There was no place for it."""
        ...

    def persisted(self, persist_s: float, held_s: float) -> None:
        """A checkpoint has become durable."""
        ...

    def restored(self, step: int, memory: object, kind: FailureKind) -> None:
        """The job failed and goes on at `step`, with what `taken` returned there; None at the very beginning."""
        ...


class _Every:
    """Every so many steps; the parent of the policies that only count."""

    waits = False
    before_end_s: Sequence[float] = ()

    def __init__(self, job: Job, every: int) -> None:
        assert every >= 1
        self.in_flight_max = job.slot_count
        self.every = every
        self._last = 0

    def steps_until_look(self, step: int, idle_in_s: float) -> int:
        """Count from the last checkpoint."""
        del idle_in_s
        return max(1, self._last + self.every - step)

    def trained(self, stretch: Stretch) -> None:
        """Nothing is learnt."""

    def is_due(self, step: int) -> bool:
        """Tell whether so many steps have passed."""
        return step >= self._last + self.every

    def taken(self, step: int, stall_s: float) -> object:
        """Count from here."""
        del stall_s
        self._last = step
        return None

    def skipped(self, step: int) -> None:
        """Count from here, too."""
        self._last = step

    def persisted(self, persist_s: float, held_s: float) -> None:
        """Nothing is learnt."""

    def restored(self, step: int, memory: object, kind: FailureKind) -> None:
        """Count from there."""
        del memory, kind
        self._last = step


class EachEpoch(_Every):
    """What most scripts do."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.epoch_steps)


class Fixed(_Every):
    """A number somebody chose."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.fixed_steps)


class YoungDaly(_Every):
    """The best interval for the costs of the beginning and the true failure rate (Daly 2006)."""

    def __init__(self, job: Job) -> None:
        costs = job.costs_at(0.0)
        cost_s = costs.stall_s + costs.slower * (costs.copy_s + costs.persist_s)
        super().__init__(job, max(1, math.ceil(daly_s(cost_s, job.mtbf_s) / costs.step_s)))


class PCcheck(_Every):
    """Its bound, T_w / (N q t), for the costs of the beginning (ASPLOS'25); waits where no place is free.

    T_w is the time of one write while N are under way: where one alone keeps the devices busy, as here, N times as
    long.
    """

    waits = True

    def __init__(self, job: Job) -> None:
        costs = job.costs_at(0.0)
        writing_s = job.slot_count * costs.persist_s
        steps = writing_s / (job.slot_count * (1 + job.budget) * costs.step_s)
        super().__init__(job, max(1, math.ceil(steps)))


class CheckFreq(_Every):
    """As published (FAST'21): one in flight, profiled once, and two steps more whenever a window costs too much.

    The variant that watches for ever (`dynamic`): the other one stops at the first window within the budget.
    """

    waits = True

    def __init__(self, job: Job) -> None:
        self._profiled, self._budget = job.costs_at(0.0), job.budget
        steps = (self._profiled.copy_s + self._profiled.persist_s) / self._profiled.step_s
        super().__init__(job, max(1, math.ceil(steps)))
        self.in_flight_max = 1
        self._window_s, self._window_steps = 0.0, 0

    def trained(self, stretch: Stretch) -> None:
        """Look at windows of `every` steps."""
        self._window_steps += stretch.steps
        self._window_s += stretch.steps * stretch.step_s + stretch.slower_s
        expected_s = self._window_steps * self._profiled.step_s
        if self._window_steps < self.every:
            return
        if self._window_s > (1 + self._budget) * expected_s:
            self.every += 2
        self._window_s, self._window_steps = 0.0, 0

    def taken(self, step: int, stall_s: float) -> object:
        """The stall is part of the next window."""
        self._window_s += stall_s
        return super().taken(step, stall_s)


class Continuous(_Every):
    """Again as soon as the last one is durable, as Orbax' ContinuousCheckpointingPolicy."""

    before_end_s = (math.inf,)

    def __init__(self, job: Job) -> None:
        super().__init__(job, 1)
        self._step_s = job.costs_at(0.0).step_s

    def steps_until_look(self, step: int, idle_in_s: float) -> int:
        """Wait until nothing is in flight."""
        del step
        return max(1, math.ceil(idle_in_s / self._step_s))

    def trained(self, stretch: Stretch) -> None:
        """Remember how long a step takes, to know when to look again."""
        self._step_s = stretch.step_s


class Ours:
    """The controller that runs in production, told the failure rate as Young and Daly are."""

    waits = False

    def __init__(self, job: Job) -> None:
        self._step_s = self._stall_s = self._held_s = 0.0
        self.in_flight_max = job.slot_count
        self._limits = Limits(budget=job.budget, mtbf_s=job.mtbf_s)
        self._storage = StorageKnown(slot_count=job.slot_count, node="node", capacity_bytes=0)
        self._attempt = 1
        self._machine = self._begin(0, None)

    def _begin(self, step: int, memory: FrequencyMemory | None) -> FrequencyMachine:
        machine = FrequencyMachine(self._limits, step=step, memory=memory)
        machine.observe(self._storage)
        self._last, self._is_new = step, not machine.is_profiling
        return machine

    @property
    def decision(self) -> Decision:
        """How often now, and why."""
        return self._machine.decision

    @property
    def before_end_s(self) -> Sequence[float]:
        """At once, and again as late as it still fits, once it is known how long one takes."""
        if not self._held_s:
            return (math.inf,)
        return math.inf, DEADLINE_ROOM * (self._stall_s + self._held_s) + DEADLINE_STEPS * self._step_s

    def steps_until_look(self, step: int, idle_in_s: float) -> int:
        """Look when the next one is due by what is known now; soon again while it waits for quiet steps.

        The profile counts steps: each is shown.
        """
        del idle_in_s
        if self._machine.is_profiling:
            return 1
        interval = self._machine.interval_steps
        soon = math.ceil(interval / LOOKS_PER_INTERVAL)
        return max(self._last + interval - step, soon)

    def trained(self, stretch: Stretch) -> None:
        """Show the controller some steps: busy ones with all that the busy ones took longer."""
        self._step_s = stretch.step_s
        busy = min(stretch.busy_steps, SHOWN_STEPS_MAX)
        quiet = min(stretch.steps - stretch.busy_steps, 2 * SHOWN_STEPS_MAX)
        shown = [(stretch.step_s, False)] * (WARMUP_STEPS if self._is_new else 0)
        shown += [(stretch.step_s + stretch.slower_s / max(busy, 1), True)] * busy
        shown += [(stretch.step_s, False)] * quiet
        self._is_new = False
        for step_s, is_busy in shown:
            self._machine.observe(StepEnded(at_s=stretch.at_s, step_s=step_s, is_busy=is_busy))

    def is_due(self, step: int) -> bool:
        """Ask the controller."""
        return bool(self._machine.due(step, step + 1))

    def taken(self, step: int, stall_s: float) -> object:
        """Tell it what that cost."""
        self._last, self._stall_s = step, stall_s
        self._machine.observe(CheckpointTaken(step=step))
        self._machine.observe(CheckpointStalled(stall_s=stall_s))
        return self._attempt, self._machine.memory

    def skipped(self, step: int) -> None:
        """Tell it: it tries again soon."""
        self._machine.observe(CheckpointSkipped(step=step))

    def persisted(self, persist_s: float, held_s: float) -> None:
        """Tell it."""
        self._held_s = held_s
        self._machine.observe(CheckpointPersisted(size_bytes=1, persist_s=persist_s, held_s=held_s))

    def restored(self, step: int, memory: object, kind: FailureKind) -> None:
        """Go on with the memory that lies in the checkpoint; attempts that left none have died since, too."""
        self._attempt += 1
        attempt, known = cast("tuple[int, FrequencyMemory | None]", memory or (self._attempt - 1, None))
        self._machine = self._begin(step, known)
        self._machine.observe(Failed(kind=kind, attempts=self._attempt - attempt))


def target_of(job: Job, costs: Costs) -> Target:
    """Return what our controller aims for once it knows what holds then."""
    busy_s = costs.copy_s + costs.persist_s
    figures = Figures(
        step=exactly(costs.step_s),
        stall=exactly(costs.stall_s),
        persist=exactly(costs.persist_s),
        held=exactly(busy_s),
        slot_count=job.slot_count,
    )
    limits = Limits(budget=job.budget, mtbf_s=job.mtbf_s)
    slower_s = busy_s * costs.slower / (1 + costs.slower)
    return find_target(figures, limits, mtbf_s=job.mtbf_s, slower_s=slower_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval between checkpoints that cost so much (Daly 2006, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


POLICIES: Mapping[str, Callable[[Job], Policy]] = {
    "each epoch": EachEpoch,
    "fixed": Fixed,
    "CheckFreq": CheckFreq,
    "Young/Daly": YoungDaly,
    "PCcheck": PCcheck,
    "continuous": Continuous,
    "everstep": Ours,
}
"""By the names that tables show."""
