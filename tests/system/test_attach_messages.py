"""What attach tells a user who could have it better, or who has mistyped."""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Numbers, Training, own_socket, refused, service, training

import everstep
from everstep.checkpoint.engine_choice import choose_engine
from everstep.core.errors import ConfigError
from everstep.daemon.control.client import connected
from everstep.dataloader import DataLoader
from everstep.hook.trainer_testing import end_daemon


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="everstep-") as path:
        if choose_engine(Path(path)).alignment is not None:
            pytest.skip("this kernel's tmpfs does direct I/O")
        yield Path(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_writes_through_the_page_cache_are_said(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(), training([in_memory]) as trained:
        (said,) = [text for text in warnings(caplog) if "page cache" in text]
        assert str(in_memory) in said
        assert "cannot do direct I/O" in said
        assert trained.save()


def test_a_device_that_gets_nothing_new_is_said_to_who_attaches_then(
    devices: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with service():
        with training(devices) as trained:
            assert trained.save()
        with connected(own_socket()) as client:
            client.drain_device(str(devices[1]), cancel=False)
        caplog.clear()
        with training(devices) as trained:
            assert trained.save()
            text = f"device {devices[1]} is draining: it gets no new segments"
            assert [note for note in trained.run.report().notes if "draining" in note] == [text]
        logged = [each for each in warnings(caplog) if "draining" in each]
    assert len(logged) == 1
    assert logged[0].startswith("storage_note run=")
    assert logged[0].endswith(text)


def test_a_daemon_that_dies_with_the_job_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with service(), training([tmp_path]):
        (said,) = [text for text in warnings(caplog) if "private_daemon" in text]
    assert "Slurm ends all processes of a job" in said
    assert "run a node daemon (docs/configuration.md)" in said


def test_of_one_daemon_that_is_said_once_and_of_the_next_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for told in (1, 2):
        with service():
            with training([tmp_path]):
                pass
            with training([tmp_path]):
                pass
        assert len([text for text in warnings(caplog) if "private_daemon" in text]) == told


def test_of_several_loaders_one_leads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train: Any = DataLoader(Numbers(8))
    val = DataLoader(Numbers(8))
    for name, notes in (("train", 1), ("loader", 0)):
        caplog.clear()
        with service(), everstep.attach(f"a{name}", **{name: train}, val=val, storage=tmp_path) as run:
            for _ in range(2):
                assert next(iter(run.epochs(1))) == 0
            assert len([text for text in warnings(caplog) if "no_loader_leads" in text]) == notes
            assert len([note for note in run.report().notes if "attach(..., loader=train)" in note]) == notes


def test_a_word_that_is_neither_directory_nor_device_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With EVERSTEP_SOCKET set the word might name a device; a private daemon has none."""
    monkeypatch.chdir(tmp_path)
    with (
        service(),
        refused(ConfigError, "'nowhere'", "does not exist", hint="create the directory"),
        training(["nowhere"]),
    ):
        pass


def said(caplog: pytest.LogCaptureFixture, trained: Training) -> tuple[list[str], list[str]]:
    """What was said of things that were not attached: in the log, and in the report."""
    logged = [text.partition(" ")[0] for text in warnings(caplog) if "not_attached" in text]
    return logged, [note for note in trained.run.report().notes if "was not attached" in note]


def test_a_loop_that_attached_all_it_moves_hears_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service(), training([tmp_path]) as trained:
        for _ in range(4):
            trained.step()
        assert said(caplog, trained) == ([], [])


def test_a_loop_that_forgot_its_loader_and_an_optimizer_hears_of_both_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service(), training([tmp_path]) as trained:
        another = torch.optim.SGD(trained.model.parameters(), lr=0.0)
        forgotten = DataLoader(Numbers(8))
        for _ in forgotten:
            trained.step()
            another.step()
        logged, noted = said(caplog, trained)
    assert sorted(logged) == ["loader_not_attached", "optimizer_not_attached"]
    assert any("a SGD steps parameters of 'model'" in note for note in noted)
    assert any("everstep.DataLoader that was not attached" in note for note in noted)


SCRIPT = """
import sys, torch, everstep
def save():
    before = run.report().checkpoints_complete
    while run.report().checkpoints_complete == before:
        run.checkpoint()
        run.step()
        run.wait()
model = torch.nn.Linear(2, 2)
run = everstep.attach("left", model=model, storage=sys.argv[1], every=10**6)
run.restore()
save()
for _ in range(3):
    run.step()
"""


@pytest.mark.parametrize(
    ("end", "is_said"),
    [
        ("", True),
        ("raise SystemExit(3)", True),
        ("1 / 0", True),
        ("run.close()", False),
        ("save()", False),
    ],
)
def test_what_a_script_that_never_closes_loses_is_said_at_its_end(
    tmp_path: Path, end: str, is_said: bool
) -> None:
    command = [sys.executable, "-P", "-c", SCRIPT + end, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert ("run_not_closed run=left last_complete=1." in done.stderr) == is_said, done.stderr
    assert ("unsaved_steps=3: these are trained again" in done.stderr) == is_said
    end_daemon()
