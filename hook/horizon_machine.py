"""Which boundaries get a checkpoint, agreed without a collective: rank 0 plans a few boundaries ahead. Pure.

A plan covers the boundaries [start, horizon) and lists those with a checkpoint. Ranks of one job may be some
boundaries apart; whoever reaches the horizon without a newer plan waits for it, so that all decide alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

LOOKAHEAD_BOUNDARIES = 8
"""Boundaries that a plan covers at most: the Store is asked once in so many steps."""
LOOKAHEAD_S = 1.0
"""And about how long: a request waits for a plan to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan number `number` (0, 1, …): the checkpoints among the boundaries [start, horizon)."""

    number: int
    start: int
    horizon: int
    steps: tuple[int, ...]
    end: str = ""
    """Why the run ends with the plan's first boundary, checkpoint or none; empty: it goes on."""

    def __post_init__(self) -> None:
        if not self.start < self.horizon or any(not self.start <= step < self.horizon for step in self.steps):
            raise ValueError(
                f"a plan lists boundaries within [{self.start}, {self.horizon}), got {self.steps}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Rank 0's side: makes the plan after the newest one in time."""

    due: Callable[[int, int], tuple[int, ...]]
    """The boundaries among [start, horizon) that get a checkpoint; asked once for each boundary."""

    def first(self, step: int) -> Plan:
        """Return plan 0, for the boundary after `step`: how many more make a second is known only then."""
        return self._make(0, step + 1, step + 2, requested=False)

    def wants_next(self, last: Plan, step: int) -> bool:
        """Tell whether the next plan should be made: half of the last one is used up."""
        covered = last.horizon - last.start
        return step >= last.horizon - max(1, covered // 2)

    def next(self, last: Plan, *, requested: bool, end: str = "", step_s: float = 0.0) -> Plan:
        """Return the plan that follows `last`; what is requested becomes its first boundary.

        With an end, for whatever reason, that is the last one: it gets a checkpoint only if one is requested.
        `step_s` is what a step takes: the longer, the fewer a plan covers; 0: nobody knows yet, and it covers one.
        """
        covers = max(1, min(LOOKAHEAD_BOUNDARIES, int(LOOKAHEAD_S / step_s))) if step_s else 1
        start = last.horizon
        return self._make(last.number + 1, start, start + covers, requested=requested, end=end)

    def _make(self, number: int, start: int, horizon: int, *, requested: bool, end: str = "") -> Plan:
        steps = {*(() if end else self.due(start, horizon)), *([start] if requested else [])}
        return Plan(number=number, start=start, horizon=horizon, steps=tuple(sorted(steps)), end=end)


@dataclass(slots=True, kw_only=True)
class Horizon:
    """Every rank's side: the plans received, in order."""

    newest: Plan | None = None
    """The last one received."""
    _steps: set[int] = field(default_factory=set[int])
    _ends: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def next_number(self) -> int:
        """Number of the plan that is waited for."""
        return self.newest.number + 1 if self.newest is not None else 0

    def receive(self, plan: Plan) -> None:
        """Take the next plan; one that was left in the middle by an exception may be taken again."""
        assert plan.number == self.next_number, (plan, self.newest)
        assert self.newest is None or plan.start == self.newest.horizon, (plan, self.newest)
        self._steps |= set(plan.steps)
        if plan.end:
            self._ends[plan.start] = plan.end
        self.newest = plan

    def knows(self, step: int) -> bool:
        """Tell whether it is decided what happens at boundary `step`."""
        return self.newest is not None and step < self.newest.horizon

    def is_due(self, step: int) -> bool:
        """Tell whether boundary `step` gets a checkpoint; only for known boundaries."""
        assert self.knows(step), step
        return step in self._steps

    def passed(self, step: int) -> tuple[int, ...]:
        """Return the boundaries before `step` that were to get a checkpoint, each once."""
        found = tuple(sorted(each for each in self._steps if each < step))
        self._steps.difference_update(found)
        return found

    def end_after(self, step: int) -> str:
        """Return why the run ends with boundary `step`, or an earlier one that was left by an exception; empty: it goes
        on.
        """
        return next((why for last, why in self._ends.items() if last <= step), "")
