"""Handlers of signals call the run at any moment, also in the middle of its boundaries: nothing hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.hook.trainer_testing import end_daemon

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "stormed_train.py"
DEADLINE_S = 150.0


@pytest.mark.parametrize("handler", ["wait", "mutating", "lease"])
def test_what_waits_answers_or_is_refused(devices: list[Path], handler: str) -> None:
    """A deadlock ends with the deadline."""
    command = [sys.executable, "-P", str(SCRIPT), "--handler", handler, "--storage", *map(str, devices)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    finally:
        end_daemon()
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout)
    assert found["done"] == 3
    assert found["answered"] > 0
    assert (found["refused"] > 0) == (handler != "lease")
