"""Trainers that are killed and start again: what each leaves in memory goes with its successor's first checkpoint."""

import subprocess
import sys
from pathlib import Path

from held_by import held_by
from holdings import read_holding
from pausing import wait_until

from everstep.daemon.testing import node_daemon

DEATHS = 4
_TRAINER = """
import sys, threading
from pathlib import Path
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames
attempt = int(sys.argv[2])
trainer = FakeTrainer(Path(sys.argv[1]))
trainer.open_run([Path("nvme0"), Path("nvme1")])
trainer.begin_attempt(attempt)
arena = trainer.make_arena(trainer.layout())
def say(text):
    print(text, flush=True)
    sys.stdin.readline()
say("arena")
for step in range(1, 5):
    arena.save(CheckpointId(attempt, step), step, step % 2)
    trainer.event(frames.Persisted)
    trainer.send(frames.SealedEverywhere(attempt=attempt, step=step))
    if step > 1:
        trainer.event(frames.SlotFree)
say("saved")
"""


class _Trainer:
    """A process that makes an arena, saves four times when told to go on, and waits."""

    def __init__(self, socket_path: Path, attempt: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, socket_path, str(attempt)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin

    def reach(self, place: bytes) -> None:
        assert self._out.readline().strip() == place

    def go_on(self) -> None:
        self._in.write(b"\n")
        self._in.flush()

    def __enter__(self) -> "_Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, as the kernel's out-of-memory killer does."""
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()


def test_what_dead_trainers_leave_goes_with_the_first_checkpoint_of_the_next(
    node_config: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path) as daemon:
        descriptors: list[int] = []
        for attempt in range(1, DEATHS + 1):
            with _Trainer(socket_path, attempt) as trainer:
                trainer.reach(b"arena")
                # The snapshot of the one before waits in its memory for a restart, until there is a newer one.
                assert read_holding(daemon.pid, 0.0).memfds == min(attempt, 2)
                trainer.go_on()
                trainer.reach(b"saved")
                wait_until(lambda: read_holding(daemon.pid, 0.0).memfds == 1)
                held = held_by(daemon.pid)
                assert held.memfds == 1, "one descriptor, however many devices and lanes move its bytes"
                descriptors.append(held.descriptors)
            # The last trainer's connection is gone by then, and whatever was still being committed.
            wait_until(lambda: held_by(daemon.pid).descriptors < descriptors[0])
