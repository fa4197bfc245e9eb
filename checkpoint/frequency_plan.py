"""How often a checkpoint may be taken: what each limit asks for, and which of them decides. Pure.

`interval = max(cost / budget, persist time, slot time / slots, endurance, least, min(best for failures, most))`, each
in seconds between two checkpoints. `everstep plan` predicts with the same functions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from msgspec import structs

from ..core.durations import duration_text
from .drift_machine import SURE_Z, Spread, student_t
from .frequency_types import Bound, BoundKind, Figures, Limits
from .goodput_plan import BudgetLoss, budget_loss

ROOM = 1.15
"""What is measured may grow by so much before the interval has to: no change for each breath of the drives."""
DEADLINE_ROOM, DEADLINE_STEPS = 1.5, 3
"""A last checkpoint begins so many times as early as it took lately, and so many steps: it cannot be taken again."""
DAY_S = 86400.0
UNSURE_S = -math.inf
"""Of bounds that are no promise for each moment: an interval that is a little short can wait to be raised."""
ROUNDING_STEPS = 1e-6
"""A bound of 12.0000001 steps is one of 12."""
ROUNDING_S = 1e-9
"""Slower steps that are less altogether were none."""


# --- figures of all ranks ---------------------------------------------------------------------------------------------


def merge(ranks: Sequence[Figures]) -> Figures:
    """Return the figures that no rank is worse than: the fastest step, the largest cost, the fewest slots.

    Ranks train in step: what stalls one makes steps of all others slower. So the slow-down is what steps took longer
    beyond the largest stall, on the rank of which that is surest: of many ranks some look slow by chance, and the
    interval of confidence is as wide as so many need (Bonferroni).
    """
    if len(ranks) == 1:
        return ranks[0]
    fill: dict[str, float] = {}
    for figures in ranks:
        for node, share in figures.fill.items():
            fill[node] = fill.get(node, 0.0) + share
    stall = _largest([figures.stall for figures in ranks])
    return Figures(
        step=min(_known(figures.step for figures in ranks), key=lambda spread: spread.mean, default=None),
        stall=stall,
        slower=_surest([_slower_beyond(stall, figures) for figures in ranks]),
        persist=_largest([figures.persist for figures in ranks]),
        held=_largest([figures.held for figures in ranks]),
        slot_count=min(figures.slot_count for figures in ranks),
        fill=fill,
    )


def _known(spreads: Iterable[Spread | None]) -> list[Spread]:
    return [spread for spread in spreads if spread is not None]


def _largest(spreads: Sequence[Spread | None]) -> Spread | None:
    return max(_known(spreads), key=lambda spread: spread.mean, default=None)


def _slower_beyond(stall: Spread | None, figures: Figures) -> Spread | None:
    """Return the slow-down of one rank less what its own stall is shorter than the longest one: it waited for that."""
    if stall is None or figures.stall is None or figures.slower is None:
        return figures.slower
    waited_s = stall.mean - figures.stall.mean
    return structs.replace(figures.slower, mean=figures.slower.mean - waited_s)


def _surest(spreads: Sequence[Spread | None]) -> Spread | None:
    chance = 1 - NormalDist().cdf(SURE_Z)
    z = -NormalDist().inv_cdf(chance / len(spreads))
    found = max(_known(spreads), key=lambda spread: spread.mean - spread.half_width_at(z), default=None)
    if found is None or found.count < 2:
        return found
    wider = student_t(z, found.count - 1) / student_t(SURE_Z, found.count - 1)
    return Spread(mean=found.mean, deviation=wider * found.deviation, count=found.count)


# --- bounds -----------------------------------------------------------------------------------------------------------


def hard_bounds(figures: Figures, limits: Limits, *, slower_s: float = 0.0) -> list[Bound]:
    """Return what no checkpoint may be taken more often than, as far as it is known; never empty.

    `slower_s`: what the slower steps beside one checkpoint count for, whatever the figures say.
    """
    found = [_least(figures, limits)]
    if figures.stall is not None:
        found.append(_budget(figures, figures.stall, slower_s, limits.budget))
    if figures.persist is not None:
        found.append(_measured(BoundKind.BANDWIDTH, figures.persist, 1))
    if figures.held is not None:
        found.append(_measured(BoundKind.SLOTS, figures.held, figures.slot_count))
    if figures.fill:
        found.append(_endurance(figures.fill, limits.drive_writes_per_day))
    return found


def best_for_failures(cost_s: float, mtbf_s: float) -> Bound:
    """Return the interval that loses least to checkpoints and failures together (Young 1974)."""
    best_s = math.sqrt(2 * cost_s * mtbf_s)
    text = f"the best for a failure each {duration_text(mtbf_s)}: sqrt(2 x {duration_text(cost_s)} x that)"
    return Bound(kind=BoundKind.FAILURES, need_s=best_s, sure_s=UNSURE_S, aim_s=best_s, text=text)


def most_allowed(figures: Figures, limits: Limits) -> Bound | None:
    """Return the longest interval that keeps the lost work allowed; None where the user allows any."""
    step_s = figures.step.mean if figures.step else 0.0
    held_s = figures.held.mean if figures.held else 0.0
    allowed = [limits.most_s] if limits.most_s is not None else []
    if limits.most_steps is not None and step_s:
        allowed.append(limits.most_steps * step_s)
    if not allowed:
        return None
    left_s = min(allowed) - held_s
    text = f"at most {duration_text(min(allowed))} of work to lose, less {duration_text(held_s)} to commit"
    return Bound(kind=BoundKind.MOST, need_s=left_s, sure_s=UNSURE_S, aim_s=left_s, text=text)


def _least(figures: Figures, limits: Limits) -> Bound:
    step_s = figures.step.mean if figures.step else 0.0
    if limits.least_s > limits.least_steps * step_s:
        least_s, sure_s, text = limits.least_s, UNSURE_S, duration_text(limits.least_s)
    else:
        count = limits.least_steps
        least_s, text = count * step_s, "each step" if count == 1 else f"{count} steps"
        sure_s = least_s
    text = f"the least interval allowed: {text}"
    return Bound(kind=BoundKind.LEAST, need_s=least_s, sure_s=sure_s, aim_s=least_s, text=text)


def _budget(figures: Figures, stall: Spread, slower_s: float, budget: float) -> Bound:
    surely_slower_s = min(slower_s, figures.slower.low) if figures.slower else slower_s
    parts = duration_text(stall.mean)
    if slower_s > ROUNDING_S:
        parts = f"{parts} stall + {duration_text(slower_s)} slower steps"
    need_s = (stall.mean + slower_s) / budget
    return Bound(
        kind=BoundKind.BUDGET,
        need_s=need_s,
        sure_s=(stall.low + surely_slower_s) / budget,
        aim_s=ROOM * need_s,
        text=f"the budget: {parts} / {100 * budget:.3g} %",
    )


def full_after_bytes(drives: Iterable[tuple[float, float]]) -> float:
    """Return how much is written until the first drive is written full once; 0 where nobody knows how large any is.

    `drives`: speed in bytes/s and capacity in bytes of each; 0 where unknown. Each gets bytes by its speed, of whatever
    size it is; one of unknown speed gets as many as the median of the others (`deal_plan`).
    """
    each = list(drives)
    typical = median([speed for speed, _ in each if speed] or [1.0])
    speeds = [speed or typical for speed, _ in each]
    total = sum(speeds)
    sizes = [capacity * total / speed for speed, (_, capacity) in zip(speeds, each, strict=True) if capacity]
    return min(sizes, default=0.0)


def _measured(kind: BoundKind, spread: Spread, share: int) -> Bound:
    text = f"persist bandwidth: {duration_text(spread.mean)}"
    if share > 1:
        text = f"{text} / {share} slots"
    need_s = spread.mean / share
    return Bound(kind=kind, need_s=need_s, sure_s=spread.low / share, aim_s=ROOM * need_s, text=text)


def _endurance(fill: Mapping[str, float], writes_per_day: float) -> Bound:
    node = max(fill, key=lambda name: fill[name])
    need_s = fill[node] * DAY_S / writes_per_day
    allowed = f"{writes_per_day:.3g} drive {'write' if writes_per_day == 1 else 'writes'} a day"
    text = f"endurance: {100 * fill[node]:.3g} % of the drives each time, {allowed}"
    return Bound(kind=BoundKind.ENDURANCE, need_s=need_s, sure_s=UNSURE_S, aim_s=need_s, text=text)


# --- all of them together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the interval should be, in seconds, and why."""

    bound: Bound
    """That decides."""
    need_s: float
    """Below this, some bound is not kept."""
    sure_s: float
    """Below this, one is surely not kept."""
    aim_s: float
    most_s: float
    """Above this, the lost work allowed is not kept; infinite where any is allowed or the goal cannot be kept."""
    goal_missed: str
    loss: BudgetLoss | None = None
    """What it costs that the budget decides and not the failures; a promise is kept all the same."""


def find_target(figures: Figures, limits: Limits, *, mtbf_s: float | None, slower_s: float = 0.0) -> Target:
    """Return the interval to aim for. The figures must know the step, unless no limit is in steps."""
    bounds = hard_bounds(figures, limits, slower_s=slower_s)
    need = max(bounds, key=lambda bound: bound.need_s)
    most = most_allowed(figures, limits)
    goal_missed, most_s = "", math.inf
    if most is not None and _leaves_no_room(most.need_s, need.need_s, figures.step):
        goal_missed = f"{most.text}: not possible, {need.text} asks for {duration_text(need.need_s)}"
    elif most is not None:
        most_s = most.need_s
    cost_s = max(figures.stall.mean + slower_s, 0.0) if figures.stall is not None else 0.0
    if mtbf_s is not None and figures.stall is not None:
        best = best_for_failures(cost_s, mtbf_s)
        bounds.append(best if most is None or best.need_s <= most.need_s else most)
    deciding = max(bounds, key=lambda bound: bound.aim_s)
    loss = None
    if deciding.kind is BoundKind.BUDGET and mtbf_s is not None:
        other_s = max(bound.aim_s for bound in bounds if bound is not deciding)
        loss = budget_loss(deciding.aim_s, other_s, cost_s=cost_s, mtbf_s=mtbf_s, room=ROOM)
        if loss is not None:
            deciding = structs.replace(deciding, text=f"{deciding.text}, which costs {loss}")
    return Target(
        bound=deciding,
        need_s=max(bound.need_s for bound in bounds),
        sure_s=max(bound.sure_s for bound in bounds),
        aim_s=min(deciding.aim_s, most_s),
        most_s=most_s,
        goal_missed=goal_missed,
        loss=loss,
    )


def _leaves_no_room(most_s: float, need_s: float, step: Spread | None) -> bool:
    """Tell whether no interval, of whole steps where their time is known, is as long as is needed and no longer."""
    if most_s < need_s or step is None or step.mean <= 0:
        return most_s < need_s
    return steps_at_most(most_s, step.mean) < steps_at_least(need_s, step.mean)


def steps_at_least(interval_s: float, step_s: float) -> int:
    """Return the fewest steps, one or more, that take as long."""
    return max(1, math.ceil(interval_s / step_s - ROUNDING_STEPS))


def steps_at_most(interval_s: float, step_s: float) -> float:
    """Return the most steps, one or more, that take no longer; infinite for ever."""
    return max(1, math.floor(interval_s / step_s + ROUNDING_STEPS)) if math.isfinite(interval_s) else math.inf
