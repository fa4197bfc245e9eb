"""A state of 200 MiB, a daemon with 64 MiB: it is saved while training goes on, and comes back bit for bit.

Whoever dies while it streams: training goes on, or a restart finds the checkpoint before, whole.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import node_config, own_socket
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.testing import opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import node_daemon
from everstep.hook.trainer_start_testing import Start
from everstep.hook.trainer_testing import Job, Line, Trainer

MIB = 1024**2
BUDGET = f"arena_max_bytes = {64 * MIB}\nreserve_bytes = 0\n"
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "ring_train.py"
NAMES = [Path("nvme0"), Path("nvme1")]
SECOND_STREAM = Phase("everstep.checkpoint.real_storage:RealStorage.write_segment", 40)
"""In the middle of the second snapshot, of some thirty segments each."""


@pytest.fixture
def job(tmp_path: Path, start_trainer: Start) -> Iterator[Job]:
    made = Job(tmp_path / "job", SCRIPT, start_trainer)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def config(job: Job) -> Path:
    return node_config(job.storage, BUDGET)


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    return Pause(tmp_path / "pause")


def digests(trainer: Trainer, rank: int = 0) -> dict[str, str]:
    """What the state was at each boundary."""
    return {
        f"1.{line['step']}": line["digest"]
        for line in trainer.lines
        if "step" in line and line["rank"] == rank
    }


def assert_restores(job: Job, expected: dict[str, str], newest: str) -> dict[str, Any]:
    """A restart gets the newest checkpoint from the devices, through whatever memory there is."""
    restart = job.start("--steps", "0", storage=NAMES)
    first = restart.until_key("restored")
    assert (first["restored"], first["source"]) == (newest, "disk")
    assert first["digest"] == expected[newest]
    (done,) = restart.done()
    return done


def taken(line: Line) -> CheckpointId:
    """What was complete then."""
    return CheckpointId.parse(line["complete"] or "0.0")


def generations(job: Job) -> list[Path]:
    return [path for device in job.storage for path in device.glob("runs/*/*/data/*")]


def committed(job: Job) -> list[str]:
    with opened(job.storage, read_only=True) as (store, _):
        (run,) = store.runs()
        return [str(info.checkpoint) for info in run.checkpoints()]


def arena_bytes() -> int:
    with connected(own_socket()) as client:
        return sum(rank.arena_bytes for run in client.status().runs for rank in run.ranks)


@pytest.mark.parametrize("options", [[], ["--debug"]], ids=["plain", "debug"])
def test_it_is_saved_while_training_goes_on_and_comes_back_bit_for_bit(
    job: Job, config: Path, options: list[str]
) -> None:
    with node_daemon(config, own_socket()):
        trainer = job.start("--steps", "8", *options, storage=NAMES)
        trainer.until_step(2)
        trainer.process.send_signal(signal.SIGSTOP)
        assert 48 * MIB < arena_bytes() <= 64 * MIB
        trainer.process.send_signal(signal.SIGCONT)
        (done,) = trainer.done()
        assert done["failures"] == []
        (note,) = done["notes"]
        assert "stream through a ring of 64.0 MiB: optimizers wait" in note
        assert "snapshots of 18" in note
        assert "the daemon's budget has 64 MiB left" in note
        assert "memory.arena_max_bytes" in note
        assert note in trainer.log
        assert_restores(job, digests(trainer) | {"1.9": done["done"]}, done["complete"])


def test_a_trainer_killed_while_it_streams_leaves_nothing_behind(
    job: Job, config: Path, pause: Pause
) -> None:
    with pausing_daemon(pause, SECOND_STREAM, config) as daemon:
        trainer = job.start("--settle", "--steps", "9", storage=NAMES)
        trainer.until(lambda line: line.get("complete") != "" and "step" in line)
        first = trainer.lines[-1]["complete"]
        pause.reached(daemon)
        trainer.kill()
        pause.go()
        wait_until(lambda: len(generations(job)) == len(job.storage))
        assert_restores(job, digests(trainer), first)
    assert committed(job) == [first]


def test_a_daemon_killed_while_it_streams_holds_nobody_up(job: Job, config: Path, pause: Pause) -> None:
    with pausing_daemon(pause, SECOND_STREAM, config) as daemon:
        trainer = job.start("--settle", "--steps", "24", storage=NAMES)
        pause.reached(daemon)
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
        lost = trainer.until(lambda line: bool(line.get("failures")))
        assert len(lost["failures"]) == 1
        assert "the daemon went away" in lost["failures"][0]
        with node_daemon(config, own_socket()):
            later = trainer.until(lambda line: "step" in line and taken(line) > taken(lost))
            assert later["failures"] == lost["failures"]
            (done,) = trainer.done()
            assert "daemon" in done["skipped"]
            assert_restores(job, digests(trainer) | {"1.25": done["done"]}, done["complete"])


def test_a_device_that_fails_while_it_streams_costs_one_checkpoint(
    job: Job, config: Path, pause: Pause
) -> None:
    phase = Phase(SECOND_STREAM.place, SECOND_STREAM.number, raises="StorageError")
    with pausing_daemon(pause, phase, config):
        trainer = job.start("--settle", "--steps", "6", storage=NAMES)
        (done,) = trainer.done()
        (failure,) = done["failures"]
        assert "planted by a test" in failure
        assert "streamed through a ring" in failure
        assert done["complete"] == "1.7"
        assert any("is suspect" in note for note in done["notes"])
        assert arena_bytes() == 0
        assert_restores(job, {"1.7": done["done"]}, "1.7")


def test_one_rank_streams_and_the_other_has_slots(job: Job, config: Path) -> None:
    with node_daemon(config, own_socket()):
        trainer = job.start("--settle", "--steps", "3", "--rows", "95000", "1000", ranks=2, storage=NAMES)
        large, small = trainer.done()
        assert large["failures"] == small["failures"] == []
        assert large["complete"] == small["complete"] != ""
        assert any("stream through a ring" in note for note in large["notes"])
        assert not any("ring" in note for note in small["notes"])
        restart = job.start("--rows", "95000", "1000", "--steps", "0", ranks=2, storage=NAMES)
        found = {}
        while len(found) < 2:
            line = restart.until_key("restored")
            found[line["rank"]] = line
        for last in (large, small):
            assert found[last["rank"]]["restored"] == last["complete"]
            assert found[last["rank"]]["digest"] == last["done"]
        restart.done()
