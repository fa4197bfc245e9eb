"""The process that writes while its power is cut: each line on stdin is an order, and starts one cycle.

What it prints, one line each, is said only when the call that it is about has returned:

    attempt A                begun and durable
    shard A.S RANK D,… N     acknowledged, with segments on these devices and N copies of its manifest
    again A.S RANK D,…       it is written again from now on, to some of these devices; acknowledged like the first time
    telling A.S              the floor may be A.S from now on
    floor A.S                acknowledged
    gone A.S                 removed, acknowledged
    recycled BYTES           so many of a shard were written over files of deleted ones
    changing VERB D          the device drains, is cancelled, retires or is readmitted from now on
    changed VERB D           acknowledged
    failed WHAT REASON       an error that training goes on after
    down REASON              the cycle has ended: every file is closed
"""

import itertools
import logging
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dawdling_storage import DawdlingStorage
from msgspec.structs import replace
from power_cut_load import ATTEMPT_CYCLES, KEEP_LAST, LEAVES, RUN_NAME, WORLD_SIZE, Order, content_of

from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.commit import lost_segments, persist_again, persist_shard
from everstep.checkpoint.copy_gate import CopyGate
from everstep.checkpoint.device_change import cancel_drain, drain, find_device, retire
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.engine import Engine
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.manifest_types import Draft
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.readmission import prepare_readmission
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import ArenaRange
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.succession_plan import SNAPSHOT_NOTE
from everstep.checkpoint.testing import HOLDER, State, make_state, memory_arena
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId, random_id

_ARENA_BYTES = 4 << 20


def say(*words: object) -> None:
    """Write one line at once: a short write to a pipe is not mixed with another thread's."""
    os.write(1, (" ".join(str(word).replace("\n", " ") for word in words) + "\n").encode())


class Rank:
    """One rank's slot and engines, kept over all cycles."""

    def __init__(self, number: int, arena: ArenaRange, device_count: int) -> None:
        self.number, self._arena = number, arena
        self._engines = [LanedEngine(AioEngine) for _ in range(device_count)]
        self._directories: tuple[Path, ...] = ()
        self._kept: Draft | None = None
        """What the slot holds, committed."""
        self._again_failed_for: tuple[int, ...] = ()
        """The lost segments of it that it could not be written again for."""

    def begin_cycle(self, directories: tuple[Path, ...]) -> None:
        """Go on with these devices; what the slot held before is not looked at any more."""
        self._directories, self._kept, self._again_failed_for = directories, None, ()

    def save(self, run: RunStore, state: State, checkpoint: CheckpointId) -> None:
        """Persist this rank's shard, and say so; what is kept in memory and has lost a device comes first."""
        self._mend(run)
        self._kept = None
        mine = State(state.layout, content_of(checkpoint, self.number))
        draft = mine.draft(checkpoint, rank=self.number, world_size=WORLD_SIZE)
        draft = replace(draft, notes=draft.notes | {SNAPSHOT_NOTE: random_id()})
        engines = self._engines_of(run)
        if checkpoint.step % 2:
            mine.copy_into(self._arena)
            result = persist_shard(run, draft, self._arena, engines=engines)
        else:
            gate = CopyGate()
            with ThreadPoolExecutor(1) as pool:
                copying = pool.submit(self._copy_announced, mine, gate)
                result = persist_shard(run, draft, self._arena, engines=engines, gate=gate)
            copying.result()
        self._saved(run, draft, result)
        self._mend(run)

    def _copy_announced(self, state: State, gate: CopyGate) -> None:
        """Copy segment by segment, and seal, while the shard is written, as with large states."""
        try:
            for plan in state.layout.segments:
                state.copy_into(self._arena, plan.segment)
                gate.copied(plan.segment)
            gate.seal()
        finally:
            gate.abandon()

    def _mend(self, run: RunStore) -> None:
        """Write the newest shard again where a device was lost, as the daemon does at once."""
        if self._kept is None:
            return
        draft = self._kept
        lost = lost_segments(run, run.shard(draft.checkpoint, self.number).segments)
        if not lost or lost == self._again_failed_for:
            return
        self._again_failed_for = lost
        say("again", draft.checkpoint, self.number, ",".join(map(str, range(len(self._directories)))))
        committed = run.manifest(draft.checkpoint, self.number)  # or one that was refused at once
        self._saved(
            run, draft, persist_again(run, draft, committed, self._arena, engines=self._engines_of(run))
        )

    def _saved(self, run: RunStore, draft: Draft, result: PersistResult) -> None:
        assert all(write.is_direct for write in result.writes)
        self._kept, self._again_failed_for = draft, ()
        numbers = {
            self._directories.index(device.path)
            for record in result.manifest.segments
            if (device := run.store.device(record.device_id)) is not None
        }
        on = ",".join(str(number) for number in sorted(numbers))
        say("shard", draft.checkpoint, self.number, on, result.copy_count)
        say("recycled", sum(write.recycled_bytes for write in result.writes))

    def _engines_of(self, run: RunStore) -> dict[str, Engine]:
        return {
            device.device_id: self._engines[self._directories.index(device.path)]
            for device in run.store.devices
        }

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


def cycle(order: Order, writers: Sequence[Rank], number: int, steps: Iterator[int]) -> None:
    """Recover, then write, complete, collect and change devices until nothing can be written to any more.

    As a trainer that outlives its daemons gives no step to two checkpoints, whatever the store knows of them.
    """
    for rank in writers:
        rank.begin_cycle(order.directories)
    with opened(order) as store:
        run = store.run(os.geteuid(), RUN_NAME, create=True)
        attempt = run.highest_attempt()
        if not attempt or number % ATTEMPT_CYCLES == 0:
            attempt += 1
            run.begin_attempt(attempt, fresh=False)
            say("attempt", attempt)
        write_on(store, run, writers, order, steps)


@contextmanager
def opened(order: Order) -> Generator[Store]:
    """Give the recovered store, with the device that is to be readmitted."""
    adopt: tuple[Path, ...] = ()
    ops, uid = DawdlingStorage(RealStorage()).as_ops() if order.dawdles else RealStorage(), os.geteuid()
    if order.readmit is not None:
        say("changing", "readmit", order.readmit)
        path = order.directories[order.readmit]
        adopt = prepare_readmission(order.directories, path, ops=ops, holder=HOLDER, uid=uid).adopt
    with open_store(order.directories, ops=ops, holder=HOLDER, uid=uid, adopt=adopt, recycles=True) as store:
        recover(store)
        if order.readmit is not None:
            say("changed", "readmit", order.readmit)
        yield store


def write_on(
    store: Store, run: RunStore, writers: Sequence[Rank], order: Order, steps: Iterator[int]
) -> None:
    """Write checkpoint after checkpoint; while one is written, the one before is completed and the oldest collected."""
    state = make_state(store, leaves=LEAVES)
    attempt = run.highest_attempt()
    beside: list[Future[None]] = []
    with ThreadPoolExecutor(WORLD_SIZE + 2) as pool:
        for step in steps:
            checkpoint = CheckpointId(attempt, step)
            saved = [pool.submit(rank.save, run, state, checkpoint) for rank in writers]
            errors = [error for each in saved if (error := each.exception()) is not None]
            for each in beside[-1:]:
                each.result()
            if errors:
                said = go_on_after(store, errors)
                say("failed", f"save-{checkpoint}", said.code, said)
                continue
            if not beside:
                beside.append(pool.submit(change, store, order))
            beside.append(pool.submit(complete, run, checkpoint))


def go_on_after(store: Store, errors: Sequence[BaseException]) -> EverstepError:
    """Return the error after which the next checkpoint is tried; raise it when no device is left."""
    (first, *_) = errors
    well = [
        each for each in store.writable if store.device_state(each.device_id)[0] is not DeviceState.SUSPECT
    ]
    if not well or not isinstance(first, EverstepError):
        raise first
    return first


def complete(run: RunStore, checkpoint: CheckpointId) -> None:
    """Tell that all ranks have this checkpoint, and let the oldest go."""
    try:
        say("telling", checkpoint)
        run.set_complete_floor(checkpoint)
        say("floor", checkpoint)
        for removed in collect_garbage(run, keep=Keep(last=KEEP_LAST)).removed:
            say("gone", removed)
    except EverstepError as exc:
        say("failed", f"complete-{checkpoint}", exc.code, exc)


def change(store: Store, order: Order) -> None:
    """Drain, cancel and retire what the order says."""
    for verb, number in order.changes:
        device_id = find_device(store, str(order.directories[number]))
        say("changing", verb, number)
        try:
            match verb:
                case "drain":
                    drain(store, device_id)
                case "cancel":
                    cancel_drain(store, device_id)
                case "retire":
                    retire(store, device_id, force=True, now_unix_s=time.time())
                case _:
                    raise AssertionError(f"there is no change {verb!r}")
        except EverstepError as exc:
            say("failed", f"{verb}-{number}", exc.code, exc)
            return
        say("changed", verb, number)


def main() -> None:
    """Do a cycle for each line, until stdin ends."""
    logging.disable()  # every cycle ends with errors of the drives
    device_count = int(sys.argv[1])
    steps = itertools.count(1)
    with ranks(device_count) as writers:
        for number, line in enumerate(sys.stdin):
            try:
                cycle(Order.of(line), writers, number, steps)
            except EverstepError as exc:
                say("down", exc.code, exc)


if __name__ == "__main__":
    main()
