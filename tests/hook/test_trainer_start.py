"""A forked trainer is what an executed one is: the tests that kill trainers rely on it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.hook.trainer_start_testing import ForkedProcess, Process, Start, execute, trainer_servers
from everstep.hook.trainer_testing import Trainer

FACTS = """
import json, os, re, resource, signal, sys

def facts():
    with os.scandir("/proc/self/fd") as entries:
        descriptors = {entry.name: re.sub("[0-9]", "", os.readlink(entry.path)) for entry in entries}
    return {
        "arguments": sys.argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "name": __name__,
        "file": __file__,
        "directory": os.getcwd(),
        # readline, which pytest imports, puts LINES and COLUMNS where only executed programs find them.
        "environment": {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")},
        "umask": os.umask(0o22),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "descriptors": descriptors,
        "buffered": sys.stdout.line_buffering,
        "torch": "torch" in sys.modules,
    }

import torch
print(json.dumps(facts()))
"""

ENDS = {
    "pass": 0,
    "raise SystemExit(7)": 7,
    "raise SystemExit('no')": 1,
    "raise ValueError('planted')": 1,
    "import os; os._exit(9)": 9,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import os; os.abort()": -signal.SIGABRT,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()": -signal.SIGINT,
}


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with trainer_servers() as start:
        yield start


def run(start: Start, folder: Path, text: str, *arguments: str) -> tuple[int, str, str]:
    """Run a script to its end; return exit status, output and errors."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(text)
    log.write_text("")
    process = start([str(script), *arguments], log)
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read()
    return process.wait(60), output, log.read_text()


def test_a_forked_trainer_has_what_an_executed_one_has(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_NAMED_LATER", "äöü")
    found: list[Any] = []
    for way in (execute, start):
        status, output, errors = run(way, tmp_path, FACTS, "--one", "two three")
        assert (status, errors) == (0, "")
        found.append(json.loads(output))
    assert found[0] == found[1]


@pytest.mark.parametrize("text", ENDS)
def test_it_ends_as_an_executed_one_does(start: Start, tmp_path: Path, text: str) -> None:
    text = f"import atexit\natexit.register(print, 'last words')\n{text}"
    executed, forked = run(execute, tmp_path, text), run(start, tmp_path, text)
    assert forked[:2] == executed[:2]
    assert forked[0] == ENDS[text.splitlines()[-1]]
    assert forked[2].splitlines()[-1:] == executed[2].splitlines()[-1:]


def test_a_module_is_run_like_a_script(start: Start, tmp_path: Path) -> None:
    outputs: list[str] = []
    for way in (execute, start):
        process = way(["-m", "calendar", "2024", "2"], tmp_path / "log")
        assert process.stdout is not None
        with process.stdout:
            outputs.append(process.stdout.read())
        assert process.wait(60) == 0
    assert outputs[0] == outputs[1]
    assert "February" in outputs[0]


def test_what_is_drawn_at_the_start_differs_from_one_start_to_the_next(start: Start, tmp_path: Path) -> None:
    text = "import random, torch, numpy.random\nprint(hash('x'), random.random(), numpy.random.random(), id(torch))"
    drawn = [run(start, tmp_path, text)[1].split() for _ in range(3)]
    for which, each in enumerate(zip(*drawn, strict=True)):
        by_server = each if which in (1, 2) else each[:2]  # the third comes from where the first came from
        assert len(set(by_server)) == len(by_server)


@pytest.mark.parametrize(
    "name", ["LC_ALL", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_SHOW_CPP_STACKTRACES"]
)
def test_what_counts_at_import_is_not_missed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "C.UTF-8" if name == "LC_ALL" else "1")
    (tmp_path / "script.py").write_text("")
    process = start([str(tmp_path / "script.py")], tmp_path / "log")
    assert isinstance(process, subprocess.Popen)
    assert Trainer(process, tmp_path / "log").finish() == 0


def waiting(start: Start, folder: Path) -> Process:
    (folder / "script.py").write_text("import signal\nprint('here', flush=True)\nsignal.pause()")
    process = start([str(folder / "script.py")], folder / "log")
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_it_can_be_held_like_a_process_of_ones_own(start: Start, tmp_path: Path) -> None:
    process = waiting(start, tmp_path)
    assert isinstance(process, ForkedProcess)
    assert (process.poll(), process.returncode) == (None, None)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert Trainer(process, tmp_path / "log").finish() == -signal.SIGTERM
    assert process.poll() == process.returncode == process.wait() == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # there is nobody any more


def test_several_live_at_the_same_time_and_outlive_their_servers(tmp_path: Path) -> None:
    with trainer_servers() as start:
        running = [waiting(start, tmp_path) for _ in range(4)]
        running[0].send_signal(signal.SIGKILL)
        assert running[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in running[1:]] == [None] * 3
    for process in running[1:]:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    for process in running:
        assert process.stdout is not None
        process.stdout.close()
