"""Runs the searches for lost checkpoints and unexpected errors in turn, each for its share of the time given, and
prints what each has tried and found. Ends with 1 when any has found something, with 130 when it was interrupted before.

    make soak DURATION=600          all of them, in 600 seconds
    make soak SOAK_ARGS="--only power --seed 7"
"""

import argparse
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("durability", "fuzz", "soak", "support")]
sys.path.append(str(ROOT / "bench"))

from bit_flips import flip_bits
from crash_explorer import explore
from device_shuffles import shuffle_devices
from fault_search import fail_calls
from full_drives import fill_drives
from fuzzing import fuzz
from kill_daemon import kill_daemon
from kill_recovery import kill_recovery
from loop_disk import SIZES_MIB, missing_tools
from mutant_search import run_mutants
from node_soak import soak_node
from power_cut import power_cut
from soaking import Search, Soak
from spoil_search import spoil_stores
from summary import Summary

NODE_LEAST_S = 60.0
"""A node takes longer to come up and to be read back than a short turn lasts."""


def searches() -> list[Search]:
    """Return the searches that this machine can run; what is left out is said."""
    found = [
        Search(
            "kill", 1.0, lambda seconds, seed: kill_daemon(duration_s=seconds, seed=seed, cycles=sys.maxsize)
        ),
        Search("recovery-kill", 1.0, lambda seconds, seed: kill_recovery(duration_s=seconds, seed=seed)),
        Search("faults", 2.0, lambda seconds, seed: fail_calls(duration_s=seconds, seed=seed)),
        Search(
            "flips", 1.0, lambda seconds, seed: flip_bits(duration_s=seconds, seed=seed, count=sys.maxsize)
        ),
        Search("corruptions", 1.0, lambda seconds, seed: spoil_stores(duration_s=seconds, seed=seed)),
        Search("devices", 1.0, lambda seconds, seed: shuffle_devices(duration_s=seconds, seed=seed)),
        Search("crash", 2.0, _crash),
        Search("mutants", 2.0, lambda seconds, seed: run_mutants(duration_s=seconds, seed=seed)),
        Search("fuzz", 2.0, lambda seconds, seed: fuzz(duration_s=seconds, seed_number=seed)),
        Search("node", 4.0, _node, is_one_turn=True),
    ]
    for kind in SIZES_MIB:
        reason = "needs root" if os.geteuid() else f"needs {' '.join(missing_tools(kind))}"
        if os.geteuid() or missing_tools(kind):
            print(f"left out: power cuts and full drives on {kind}: {reason}")
        else:
            found += [Search(f"power-{kind}", 2.0, _power(kind)), Search(f"full-{kind}", 1.0, _full(kind))]
    return found


def _node(seconds: float, seed: int) -> Summary:
    return soak_node(duration_s=max(NODE_LEAST_S, seconds), seed=seed, output=ROOT / "build" / "soak")


def _power(kind: str) -> Callable[[float, int], Summary]:
    return lambda seconds, seed: power_cut(kind, duration_s=seconds, seed=seed)


def _full(kind: str) -> Callable[[float, int], Summary]:
    return lambda seconds, seed: fill_drives(kind, duration_s=seconds, seed=seed)


def _crash(seconds: float, seed: int) -> Summary:
    found = explore(seconds, seed)
    return Summary(
        what="crash states of the model",
        count=found.state_count,
        failures=tuple(found.violations),
        seed=seed,
        counted={"recoveries": found.check_count},
    )


def show(soak: Soak) -> None:
    """Print the table, what was not done, and every finding."""
    table = Table("search", "what", "tried", "failures", "seconds", "counted")
    for each in soak.progress:
        if each.summary is not None:
            failures, notes = len(each.summary.failures), each.summary.notes
            table.add_row(
                each.search.name,
                each.summary.what,
                f"{each.summary.count:,}",
                str(failures),
                f"{each.taken_s:.0f}",
                notes,
            )
    Console(width=160).print(table)
    print(*soak.unfinished(), *soak.failures(), sep="\n")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Return 1 when something was found."""
    parser = argparse.ArgumentParser(
        description="search for lost checkpoints and unexpected errors for a long time"
    )
    parser.add_argument("--duration", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices of an earlier run")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="searches whose name begins so; several by commas"
    )
    arguments = parser.parse_args()
    logging.disable()  # thousands of injected errors are logged
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell's background job ignores the first
        signal.signal(number, _interrupt)
    names = tuple(arguments.only.split(","))
    chosen = [search for search in searches() if search.name.startswith(names)]
    if not chosen:
        parser.error(f"no search has a name that begins with {' or '.join(names)}")
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    soak = Soak(chosen, arguments.duration, seed)
    listed = ", ".join(search.name for search in chosen)
    print(f"seed {seed}, {arguments.duration:.0f} s in {soak.rounds} rounds: {listed}", flush=True)
    status = soak.run(lambda line: print(line, flush=True))
    show(soak)
    return status


if __name__ == "__main__":
    sys.exit(main())
