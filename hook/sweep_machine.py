"""Which keys of the ranks' Store nobody reads any more. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..core.ids import CheckpointId
from .horizon_machine import Plan

CHECKPOINT_KEYS = ("sealed", "all-sealed", "committed", "all-committed", "failed")
KEPT_MAX = 4096
"""So many plans, and checkpoints that have ended, keep their keys beside a rank that is lost, which is done with none.

A plan is for eight boundaries, or a second of longer ones: who is so far behind and goes on finds no plan, as if rank 0
were gone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a rank is with what ranks tell each other."""

    plan: int
    """It has read all plans before this one."""
    step: int
    """It has heard the end of all checkpoints of boundaries before this one, and says no more of them."""


class Sweep:
    """On rank 0: what has keys. Each key that can go is named once."""

    def __init__(self) -> None:
        self._plans: deque[int] = deque()
        self._checkpoints: set[CheckpointId] = set()

    def published(self, plan: Plan) -> None:
        """A plan has a key now."""
        self._plans.append(plan.number)

    def ended(self, checkpoints: Iterable[CheckpointId]) -> None:
        """They are complete, or never will be; rank 0 has heard it."""
        self._checkpoints.update(checkpoints)

    def old_keys(self, marks: Iterable[Mark]) -> list[str]:
        """Return the keys of what all ranks are done with, of which these are the marks, and of what is too much."""
        marks = list(marks)
        plan, step = min(mark.plan for mark in marks), min(mark.step for mark in marks)
        keys: list[str] = []
        while self._plans and (self._plans[0] < plan or len(self._plans) > KEPT_MAX):
            keys.append(f"plan/{self._plans.popleft()}")
        ended = sorted(self._checkpoints)
        surplus = max(0, len(ended) - KEPT_MAX)
        over = ended[:surplus] + [checkpoint for checkpoint in ended[surplus:] if checkpoint.step < step]
        self._checkpoints.difference_update(over)
        return keys + [f"{key}/{checkpoint}" for checkpoint in over for key in CHECKPOINT_KEYS]
