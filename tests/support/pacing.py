"""A training loop in the test's own process whose steps and costs are known, for the tests of the controller."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import everstep
from everstep.checkpoint.frequency_types import Decision
from everstep.hook import copier
from everstep.hook.copy_plan import Moves
from everstep.hook.run import Run

DEADLINE_S = 120.0


class Loop:
    """A model of some megabytes whose steps do nothing but take time, with an optimizer for the guard alone."""

    def __init__(self, megabytes: int = 4) -> None:
        self.model = torch.nn.Linear(1000, 250 * megabytes, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.step_s = 0.0
        """Mean of what steps really took lately, checkpoints apart: a busy machine oversleeps."""

    def attach(self, storage: list[Path], budget: float) -> Run:
        limits = everstep.Limits(budget=budget, drive_writes_per_day=1e6)  # the disks here are small
        return everstep.attach(
            "paced", model=self.model, optimizer=self.optimizer, storage=storage, limits=limits
        )

    def step(self, run: Run, inside: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        inside()
        took_s = time.perf_counter() - began_s
        self.step_s += (took_s - self.step_s) / 32 if self.step_s else took_s
        self.optimizer.step()
        run.step()

    def until(self, run: Run, is_so: Callable[[Decision], bool], *, inside: Callable[[], None]) -> Decision:
        """Train until the controller has decided so."""
        until_s = time.monotonic() + DEADLINE_S
        while not is_so(decision := run.report().decision):
            assert time.monotonic() < until_s, run.report()
            self.step(run, inside)
        return decision

    def for_checkpoints(self, run: Run, count: int, *, inside: Callable[[], None]) -> list[Decision]:
        """Train until so many more checkpoints are complete; return the decision at the end of each."""
        return [self._for_one(run, inside) for _ in range(count)]

    def _for_one(self, run: Run, inside: Callable[[], None]) -> Decision:
        wanted = run.report().checkpoints_complete + 1
        return self.until(run, lambda _: run.report().checkpoints_complete >= wanted, inside=inside)


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float | Callable[[], float]) -> None:
    """Make each segment's copy that much slower, or as much as it is then."""
    fast = copier.copy

    def slow(moves: Moves) -> None:
        time.sleep(seconds() if callable(seconds) else seconds)
        fast(moves)

    monkeypatch.setattr(copier, "copy", slow)


def changes(decisions: list[Decision]) -> int:
    """Return how often the interval was another than before."""
    return sum(one.interval_steps != other.interval_steps for one, other in pairwise(decisions))


def stalled_ms(decision: Decision) -> float:
    """Return what one checkpoint stalls, as the reason says."""
    number, unit = decision.reason.partition("the budget: ")[2].split()[:2]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]
