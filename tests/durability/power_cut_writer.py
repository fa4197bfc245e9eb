"""The process that writes while its power is cut: each line on stdin starts one cycle over the directories it names.

What it prints, one line each, is said only when the call that it is about has returned:

    attempt A                begun and durable
    shard A.S RANK           acknowledged
    telling A.S              the floor may be A.S from now on
    floor A.S                acknowledged
    gone A.S                 removed, acknowledged
    down REASON              the cycle has ended: every file is closed
"""

import json
import logging
import os
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from power_cut_load import ATTEMPT_CYCLES, KEEP_LAST, LEAVES, RUN_NAME, WORLD_SIZE, content_of

from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.engine import Engine
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import ArenaRange
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import State, make_state, memory_arena, opened
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId

_ARENA_BYTES = 4 << 20


def say(*words: object) -> None:
    """Write one line at once: a short write to a pipe is not mixed with another thread's."""
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


class Rank:
    """One rank's slot and engines, kept over all cycles."""

    def __init__(self, number: int, arena: ArenaRange, device_count: int) -> None:
        self.number, self._arena = number, arena
        self._engines = [LanedEngine(AioEngine) for _ in range(device_count)]

    def save(self, run: RunStore, state: State, checkpoint: CheckpointId) -> None:
        """Persist this rank's shard, and say so."""
        engines: dict[str, Engine] = {
            device.device_id: engine for device, engine in zip(run.store.devices, self._engines, strict=True)
        }
        mine = State(state.layout, content_of(checkpoint, self.number))
        mine.copy_into(self._arena)
        draft = mine.draft(checkpoint, rank=self.number, world_size=WORLD_SIZE)
        written = persist_shard(run, draft, self._arena, engines=engines)
        assert all(write.is_direct for write in written.writes)
        say("shard", checkpoint, self.number)

    def close(self) -> None:
        """Give the engines back."""
        for engine in self._engines:
            engine.close()


@contextmanager
def ranks(device_count: int) -> Generator[list[Rank]]:
    """Give every rank its slot."""
    with memory_arena(_ARENA_BYTES) as first, memory_arena(_ARENA_BYTES) as second:
        made = [Rank(number, arena, device_count) for number, arena in enumerate((first, second))]
        try:
            yield made
        finally:
            for rank in made:
                rank.close()


def cycle(directories: Sequence[Path], writers: Sequence[Rank], number: int) -> None:
    """Recover, then write, complete and collect until something fails."""
    with opened(directories) as (store, _), ThreadPoolExecutor(WORLD_SIZE + 1) as pool:
        run = store.run(os.geteuid(), RUN_NAME, create=True)
        attempt = run.highest_attempt()
        if not attempt or number % ATTEMPT_CYCLES == 0:
            attempt += 1
            run.begin_attempt(attempt, fresh=False)
            say("attempt", attempt)
        write_on(store, run, writers, pool)


def write_on(store: Store, run: RunStore, writers: Sequence[Rank], pool: ThreadPoolExecutor) -> None:
    """Write checkpoint after checkpoint; while one is written, the one before is completed and the oldest collected."""
    state = make_state(store, leaves=LEAVES)
    attempt = run.highest_attempt()
    step = max((info.checkpoint.step for info in run.checkpoints()), default=0)
    done: Future[None] | None = None
    while True:
        step += 1
        checkpoint = CheckpointId(attempt, step)
        saved = [pool.submit(rank.save, run, state, checkpoint) for rank in writers]
        errors = [error for each in saved if (error := each.exception()) is not None]
        if done is not None:
            done.result()
        if errors:
            raise errors[0]
        done = pool.submit(complete, run, checkpoint)


def complete(run: RunStore, checkpoint: CheckpointId) -> None:
    """Tell that all ranks have this checkpoint, and let the oldest go."""
    say("telling", checkpoint)
    run.set_complete_floor(checkpoint)
    say("floor", checkpoint)
    for removed in collect_garbage(run, keep=Keep(last=KEEP_LAST)).removed:
        say("gone", removed)


def main() -> None:
    """Do a cycle for each line, until stdin ends."""
    logging.disable()  # every cycle ends with errors of the drives
    device_count = int(sys.argv[1])
    with ranks(device_count) as writers:
        for number, line in enumerate(sys.stdin):
            try:
                cycle([Path(path) for path in json.loads(line)], writers, number)
            except EverstepError as exc:
                say("down", exc.code, str(exc).replace("\n", " "))


if __name__ == "__main__":
    main()
