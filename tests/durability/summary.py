"""What a search for lost checkpoints or unexpected errors found: one line of the table that `make soak` prints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One search that ended."""

    what: str
    count: int
    """Cycles, flips, inputs: what was tried."""
    failures: tuple[str, ...]
    """One sentence for each thing that must not happen."""
    seed: int
    notes: str = ""
    """What else was counted, to see that the search did reach something."""

    def __str__(self) -> str:
        notes = f" ({self.notes})" if self.notes else ""
        return f"{self.what}: {self.count}, failures {len(self.failures)}, seed {self.seed}{notes}"

    def check(self) -> None:
        """Print the line, and fail with the first findings."""
        print(f"\n{self}")
        assert not self.failures, "\n".join((str(self), *self.failures[:5]))
