"""The rules of what stays of a run's checkpoints, as a person gives them."""

from dataclasses import dataclass

from ..core.durations import parse_duration
from ..core.errors import ConfigError

KEEP_LAST = 3
"""Complete checkpoints kept where nobody says how many."""
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays: a checkpoint that any rule keeps. collect_plan.py says what stays whatever the rules are.

        everstep.attach("my-run", ..., keep=everstep.Keep(last=3, every_steps=1000, every="6h"))

    Raises:
        ConfigError: a value that makes no sense.
    """

    last: int = KEEP_LAST
    """The newest complete ones."""
    every_steps: int | None = None
    """The first one in each stretch of so many steps, counted from step 0; None: no such rule."""
    every: str | None = None
    """The first one in each stretch of so much time (`6h`), counted from 1970-01-01 UTC; None: no such rule."""

    def __post_init__(self) -> None:
        if not 1 <= self.last <= _LARGEST:
            raise ConfigError(f"keep: last is {self.last}", hint="1 or more complete checkpoints")
        if self.every_steps is not None and not 1 <= self.every_steps <= _LARGEST:
            raise ConfigError(f"keep: every_steps is {self.every_steps}", hint="1 or more steps")
        if self.every is not None:
            try:
                parse_duration(self.every)
            except ValueError as exc:
                raise ConfigError(f"keep: every is {self.every!r}", hint=str(exc)) from exc

    @property
    def every_s(self) -> float | None:
        """Seconds of `every`."""
        return None if self.every is None else parse_duration(self.every)

    def __str__(self) -> str:
        parts = [f"last {self.last}"]
        if self.every_steps is not None:
            parts.append(f"one every {self.every_steps} steps")
        if self.every is not None:
            parts.append(f"one every {self.every}")
        return ", ".join(parts)
