"""What attach tells a user who could have it better, or who has mistyped."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import refused, service, training

from everstep.checkpoint.engine_choice import choose_engine
from everstep.core.errors import ConfigError


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


def test_a_daemon_that_dies_with_the_job_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with service(), training([tmp_path]):
        (said,) = [text for text in warnings(caplog) if "private_daemon" in text]
    assert "Slurm ends all processes of a job" in said
    assert "run a node daemon (docs/configuration.md)" in said


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
