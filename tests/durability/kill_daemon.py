"""kill -9 of a real daemon under load: whatever it said was persisted must be offered by the next one, and verify.

Two ranks save at once, and the kill comes about when they are written. In every second cycle that is while they are
copied, as with large states, and what was not sealed must never be offered. What was hit shows on the devices before
anybody recovers them: generations that nobody had acknowledged and that not every device names were being written.
"""

import contextlib
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from oracle import Oracle, Shard
from places import memory_folder
from summary import Summary

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_format import parse_manifest_name
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import STAMP_PREFIX_BYTES, read_stamp
from everstep.checkpoint.testing import SMALL_LEAVES, load, opened
from everstep.core.errors import CorruptDataError
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import DEADLINE_S, FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

RANK_COUNT = 2
HIT = "killed while a shard was written"
HIT_UNSEALED = "before it was sealed"
OVERLAPPED = "sealed while written"
_SLOT_COUNT = 2
_LEAVES = (*SMALL_LEAVES, whole_leaf("model.large", "uint8", (2 << 20,)))


class _Session:
    """One store and socket over all cycles."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.failures: list[str] = []
        self.cycle_count = 0
        self.counted: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._socket = folder / "s" / "data.sock"
        self._directories = [folder / "d0", folder / "d1"]
        for path in self._directories:
            path.mkdir()
        self._content: dict[Shard, bytes] = {}
        """Digest of what was sealed: it may or may not be there later, but only with these bytes."""
        self._acknowledged: set[Shard] = set()
        self._persist_s = 0.0
        """How long the last one took."""
        self._is_sealed = True
        """The last snapshot of a cycle was."""
        self._before: set[str] = set()
        """Generations that were there before the last checkpoint of a cycle was sealed."""
        self._oracle = Oracle(RANK_COUNT)

    def cycle(self) -> None:
        """Start a daemon, let it write, kill it in the middle."""
        self.cycle_count += 1
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(daemon_process(self._socket))
            trainers = [stack.enter_context(FakeTrainer(self._socket)) for _ in range(RANK_COUNT)]
            for rank, trainer in enumerate(trainers):
                trainer.open_run(self._directories, rank=rank, world_size=RANK_COUNT)
            self._check_offers(trainers)
            arenas: list[FakeArena] = []
            for trainer in trainers:
                trainer.begin_attempt(self.cycle_count)
                arenas.append(trainer.make_arena(trainer.layout(_LEAVES), _SLOT_COUNT))
                stack.callback(arenas[-1].close)
            self._write(arenas, overlaps=self.cycle_count % 2 == 0)
            time.sleep(self._random.uniform(0, self._persist_s / 2))
            daemon.kill()
            daemon.wait()
            for rank, trainer in enumerate(trainers):
                self._hear_rest(trainer, rank)
        hit = self._half_written()
        self.counted[HIT] += bool(hit)
        self.counted[HIT_UNSEALED] += bool(hit) and not self._is_sealed
        self.counted["of both ranks"] += hit == RANK_COUNT
        self._check_bytes()

    def _write(self, arenas: Sequence[FakeArena], *, overlaps: bool) -> None:
        """Persist a few checkpoints, and leave with one more under way, most times when its first files are there."""
        count = self._random.randint(1, 3)
        for step in range(1, count + 1):
            checkpoint = CheckpointId(self.cycle_count, step)
            self._save(arenas, checkpoint, overlaps=overlaps)
            for rank, arena in enumerate(arenas):
                event = arena.trainer.event(frames.Persisted)
                assert isinstance(event, frames.Persisted)
                self._persisted(event, rank)
                self._persist_s = event.persist_s
            self._oracle.floor_begins(checkpoint)
            arenas[0].trainer.send(frames.Complete(attempt=checkpoint.attempt, step=step))
            for arena in arenas:
                arena.trainer.send(frames.SealedEverywhere(attempt=checkpoint.attempt, step=step))
        self._before = self._generations()
        if self._random.random() < 0.9:
            self._save(
                arenas,
                CheckpointId(self.cycle_count, count + 1),
                overlaps=overlaps,
                seals=not overlaps or self._random.random() < 0.5,
            )
            if self._random.random() < 0.8:
                self._wait_for_more()

    def _save(
        self, arenas: Sequence[FakeArena], checkpoint: CheckpointId, *, overlaps: bool, seals: bool = True
    ) -> None:
        """Copy the state of every rank, then seal all of them; the daemon writes it meanwhile where that overlaps.

        What is not sealed is left with a part of its segments copied.
        """
        slot = checkpoint.step % _SLOT_COUNT
        seeds = [self._random.randrange(1 << 30) for _ in arenas]
        for rank, (arena, seed) in enumerate(zip(arenas, seeds, strict=True)):
            arena.begin(checkpoint, slot)
            if overlaps:
                arena.announce(checkpoint, slot, rank=rank, world_size=RANK_COUNT)
                self._copy_announced(arena, seed, slot, is_all=seals)
            else:
                arena.fill(seed, slot)
        self._is_sealed = seals
        for rank, (arena, seed) in enumerate(zip(arenas, seeds, strict=True)):
            if seals:
                self._content[checkpoint, rank] = _digest(arena.content(seed))
                arena.seal(checkpoint, slot, rank=rank, world_size=RANK_COUNT)
        self.counted[OVERLAPPED] += overlaps and seals

    def _copy_announced(self, arena: FakeArena, seed: int, slot: int, *, is_all: bool) -> None:
        """Copy segment by segment, and say so of each, as a hook does; of all, or of some."""
        segments = [plan.segment for plan in arena.layout.segments]
        for segment in segments[: None if is_all else self._random.randint(1, len(segments))]:
            arena.fill(seed, slot, segment)
            arena.copied(segment, slot)

    def _wait_for_more(self) -> None:
        """Return when there is a new generation."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._before.issuperset(self._generations()):
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)

    def _persisted(self, event: frames.Persisted, rank: int) -> None:
        checkpoint = CheckpointId(event.attempt, event.step)
        self._oracle.persisted(checkpoint, rank)
        self._acknowledged.add((checkpoint, rank))
        self.counted["persisted"] += 1

    def _hear_rest(self, trainer: FakeTrainer, rank: int) -> None:
        """Take what the daemon had said and nobody had read when it died: that counts."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                trainer.events.append(trainer.receive())
        for event in trainer.events:
            if isinstance(event, frames.Persisted):
                self._persisted(event, rank)

    def _half_written(self) -> int:
        """Return how many shards were being written or published when the daemon died, as the devices show.

        Their generations are there since they were sealed, and no file in them carries the stamp of a shard that
        somebody acknowledged or that every device names. A kill before the first directory or after the last manifest
        is not seen.
        """
        named: Counter[Shard] = Counter()
        for manifest in self._below("commits/*"):
            name = parse_manifest_name(manifest.name)
            if name is not None:
                named[name.checkpoint, name.rank] += 1
        whole = {
            shard for shard, count in named.items() if count == len(self._directories)
        } | self._acknowledged
        ended = {path.parent.name for path in self._below("data/*/*") if _stamped(path) in whole}
        return len(self._generations() - self._before - ended)

    def _generations(self) -> set[str]:
        return {path.name for path in self._below("data/*")}

    def _below(self, pattern: str) -> list[Path]:
        return [found for path in self._directories for found in path.glob(f"runs/*/*/{pattern}")]

    def _check_offers(self, trainers: Sequence[FakeTrainer]) -> None:
        self._fail(
            self._oracle.lost(
                {
                    (CheckpointId(offer.attempt, offer.step), rank)
                    for trainer in trainers
                    for offer in trainer.offers()
                    if not offer.problem
                    for rank in offer.shards
                }
            )
        )

    def _check_bytes(self) -> None:
        """Read back everything that a store opened after the kill offers."""
        with opened(self._directories) as (store, report):
            self._fail(report.problems)
            for run in store.runs():
                offered = {
                    (checkpoint, rank) for checkpoint in run.offered() for rank in run.info(checkpoint).ranks
                }
                self._fail(self._oracle.lost({each for each in offered if self._reads_back(run, *each)}))

    def _reads_back(self, run: RunStore, checkpoint: CheckpointId, rank: int) -> bool:
        self.counted["read back"] += 1
        if (checkpoint, rank) not in self._content:
            self._fail([f"rank {rank} of {checkpoint} was never sealed"])
        elif _digest(load(run, run.manifest(checkpoint, rank))) == self._content[checkpoint, rank]:
            return True
        else:
            self._fail([f"rank {rank} of {checkpoint} has other bytes"])
        return False

    def _fail(self, problems: Iterable[str]) -> None:
        self.failures += [f"cycle {self.cycle_count}: {problem}" for problem in problems]


def _stamped(segment: Path) -> Shard | None:
    """Return whose bytes a file holds; None while its header is not written."""
    with segment.open("rb") as file, contextlib.suppress(CorruptDataError):
        stamp = read_stamp(file.read(STAMP_PREFIX_BYTES))
        return stamp.checkpoint, stamp.rank
    return None


def _digest(content: Mapping[str, bytes]) -> bytes:
    return hashlib.sha256(b"".join(content[name] for name in sorted(content))).digest()


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
        counted=session.counted,
    )
