"""A checkpoint that stops coming in the middle of a restore: it is said, and no thread goes on receiving."""

import threading
from pathlib import Path

import pytest
import torch
from in_process import refused, saved_run, training
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.core.errors import CorruptDataError, DaemonUnavailableError, StorageError

WIDTH = 200_000
"""25 MB: a chunk of 16 MiB, and another one."""
SECOND_CHUNK = "everstep.daemon.devices.restore_stream:RestoreStream._deliver", "file_offset_bytes=16777216"
PARTS = "the objects hold parts of a checkpoint that could not be restored to its end"


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    path = tmp_path / "d0"
    path.mkdir()
    saved_run([path], count=1, width=WIDTH)
    return [path]


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    return Pause(tmp_path / "pause")


def receiving() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("everstep-receive")]


def test_a_daemon_that_dies_between_two_chunks_ends_the_restore(storage: list[Path], pause: Pause) -> None:
    place, second = SECOND_CHUNK
    with (
        pausing_daemon(pause, Phase(place, match=second)) as daemon,
        training(storage, width=WIDTH) as trained,
    ):
        before = trained.weights()

        def kill() -> None:
            pause.reached(daemon)
            wait_until(
                lambda: not torch.equal(trained.weights(), before)
            )  # the first chunk is in the tensors
            daemon.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        with pytest.raises(
            DaemonUnavailableError, match="the daemon went away while the checkpoint was read"
        ):
            trained.run.restore()
        assert not receiving()
        killing.join()
        with refused(CorruptDataError, PARTS, hint="build them anew"):
            trained.run.step()


def test_a_device_that_fails_between_two_chunks_ends_the_restore(storage: list[Path], pause: Pause) -> None:
    place, second = SECOND_CHUNK
    fails = Phase(place, match=second, raises="StorageError")
    with pausing_daemon(pause, fails), training(storage, width=WIDTH) as trained:
        with pytest.raises(StorageError, match="planted by a test"):
            trained.run.restore()
        assert not receiving()
        with refused(CorruptDataError, PARTS, hint="build them anew"):
            trained.run.step()
