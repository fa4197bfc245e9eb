"""docs/metrics.md beside what a daemon really serves."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PATH = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEADER = "| name | type | labels | unit | meaning | when to look at it |\n|---|---|---|---|---|---|\n"
_ROW = re.compile(r"^\| `(?P<name>(?:everstep|process)_\w+)` \|(?P<cells>.*)\|$", re.MULTILINE)
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "share", "info": "", "second": "bytes/s"}
_HIDDEN_LABELS = {"le"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric as the table has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str
    look: str = ""

    def text(self) -> str:
        """Return the line of the table."""
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {labels} | {self.unit} | {self.meaning} | {self.look} |\n"


def served(text: str) -> dict[str, Row]:
    """Return the rows of everything in a scrape, without what only a person can say."""
    return {row.name: row for row in map(_row, text_string_to_metric_families(text))}


def _row(family: Metric) -> Row:
    name = family.name + "_total" if family.type == "counter" else family.name
    labels = {label for sample in family.samples for label in sample.labels} - _HIDDEN_LABELS
    return Row(
        name=name,
        kind=family.type,
        labels=tuple(sorted(labels)),
        unit=_unit(name),
        meaning=family.documentation.rstrip("."),
    )


def _unit(name: str) -> str:
    words = name.removesuffix("_total").split("_")
    if "timestamp" in words or name == "process_start_time_seconds":
        return "Unix s"
    return next((_UNITS[word] for word in reversed(words) if word in _UNITS), "count")


def written() -> dict[str, Row]:
    """Return the rows of the document."""
    rows: dict[str, Row] = {}
    for found in _ROW.finditer(PATH.read_text()):
        kind, labels, unit, meaning, look = (cell.strip() for cell in found["cells"].split("|"))
        rows[found["name"]] = Row(
            name=found["name"],
            kind=kind,
            labels=tuple(re.findall(r"`(\w+)`", labels)),
            unit=unit,
            meaning=meaning,
            look=look,
        )
    return rows


def render(rows: Iterable[Row]) -> str:
    """Return a table of these."""
    return HEADER + "".join(row.text() for row in rows)
