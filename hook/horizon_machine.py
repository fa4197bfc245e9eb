"""Which boundaries get a checkpoint, agreed without a collective: rank 0 plans a few boundaries ahead. Pure.

A plan covers the boundaries [start, horizon) and lists those with a checkpoint. Ranks of one job may be some
boundaries apart; whoever reaches the horizon without a newer plan waits for it, so that all decide alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

LOOKAHEAD_BOUNDARIES = 8
"""Boundaries that a plan covers: a request waits for at most one plan, and the Store is asked once in so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan number `number` (0, 1, …): the checkpoints among the boundaries [start, horizon)."""

    number: int
    start: int
    horizon: int
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.start < self.horizon or any(not self.start <= step < self.horizon for step in self.steps):
            raise ValueError(
                f"a plan lists boundaries within [{self.start}, {self.horizon}), got {self.steps}"
            )


@dataclass(slots=True, kw_only=True)
class Planner:
    """Rank 0's side: makes the next plan in time."""

    due: Callable[[int, int], tuple[int, ...]]
    """The boundaries among [start, horizon) that get a checkpoint; asked once for each boundary."""
    _last: Plan | None = None

    def first(self, step: int) -> Plan:
        """Return plan 0, for the boundaries after `step`."""
        assert self._last is None
        return self._make(0, step + 1, requested=False)

    def wants_next(self, step: int) -> bool:
        """Tell whether the next plan should be made: half of the last one is used up."""
        assert self._last is not None
        return step >= self._last.horizon - LOOKAHEAD_BOUNDARIES // 2

    def next(self, *, requested: bool) -> Plan:
        """Return the plan that follows; a request becomes its first boundary."""
        assert self._last is not None
        return self._make(self._last.number + 1, self._last.horizon, requested=requested)

    def _make(self, number: int, start: int, *, requested: bool) -> Plan:
        horizon = start + LOOKAHEAD_BOUNDARIES
        steps = {*self.due(start, horizon), *([start] if requested else [])}
        self._last = Plan(number=number, start=start, horizon=horizon, steps=tuple(sorted(steps)))
        return self._last


@dataclass(slots=True, kw_only=True)
class Horizon:
    """Every rank's side: the plans received, in order."""

    _horizon: int | None = None
    _next_number: int = 0
    _steps: set[int] = field(default_factory=set[int])

    @property
    def next_number(self) -> int:
        """Number of the plan that is waited for."""
        return self._next_number

    def receive(self, plan: Plan) -> None:
        """Take the next plan."""
        assert plan.number == self._next_number, (plan, self._next_number)
        assert self._horizon is None or plan.start == self._horizon, (plan, self._horizon)
        self._horizon, self._next_number = plan.horizon, plan.number + 1
        self._steps |= set(plan.steps)

    def knows(self, step: int) -> bool:
        """Tell whether it is decided what happens at boundary `step`."""
        return self._horizon is not None and step < self._horizon

    def is_due(self, step: int) -> bool:
        """Tell whether boundary `step` gets a checkpoint; only for known boundaries, asked once each."""
        assert self.knows(step), step
        due = step in self._steps
        self._steps.discard(step)
        return due
