"""Real trainers in real processes, for tests that kill them; nothing of the product imports this."""

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .trainer_start_testing import Process, Start, execute

LINE_DEADLINE_S = 90.0

Line = dict[str, Any]


class Trainer:
    """A training process: its JSON lines, its log, its end."""

    def __init__(self, process: Process, log: Path) -> None:
        self.log_path = log
        self.lines: list[Line] = []
        self.process = process

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def until(self, wanted: Callable[[Line], bool]) -> Line:
        """Read lines up to the first that is wanted."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            self.lines.append(line)
            if wanted(line):
                return line
        raise AssertionError(f"the trainer ended (status {self.process.wait()}):\n{self.log[-4000:]}")

    def until_step(self, step: int) -> Line:
        return self.until(lambda line: line.get("step") == step)

    def until_key(self, key: str) -> Line:
        return self.until(lambda line: key in line)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the trainer and all its children (torchrun's ranks, loader workers), then reap."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.finish()

    def finish(self) -> int:
        """Read to the end; return the exit status."""
        assert self.process.stdout is not None
        with self.process.stdout:
            for text in self.process.stdout:
                if text.startswith("{"):
                    self.lines.append(json.loads(text))
        return self.process.wait(60)

    def done(self) -> list[Line]:
        """Finish normally; return the last line of each rank, by rank."""
        status = self.finish()
        assert status == 0, self.log[-4000:]
        return sorted((line for line in self.lines if "done" in line), key=lambda line: line["rank"])

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if "ids" in line]


class Job:
    """Starts trainers of one script over the same two directories."""

    def __init__(self, folder: Path, script: Path, start: Start = execute) -> None:
        self.folder, self.script = folder, script
        self._start = start
        self.storage = [folder / "d0", folder / "d1"]
        for path in self.storage:
            path.mkdir(parents=True)
        self.trainers: list[Trainer] = []

    def start(
        self,
        *arguments: str,
        ranks: int = 1,
        storage: list[Path] | None = None,
        restarts: int = 0,
        torchrun: bool = False,
    ) -> Trainer:
        """Start it; several ranks by torchrun, which starts all of them again so many times when one has died.

        A single one, too, if `torchrun` says so.
        """
        script = [str(self.script), "--storage", *map(str, storage or self.storage), *arguments]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
        launcher = [*launcher, f"--nproc-per-node={ranks}"] if torchrun or ranks > 1 else []
        log = self.folder / f"trainer{len(self.trainers)}.log"
        self.trainers.append(Trainer(self._start([*launcher, *script], log), log))
        return self.trainers[-1]

    def end(self) -> None:
        for trainer in self.trainers:
            if trainer.process.poll() is None:
                trainer.kill()


def _descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, but for the daemon that a trainer started: it is in a session of its own.

    torchrun's ranks are in sessions of their own, too, so the session does not tell; what runs does.
    """
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"everstep.daemon" not in (entry / "cmdline").read_bytes():
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    parents.setdefault(parent, []).append(int(entry.name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


def daemon_pid() -> int:
    """Return the pid of the test's private daemon."""
    address = Path(os.environ["EVERSTEP_SOCKET"]).with_name("daemon.json")
    return int(json.loads(address.read_text())["pid"])


def end_daemon() -> None:
    """End the private daemon if there is one, and wait for its end."""
    try:
        pid = daemon_pid()
        watched = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGTERM)
        ended, _, _ = select.select([watched], [], [], LINE_DEADLINE_S)
        assert ended, f"daemon {pid} did not end"
    finally:
        os.close(watched)
