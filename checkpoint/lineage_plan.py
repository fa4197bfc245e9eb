"""Where a run went back to older checkpoints, as each checkpoint since says in its notes; plain Python.

So a going back is as durable as the first checkpoint after it, and nobody has to remember it else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.ids import CheckpointId

WENT_BACK_NOTE = "went_back"
"""In a manifest's notes: `<attempt>:<goal>` of each going back along the lineage, the oldest first, between spaces."""
NUMBER_DIGITS_MAX = 9
TURN_COUNT_MAX = 64
"""So many are remembered, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A checkpoint to go back to: `3.2000`, or `3.2000#2` to go there once more."""

    text: str
    checkpoint: CheckpointId

    @classmethod
    def parse(cls, text: str) -> "Goal":
        """Return the goal that is written so; ValueError on anything else."""
        name, mark, number = text.partition("#")
        if mark and not (number.isascii() and number.isdigit() and len(number) <= NUMBER_DIGITS_MAX):
            raise ValueError(f"behind # stands a number of at most {NUMBER_DIGITS_MAX} digits, got {text!r}")
        return cls(text=text, checkpoint=CheckpointId.parse(name))

    @property
    def once_more(self) -> str:
        """How to ask for it when the run has been there."""
        return f"{self.checkpoint}#{int(self.text.partition('#')[2] or 1) + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An attempt that went back."""

    attempt: int
    goal: Goal


def turns_of(notes: Mapping[str, str]) -> tuple[Turn, ...]:
    """Return the turns along a checkpoint's lineage, the oldest first; what is not written so is none."""
    found: list[Turn] = []
    for word in notes.get(WENT_BACK_NOTE, "").split()[-TURN_COUNT_MAX:]:
        attempt, _, goal = word.partition(":")
        try:
            found.append(Turn(attempt=int(attempt), goal=Goal.parse(goal)))
        except ValueError:
            return ()
    return tuple(found)


def note_of(turns: Sequence[Turn]) -> str:
    """Return the note that says so."""
    return " ".join(f"{turn.attempt}:{turn.goal.text}" for turn in turns[-TURN_COUNT_MAX:])


def is_left(checkpoint: CheckpointId, turns: Sequence[Turn]) -> bool:
    """Tell whether a checkpoint is on a branch that a lineage with these turns has left."""
    return any(checkpoint.attempt < turn.attempt and checkpoint > turn.goal.checkpoint for turn in turns)
