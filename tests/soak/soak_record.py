"""What a soak has done and found: as JSON for tools, as Markdown for people."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_plan import Fault
from leak_plan import MIB, Holding, growth_per_hour

WORDS = {
    "state": "boundaries whose state the oracle was told",
    "begun": "ranks that began or restored",
    "begun from nothing": "of these, with nothing to restore",
    "restored from memory": "of these, restored from memory",
    "restored from disk": "of these, restored from the devices",
    "acknowledged": "times that a rank heard of a complete checkpoint",
    "found": "shards read back from the devices at the end",
    "states compared": "states that came back, compared bit for bit",
    "listing": "times that a run's list of checkpoints was asked for",
    "listed": "lists that were compared",
    "metrics": "times that metrics and control API were compared",
    "events": "times that a run's events were compared",
    "daemon_started": "starts of the daemon",
    "cost": "times that a run's cost was held against its budget",
    "end": "",
}
"""What people read for what the account counts; the rest say it themselves. Empty: nothing."""


@dataclass(slots=True, kw_only=True)
class SoakRecord:
    """One soak. `violations` and `leaks` must be empty."""

    seed: int
    duration_s: float
    origin: Mapping[str, str]
    """Machine, date, commit."""
    left_out: tuple[str, ...] = ()
    """Faults that this machine could not be given, with the reason."""
    faults: list[Fault] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)
    violations: Sequence[str] = ()
    leaks: Sequence[str] = ()
    holdings: list[Holding] = field(default_factory=list)
    starts: Mapping[str, int] = field(default_factory=dict)
    """How often each job was started."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Everything that must not be."""
        return (*self.violations, *self.leaks)

    def as_json(self) -> str:
        """Return all of it."""
        return json.dumps(
            {
                **self.origin,
                "seed": self.seed,
                "duration_s": self.duration_s,
                "left_out": list(self.left_out),
                "faults": [each.facts() for each in self.faults],
                "counts": dict(self.counts),
                "starts": dict(self.starts),
                "violations": list(self.violations),
                "leaks": list(self.leaks),
                "holdings": [each.facts() for each in self.holdings],
            },
            indent=1,
        )

    def as_markdown(self) -> str:
        """Return what a page of documentation shows."""
        kinds = Counter(each.kind.value for each in self.faults)
        where = f"{self.origin['date']}, {self.origin['machine']}, commit {self.origin['commit']}"
        memory_mib = max((each.memory_bytes for each in self.holdings), default=0) / MIB
        descriptors = max((each.descriptors for each in self.holdings), default=0)
        lines = [
            f"Seed {self.seed}, {self.duration_s:.0f} s, {where}.",
            "",
            "| fault | times |",
            "|---|---|",
            *(f"| {kind} | {count} |" for kind, count in sorted(kinds.items())),
            *(f"| {reason} | left out |" for reason in self.left_out),
            "",
            "| counted | |",
            "|---|---|",
            *(f"| {WORDS.get(what, what)} | {count:,} |" for what, count in self._counted()),
            f"| starts of trainers | {sum(self.starts.values())} |",
            f"| looks at what the daemon holds | {len(self.holdings)} |",
            f"| most private memory of a daemon | {memory_mib:.1f} MiB |",
            f"| most descriptors of a daemon | {descriptors} |",
            f"| growth of memory in the longest life | {_growth(growth_per_hour(self.holdings))} |",
            f"| violations | {len(self.violations)} |",
            f"| leaks | {len(self.leaks)} |",
            *(["", *(f"- {text}" for text in self.failures)] if self.failures else []),
        ]
        return "\n".join(lines) + "\n"

    def _counted(self) -> list[tuple[str, int]]:
        """Return what is worth a line: in the order of WORDS, then by name."""
        order = {what: place for place, what in enumerate(WORDS)}
        shown = [(what, count) for what, count in self.counts.items() if WORDS.get(what, what)]
        return sorted(shown, key=lambda each: (order.get(each[0], len(order)), each[0]))

    def write(self, folder: Path) -> None:
        """Write both forms into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"node-{self.seed}.json").write_text(self.as_json() + "\n")
        (folder / f"node-{self.seed}.md").write_text(self.as_markdown())


def _growth(growth: float | None) -> str:
    return "not known" if growth is None else f"{growth / MIB:.2f} MiB an hour"
