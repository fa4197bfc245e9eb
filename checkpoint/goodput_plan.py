"""What failures and checkpoints leave for progress, by the interval, and what a budget costs of it. Pure."""

import math
from dataclasses import dataclass

from ..core.durations import duration_text

WORTH_SAYING = 0.005
"""Of goodput: less than that nobody changes a budget for."""
_EXPONENT_MAX = 700.0
_BUDGET_MAX = 0.99


def goodput(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the share of the time that makes progress where failures have no memory (Daly 2006, equation 20).

    Restarts, and the time until a checkpoint is durable, are left out: they are the same for each interval.
    """
    return interval_s / (mtbf_s * math.expm1(min((interval_s + cost_s) / mtbf_s, _EXPONENT_MAX)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLoss:
    """What a budget costs a job that fails."""

    share: float
    """Of the goodput that the best budget would have."""
    best_budget: float
    mtbf_s: float

    def __str__(self) -> str:
        """`12 % of goodput: for a failure each 46.4 min a budget of 4.9 % would be best`."""
        failures = duration_text(self.mtbf_s)
        share = f"{100 * self.share:.0f}" if self.share >= 0.1 else f"{100 * self.share:.2g}"
        return (
            f"{share} % of goodput:"
            f" for a failure each {failures} a budget of {100 * self.best_budget:.3g} % would be best"
        )


def budget_loss(
    interval_s: float, other_s: float, *, cost_s: float, mtbf_s: float, room: float
) -> BudgetLoss | None:
    """Return what it costs that a budget asks for `interval_s` where all else asks for `other_s`.

    `room`: so many times as long as it must be is an interval that the budget binds. None: it costs nothing worth
    saying.
    """
    if not 0 < other_s < interval_s or cost_s <= 0:
        return None
    best = goodput(other_s, cost_s, mtbf_s)
    if not best:
        return None  # so many failures leave nothing to lose
    share = 1 - goodput(interval_s, cost_s, mtbf_s) / best
    if share < WORTH_SAYING:
        return None
    return BudgetLoss(share=share, best_budget=min(room * cost_s / other_s, _BUDGET_MAX), mtbf_s=mtbf_s)
