"""Power cuts under load on the real kernel: write, cut, unmount, mount, recover, compare with what was acknowledged."""

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loop_disk import LoopDisk
from oracle import Oracle
from places import memory_folder
from power_cut_load import RUN_NAME, WORLD_SIZE, content_of
from summary import Summary

from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import RealStorage
from everstep.checkpoint.testing import load, opened
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId

WRITER = Path(__file__).with_name("power_cut_writer.py")
_DEADLINE_S = 30.0
_DEVICE_COUNT = 2
_FAILURES_MAX = 10
_DOWN = "down"


class Writer:
    """The writing process, over all cycles."""

    def __init__(self, program: Path, device_count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(device_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="power-cut-reader")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")

    def start(self, directories: Sequence[Path]) -> None:
        """Let a cycle begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(path) for path in directories]) + "\n")

    def next_line(self) -> str:
        """Return what it says next."""
        line = self._lines.get(timeout=_DEADLINE_S)
        assert line, f"the writing process ended with {self._process.wait()}"
        return line

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def power_cut(
    kind: str, *, duration_s: float, seed: int, cycles: int = sys.maxsize, program: Path = WRITER
) -> Summary:
    """Cut the power again and again, until so many cycles or seconds have passed, and return what was lost."""
    started_s = time.monotonic()
    with _disks(kind) as disks, _writer(program) as writer:
        session = _Session(disks, writer, random.Random(seed))
        while session.cycle_count < cycles and time.monotonic() - started_s < duration_s:
            session.cycle()
            if len(session.failures) > _FAILURES_MAX:
                break
    each_s = (time.monotonic() - started_s) / max(session.cycle_count, 1)
    return Summary(
        what=f"power cuts on {kind}",
        count=session.cycle_count,
        failures=tuple(session.failures),
        seed=seed,
        notes=f"{session.oracle.acknowledged_count} acknowledged, {session.read_count} shards read back,"
        f" {each_s:.3f} s each",
    )


class _Session:
    """One store over all cycles, so that its history grows with them; its drives are mounted between them."""

    def __init__(self, disks: Sequence[LoopDisk], writer: Writer, source: random.Random) -> None:
        self.oracle = Oracle(WORLD_SIZE)
        self.failures: list[str] = []
        self.cycle_count = 0
        self.read_count = 0
        self._disks, self._writer, self._random = disks, writer, source
        self._directories = [disk.path / "everstep" for disk in disks]
        for path in self._directories:
            path.mkdir()
            RealStorage().sync_directory(path.parent)  # the user's directories are no part of the promise

    def cycle(self) -> None:
        """Write, cut, mount and check once.

        The drives stay mounted for the next cycle: what recovery mended must be durable by its own doing.
        """
        self.cycle_count += 1
        self._writer.start(self._directories)
        self._wait()
        self._cut()
        while not (line := self._writer.next_line()).startswith(_DOWN):
            self.oracle.hear(line)
        if line.split()[1] not in ("StorageError", "DeviceMissingError"):
            self._fail(line)
        for disk in self._disks:
            disk.unmount()
            disk.mount()
        try:
            self._check()
        except EverstepError as exc:
            self._fail(f"{exc.code}: {exc}")

    def _wait(self) -> None:
        """Let the writer go on for a random time: from its start on, or from its first acknowledgement."""
        if self._random.random() < 0.7:
            line = self._writer.next_line()
            self.oracle.hear(line)
            time.sleep(self._random.uniform(0, 0.04))
        else:
            time.sleep(self._random.uniform(0, 0.06))

    def _cut(self) -> None:
        """Cut all drives: at once, or one a little after the other."""
        gap_s = self._random.choice((0.0, 0.0, self._random.uniform(0, 0.003)))
        for disk in self._random.sample(self._disks, len(self._disks)):
            disk.cut()
            time.sleep(gap_s)

    def _check(self) -> None:
        with opened(self._directories) as (store, report):
            run = store.run(os.geteuid(), RUN_NAME, create=True)
            intact: set[tuple[CheckpointId, int]] = set()
            listed: list[CheckpointId] = []
            for info in run.checkpoints():
                listed.append(info.checkpoint)
                intact |= {
                    (info.checkpoint, rank)
                    for rank in info.ranks
                    if self._reads_back(run, info.checkpoint, rank)
                }
            problems = self.oracle.problems(
                attempt=run.highest_attempt(), floor=run.complete_floor(), listed=listed, intact=intact
            )
            for problem in (*problems, *report.problems, *self._leftovers(run)):
                self._fail(problem)

    def _reads_back(self, run: RunStore, checkpoint: CheckpointId, rank: int) -> bool:
        self.read_count += 1
        if load(run, run.manifest(checkpoint, rank)) == content_of(checkpoint, rank):
            return True
        self._fail(f"rank {rank} of checkpoint {checkpoint} is not what was written")
        return False

    def _leftovers(self, run: RunStore) -> list[str]:
        """Return the generations that nothing refers to: recovery had all devices and must have removed them."""
        kept = {shard.generation for shard in run.shards()}
        return [
            f"generation {name} is left over on {device.path}"
            for device in run.store.devices
            for name in run.store.ops.list_directory(run.data_path(device))
            if name not in kept
        ]

    def _fail(self, problem: str) -> None:
        self.failures.append(f"cycle {self.cycle_count}: {problem}")


@contextmanager
def _disks(kind: str) -> Generator[list[LoopDisk]]:
    with memory_folder() as folder, ExitStack() as stack:
        made: list[LoopDisk] = []
        for number in range(_DEVICE_COUNT):
            made.append(LoopDisk(folder, kind, f"drive{number}"))
            stack.callback(made[-1].remove)
            made[-1].mount()
        yield made


@contextmanager
def _writer(program: Path) -> Generator[Writer]:
    writer = Writer(program, _DEVICE_COUNT)
    try:
        yield writer
    finally:
        writer.close()
