"""Runs the searches for lost checkpoints and unexpected errors in turn, each for its share of the time given, and
prints what each has found. Ends with 1 when any has found something.

    make soak DURATION=600          all of them, in 600 seconds
    make soak SOAK_ARGS="--only power --seed 7"
"""

import argparse
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "durability"), str(ROOT / "tests" / "fuzz")]

from bit_flips import flip_bits
from crash_explorer import explore
from fuzzing import fuzz
from kill_daemon import kill_daemon
from kill_recovery import kill_recovery
from loop_disk import SIZES_MIB, missing_tools
from power_cut import power_cut
from summary import Summary


@dataclass(frozen=True, slots=True)
class Search:
    """One search: its name, its part of the time, and the call that runs it for (seconds, seed)."""

    name: str
    share: float
    run: Callable[[float, int], Summary]


def searches() -> list[Search]:
    """Return the searches that this machine and this version have; what is left out is said."""
    found = [
        Search(
            "kill", 1.0, lambda seconds, seed: kill_daemon(duration_s=seconds, seed=seed, cycles=sys.maxsize)
        ),
        Search(
            "flips", 1.0, lambda seconds, seed: flip_bits(duration_s=seconds, seed=seed, count=sys.maxsize)
        ),
        Search("recovery-kill", 1.0, lambda seconds, seed: kill_recovery(duration_s=seconds, seed=seed)),
        Search("crash", 2.0, _crash),
        Search("fuzz", 2.0, lambda seconds, seed: fuzz(duration_s=seconds, seed_number=seed)),
    ]
    for kind in SIZES_MIB:
        reason = "needs root" if os.geteuid() else f"needs {' '.join(missing_tools(kind))}"
        if os.geteuid() or missing_tools(kind):
            print(f"left out: power cuts on {kind}: {reason}")
        else:
            found.append(Search(f"power-{kind}", 2.0, _power(kind)))
    return found


def _power(kind: str) -> Callable[[float, int], Summary]:
    return lambda seconds, seed: power_cut(kind, duration_s=seconds, seed=seed)


def _crash(seconds: float, seed: int) -> Summary:
    found = explore(seconds, seed)
    return Summary(
        what="crash states of the model",
        count=found.state_count,
        failures=tuple(found.violations),
        seed=seed,
        notes=f"{found.check_count} recoveries",
    )


def run_all(chosen: Sequence[Search], duration_s: float, seed: int) -> list[tuple[Summary, float]]:
    """Run them in turn and return what each found and how long it took; the line of each is printed when it ends."""
    whole = sum(search.share for search in chosen)
    found: list[tuple[Summary, float]] = []
    for search in chosen:
        started_s = time.monotonic()
        summary = search.run(duration_s * search.share / whole, seed)
        found.append((summary, time.monotonic() - started_s))
        print(summary, flush=True)
    return found


def show(found: Sequence[tuple[Summary, float]]) -> None:
    """Print the table, and every finding below it."""
    table = Table("what", "tried", "failures", "seed", "seconds", "counted")
    for summary, taken_s in found:
        table.add_row(
            summary.what,
            str(summary.count),
            str(len(summary.failures)),
            str(summary.seed),
            f"{taken_s:.0f}",
            summary.notes,
        )
    Console(width=160).print(table)
    for summary, _ in found:
        for failure in summary.failures:
            print(f"{summary.what}: {failure}")


def main() -> int:
    """Return 1 when something was found."""
    parser = argparse.ArgumentParser(
        description="search for lost checkpoints and unexpected errors for a long time"
    )
    parser.add_argument("--duration", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices of an earlier run")
    parser.add_argument("--only", default="", metavar="NAME", help="searches whose name begins so")
    arguments = parser.parse_args()
    logging.disable()  # thousands of injected errors are logged
    chosen = [search for search in searches() if search.name.startswith(arguments.only)]
    if not chosen:
        parser.error(f"no search has a name that begins with {arguments.only!r}")
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(
        f"seed {seed}, {arguments.duration:.0f} s: {', '.join(search.name for search in chosen)}", flush=True
    )
    found = run_all(chosen, arguments.duration, seed)
    show(found)
    return 1 if any(summary.failures for summary, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
