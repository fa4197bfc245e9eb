"""Each mutant in a process of its own, as whoever wants to know of it sees that."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant

RUNNER = Path(__file__).with_name("mutant_run.py")
FOUND, SURVIVED = 0, 3
"""Exit codes; any other one: it shows nothing."""
DEADLINE_S = 240.0
"""Seconds against hanging for ever: then it says where every thread stands, and fails."""


def run_mutant(mutant: Mutant, *, seed: int = 1) -> tuple[int, str]:
    """Return the exit code and what was printed; `seed` is the first of those that the explorer draws by."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), mutant.name, "--seed", str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S + 60,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    return done.returncode, done.stdout + done.stderr


def run_mutants_by_fork(mutants: Sequence[Mutant]) -> list[tuple[Mutant, int, str]]:
    """Return each with exit code and output, run one after the other; only the first waits for Python's start."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--json", *[mutant.name for mutant in mutants]],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["name"] for line in lines] == [mutant.name for mutant in mutants]
    return [(mutant, line["status"], line["output"]) for mutant, line in zip(mutants, lines, strict=True)]
