"""The frequency controller: which boundaries get a checkpoint, and why. Pure; time comes with the observations.

Every rank measures (`observe`, `figures`); rank 0 decides for all of them (`hear`, `due`). First a profile, as
CheckFreq has it: some steps without checkpoints. Then it adapts in both directions. A bound that is not kept by far
raises the interval at once if that is sure or something is no longer what it was; all other changes wait for some
checkpoints after the last one, and a fall for longer each time that the one before had to be taken back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..core.durations import duration_text
from .drift_machine import Spread
from .frequency_meter_machine import UNPAIRED_QUIET, WARMUP_STEPS, CostMeter, MeterMemory
from .frequency_plan import ROUNDING_STEPS, Target, find_target, merge, steps_at_least, steps_at_most
from .frequency_types import (
    BoundKind,
    CheckpointSkipped,
    CheckpointTaken,
    Decision,
    Figures,
    Limits,
    Observation,
    SlowerSteps,
)

PROFILE_STEPS = 24
"""Quiet steps before the first checkpoint, and between those of which nobody knows how long writing takes."""
PROFILE_S = 60.0
"""With long steps, or without quiet ones, the profile ends after this time, or what the user allows to lose."""
PROFILE_STEPS_MIN = 3 + WARMUP_STEPS
UNKNOWN_MAX = 8
"""So many times as far apart are checkpoints at most while none has become durable."""
IN_VAIN = "no checkpoint has become durable yet: they are tried less often meanwhile"
STALLS_NEEDED = 3
"""Until so many were measured, each new one counts at once: the first is often dear, and never again (ADR 0090)."""

CALM_CHECKPOINTS = 5
"""Between two changes of the interval, but for what is urgent or new."""
URGENT = 1.25
"""A bound that surely needs an interval so many times as long is waited for no longer."""
LOWER_SHARE = 0.8
"""The interval goes down when it can become a fifth shorter: less is not worth a change."""
LOW_CHECKPOINTS = 3
"""For so many the interval could have been shorter all the time, before it is."""
FALL_WAIT_MAX = 8 * CALM_CHECKPOINTS
"""Steps beside a neighbour come in bursts, long ones, then short ones: the shortest decide about the budget."""
PROBE_INTERVALS_MAX = 3
"""How long a checkpoint waits for quiet steps; then somebody else keeps the steps busy."""
RESOLUTION = 0.5
"""Slower steps count at the latest when they are known to this share of what checkpoints may cost."""
LOOKS_PER_INTERVAL = 8
"""How often between two checkpoints it is asked whether the next one may come sooner."""
RETRY_STEPS_MIN, VAIN_MAX = 4, 3
"""After a checkpoint that could not be taken: an eighth of an interval, after four in a row a whole one."""


class Frequency(Protocol):
    """What decides about the boundaries of a run."""

    def observe(self, observation: Observation) -> None:
        """Take what this rank has measured."""
        ...

    def due(self, start: int, horizon: int) -> tuple[int, ...]:
        """Return the boundaries among [start, horizon) that get a checkpoint; asked once for each boundary."""
        ...

    @property
    def decision(self) -> Decision:
        """How often now, and why."""
        ...

    @property
    def figures(self) -> Figures:
        """What this rank has measured: to be sent to rank 0."""
        ...

    def hear(self, peers: Sequence[Figures]) -> None:
        """Take the newest figures of the other ranks: on rank 0, before it decides."""
        ...

    def limit(self, budget: float) -> None:
        """Keep to another budget from now on: on rank 0; the next decision goes by it without any calm."""
        ...

    @property
    def slower_steps(self) -> SlowerSteps:
        """What the steps beside checkpoints of this rank took longer so far."""
        ...

    @property
    def memory(self) -> "FrequencyMemory":
        """What the next attempt should know: a part of the checkpoint."""
        ...


class FixedInterval:
    """Every N steps, whatever it costs."""

    def __init__(self, every: int) -> None:
        assert every >= 1
        self._every = every
        self._meter = CostMeter()

    def observe(self, observation: Observation) -> None:
        """Measure what it costs; nothing changes it."""
        self._meter.observe(observation)

    def due(self, start: int, horizon: int) -> tuple[int, ...]:
        """Return the multiples of N."""
        first = -(-start // self._every) * self._every
        return tuple(range(first, horizon, self._every))

    @property
    def decision(self) -> Decision:
        """Always the same."""
        return Decision(
            interval_steps=self._every, kind=BoundKind.FIXED, reason=f"every={self._every}, as asked"
        )

    @property
    def figures(self) -> Figures:
        """What this rank has measured; nothing goes by it."""
        return self._meter.figures

    @property
    def slower_steps(self) -> SlowerSteps:
        """What the steps beside checkpoints of this rank took longer so far."""
        return self._meter.compared

    def hear(self, peers: Sequence[Figures]) -> None:
        """Nothing changes it."""

    def limit(self, budget: float) -> None:
        """Nothing changes it."""

    @property
    def memory(self) -> "FrequencyMemory":
        """Nothing is learnt."""
        return FrequencyMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyMemory:
    """What the controller keeps from one attempt to the next."""

    meter: MeterMemory = field(default_factory=MeterMemory)
    interval_steps: int | None = None
    slower_s: float = 0.0
    unchanged: int = CALM_CHECKPOINTS
    """Checkpoints since the interval was changed, the one that this lies in included."""
    low: int | None = None
    """The same since it could first have been shorter, as it can be since; None: it cannot."""
    limits: str = ""
    """That it was decided by, as text: other ones need only be told apart."""


class FrequencyMachine:
    """One run's controller on one rank. `step`: the boundary that was passed last, or restored."""

    def __init__(self, limits: Limits, *, step: int = 0, memory: FrequencyMemory | None = None) -> None:
        memory = memory or FrequencyMemory()
        self._limits = limits
        self._meter = CostMeter(memory.meter)
        self._interval = memory.interval_steps
        self._slower_s = memory.slower_s
        known = self._meter.figures.step
        self._known_step_s = known.mean if self._interval is not None and known is not None else None
        """What a step took in earlier attempts, whose interval it is; None: nobody knows, or it is of this one."""
        self._known_mtbf_s = self._mtbf_s
        """Mean time between the failures that the checkpoint knows of; this attempt is told of those since."""
        self._is_known = self._interval is not None
        """All that a checkpoint costs was measured at least once."""
        self._is_settled = self._is_known and self._has_stalls(self._meter.figures)
        self._changed_at, self._drifts_known = -memory.unchanged if self._is_known else 0, 0
        """Checkpoints that were taken when it was changed, in this attempt or before."""
        self._is_in_vain = False
        """The interval is longer than what was measured asks for, since nothing has become durable."""
        self._has_fallen, self._fell_at, self._taken_back = False, -FALL_WAIT_MAX, 0
        """What the last change was, when the last fall was, and how many in a row were none."""
        self._low_since = -memory.low if memory.low is not None else None
        """Checkpoints that were taken when the interval could first have been shorter, as it can be since."""
        self._last_listed, self._looked_at = step, float(step)
        self._begun_at: int | None = None
        """The checkpoint that was begun last, as long as nobody has said that it could not be taken."""
        self._vain = 0
        """How many in a row could not be taken."""
        self._peers: Sequence[Figures] = ()
        self._figures = self._meter.figures
        """Of the newest decision."""
        self._target: Target | None = None
        self._probe_until_s: float | None = None
        """When storage should be idle, though steps may be shorter than is known; None while no checkpoint waits."""
        self._withdrawn, self._withdrawn_at = 0, -1
        """How often a cost turned out to be none, and after how many checkpoints the last one did."""
        self._asked = repr(limits)
        self._decided_by = memory.limits or self._asked
        """Where that is not what is asked for, nothing was decided since somebody changed it."""

    # -- every rank

    def observe(self, observation: Observation) -> None:
        """Take what this rank has measured."""
        self._meter.observe(observation)
        if isinstance(observation, CheckpointTaken):
            self._forget_vain(observation.step)
            self._begun_at = observation.step
            self._last_listed = max(self._last_listed, observation.step)
        elif isinstance(observation, CheckpointSkipped) and observation.step == self._last_listed:
            self._forget_vain(observation.step)
            self._begun_at = None
            self._last_listed = observation.step + self._retry_steps() - self.interval_steps
            self._vain += 1

    def _forget_vain(self, step: int) -> None:
        """The one before `step` was begun and never taken back: none was in vain since."""
        if self._begun_at not in (None, step):
            self._vain = 0

    @property
    def figures(self) -> Figures:
        """What this rank has measured: to be sent to rank 0."""
        return self._meter.figures

    @property
    def slower_steps(self) -> SlowerSteps:
        """What the steps beside checkpoints of this rank took longer so far."""
        return self._meter.compared

    @property
    def memory(self) -> FrequencyMemory:
        """What the next attempt should know."""
        counted = self._meter.taken + 1
        return FrequencyMemory(
            meter=self._meter.memory,
            interval_steps=self._interval if self._is_known else None,
            slower_s=self._slower_s,
            unchanged=counted - self._changed_at,
            low=counted - self._low_since if self._low_since is not None else None,
            limits=self._decided_by,
        )

    # -- rank 0

    def hear(self, peers: Sequence[Figures]) -> None:
        """Take the newest figures of the other ranks."""
        self._peers = peers

    def limit(self, budget: float) -> None:
        """Keep to another budget from now on; the next decision goes by it without any calm."""
        if budget != self._limits.budget:
            self._limits = replace(self._limits, budget=budget)
            self._asked, self._looked_at = repr(self._limits), -math.inf

    def due(self, start: int, horizon: int) -> tuple[int, ...]:
        """Return the boundaries among [start, horizon) that get a checkpoint, by what is known now."""
        interval = self._interval or 1
        self._hear_what_is_withdrawn()
        is_news = self._is_withdrawn or self._is_out_of_date or self._has_failed_more
        looked_for = interval if self._is_settled and not is_news else min(interval, PROFILE_STEPS)
        look_at = min(self._last_listed + interval, self._looked_at + 1 + looked_for // LOOKS_PER_INTERVAL)
        if horizon > look_at:
            self._decide()
            self._looked_at = start
        if self._interval is None or self._is_probing(start, horizon):
            return ()
        first = max(self._last_listed + self._interval, start)
        steps = tuple(range(first, horizon, self._interval))
        if not self._is_settled:
            steps = steps[:1]  # the first ones are taken to learn from
        if steps:
            self._last_listed = steps[-1]
        return steps

    def _decide(self) -> None:
        figures = merge([self._meter.figures, *self._peers])
        step = figures.step
        if step is None or step.mean <= 0 or (self._interval is None and not self._is_profiled()):
            return
        self._figures = figures
        self._count_slower_steps(step.mean)
        target = self._target = self._find(self._mtbf_s)
        most, aim = steps_at_most(target.most_s, step.mean), _aim_steps(target, step.mean)
        if self._is_settled and self._is_out_of_date:
            self._bring_up_to_date(step.mean, target.need_s)
        if not self._is_settled:
            self._settle(aim)
        elif self._should_change(target, step, aim, most) and aim != self._interval:
            self._move(aim)
        self._decided_by = self._asked

    @property
    def _mtbf_s(self) -> float | None:
        return self._limits.mtbf_s if self._limits.mtbf_s is not None else self._meter.mtbf_s

    def _find(self, mtbf_s: float | None) -> Target:
        """Return where the interval should be if failures come so often, by the newest figures."""
        return find_target(self._figures, self._limits, mtbf_s=mtbf_s, slower_s=self._slower_s)

    def _hear_what_is_withdrawn(self) -> None:
        """A cost that was none holds no interval up: what counts of slower steps is decided anew."""
        if self._meter.withdrawn > self._withdrawn:
            self._withdrawn, self._withdrawn_at = self._meter.withdrawn, self._meter.taken
            self._slower_s, self._looked_at = 0.0, -math.inf

    @property
    def _is_withdrawn(self) -> bool:
        """Tell whether that was since the newest checkpoint."""
        return self._withdrawn_at == self._meter.taken

    def _change(self, interval: int) -> None:
        self._interval = interval
        self._changed_at, self._drifts_known = self._meter.taken, self._meter.drifts

    def _move(self, interval: int) -> None:
        """Change what was settled."""
        assert self._interval is not None
        falls, taken = interval < self._interval, self._meter.taken
        if self._has_fallen:
            is_back = not falls and taken < self._fell_at + 2 * self._fall_wait
            self._taken_back = self._taken_back + 1 if is_back else 0
        if falls:
            self._fell_at = taken
        self._has_fallen = falls
        self._change(interval)

    @property
    def _fall_wait(self) -> int:
        """Checkpoints from a fall to the next one: twice as many each time that one was soon taken back."""
        return min(CALM_CHECKPOINTS << self._taken_back, FALL_WAIT_MAX)

    def _settle(self, aim: int) -> None:
        """Until enough checkpoints were measured, each new figure counts at once."""
        self._is_known = self._figures.stall is not None and self._figures.persist is not None
        self._is_settled = self._is_known and self._has_stalls(self._figures)
        wanted = aim
        if not self._is_known:
            aim = max(aim, PROFILE_STEPS * min(self._meter.taken, UNKNOWN_MAX))
        self._is_in_vain = aim > wanted
        if aim != self._interval:
            self._change(aim)

    @staticmethod
    def _has_stalls(figures: Figures) -> bool:
        return figures.stall is not None and figures.stall.count >= STALLS_NEEDED

    def _should_change(self, target: Target, step: Spread, aim: int, most: float) -> bool:
        assert self._interval is not None
        interval, taken = self._interval + ROUNDING_STEPS, self._meter.taken
        may_fall = self._may_fall(aim)
        is_lower = aim <= LOWER_SHARE * self._interval
        if self._asked != self._decided_by or (self._is_withdrawn and is_lower):
            return True
        if is_lower and self._has_failed_more and aim <= LOWER_SHARE * self._known_aim(step.mean):
            return True
        if may_fall or (self._interval > most and taken >= self._changed_at + CALM_CHECKPOINTS):
            return True
        # Nothing rises by the first ones of an attempt: they may be dear, and never again.
        if taken < max(self._changed_at, 0) + CALM_CHECKPOINTS:
            # A drift is no noise. Of other ranks' drifts rank 0 knows nothing: of many some always see one by chance.
            return (self._has_drifted and target.need_s > URGENT * interval * step.mean) or (
                target.sure_s > URGENT * interval * step.high
            )
        return target.need_s > interval * step.mean

    @property
    def _has_drifted(self) -> bool:
        """Tell whether something is surely no longer what it was at the last change. Of other ranks nobody knows."""
        return self._meter.drifts > self._drifts_known

    @property
    def _is_out_of_date(self) -> bool:
        """Tell whether steps are surely no longer what earlier attempts knew, before this one's first checkpoint."""
        return self._known_step_s is not None and self._meter.taken == 0 and self._has_drifted

    def _bring_up_to_date(self, step_s: float, need_s: float) -> None:
        """Let the interval be as long as earlier attempts' was, in seconds, where longer steps make it longer; once.

        But no shorter than what is needed.

        Attempts that end before their first checkpoint would teach nobody. What else is new is for the usual rules.
        """
        assert self._interval is not None
        if self._known_step_s is None:
            return
        as_long = steps_at_least(max(self._interval * self._known_step_s, need_s), step_s)
        if as_long <= LOWER_SHARE * self._interval:
            self._interval, self._known_step_s = as_long, None

    @property
    def _has_failed_more(self) -> bool:
        """Tell whether failures come more often than the checkpoint knows, before this attempt's first one.

        Attempts that end before it leave no checkpoint by which a fall is waited for.
        """
        known_s, mtbf_s = self._known_mtbf_s, self._mtbf_s
        return self._meter.taken == 0 and known_s is not None and mtbf_s is not None and mtbf_s < known_s

    def _known_aim(self, step_s: float) -> int:
        """Return where the interval should be but for these failures. What else is new is for the usual rules."""
        return _aim_steps(self._find(self._known_mtbf_s), step_s)

    def _may_fall(self, aim: int) -> bool:
        """Tell whether the interval could have been shorter for some checkpoints, without a break.

        Where something is no longer what it was at the last change, a fall has to wait half as long for the next one.
        """
        assert self._interval is not None
        if aim > LOWER_SHARE * self._interval:
            self._low_since = None
            return False
        if self._low_since is None:
            self._low_since = self._meter.taken
        return self._meter.taken >= max(
            self._changed_at + CALM_CHECKPOINTS,
            self._fell_at + self._fall_wait // (2 if self._has_drifted else 1),
            self._low_since + LOW_CHECKPOINTS,
        )

    def _count_slower_steps(self, step_s: float) -> None:
        """Let slower steps count once they are known well enough, and then by the upper end: so the budget is safe.

        Not beside a first stall that may never come again: what is little of its interval may be much of the next one.
        """
        stall, slower = self._figures.stall, self._figures.slower
        if stall is None or slower is None or self._interval is None:
            return
        if not self._is_settled and not self._has_stalls(self._figures):
            return
        allowed_s = self._limits.budget * self._interval * step_s
        if _is_decided(stall, slower, allowed_s):
            self._slower_s = max(slower.high, 0.0)

    def _retry_steps(self) -> int:
        """Return how soon a checkpoint is tried again that could not be taken: each time in a row twice as late.

        Where one rank has no room for its part, all others pay for theirs in vain: no more often than an interval.
        """
        interval, most = self.interval_steps, self.interval_steps
        if not self._is_known:
            most = max(most, PROFILE_STEPS)
        in_a_row = min(self._vain, VAIN_MAX)
        return min(max(RETRY_STEPS_MIN << in_a_row, interval >> (VAIN_MAX - in_a_row)), most)

    # -- the profile, and looking again

    def _is_profiled(self) -> bool:
        meter, limits = self._meter, self._limits
        is_long = meter.attempt_s >= min(PROFILE_S, limits.most_s or math.inf)
        is_most = meter.steps >= (limits.most_steps or math.inf)
        return meter.quiet_steps >= PROFILE_STEPS or (
            (is_long or is_most) and meter.steps >= PROFILE_STEPS_MIN
        )

    def _is_probing(self, start: int, horizon: int) -> bool:
        """Tell whether the next checkpoint waits beyond [start, horizon) for quiet steps to compare busy ones with."""
        assert self._interval is not None
        if not self._meter.wants_quiet:
            self._probe_until_s = None
            return False
        if self._probe_until_s is None:
            self._probe_until_s = self._meter.attempt_s + self._written_within_s
        if horizon <= self._last_listed + self._probe_steps_max and (
            start < self._last_listed + PROBE_INTERVALS_MAX * (self._interval + UNPAIRED_QUIET)
            or self._meter.attempt_s < self._probe_until_s
        ):
            return True
        self._probe_until_s = None
        self._meter.give_up_quiet()
        return False

    @property
    def _probe_steps_max(self) -> float:
        """Return how many steps after the last checkpoint the next one may wait: as many as may be lost.

        But while nobody knows what busy steps cost, and once after many waits in vain: the budget is a promise, too.
        """
        step, target = self._figures.step, self._target
        if step is None or target is None or self._meter.is_long_unpaired or self._steps_undecided(step.mean):
            return math.inf
        return steps_at_most(target.most_s, step.mean)

    @property
    def _written_within_s(self) -> float:
        """Return how long it takes at most until all snapshots are written that hold slots now."""
        held = self._figures.held
        return self._figures.slot_count * held.mean if held is not None else 0.0

    # -- what a person reads

    @property
    def is_profiling(self) -> bool:
        """Tell whether no interval was decided yet."""
        return self._interval is None

    @property
    def interval_steps(self) -> int:
        """How often now; before it is known, how long the profile is."""
        return self._interval or PROFILE_STEPS

    @property
    def decision(self) -> Decision:
        """How often now, and why."""
        target, step = self._target, self._figures.step
        if self._interval is None or target is None or step is None:
            return Decision(
                interval_steps=self.interval_steps,
                kind=BoundKind.PROFILE,
                reason=self._profile_text(),
                budget=self._limits.budget,
            )
        share, half_width = self._cost(step.mean)
        kind, reason, missed = target.bound.kind, f"bound by {target.bound.text}", target.goal_missed
        if self._is_in_vain:
            kind, reason = BoundKind.PROFILE, IN_VAIN
            if self._interval * step.mean > target.most_s:
                missed = f"{duration_text(target.most_s)} of lost work at most: not possible, {IN_VAIN}"
        return Decision(
            interval_steps=self._interval,
            kind=kind,
            reason=reason,
            goal_missed=missed,
            cost_share=share,
            cost_half_width=half_width,
            cost_least=self._cost_least(step.mean),
            steps_undecided=self._steps_undecided(step.mean),
            budget=self._limits.budget,
        )

    def _profile_text(self) -> str:
        if self._interval is not None:
            return "as an attempt before has learnt, until it is decided anew"
        quiet = self._meter.quiet_steps
        if self._is_profiled():
            return f"profile: complete after {quiet} quiet steps, the interval is decided next"
        return f"profile: {quiet} of {PROFILE_STEPS} quiet steps before the first checkpoint"

    def _cost(self, step_s: float) -> tuple[float | None, float | None]:
        """Return the whole cost as a share of the interval, and half of its interval of confidence."""
        assert self._interval is not None
        stall, slower = self._figures.stall, self._figures.slower
        if stall is None:
            return None, None
        interval_s = self._interval * step_s
        if slower is None:
            return stall.mean / interval_s, None
        half_width_s = math.hypot(stall.half_width, slower.half_width)
        share = (stall.mean + max(slower.mean, 0.0)) / interval_s
        return share, half_width_s / interval_s if math.isfinite(half_width_s) else None

    def _cost_least(self, step_s: float) -> float:
        assert self._interval is not None
        stall = self._figures.stall
        return max(stall.low, 0.0) / (self._interval * step_s) if stall is not None else 0.0

    def _steps_undecided(self, step_s: float) -> int:
        """Return about how many steps it takes until it is known well enough what slower steps cost."""
        assert self._interval is not None
        stall, slower = self._figures.stall, self._figures.slower
        if stall is None or slower is None or slower.count < 2:
            return 2 * self._interval
        allowed_s = self._limits.budget * self._interval * step_s
        if _is_decided(stall, slower, allowed_s):
            return 0
        needed = slower.count * (slower.half_width / (RESOLUTION * allowed_s)) ** 2
        return max(1, math.ceil(needed - slower.count)) * self._interval


def _aim_steps(target: Target, step_s: float) -> int:
    return int(min(steps_at_least(target.aim_s, step_s), steps_at_most(target.most_s, step_s)))


def _is_decided(stall: Spread, slower: Spread, allowed_s: float) -> bool:
    """Tell whether the slower steps are surely within what is allowed, surely not, or known as well as needed."""
    left_s = allowed_s - stall.mean
    return slower.low > left_s or slower.high <= left_s or slower.half_width <= RESOLUTION * allowed_s
