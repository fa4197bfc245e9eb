"""What one rank measures of its own training: observations in, figures out. Pure."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import median
from typing import assert_never

from .cost_window_machine import CostWindow
from .drift_machine import DRIFT_Z, Block, DriftWindow, Spread
from .frequency_types import (
    CheckpointPersisted,
    CheckpointSkipped,
    CheckpointStalled,
    CheckpointTaken,
    Failed,
    FailureKind,
    Figures,
    Observation,
    SlowerSteps,
    StepEnded,
    StorageKnown,
)
from .slow_down_machine import Cycle, SlowDown, Steps

TIME_S_MAX = 1e9
"""Nothing takes 30 years."""
STEPS_PER_CHECK = 32
"""Steps are many; what a checkpoint costs is compared with its past more often."""

WARMUP_STEPS = 5
"""Of each attempt, not measured: compilation, first touches of memory, autotuning."""

PAUSE_FACTOR, PAUSE_DEVIATIONS = 3.0, 6.0
"""A step so much longer than the mean quiet one is a pause: an evaluation, the end of an epoch."""
PAUSE_NEEDS = 8
"""Of fewer steps, one that was a pause would hide all others in its deviation: before, the median tells."""
PAUSES_MAX = 2
"""Of quiet steps in a row; one more, and they are the rule."""
FIRST_STEPS, PLACES_KEPT, PLACES_NEEDED = 2, 8, 2
"""Long steps are no pauses where they come at one place after half of so many checkpoints, and not after one."""
STEPS_AFTER = 2
"""Beside which nothing is written any more, but which a checkpoint still makes long: its commit, memory given back."""
LONG_KEPT = 64
"""Long steps of each kind that are counted; then half of the kind is forgotten: the rarer kind stays known."""
ALIKE_NEEDS = 2
"""Pauses among quiet steps, from which on it may be said that the busy ones have as many."""
ALIKE_Z = 2.0
"""By chance one of seven times is as far apart."""
WITHDRAW_NEEDS = 8
"""The same, from which on what was taken for a cost is withdrawn."""

QUIET_ENOUGH = 8
"""Quiet steps, besides twice the busy ones, that make a cycle's comparison as good as it can become."""
UNPAIRED_MAX = 4
"""Checkpoints without a quiet step between them, after which the next one should wait for some."""
UNPAIRED_QUIET = 2
BUSY_KEPT = 32
"""Newest busy steps, which show that quiet ones have become shorter where there are none to measure."""
UNPAIRED_LIMIT = 64
"""The same where waiting was in vain: each time twice as many, up to this."""

FAILURES_NEEDED = 3
"""From three failures on, their mean time is known within a factor of four."""


@dataclass(slots=True)
class LongSteps:
    """How often steps are long near checkpoints, and how often far from them: pauses come to both alike."""

    near: int = 0
    near_long: int = 0
    far: int = 0
    far_long: int = 0

    def add_near(self, *, is_long: bool) -> None:
        self.near += 1
        self.near_long += is_long
        if self.near_long > LONG_KEPT:
            self.near, self.near_long = self.near // 2, self.near_long // 2

    def add_far(self, others: int, *, long: int) -> None:
        self.far += others + long
        self.far_long += long
        if self.far_long > LONG_KEPT:
            self.far, self.far_long = self.far // 2, self.far_long // 2

    @property
    def are_alike(self) -> bool:
        """Tell whether both kinds of steps are long, and the near ones no more often."""
        return self.far_long >= ALIKE_NEEDS and not self._differ(ALIKE_Z)

    @property
    def are_surely_alike(self) -> bool:
        """Tell the same of so many that what was said before was wrong.

        Near ones, too, or that none of them was long says nothing: at the far ones' rate one of them would have been.
        """
        is_enough = self.far_long >= WITHDRAW_NEEDS and self.near * self.far_long >= self.far
        return is_enough and self.are_alike

    @property
    def are_surely_more(self) -> bool:
        """Tell whether near steps are long more often than chance explains."""
        return self.near_long >= PLACES_NEEDED and self._differ(DRIFT_Z)

    def _differ(self, z: float) -> bool:
        """Tell whether so many of the long steps would be near by chance more rarely than `z` deviations.

        By Chernoff's bound of the binomial distribution, which holds for few steps, too.
        """
        count = self.near_long + self.far_long
        found, expected = self.near_long / count, self.near / (self.near + self.far)
        if found <= expected:
            return False
        surprise = found * math.log(found / expected)
        if self.far_long:
            surprise += (1 - found) * math.log((1 - found) / (1 - expected))
        return count * surprise > z * z / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterMemory:
    """What a rank's measuring keeps from one attempt to the next."""

    step: tuple[Block, ...] = ()
    stall: tuple[Block, ...] = ()
    slower: tuple[Block, ...] = ()
    persist: tuple[Block, ...] = ()
    held: tuple[Block, ...] = ()
    size_bytes: int = 0
    trained_s: float = 0.0
    """In all attempts."""
    trainer_failures: int = 0
    """In that time, as `node_failures`."""
    node_failures: int = 0
    waiting: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]] = ((), (), ())
    """Exceptions of stall, persist and held that wait for a second one."""
    slower_but_long: tuple[Block, ...] | None = None
    """What `slower` is if the long steps in it turn out to be pauses; None: there are none in it."""
    long_steps: LongSteps = field(default_factory=LongSteps)
    """By which that is told."""

    def of_ranks(self, grown: float) -> "MeterMemory":
        """Return what holds at `grown` times as many ranks: as many failures come in so much less time."""
        return MeterMemory(
            trained_s=min(self.trained_s / grown, TIME_S_MAX),
            trainer_failures=self.trainer_failures,
            node_failures=self.node_failures,
        )


class CostMeter:
    """One rank's measuring."""

    def __init__(self, memory: MeterMemory | None = None) -> None:
        memory = memory or MeterMemory()
        self._step = DriftWindow(memory.step, check_every=STEPS_PER_CHECK)
        stall, persist, held = memory.waiting
        self._stall = CostWindow(memory.stall, stall)
        self._slower = SlowDown(memory.slower, memory.slower_but_long)
        self._persist, self._held = CostWindow(memory.persist, persist), CostWindow(memory.held, held)
        self._size_bytes, self._trained_s = memory.size_bytes, memory.trained_s
        self._failures = {
            FailureKind.TRAINER: memory.trainer_failures,
            FailureKind.NODE: memory.node_failures,
        }
        self._storage: StorageKnown | None = None
        self._cycle: Cycle | None = None
        self._held_back: list[float] = []
        """Quiet steps that may be pauses."""
        self._pauses_far = 0
        """Of them, too long after a checkpoint to be its cost."""
        self._newest_s = deque[float](maxlen=PAUSE_NEEDS)
        """Steps of whatever kind but busy."""
        self._newest_busy_s = deque[float](maxlen=BUSY_KEPT)
        """But for those that look like pauses."""
        self._since_taken = 0
        self._long_at = deque[set[int]](maxlen=PLACES_KEPT)
        """For each of the newest checkpoints: how many steps after it long ones came; the first ones are one place."""
        self._long_steps = replace(memory.long_steps)
        self._busy_until = deque[int](maxlen=PLACES_KEPT)
        """For each of them: how many steps after it the last busy one came."""
        self.pauses = 0
        """Steps that were none: evaluations and their like."""
        known = self._slower.spread
        self._unpaired_max = UNPAIRED_MAX if known is not None and known.count > 1 else 1
        """The first two comparisons are not waited for."""
        self.drifts = 0
        """How often something measured turned out to be no longer what it was."""
        self._last_s: float | None = None
        self._measured = Block(0, 0.0, 0.0)
        self.steps = 0
        """Ended in this attempt."""
        self.attempt_s = 0.0
        """That this attempt has trained."""
        self.taken = 0
        """Checkpoints of this attempt."""

    def observe(self, observation: Observation) -> None:
        """Take one observation."""
        match observation:
            case StepEnded():
                self._step_ended(observation)
            case CheckpointTaken():
                self._checkpoint_taken()
            case CheckpointStalled():
                self.drifts += self._stall.add(observation.stall_s)
            case CheckpointPersisted():
                self._size_bytes = observation.size_bytes
                at_once = self._storage.slot_count if self._storage else 1
                self.drifts += self._persist.add(observation.persist_s, at_once=at_once)
                self.drifts += self._held.add(observation.held_s, at_once=at_once)
            case StorageKnown():
                self._storage = observation
            case Failed():
                if self._trained_s > 0:  # else nobody knows over which time they came
                    self._failures[observation.kind] += observation.attempts
            case CheckpointSkipped():
                pass  # it cost nothing that can be told from the step
            case _:
                assert_never(observation)

    # -- what is known

    @property
    def figures(self) -> Figures:
        """What was measured."""
        storage = self._storage
        knows_fill = storage is not None and storage.capacity_bytes > 0 and self._size_bytes > 0
        return Figures(
            step=self._step.spread or self._any_step(),
            stall=self._stall.spread,
            slower=self._slower.spread,
            persist=self._persist.spread,
            held=self._held.spread,
            slot_count=storage.slot_count if storage else 2,
            fill={storage.node: self._size_bytes / storage.capacity_bytes} if storage and knows_fill else {},
        )

    @property
    def compared(self) -> SlowerSteps:
        """All comparisons of this attempt together, however old."""
        return self._slower.compared

    @property
    def withdrawn(self) -> int:
        """How often long steps that were taken for a cost turned out to be pauses."""
        return self._slower.withdrawn

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures, once there were enough of them. Both kinds lose half an interval on average."""
        count = sum(self._failures.values())
        return self._trained_s / count if count >= FAILURES_NEEDED and self._trained_s > 0 else None

    @property
    def quiet_steps(self) -> int:
        """Quiet steps that look like the present."""
        spread = self._step.spread
        return spread.count if spread else 0

    @property
    def wants_quiet(self) -> bool:
        """Tell whether the next checkpoint should wait for quiet steps, or nobody learns what the busy ones cost."""
        cycle = self._cycle
        if cycle is None or cycle.quiet.count >= UNPAIRED_QUIET:
            return False
        return cycle.checkpoints >= self._unpaired_max

    @property
    def is_long_unpaired(self) -> bool:
        """Tell whether none has come for as long as one may be missing."""
        return self._unpaired_max >= UNPAIRED_LIMIT

    def give_up_quiet(self) -> None:
        """No quiet steps came: what the busy ones cost stays unknown for some time.

        A quiet step takes no longer than a busy one. Where those that are known surely do, steps have become shorter
        since, and the busy ones are the better guess until a quiet one comes.
        """
        known, busy = self._step.spread, _all_of(self._newest_busy_s)
        if known is not None and _is_surely_shorter(busy, known):
            self._step, self._measured = DriftWindow(check_every=STEPS_PER_CHECK), busy
            self._newest_s.clear()
            self._held_back.clear()
            self._steps_changed()
        self._cycle = None
        self._unpaired_max = min(max(2 * self._unpaired_max, UNPAIRED_MAX), UNPAIRED_LIMIT)

    @property
    def memory(self) -> MeterMemory:
        """What the next attempt should know."""
        return MeterMemory(
            step=tuple(self._step.blocks),
            stall=tuple(self._stall.blocks),
            slower=tuple(self._slower.blocks),
            persist=tuple(self._persist.blocks),
            held=tuple(self._held.blocks),
            size_bytes=self._size_bytes,
            trained_s=self._trained_s,
            trainer_failures=self._failures[FailureKind.TRAINER],
            node_failures=self._failures[FailureKind.NODE],
            waiting=(self._stall.waiting, self._persist.waiting, self._held.waiting),
            slower_but_long=tuple(self._slower.blocks_but_long) if self._slower.counts_long else None,
            long_steps=replace(self._long_steps),
        )

    def _any_step(self) -> Spread | None:
        """Without any quiet step, the mean of all is the best guess."""
        return Spread(mean=self._measured.mean, count=1) if self._measured.samples else None

    # -- observations

    def _step_ended(self, step: StepEnded) -> None:
        passed_s = step.step_s if self._last_s is None else step.at_s - self._last_s
        assert passed_s >= 0, step
        self._last_s = step.at_s
        self._trained_s += passed_s
        self.attempt_s += passed_s
        self.steps += 1
        if not step.is_busy:
            self._newest_s.append(step.step_s)
        if self.steps <= WARMUP_STEPS:
            return
        self._measured = self._measured.joined(Block(1, step.step_s, 0.0))
        self._since_taken += 1
        if not step.is_busy:
            self._quiet_step(step.step_s)
        elif self._cycle is not None:
            self._busy_step(step.step_s, self._cycle)

    def _busy_step(self, step_s: float, cycle: Cycle) -> None:
        """Put long ones aside: whether they are pauses is seen when the cycle is compared."""
        is_long = self._is_long(step_s)
        self._busy_until[-1] = self._since_taken
        self._near_step(step_s, cycle.long, is_long=is_long)
        if not is_long:
            cycle.busy.add(step_s)
            self._newest_busy_s.append(step_s)

    def _near_step(self, step_s: float, long: Steps, *, is_long: bool) -> None:
        """Put it to `long` if it is."""
        self._long_steps.add_near(is_long=is_long)
        if is_long:
            long.add(step_s)
            self._long_at[-1].add(max(self._since_taken, FIRST_STEPS))

    def _quiet_step(self, step_s: float) -> None:
        """Hold long ones back, until there are too many in a row for pauses."""
        is_long, is_near = self._is_long(step_s), self._is_near
        if is_near and self._cycle is not None:
            self._near_step(step_s, self._cycle.long_after, is_long=is_long)
        if is_long:
            self._held_back.append(step_s)
            self._pauses_far += not is_near
            if len(self._held_back) <= PAUSES_MAX:
                return
        else:
            self._long_steps.add_far(int(not is_near), long=self._pauses_far)
            if self._slower.counts_long and self._long_steps.are_surely_alike:
                self._slower.withdraw_long()  # they came in step with checkpoints, and come without them as often
            self.pauses += self._pauses_far
            self._held_back = [step_s]
        self._pauses_far = 0
        for each_s in self._held_back:
            if self._step.add(each_s):
                self._steps_changed()
            if self._cycle is not None:
                self._cycle.quiet.add(each_s)
        self._held_back.clear()
        cycle = self._cycle
        if cycle is not None and cycle.quiet.count >= 2 * cycle.busy.count + QUIET_ENOUGH:
            self._compare(cycle)
            self._cycle = None

    @property
    def _is_near(self) -> bool:
        """Tell whether a checkpoint may make this step long: so many steps after one lately were busy, or nearly."""
        return bool(self._busy_until) and self._since_taken <= max(self._busy_until) + STEPS_AFTER

    def _steps_changed(self) -> None:
        """Steps are no longer what they were: nothing to compare the older ones with."""
        self.drifts += 1
        self._cycle, self._long_steps = None, LongSteps()

    def _is_long(self, step_s: float) -> bool:
        known = self._step.spread
        if known is None or known.count < PAUSE_NEEDS:
            return bool(self._newest_s) and step_s > PAUSE_FACTOR * median(self._newest_s)
        return step_s > max(PAUSE_FACTOR * known.mean, known.mean + PAUSE_DEVIATIONS * known.deviation)

    def _checkpoint_taken(self) -> None:
        self.taken += 1
        self._since_taken = 0
        self._long_at.append(set())
        self._busy_until.append(0)
        cycle = self._cycle
        if cycle is not None and cycle.quiet.count > 0:
            self._compare(cycle)
            cycle = None
        self._cycle = cycle or Cycle()
        self._cycle.checkpoints += 1

    @property
    def _come_with_checkpoints(self) -> bool:
        """Tell whether long busy steps are no pauses: they come at one place, or with most checkpoints and not else."""
        needed = max(PLACES_NEEDED, len(self._long_at) / 2)
        places = Counter(place for places in self._long_at for place in places)
        if max(places.values(), default=0) >= needed:
            return not self._long_steps.are_alike
        return sum(map(bool, self._long_at)) >= needed and self._long_steps.are_surely_more

    def _compare(self, cycle: Cycle) -> None:
        """Count what a cycle's steps took longer, the long ones only where checkpoints bring them about."""
        with_long = self._come_with_checkpoints
        if not with_long:
            self.pauses += cycle.long_count
        self.drifts += self._slower.add(cycle, with_long=with_long)
        known = self._slower.spread
        if known is not None and known.count > 1:
            self._unpaired_max = UNPAIRED_MAX


def _all_of(values: Iterable[float]) -> Block:
    return reduce(Block.joined, (Block(1, value, 0.0) for value in values), Block(0, 0.0, 0.0))


def _is_surely_shorter(busy: Block, known: Spread) -> bool:
    """Tell whether busy steps are shorter than the known ones by more than chance explains."""
    few = Spread(mean=busy.mean, deviation=math.sqrt(busy.variance), count=busy.samples)
    return few.mean + few.half_width_at(DRIFT_Z) < known.mean - known.half_width_at(DRIFT_Z)
