"""kill -9 of a real daemon under load: whatever it said was persisted must be offered by the next one, and verify."""

import math
import random
import time
from collections.abc import Iterable
from pathlib import Path

from oracle import Oracle
from places import memory_folder
from summary import Summary

from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

_SLOT_COUNT = 2


class _Session:
    """One store and socket over all cycles."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.failures: list[str] = []
        self.persisted_count = 0
        self.cycle_count = 0
        self.read_count = 0
        self._random = random.Random(seed)
        self._socket = folder / "s" / "data.sock"
        self._directories = [folder / "d0", folder / "d1"]
        for path in self._directories:
            path.mkdir()
        self._content: dict[CheckpointId, dict[str, bytes]] = {}
        """What was sealed: it may or may not be there later, but only with these bytes."""
        self._oracle = Oracle(1)

    def cycle(self) -> None:
        """Start a daemon, let it write, kill it in the middle."""
        self.cycle_count += 1
        with daemon_process(self._socket) as daemon, FakeTrainer(self._socket) as trainer:
            trainer.open_run(self._directories)
            self._check_offers(trainer)
            attempt = self.cycle_count
            trainer.begin_attempt(attempt)
            arena = trainer.make_arena(trainer.layout(), _SLOT_COUNT)
            try:
                self._write(trainer, arena, attempt)
            finally:
                arena.close()
            time.sleep(self._random.uniform(0, 0.01))
            daemon.kill()
            daemon.wait()
        self._check_bytes()

    def _write(self, trainer: FakeTrainer, arena: FakeArena, attempt: int) -> None:
        """Seal a few checkpoints, and leave with the last of them under way."""
        for step in range(1, self._random.randint(2, 6)):
            checkpoint, seed = CheckpointId(attempt, step), self._random.randrange(1 << 30)
            slot = step % _SLOT_COUNT
            self._content[checkpoint] = arena.content(seed)
            self._oracle.floor_begins(checkpoint)  # a daemon with the only rank knows what is complete
            arena.save(checkpoint, seed, slot)
            if self._random.random() < 0.2:
                return
            event = trainer.event(frames.Persisted)
            assert isinstance(event, frames.Persisted)
            self._oracle.persisted(CheckpointId(event.attempt, event.step), 0)
            self.persisted_count += 1
            trainer.send(frames.Complete(attempt=attempt, step=step))
            trainer.send(frames.SealedEverywhere(attempt=attempt, step=step))

    def _check_offers(self, trainer: FakeTrainer) -> None:
        self._fail(
            self._oracle.lost(
                {
                    (CheckpointId(offer.attempt, offer.step), 0)
                    for offer in trainer.offers()
                    if not offer.problem
                }
            )
        )

    def _check_bytes(self) -> None:
        """Read back everything that a store opened after the kill offers."""
        with opened(self._directories) as (store, report):
            self._fail(report.problems)
            for run in store.runs():
                intact = {checkpoint for checkpoint in run.offered() if self._reads_back(run, checkpoint)}
                self._fail(self._oracle.lost({(checkpoint, 0) for checkpoint in intact}))

    def _reads_back(self, run: RunStore, checkpoint: CheckpointId) -> bool:
        self.read_count += 1
        if load(run, run.manifest(checkpoint, 0)) == self._content[checkpoint]:
            return True
        self._fail([f"{checkpoint} has other bytes"])
        return False

    def _fail(self, problems: Iterable[str]) -> None:
        self.failures += [f"cycle {self.cycle_count}: {problem}" for problem in problems]


def kill_daemon(*, cycles: int, seed: int, duration_s: float = math.inf) -> Summary:
    """Kill a daemon again and again, until so many cycles or seconds have passed, and return what was lost."""
    started_s = time.monotonic()
    with memory_folder() as folder:
        session = _Session(folder, seed)
        while session.cycle_count < cycles and time.monotonic() - started_s < duration_s:
            session.cycle()
    return Summary(
        what="kill -9 of the daemon",
        count=session.cycle_count,
        failures=tuple(session.failures),
        seed=seed,
        counted={"persisted": session.persisted_count, "read back": session.read_count},
    )
