"""The one player that runs workloads through the product's public calls, and says what was promised."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from crash_check import RUN_PARTS, shards_on
from crash_plan import Restart
from model_storage import Fault, ModelStorage, place_of
from overlapped import save_overlapped
from promises import ALARM, RUN_NAME, Promise, Shard, Witness
from workloads import (
    Begin,
    Break,
    Collect,
    Complete,
    Damage,
    DeviceStep,
    Drain,
    Label,
    Lose,
    Overlap,
    Readmit,
    Remove,
    Reopen,
    Retire,
    Save,
    SaveAgain,
    Scrub,
    Step,
    StepOfRun,
    Unplug,
    Workload,
)

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.copy_gate import CopyAbandonedError
from everstep.checkpoint.damage import record_damage
from everstep.checkpoint.device import Device
from everstep.checkpoint.device_change import (
    cancel_drain,
    drain,
    find_device,
    retire,
)
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.readmission import prepare_readmission
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.scrub_mark import write_scrub_mark
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.store_format import ScrubMark, ScrubPlace
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import HOLDER, State, make_state, save, save_again
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import CorruptDataError, EverstepError, StorageError
from everstep.core.ids import CheckpointId


class UnexpectedError(AssertionError):
    """A workload did not go as its data say: the product did more or less than it should."""


def _longer(leaves: tuple[LeafSpec, ...], extra: int) -> tuple[LeafSpec, ...]:
    first, *rest = leaves
    return (whole_leaf(first.name, first.dtype, (first.shape[0] + extra,)), *rest)


class Player:
    """Plays a workload on a store of its own, and writes into the trace what the product promised."""

    def __init__(self, workload: Workload, storage: ModelStorage, witness: Witness) -> None:
        self._workload = workload
        self._storage = storage
        self._witness = witness
        self._attempt = 0
        self._broken: Fault | None = None
        self._promise = Promise()
        self._store: Store | None = None
        self._run: RunStore | None = None
        self._unplugged: set[int] = set()
        self._states: dict[Shard, State] = {}
        self._lost: set[int] = set()

    def open(self, adopt: Sequence[Path] = ()) -> None:
        """Open the store and the run in it, both made if new."""
        self._store = open_store(
            self._directories(),
            ops=self._storage,
            holder=HOLDER,
            uid=HOLDER.uid,
            adopt=adopt,
            recycles=self._workload.recycles,
        )
        recover(self._store)
        self._run = self._store.run(HOLDER.uid, RUN_NAME, create=True)

    def _directories(self) -> list[Path]:
        return [
            path for number, path in enumerate(self._storage.directories) if number not in self._unplugged
        ]

    def close(self) -> None:
        """End the daemon in good order."""
        if self._store is not None:
            self._store.close()

    def play(self) -> None:
        """Run all steps."""
        for step in self._workload.steps:
            self._storage.faults = [] if self._broken is None else [self._broken]
            self._broken = None
            self._step(step)
        self._storage.faults = []
        if self._storage.open_count():
            raise UnexpectedError(f"{self._storage.open_count()} segment files are still open")

    def _promised(self, promise: Promise) -> None:
        self._promise = promise
        self._storage.mark(promise)

    def _step(self, step: Step) -> None:
        match step:
            case Break():
                self._broken = Fault(
                    call=step.call,
                    device=step.device,
                    part=step.part,
                    nth=step.nth,
                    times=step.times,
                    is_done=step.is_done,
                )
            case Reopen():
                self._lost.clear()
                self.close()
                self._storage.recorder.add(Restart())
                self._promised(self._promise.unplugged(self._unplugged))
                self.open()
                self._promised(self._promise.decided(self._out(), len(self._storage.roots)))
            case _:
                assert self._run is not None
                self._step_of_run(step, self._run)

    def _step_of_run(self, step: StepOfRun, run: RunStore) -> None:
        match step:
            case Lose(device):
                run.store.mark_suspect(self._device(run, device).device_id, StorageError("it hurts"))
                self._lost.add(device)
            case SaveAgain():
                for rank in step.ranks:
                    self._save_again(run, step, rank)
            case Begin(fresh):
                self._attempt += 1
                self._promised(self._promise.beginning(self._attempt, fresh=fresh))
                run.begin_attempt(self._attempt, fresh=fresh)
                self._promised(self._promise.begun(behind=self._untrusted(run)))
            case Save():
                for rank in step.ranks:
                    self._save(run, step, rank)
            case Complete(number, fails):
                checkpoint = CheckpointId(self._attempt, number)
                self._promised(self._promise.completing(checkpoint))
                if self._goes(lambda: run.set_complete_floor(checkpoint), fails=fails):
                    self._promised(self._promise.completed(checkpoint, behind=self._untrusted(run)))
            case Collect() | Remove() | Label():
                self._retain(run, step)
            case Scrub() | Damage():
                self._read(run, step)
            case Drain() | Unplug() | Retire() | Readmit():
                self._change(step)

    def _mark(self, run: RunStore, count: int, *, ends: bool) -> ScrubMark:
        newest = run.checkpoints()[0].checkpoint
        return ScrubMark(
            store_id=run.store.store_id,
            started_unix_s=1.0,
            ended_unix_s=2.0 if ends else None,
            checkpoint_count=count,
            place=ScrubPlace(owner_uid=run.owner_uid, run_id=run.run_id, checkpoint=newest),
        )

    def _read(self, run: RunStore, step: Scrub | Damage) -> None:
        """Keep how far reading has come, or what it has shown."""
        match step:
            case Scrub(count, ends):
                self._promised(self._promise.scrubbing(count))
                write_scrub_mark(run.store, self._mark(run, count, ends=ends))
                self._promised(self._promise.scrubbed())
            case Damage():
                self._damage(run, step)

    def _damage(self, run: RunStore, step: Damage) -> None:
        checkpoint = CheckpointId(*step.checkpoint)
        self._promised(self._promise.marking((checkpoint, 0)))
        if not step.is_disproved:
            generation = run.shard(checkpoint, 0).generation
            record_damage(run, checkpoint, 0, CorruptDataError(ALARM), generation=generation)
        elif not verify_checkpoint(run, checkpoint).is_intact:
            raise UnexpectedError(f"{checkpoint} is not intact")
        copies = self._device_count() if step.copies is None else step.copies
        self._promised(self._promise.marked((checkpoint, 0), copies, is_damaged=not step.is_disproved))

    def _retain(self, run: RunStore, step: Collect | Remove | Label) -> None:
        match step:
            case Collect(keep_last, removes, fails, every_steps):
                keep = Keep(last=keep_last, every_steps=every_steps)
                gone = [CheckpointId(*each) for each in removes]
                self._promised(self._promise.removing(gone))
                if self._goes(lambda: self._collect(run, keep, gone), fails=fails):
                    self._promised(self._promise.removed(gone))
            case Label(name, tagged, is_removed, fails):
                checkpoint = CheckpointId(*tagged)
                self._promised(self._promise.tag_changing(name, checkpoint))
                if self._goes(lambda: self._label(run, step), fails=fails):
                    self._promised(self._promise.tag_settled(name, checkpoint, is_there=not is_removed))
            case Remove(named):
                gone = [CheckpointId(*named)]
                self._promised(self._promise.removing(gone))
                remove_checkpoint(run, gone[0])
                self._promised(self._promise.removed(gone))

    def _out(self) -> set[int]:
        """Return the devices that are no members, plugged in or not."""
        assert self._store is not None
        members = {*self._store.membership.members.values()}
        return {number for number, path in enumerate(self._storage.directories) if str(path) not in members}

    def _device_count(self) -> int:
        assert self._store is not None
        return len(self._store.devices)

    def _change(self, step: DeviceStep) -> None:
        """Change who belongs to the store."""
        store, path, total = self._store, self._storage.directories[step.device], len(self._storage.roots)
        assert store is not None
        name = find_device(store, str(path))
        match step:
            case Unplug(device, back):
                (self._unplugged.discard if back else self._unplugged.add)(device)
            case Readmit(device):
                self.close()
                self._promised(self._promise.readmitting(device))
                ready = prepare_readmission(
                    self._directories(), path, ops=self._storage, holder=HOLDER, uid=HOLDER.uid
                )
                self.open(ready.adopt)
                self._promised(self._promise.readmitted(device, total))
            case Drain(device, cancel):
                if cancel:
                    self._promised(self._promise.drained(device, is_cancelled=True))
                    cancel_drain(store, name)
                else:
                    drain(store, name)
                    self._promised(self._promise.drained(device))
            case Retire(device, fails):
                assert self._run is not None
                self._promised(self._promise.retiring(device, shards_on(self._run, (name,))))
                if self._goes(lambda: retire(store, name, force=True, now_unix_s=1.0), fails=fails):
                    self._promised(self._promise.retired(device, total))

    def _goes(self, call: Callable[[], object], *, fails: bool) -> bool:
        """Return whether the call went well; UnexpectedError when that is not what the data say."""
        try:
            call()
        except EverstepError:
            if not fails:
                raise
            return False
        if fails:
            raise UnexpectedError("a call reported success although a device failed")
        return True

    def _collect(self, run: RunStore, keep: Keep, gone: Sequence[CheckpointId]) -> None:
        removed = collect_garbage(run, keep=keep).removed
        if list(removed) != list(gone):
            raise UnexpectedError(f"collection removed {removed}, expected {gone}")

    def _label(self, run: RunStore, step: Label) -> None:
        if step.is_removed:
            remove_tag(run, step.name)
        else:
            add_tag(run, step.name, CheckpointId(*step.checkpoint))

    def _save(self, run: RunStore, step: Save, rank: int) -> None:
        assert self._store is not None
        shard = (CheckpointId(self._attempt, step.step), rank)
        state = make_state(
            self._store,
            hash((self._attempt, step.step, rank)) & 0xFFFF,
            _longer(self._workload.leaves, step.extra),
            segment_count=self._workload.segment_count,
        )
        self._states[shard] = state
        self._witness.expect(shard, state.content)
        if step.overlap is not None and step.overlap.given_up_after is not None:
            self._give_up(run, state, shard, step.overlap)
            return
        copies = self._device_count() if step.copies is None else step.copies
        try:
            result = self._saved(run, state, shard, step.overlap)
        except EverstepError:
            if copies:
                raise
            if not step.is_unknown:
                self._promised(self._promise.refused(shard))
            return
        if result.copy_count != copies:
            raise UnexpectedError(f"{shard} has {result.copy_count} copies, expected {copies}")
        written = {(write.recycled_bytes, write.size_bytes) for write in result.writes}
        if step.is_recycled is not None and any(
            again != (step.is_recycled and all_) for again, all_ in written
        ):
            raise UnexpectedError(f"{shard}: bytes over old files, and all: {written}")
        self._witness.committed(shard, self._storage, copies)
        self._promised(self._promise.kept(shard, copies))

    def _saved(self, run: RunStore, state: State, shard: Shard, overlap: Overlap | None) -> PersistResult:
        """Persist it; from its seal on it may be there."""

        def sealed() -> None:
            self._promised(self._promise.trying(shard))

        checkpoint, rank = shard
        world_size = self._workload.world_size
        if overlap is None:
            sealed()
            return save(run, state, checkpoint, rank=rank, world_size=world_size)
        self._storage.recorder.hashes_last = overlap.hashes_last
        try:
            return save_overlapped(
                run, state, checkpoint, overlap, rank=rank, world_size=world_size, on_seal=sealed
            )
        finally:
            self._storage.recorder.hashes_last = False

    def _give_up(self, run: RunStore, state: State, shard: Shard, overlap: Overlap) -> None:
        """Give it up while it is written: it must not be there at any moment, and leaves nothing behind."""
        before = self._data()
        with contextlib.suppress(CopyAbandonedError):
            self._saved(run, state, shard, overlap)
            raise UnexpectedError(f"{shard} was persisted although it was given up")
        if self._data() != before:
            raise UnexpectedError(f"of {shard}, which was given up, {self._data() - before} is left")

    def _data(self) -> set[tuple[int, str]]:
        """Return everything that lies where segments do, by device."""
        return {
            (number, name)
            for number in range(len(self._storage.roots))
            for name, _ in self._storage.files_below(number, *RUN_PARTS, "data")
        }

    def _save_again(self, run: RunStore, step: SaveAgain, rank: int) -> None:
        shard = (CheckpointId(self._attempt, step.step), rank)
        result = save_again(run, self._states[shard], shard[0], rank=rank)
        if result.copy_count != step.copies:
            raise UnexpectedError(f"{shard} has {result.copy_count} copies, expected {step.copies}")
        self._witness.committed_again(shard, self._storage)
        self._promised(self._promise.without(shard, self._lost))

    def _untrusted(self, run: RunStore) -> set[int]:
        trusted = run.store.trusted
        return {place_of(each.path)[0] for each in run.store.devices if each not in trusted}

    def _device(self, run: RunStore, index: int) -> Device:
        return next(each for each in run.store.devices if place_of(each.path)[0] == index)
