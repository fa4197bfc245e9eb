"""In which scheduling classes a real daemon's threads run, before and after they have written a checkpoint."""

import os
import subprocess
from pathlib import Path

from everstep.core.ids import CheckpointId
from everstep.daemon.devices.device_queue import QUEUE_LANES
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames


def classes(process: subprocess.Popen[bytes]) -> list[int]:
    return [os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{process.pid}/task").iterdir()]


def main_class(process: subprocess.Popen[bytes]) -> int:
    return os.sched_getscheduler(process.pid)


def save(socket_path: Path) -> None:
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


def test_the_event_loop_waits_for_its_turn_and_who_writes_does_not(
    node_config: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path) as process:
        assert main_class(process) == os.SCHED_BATCH
        before = classes(process).count(os.SCHED_OTHER)
        assert before >= 2 * QUEUE_LANES  # those of the two drives
        save(socket_path)
        assert main_class(process) == os.SCHED_BATCH
        assert classes(process).count(os.SCHED_OTHER) > before  # one writes the shard


def test_a_class_that_was_chosen_for_the_daemon_stays(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path, prefix=["chrt", "--idle", "0"]) as process:
        save(socket_path)
        assert set(classes(process)) == {os.SCHED_IDLE}
