"""Mutants under seeds that no test has: a wrong version must be found whatever the explorer happens to draw.

Those that a named test finds are left out: nothing there depends on a seed.
"""

import itertools
import math
import random
import subprocess
import sys
import time

from mutant_process import FOUND, SURVIVED, run_mutant
from mutants import MUTANTS, Mutant
from summary import Summary

_EXPLORED = [mutant for mutant in MUTANTS if mutant.workloads]


def run_mutants(*, seed: int, duration_s: float = math.inf, count: int = sys.maxsize) -> Summary:
    """Run mutants in an order that the seed draws, again and again, and return those that were not found."""
    began_s = time.monotonic()
    order = random.Random(seed).sample(_EXPLORED, len(_EXPLORED))
    done: list[Mutant] = []
    failures: list[str] = []
    for number, mutant in enumerate(itertools.cycle(order)):
        if len(done) >= count or time.monotonic() - began_s >= duration_s:
            break
        failures += _problems(mutant, seed + number // len(order))
        done.append(mutant)
    return Summary(
        what="mutants of the product",
        count=len(done),
        failures=tuple(failures),
        seed=seed,
        counted={"found": len(done) - len(failures), "of them different": len(set(done))},
    )


def _problems(mutant: Mutant, seed: int) -> list[str]:
    try:
        status, output = run_mutant(mutant, seed=seed)
    except subprocess.TimeoutExpired as exc:
        return [f"{mutant.name}, seed {seed}: {exc}"]
    if status == FOUND:
        return []
    said = "was not found" if status == SURVIVED else f"shows nothing: {output}"
    return [f"{mutant.name}, seed {seed}: {said}"]
