"""The main job: a training run that survives kill -9.

Trains a small GPT once undisturbed, then once while its trainer is killed several times and its daemon once, each
time followed by a plain restart of the same command; then compares the two runs bit for bit. Exit code 1 when
anything differs.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import compare_runs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESTORED = re.compile(r"restored run=\S+ checkpoint=(\d+)\.(\d+) from=(\w+) .*restore_s=([\d.]+)")
REPORT = re.compile(
    r"run_closed .* complete=(\d+) .*stall_per_checkpoint_ms=([\d.]+) slowdown_percent=([\d.]+)"
)
THREADS = "1"
"""Intra-op threads of both runs: bit-identical training needs the same number, and one trains this model fastest."""

FOLDER_LENGTH_MAX = 50
"""A socket's path ends at 107 bytes; what is made below the folder takes up to 55."""


@dataclasses.dataclass
class Crash:
    """One kill and what came back."""

    victim: str
    at_step: int
    restored_step: int = 0
    source: str = "nothing"
    restore_s: float = 0.0
    recovery_s: float = 0.0
    """From the kill to the first step of the restarted trainer, Python's start and imports included."""


class Trainer:
    """The training command, started as a user would start it."""

    def __init__(self, storage: list[Path], arguments: list[str], log: Path, ranks: int) -> None:
        self.log, self.ranks = log, ranks
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        script = ["train.py"] if ranks == 1 else [*torchrun, "train_ddp.py"]
        script[-1] = str(HERE / script[-1])
        command = [sys.executable, *script, "--storage", *map(str, storage), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": THREADS}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def next_step(self) -> bool:
        """Wait for the line of the next training step; False when the trainer has ended."""
        assert self.process.stdout is not None
        return any(line.startswith("epoch ") for line in self.process.stdout)

    def kill(self, rank: int) -> None:
        """SIGKILL one rank, as the kernel's out-of-memory killer would; torchrun then ends the others."""
        if self.process.poll() is None:
            victim = self.process.pid if self.ranks == 1 else _children(self.process.pid)[rank]
            os.kill(victim, signal.SIGKILL)
        status = self.finish()
        if self.ranks == 1 and status != -signal.SIGKILL:
            raise SystemExit(f"the trainer ended by itself with status {status}:\n{self.last_words()}")

    def finish(self) -> int:
        """Reap the trainer; return its exit status."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()

    def end_well(self) -> None:
        """Reap a trainer that has come to its end; one that failed ends the demo."""
        if (status := self.finish()) != 0:
            raise SystemExit(f"the trainer failed with status {status}:\n{self.last_words()}")

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text()[-3000:]


class Demo:
    """Both runs, in a folder of their own."""

    def __init__(self, folder: Path, options: argparse.Namespace, console: Console) -> None:
        self.folder, self.console = folder, console
        self.ranks: int = options.ranks
        self.steps = options.epochs * -(-options.windows // (16 * options.ranks))
        self.arguments = ["--epochs", str(options.epochs), "--windows", str(options.windows)]
        self.random = random.Random(options.seed)
        self.kills, self.seed = options.kills, options.seed
        self.crashes: list[Crash] = []
        os.environ["EVERSTEP_SOCKET"] = str(folder / "socket" / "data.sock")
        os.environ["TMPDIR"] = str(folder)  # what torch leaves there goes, too

    def storage(self, name: str) -> list[Path]:
        """Return two directories for a run's store, made if need be."""
        directories = [self.folder / name / device for device in ("nvme0", "nvme1")]
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        return directories

    def start(self, name: str) -> Trainer:
        """Start the command of a run; the same command each time."""
        return Trainer(self.storage(name), self.arguments, self.folder / f"{name}.log", self.ranks)

    def undisturbed(self, progress: Progress) -> None:
        """Train from the first to the last step."""
        bar = progress.add_task("undisturbed", total=self.steps)
        trainer = self.start("undisturbed")
        while trainer.next_step():
            progress.advance(bar)
        trainer.end_well()

    def disturbed(self, progress: Progress) -> None:
        """Train the same, with a kill at random moments; one of them takes the daemon, too."""
        bar = progress.add_task("killed and restarted", total=self.steps)
        moments = sorted(self.random.sample(range(30, self.steps - 10), self.kills))
        daemon_dies = self.random.randrange(self.kills)
        step, crash = 0, None
        for number, moment in enumerate([*moments, self.steps + 1]):
            trainer = self.start("disturbed")
            step = self._train_until(trainer, step, moment, crash, progress=progress, bar=bar)
            if moment > self.steps:
                trainer.end_well()
                return
            if step < moment:
                status = trainer.finish()
                raise SystemExit(
                    f"the trainer ended by itself at step {step} with status {status}:\n{trainer.last_words()}"
                )
            crash = Crash(victim="trainer" if number != daemon_dies else "daemon and trainer", at_step=step)
            self.crashes.append(crash)
            time.sleep(self.random.uniform(0.0, 0.05))  # anywhere within a step
            self._kill(trainer, with_daemon=number == daemon_dies)

    def _kill(self, trainer: Trainer, *, with_daemon: bool) -> None:
        self._killed_s = time.monotonic()
        if with_daemon:
            os.kill(daemon_pid(self.folder), signal.SIGKILL)
        trainer.kill(self.random.randrange(self.ranks))

    def _train_until(
        self,
        trainer: Trainer,
        step: int,
        moment: int,
        crash: Crash | None,
        *,
        progress: Progress,
        bar: TaskID,
    ) -> int:
        """Follow the trainer up to step `moment` or its end; fill in how the crash before was recovered."""
        first = True
        while step < moment and trainer.next_step():
            if first and crash is not None:
                crash.recovery_s = time.monotonic() - self._killed_s
                found = RESTORED.findall(trainer.log.read_text())
                if found:
                    _, restored_step, crash.source, restore_s = found[-1]
                    crash.restored_step, crash.restore_s = int(restored_step), float(restore_s)
                step = crash.restored_step
            first = False
            step += 1
            progress.update(bar, completed=step)
        return step

    def show(self) -> bool:
        """Print the tables and the verdict; return whether all is well."""
        table = Table(title="Every kill -9 and what came back", title_justify="left")
        for column in (
            "killed",
            "at step",
            "restored step",
            "steps lost",
            "from",
            "restore",
            "until training again",
        ):
            table.add_column(column, justify="left" if column in ("killed", "from") else "right")
        for crash in self.crashes:
            table.add_row(
                crash.victim,
                str(crash.at_step),
                str(crash.restored_step),
                str(crash.at_step - crash.restored_step),
                crash.source,
                f"{crash.restore_s:.2f} s",
                f"{crash.recovery_s:.1f} s",
            )
        self.console.print(table)
        for count, stall_ms, slowdown in REPORT.findall((self.folder / "undisturbed.log").read_text()):
            self.console.print(
                f"undisturbed run: {count} checkpoints, mean stall {stall_ms} ms each, "
                f"whole cost {slowdown} % of training",
                highlight=False,
            )
        problems = compare_runs(self.storage("undisturbed"), self.storage("disturbed"))
        restored = [crash for crash in self.crashes if crash.restored_step == 0]
        problems += [f"the run killed at step {crash.at_step} restored nothing" for crash in restored]
        for problem in problems:
            self.console.print(f"[red]different:[/red] {problem}", highlight=False)
        if not problems:
            self.console.print(
                f"[bold green]identical:[/bold green] weights, optimizer state, schedule, random states and loss "
                f"history of both runs are the same bit for bit after {self.steps} steps ({THREADS} thread), and each "
                "sample was delivered exactly once per epoch."
            )
        return not problems


def _children(pid: int) -> list[int]:
    """Return the processes that `pid` has started: torchrun's are the ranks, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def daemon_pid(folder: Path) -> int:
    """Return the pid of the demo's own daemon, from the file beside its socket."""
    return int(json.loads((folder / "socket" / "daemon.json").read_text())["pid"])


def end_daemon(folder: Path) -> None:
    """End the demo's daemon if it still lingers, and wait until it is gone."""
    if not (folder / "socket" / "daemon.json").exists():
        return
    pid = daemon_pid(folder)
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    os.kill(pid, signal.SIGTERM)
    select.select([watched], [], [], 60)  # readable when the process has ended
    os.close(watched)


def make_folder() -> Path:
    """Return a new temporary folder whose path leaves room for the sockets of daemon and loader workers."""
    base = tempfile.gettempdir()
    if len(base) > FOLDER_LENGTH_MAX:
        raise SystemExit(f"{base} is too long for the paths of sockets: set TMPDIR to a shorter one")
    return Path(tempfile.mkdtemp(prefix="everstep-demo-"))


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=3200, help="samples of an epoch")
    parser.add_argument("--ranks", type=int, default=1, help="more than one train with DDP under torchrun")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills; printed")
    parser.add_argument("--keep", action="store_true", help="keep the folder with stores and logs")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    console = Console()
    folder = make_folder()
    demo = Demo(folder, options, console)
    console.print(f"seed {options.seed}, {demo.steps} steps, {options.kills} kills, {options.ranks} rank(s)")
    columns = (TextColumn("{task.description:>21}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            demo.undisturbed(progress)
            demo.disturbed(progress)
        return 0 if demo.show() else 1
    finally:
        end_daemon(folder)
        if options.keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
