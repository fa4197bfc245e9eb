"""The main job as `make demo` runs it, in little: the examples' own scripts, alone and under torchrun."""

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import demo
import pytest
from compare import compare_runs
from in_process import saved_run
from rich.console import Console
from rich.progress import Progress

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_killed_run_ends_like_the_undisturbed_one(ranks: int) -> None:
    folder = Path(os.environ["TMPDIR"])  # tmp_path is too long for the sockets of loader workers
    steps_an_epoch = 22
    command = [sys.executable, "-P", str(EXAMPLES / "demo.py"), f"--ranks={ranks}", "--kills=2", "--seed=5"]
    ended = subprocess.run(
        [*command, f"--windows={16 * ranks * steps_an_epoch}"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(EXAMPLES), "COLUMNS": "200", "TMPDIR": str(folder), "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"the same bit for bit after {2 * steps_an_epoch} steps" in ended.stdout
    assert ended.stdout.count("│ trainer") == 1
    assert ended.stdout.count("│ daemon and trainer") == 1
    assert not list(folder.iterdir())


def test_a_trainer_that_ends_by_itself_is_no_crash_that_was_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'print("epoch 0 loss 1\\n" * 20, flush=True)\nraise SystemExit("no memory left")\n'
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(demo, "HERE", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = argparse.Namespace(ranks=1, epochs=1, windows=16 * 60, seed=1, kills=2)
    console = Console(quiet=True)
    disturbed = demo.Demo(tmp_path, options, console).disturbed
    with pytest.raises(SystemExit, match="by itself at step 20 with status 1") as ended:
        disturbed(Progress(console=console))
    assert "no memory left" in str(ended.value)


def test_a_folder_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = Path(os.environ["TMPDIR"]) / ("deep" * 10)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises(SystemExit, match="set TMPDIR to a shorter one"):
        demo.main()
    deep.rmdir()


def changes(old: str, new: str) -> list[str]:
    """What `diff -w` calls removed and added, each with its sign, as two scripts' lines without their docstring."""
    before, after = [text.splitlines()[1:] for text in (old, new)]
    changed: list[str] = []
    stripped = [[line.strip() for line in lines] for lines in (before, after)]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *stripped, autojunk=False).get_opcodes():
        if tag != "equal":
            changed += [f"-{line}" for line in before[a:b]] + [f"+{line}" for line in after[c:d]]
    return changed


def test_the_readme_shows_the_examples_difference() -> None:
    old, new = [(EXAMPLES / name).read_text() for name in ("train_plain.py", "train.py")]
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert [line for line in shown if line[:1] in ("-", "+")] == changes(old, new)
    assert len(new.splitlines()) - len(old.splitlines()) <= 5


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
