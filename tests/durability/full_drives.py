"""A real daemon on small drives that somebody else fills to the last block, and empties, while it saves and collects.

What it says is persisted is there after its end, of whatever kind; what it refuses leaves nothing behind; and once
there is room again, it saves again.
"""

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from drive_filler import Filler
from loop_disk import LoopDisk
from oracle import Oracle
from places import memory_folder
from summary import Summary

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

_DRIVE_COUNT = 2
_SLOT_COUNT = 2
_SIZES_BYTES = (200_000, 1 << 20, 3_000_001, 9 << 20)
"""Of a checkpoint: so that several are on a drive, and a few more fill it."""
_NO_SPACE = "NoSpaceError"


class _Session:
    """One store over all cycles; its drives stay mounted."""

    def __init__(self, folder: Path, drives: Sequence[LoopDisk], source: random.Random) -> None:
        self.failures: list[str] = []
        self.cycle_count = 0
        self.counted: Counter[str] = Counter()
        self._random = source
        self._socket = folder / "s" / "data.sock"
        self._drives = [drive.path for drive in drives]
        self._directories = [path / "everstep" for path in self._drives]
        for path in self._directories:
            path.mkdir()
        self._content: dict[CheckpointId, dict[str, bytes]] = {}
        """What was sealed: it may or may not be there later, but only with these bytes."""
        self._oracle = Oracle(1)

    def cycle(self) -> None:
        """Start a daemon, let it save while the drives fill and empty, and once more when they are empty; end it."""
        self.cycle_count += 1
        with daemon_process(self._socket) as daemon, FakeTrainer(self._socket) as trainer:
            self._save_all(trainer)
            if self._random.random() < 0.5:
                daemon.kill()
        self._check_bytes()

    def _save_all(self, trainer: FakeTrainer) -> None:
        attempt, keep = self.cycle_count, frames.KeepRules(last=self._random.randint(1, 3))
        with self._filled():
            is_open = self._is_done(trainer.open_run(self._directories, keep=keep), frames.RunOpened)
        if not is_open and not self._is_done(
            trainer.open_run(self._directories, keep=keep), frames.RunOpened
        ):
            self._fail(["no run can be opened on empty drives"])
            return
        self._fail(self._oracle.lost(_offered(trainer)))
        with self._filled():
            begun = self._is_done(trainer.begin_attempt(attempt), frames.Done)
        if not begun and not self._is_done(trainer.begin_attempt(attempt), frames.Done):
            self._fail(["no attempt can begin on empty drives"])
            return
        leaf = whole_leaf("w", "uint8", (self._random.choice(_SIZES_BYTES),))
        rest = [whole_leaf(f"w.{number}", "uint8", (self._random.randrange(1, 9999),)) for number in range(3)]
        arena = trainer.make_arena(trainer.layout((leaf, *rest)), _SLOT_COUNT)
        steps = self._random.randint(4, 16)
        try:
            with self._filled():
                for step in range(1, steps):
                    self._save(trainer, arena, CheckpointId(attempt, step))
            refusal = self._save(trainer, arena, CheckpointId(attempt, steps))
            self._fail(
                [f"nothing is saved although the drives are empty again: {refusal}"] if refusal else []
            )
        finally:
            arena.close()

    @contextmanager
    def _filled(self) -> Generator[None]:
        """Let somebody fill the drives meanwhile."""
        with Filler(self._drives, random.Random(self._random.randrange(1 << 32))) as filler:
            yield
        self.counted["times a drive was filled"] += filler.fill_count

    def _is_done(self, reply: frames.Reply, kind: type[frames.Reply]) -> bool:
        """Tell whether a request was granted; a refusal must say that there is no room."""
        if isinstance(reply, kind):
            return True
        is_declared = isinstance(reply, frames.Failure) and reply.code == _NO_SPACE
        self._fail([] if is_declared else [f"it answers {reply}"])
        self.counted["requests refused"] += 1
        return False

    def _save(self, trainer: FakeTrainer, arena: FakeArena, checkpoint: CheckpointId) -> str:
        """Seal a checkpoint and return why it was not persisted; an empty string when it was."""
        seed = self._random.randrange(1 << 30)
        self._content[checkpoint] = arena.content(seed)
        self._oracle.floor_begins(checkpoint)  # a daemon with the only rank knows what is complete
        arena.save(checkpoint, seed, checkpoint.step % _SLOT_COUNT)
        trainer.send(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))
        while not isinstance(event := trainer.receive(), frames.Persisted):
            if isinstance(event, frames.PersistFailed):
                self._fail([] if event.code == _NO_SPACE else [f"{checkpoint} failed with {event}"])
                self.counted["refused"] += 1
                return event.message
        self._oracle.persisted(CheckpointId(event.attempt, event.step), 0)
        self.counted["persisted"] += 1
        return ""

    def _check_bytes(self) -> None:
        """Read back everything that a store opened afterwards offers; nothing else may be left of what was refused."""
        with opened(self._directories) as (store, report):
            self._fail(report.problems)
            for run in store.runs():
                intact = {checkpoint for checkpoint in run.offered() if self._reads_back(run, checkpoint)}
                self._fail(self._oracle.lost({(checkpoint, 0) for checkpoint in intact}))
                known = {ref.generation for shard in run.shards() for ref in shard.segments}
                found = {path.name for each in store.devices for path in run.data_path(each).iterdir()}
                self._fail(f"generation {name} is left over" for name in found - known)

    def _reads_back(self, run: RunStore, checkpoint: CheckpointId) -> bool:
        self.counted["read back"] += 1
        if load(run, run.manifest(checkpoint, 0)) == self._content[checkpoint]:
            return True
        self._fail([f"{checkpoint} has other bytes"])
        return False

    def _fail(self, problems: Iterable[str]) -> None:
        self.failures += [f"cycle {self.cycle_count}: {problem}" for problem in problems]


def _offered(trainer: FakeTrainer) -> set[tuple[CheckpointId, int]]:
    offers = [offer for offer in trainer.offers() if not offer.problem]
    return {(CheckpointId(offer.attempt, offer.step), 0) for offer in offers}


@contextmanager
def mounted_drives(kind: str, count: int) -> Generator[tuple[Path, list[LoopDisk]]]:
    """Give mounted drives, and the folder that they are in."""
    with memory_folder() as folder, ExitStack() as stack:
        drives: list[LoopDisk] = []
        for number in range(count):
            drives.append(LoopDisk(folder, kind, f"drive{number}"))
            stack.callback(drives[-1].remove)
            drives[-1].mount()
        yield folder, drives


def fill_drives(kind: str, *, seed: int, cycles: int = sys.maxsize, duration_s: float = math.inf) -> Summary:
    """Let daemons save on drives that fill, until so many cycles or seconds have passed; return what went wrong."""
    started_s = time.monotonic()
    with mounted_drives(kind, _DRIVE_COUNT) as (folder, drives):
        session = _Session(folder, drives, random.Random(seed))
        while session.cycle_count < cycles and time.monotonic() - started_s < duration_s:
            session.cycle()
    return Summary(
        what=f"daemons on {kind} that fills",
        count=session.cycle_count,
        failures=tuple(session.failures),
        seed=seed,
        counted=session.counted,
    )
