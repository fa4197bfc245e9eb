"""The main job as `make demo` runs it, in little: the examples' own scripts, alone and under torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest
from compare import compare_runs
from in_process import saved_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_killed_run_ends_like_the_undisturbed_one(ranks: int, tmp_path: Path) -> None:
    steps_an_epoch = 30
    command = [sys.executable, "-P", str(EXAMPLES / "demo.py"), f"--ranks={ranks}", "--kills=2", "--seed=5"]
    ended = subprocess.run(
        [*command, f"--windows={16 * ranks * steps_an_epoch}"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(EXAMPLES), "COLUMNS": "200", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"the same bit for bit after {2 * steps_an_epoch} steps" in ended.stdout
    assert ended.stdout.count("│ trainer") == 1
    assert ended.stdout.count("│ daemon and trainer") == 1
    assert not list(tmp_path.iterdir())


def test_a_difference_is_told(tmp_path: Path) -> None:
    stores = [[tmp_path / name / device for device in ("d0", "d1")] for name in ("a", "b")]
    for store in stores:
        for device in store:
            device.mkdir(parents=True)
        saved_run(store)
    first, second = stores
    assert compare_runs(first, first) == []
    told = compare_runs(first, second)
    assert "rank 0: leaf 'model.0.weight'" in told
    assert "rank 0: leaf 'optimizer.state.0.weight.momentum_buffer'" in told
