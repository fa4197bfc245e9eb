"""What a search for lost checkpoints or unexpected errors found: one line of the table that `make soak` prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One search that ended."""

    what: str
    count: int
    """Cycles, flips, inputs: what was tried."""
    failures: tuple[str, ...]
    """One sentence for each thing that must not happen."""
    seed: int
    counted: Mapping[str, int] = field(default_factory=dict[str, int])
    """What else was counted, to see that the search did reach something."""
    spent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds, by what they were spent on."""

    @property
    def notes(self) -> str:
        """What else was counted, for people."""
        numbers = [f"{count:,} {what}" for what, count in self.counted.items()]
        return ", ".join([*numbers, *(f"{seconds:.1f} s {what}" for what, seconds in self.spent_s.items())])

    def and_then(self, later: "Summary") -> "Summary":
        """Return this and a later turn of the same search as one; the seed is that of the first."""
        return Summary(
            what=self.what,
            count=self.count + later.count,
            failures=(*self.failures, *later.failures),
            seed=self.seed,
            counted={
                what: self.counted.get(what, 0) + later.counted.get(what, 0)
                for what in {**self.counted, **later.counted}
            },
            spent_s={
                what: self.spent_s.get(what, 0.0) + later.spent_s.get(what, 0.0)
                for what in {**self.spent_s, **later.spent_s}
            },
        )

    def __str__(self) -> str:
        notes = f" ({self.notes})" if self.notes else ""
        return f"{self.what}: {self.count}, failures {len(self.failures)}, seed {self.seed}{notes}"

    def check(self) -> None:
        """Print the line, and fail with the first findings."""
        print(f"\n{self}")
        assert not self.failures, "\n".join((str(self), *self.failures[:5]))
