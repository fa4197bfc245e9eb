"""One mutant in a process of its own, as whoever wants to know of it sees that."""

import os
import subprocess
import sys
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
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "EVERSTEP_TEST_GRACE_S": "0",
        },  # what fails may leave what it will
    )
    return done.returncode, done.stdout + done.stderr
