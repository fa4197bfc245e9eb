"""The trainers of a soak: real processes, kept running, whatever is done to them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.daemon.nodes.testing import free_port

HERE = Path(__file__).resolve().parent
AGAIN_S = 0.5
END_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job is: its run's name, how many ranks it has, and the arguments of soak_train.py."""

    name: str
    ranks: int = 1
    arguments: tuple[str, ...] = ()


SPECS = (
    JobSpec(name="alone"),
    JobSpec(name="pair", ranks=2),
    JobSpec(name="adaptive", arguments=("--every", "0")),
    JobSpec(name="search-a", arguments=("--group", "search", "--every", "7")),
    JobSpec(name="search-b", arguments=("--group", "search", "--every", "13")),
)


class Job:
    """One run's processes, one for each rank: when one ends, all are started again, as torchrun does."""

    def __init__(self, spec: JobSpec, common: Sequence[str], folder: Path) -> None:
        self.spec = spec
        self.starts = 0
        self.ended_oddly: list[str] = []
        self._common, self._log_path = list(common), folder / f"{spec.name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_killed = False

    @property
    def pids(self) -> list[int]:
        """Of its ranks."""
        return [each.pid for each in self._processes]

    def start(self, *more: str) -> None:
        """Start all ranks."""
        self.starts += 1
        self._is_killed = False
        arguments = [
            str(HERE / "soak_train.py"),
            "--name",
            self.spec.name,
            *self._common,
            *self.spec.arguments,
        ]
        port = free_port("127.0.0.1")
        with self._log_path.open("ab") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-P", *arguments, *more],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment(rank, port)},
                )
                for rank in range(self.spec.ranks)
            ]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        found = {
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_RANK_DEADLINE_S": "20",
            "EVERSTEP_PRIVATE_DAEMON": "never",  # else the node's daemon, killed, would find its socket taken
        }
        if self.spec.ranks > 1:
            places = {"RANK": rank, "WORLD_SIZE": self.spec.ranks, "MASTER_PORT": port}
            found |= {"MASTER_ADDR": "127.0.0.1", **{key: str(each) for key, each in places.items()}}
        return found

    def keep_running(self) -> bool:
        """Start it again when a rank has ended; return whether it has been."""
        statuses = [each.poll() for each in self._processes]
        if all(status is None for status in statuses):
            return False
        self._note_end([status for status in statuses if status is not None])
        self.kill()
        self.start()
        return True

    def _note_end(self, statuses: list[int]) -> None:
        """What ended by itself, for no reason that was given it, is worth a look: where one had it, others follow."""
        if not self._is_killed and {75, -signal.SIGKILL}.isdisjoint(statuses):
            self.ended_oddly.append(f"{self.spec.name}: start {self.starts} ended with {statuses}")

    def signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to a rank."""
        self._is_killed = self._is_killed or number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            self._processes[rank % len(self._processes)].send_signal(number)

    def kill(self) -> None:
        """Kill all ranks, and wait for their ends."""
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()

    def end(self) -> list[int]:
        """Wait until all ranks have ended by themselves; return their statuses. Who does not is killed."""
        deadline_s = time.monotonic() + END_S
        try:
            return [each.wait(max(0.1, deadline_s - time.monotonic())) for each in self._processes]
        except subprocess.TimeoutExpired:
            self.kill()
            return [each.returncode for each in self._processes]

    def log_end(self) -> str:
        """Return the last lines that it has logged."""
        return self._log_path.read_text(errors="replace")[-3000:]
