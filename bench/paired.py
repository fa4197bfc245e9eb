"""Ratios taken in pairs within one run, and the form in which every `make bench-*` writes them.

The machine is shared and its speed changes by the minute, so that a figure alone says little: each sample is a pair,
ours and the other's, one after the other. A row's value is the median of the pairs' ratios; low and high are their
quartiles; a row whose quartiles differ by more than 15 % of the value is `noisy`.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

PAIRS_MIN = 7
NOISY = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure. `goal` is what must be reached: at least, or for `at_most` at most."""

    measure: str
    value: float
    low: float
    high: float
    goal: float | None
    met: bool
    at_most: bool = False
    noisy: bool = False
    unit: str = "ratio"


def row(
    measure: str, samples: Sequence[float], *, goal: float | None, at_most: bool = False, unit: str = "ratio"
) -> Row:
    """Return the row of some samples: their median and quartiles, and whether the goal is met."""
    value = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [value] * 3
    met = goal is None or (value <= goal if at_most else value >= goal)
    noisy = value != 0 and (high - low) / abs(value) > NOISY
    return Row(
        measure=measure,
        value=value,
        low=low,
        high=high,
        goal=goal,
        met=met,
        at_most=at_most,
        noisy=noisy,
        unit=unit,
    )


def interleaved(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int = PAIRS_MIN
) -> list[tuple[float, float]]:
    """Return (ours, theirs) of each pair; who goes first changes from pair to pair, so that no drift favours one."""
    found: list[tuple[float, float]] = []
    for index in range(pairs):
        if index % 2:
            second = theirs()
            found.append((ours(), second))
        else:
            first = ours()
            found.append((first, theirs()))
    return found


def ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return ours / theirs of each pair."""
    return [ours / theirs for ours, theirs in pairs]


def publish(title: str, rows: Sequence[Row], path: Path, left_out: Mapping[str, str] | None = None) -> bool:
    """Print the table, write `path` (JSON), and return whether every goal is met.

    `left_out` says why there is no row of something, e.g. of what is not installed: in the table and in the file.
    """
    table = Table(title=title, title_justify="left")
    for column in ("measure", "value", "quartiles", "goal", ""):
        table.add_column(column, justify="left" if column in ("measure", "") else "right")
    for each in rows:
        sign = "<=" if each.at_most else ">="
        verdict = "" if each.goal is None else ("met" if each.met else "[bold]missed[/bold]")
        table.add_row(
            each.measure,
            _number(each.value, each.unit),
            f"{each.low:.3f} to {each.high:.3f}",
            "" if each.goal is None else f"{sign} {each.goal:g}",
            f"{verdict}{' (noisy)' if each.noisy else ''}",
        )
    for measure, reason in (left_out or {}).items():
        table.add_row(measure, "-", "", "", reason)
    Console(width=150).print(table)
    write(rows, path, left_out)
    return all(each.met for each in rows)


def write(rows: Sequence[Row], path: Path, left_out: Mapping[str, str] | None = None) -> None:
    """Write the rows, and why others are not there, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**origin(), "rows": [asdict(each) for each in rows], "left_out": dict(left_out or {})}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "ratio" else f"{value:.3g} {unit}"


def origin() -> dict[str, str]:
    """Return where and when: machine, date, commit."""
    git = shutil.which("git") or "false"
    commit = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = (
        f"{os.cpu_count()} cores ({_processor()}), {memory_gib:.0f} GiB, Linux {platform.release()}{_gpus()}"
    )
    return {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit}


def _gpus() -> str:
    found = [
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return "".join(f", {model}" for model in found)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
