"""What is recorded: workloads as data, and the one player that runs them through the product's public calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crash_check import shards_on
from crash_plan import Restart
from model_storage import Fault, ModelStorage, place_of
from promises import RUN_NAME, Promise, Shard, Witness

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.device import Device
from everstep.checkpoint.device_change import (
    cancel_drain,
    drain,
    find_device,
    retire,
)
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.checkpoint.readmission import prepare_readmission
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import HOLDER, State, make_state, save, save_again
from everstep.core.errors import EverstepError, StorageError
from everstep.core.ids import CheckpointId

LEAVES = (whole_leaf("weight", "float32", (1000,)), whole_leaf("bias", "float32", (200,)))
FOUR_LEAVES = tuple(whole_leaf(f"weight.{number}", "float32", (100,)) for number in range(4))
"""One in each of four segments."""


class UnexpectedError(AssertionError):
    """A workload did not go as its data say: the product did more or less than it should."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the next attempt."""

    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Persist the shards of these ranks at a step; `copies` is the number of durable manifests, 0 for a failure."""

    step: int
    ranks: tuple[int, ...] = (0,)
    copies: int | None = None
    """None: one on each device."""
    is_unknown: bool = False
    """With copies=0: it may be there all the same."""
    is_recycled: bool | None = None
    """All of its segments, or none of them, are written over files of deleted ones."""
    extra: int = 0
    """So many elements more in the first leaf than the workload says."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Say that all ranks have committed a step of this attempt."""

    step: int
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Collect garbage; exactly these checkpoints may go."""

    keep_last: int
    removes: tuple[tuple[int, int], ...] = ()
    fails: bool = False
    every_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove one checkpoint on request."""

    checkpoint: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Label:
    """Give a checkpoint a tag, or take it away."""

    name: str
    checkpoint: tuple[int, int]
    is_removed: bool = False
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Let a call of the next step fail."""

    call: str
    device: int | None = None
    part: str = ""
    nth: int = 1
    times: int = 1
    is_done: bool = False
    """It does its work first."""


@dataclass(frozen=True, slots=True)
class Lose:
    """A device counts as failed from here on, until the store is opened again."""

    device: int


@dataclass(frozen=True, slots=True)
class SaveAgain:
    """Persist the shards of a step again, so that they do without the devices that are lost."""

    step: int
    copies: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Reopen:
    """End the daemon, start it again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a device get no new segments."""

    device: int
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class Unplug:
    """Open the store without a device from the next Reopen on; `back` plugs it in again."""

    device: int
    back: bool = False


@dataclass(frozen=True, slots=True)
class Retire:
    """Take a device out of the store."""

    device: int
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Readmit:
    """Open the store again with a retired device taken back as a new one."""

    device: int


DeviceStep = Drain | Unplug | Retire | Readmit
StepOfRun = Begin | Save | SaveAgain | Complete | Collect | Remove | Label | Lose | DeviceStep
Step = StepOfRun | Break | Reopen


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What happens to a store."""

    name: str
    steps: tuple[Step, ...]
    device_count: int = 2
    world_size: int = 1
    from_birth: bool = False
    """The making of the store and of the run is recorded too."""
    leaves: tuple[LeafSpec, ...] = LEAVES
    segment_count: int | None = None
    """As many as fit the devices, unless given."""
    recycles: bool = False
    """Segments are written over files of deleted ones."""
    partial_views: bool = False
    """The store is also opened while a device is missing or cannot be read."""


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
                self._promised(self._promise.begun())
            case Save():
                for rank in step.ranks:
                    self._save(run, step, rank)
            case Complete(number, fails):
                checkpoint = CheckpointId(self._attempt, number)
                self._promised(self._promise.completing(checkpoint))
                if self._goes(lambda: run.set_complete_floor(checkpoint), fails=fails):
                    self._promised(self._promise.completed(checkpoint))
            case Collect() | Remove() | Label():
                self._retain(run, step)
            case Drain() | Unplug() | Retire() | Readmit():
                self._change(step)

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
        self._promised(self._promise.trying(shard))
        copies = self._device_count() if step.copies is None else step.copies
        try:
            result = save(run, state, shard[0], rank=rank, world_size=self._workload.world_size)
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

    def _save_again(self, run: RunStore, step: SaveAgain, rank: int) -> None:
        shard = (CheckpointId(self._attempt, step.step), rank)
        result = save_again(run, self._states[shard], shard[0], rank=rank)
        if result.copy_count != step.copies:
            raise UnexpectedError(f"{shard} has {result.copy_count} copies, expected {step.copies}")
        self._witness.committed_again(shard, self._storage)
        self._promised(self._promise.without(shard, self._lost))

    def _device(self, run: RunStore, index: int) -> Device:
        return next(each for each in run.store.devices if place_of(each.path)[0] == index)


_SAVES = (Begin(), Save(1), Complete(1), Save(2), Complete(2), Save(3), Complete(3))

WORKLOADS = (
    Workload(name="birth", steps=(Begin(), Save(1)), from_birth=True),
    Workload(
        name="two devices with collection",
        steps=(*_SAVES, Collect(1, removes=((1, 1),)), Save(4), Complete(4), Collect(1, removes=((1, 2),))),
    ),
    Workload(
        name="three devices",
        steps=(Begin(), Save(1), Save(2), Save(3), Complete(3), Collect(1, removes=((1, 1),))),
        device_count=3,
    ),
    Workload(
        name="two ranks with completion",
        steps=(
            Begin(),
            Save(1, (0, 1)),
            Complete(1),
            Save(2, (0,)),
            Save(3, (0, 1)),
            Complete(3),
            Complete(1),  # old news
            Save(4, (1,)),
            Collect(1, removes=((1, 2),)),
        ),
        world_size=2,
    ),
    Workload(
        name="an abandoned branch",
        steps=(*_SAVES, Reopen(), Begin(), Save(2), Complete(2), Collect(1, removes=((1, 1), (1, 2)))),
    ),
    Workload(name="a fresh start", steps=(*_SAVES[:5], Begin(fresh=True), Save(1), Complete(1), Save(2))),
    Workload(
        name="removal on request",
        steps=(*_SAVES, Remove((1, 2)), Save(4), Remove((1, 1))),
    ),
    Workload(
        name="tags and retention",
        steps=(
            *_SAVES,
            Label("best", (1, 1)),
            Collect(1),  # a tag, the floor and the one before it
            Save(4),
            Complete(4),
            Collect(1, every_steps=2),  # 1 in [0, 2), 2 in [2, 4), 4 in [4, 6); 3 before the floor
            Collect(1, removes=((1, 2),)),
            Label("best", (1, 1), is_removed=True),
            Label("kept", (1, 3)),
            Collect(1, removes=((1, 1),)),
        ),
    ),
    Workload(
        name="failed tags",
        steps=(
            *_SAVES,
            Break(call="write_small_new", device=0, part="/tags"),
            Label("best", (1, 1), fails=True),
            Reopen(),
            Break(call="sync_directory", device=0, part="/tags"),
            Label("late", (1, 2), fails=True),
            Label("late", (1, 2), fails=True),  # a failed sync is not repeated
            Reopen(),
            Label("late", (1, 2)),
            Break(call="unlink", device=0, part="/tags"),
            Label("late", (1, 2), is_removed=True, fails=True),
            Collect(1),  # a device is suspect
            Reopen(),
            Collect(1),
        ),
        partial_views=True,
    ),
    Workload(
        name="failed fdatasync",
        steps=(
            *_SAVES,
            Break(call="sync_data", device=1),
            Save(4, copies=1),  # on the other device
            Collect(1),  # a device is suspect
            Reopen(),
            Collect(1, removes=((1, 1),)),
            Save(5),
        ),
    ),
    Workload(
        name="failed write",
        steps=(
            Begin(),
            Save(1),
            Break(call="write_segment", device=0),
            Save(2, copies=1),
            Save(3, copies=1),
            Reopen(),
            Break(call="write_segment", times=2),
            Save(4, copies=0),
            Save(5),
        ),
    ),
    Workload(
        name="failed fsync of data directories",
        steps=(
            *_SAVES[:3],
            Break(call="sync_directory", device=0, part="/data"),
            Save(2, copies=1),
            Break(call="sync_directory", device=1, part="/data", nth=2),
            Save(3),  # both have failed now: on the first again, rather than nowhere
            Save(4),
        ),
    ),
    Workload(
        name="manifest on one device only",
        steps=(
            *_SAVES[:3],
            Break(call="rename_noreplace", device=1),
            Save(2, copies=1),
            Reopen(),
            Break(call="write_small_new", device=0, part="/commits"),
            Save(3, copies=1),
            Collect(1),
            Reopen(),
            Complete(3),
            Collect(1, removes=((1, 1),)),
        ),
        partial_views=True,
    ),
    Workload(
        name="failed fsync of commits",
        steps=(
            *_SAVES[:3],
            Break(call="sync_directory", device=0, part="/commits"),
            Save(2, copies=1),
            Reopen(),
            Break(call="sync_directory", part="/commits", times=2),
            Save(3, copies=0, is_unknown=True),
            Save(4),
        ),
    ),
    Workload(
        name="renames that were done and failed",
        steps=(
            *_SAVES[:3],
            Break(call="rename_noreplace", device=1, is_done=True),
            Save(2, copies=1),
            Reopen(),
            Break(call="rename_noreplace", times=2, is_done=True),
            Save(3, copies=0, is_unknown=True),
            Break(call="replace", device=1, is_done=True),
            Complete(2, fails=True),
            Save(4),
            Reopen(),
            Save(5),
        ),
    ),
    Workload(
        name="failed manifests",
        steps=(
            Begin(),
            Save(1),
            Break(call="write_small_new", part="/commits", times=2),
            Save(2, copies=0),
            Save(3),
        ),
    ),
    Workload(
        name="failed collection",
        steps=(
            *_SAVES,
            Break(call="sync_directory", device=1, part="/commits"),
            Collect(1, removes=((1, 1),), fails=True),
            Collect(1),
            Reopen(),
            Save(4),
            Complete(4),
        ),
    ),
    Workload(
        name="failed completion",
        steps=(
            *_SAVES[:4],
            Break(call="replace", device=0),
            Complete(2, fails=True),
            Save(3, copies=1),
            Reopen(),
            Complete(3),
        ),
    ),
    Workload(
        name="a device missing",
        steps=(Begin(), Save(1), Save(2), Complete(2), Break(call="sync_data", device=0), Save(3, copies=1)),
        partial_views=True,
    ),
    Workload(
        name="a segment taken over",
        # Made one after the other, the first device has run out while two segments wait for the second.
        steps=(*_SAVES[:5], Break(call="write_segment", device=1), Save(3, copies=1), Reopen(), Save(4)),
        leaves=FOUR_LEAVES,
        segment_count=4,
    ),
    Workload(
        name="one of three devices fails",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Break(call="sync_data", device=1),
            Save(2, copies=2),
            Save(3, copies=2),
            Reopen(),
            Complete(3),
            Save(4),
            Collect(1, removes=((1, 1),)),
        ),
        device_count=3,
    ),
    Workload(
        name="a device lost after the commit",
        steps=(
            *_SAVES[:5],
            Lose(1),
            SaveAgain(2, copies=1),
            Save(3, copies=1),
            Reopen(),
            Complete(3),
            Collect(1, removes=((1, 1),)),
            Lose(0),
            SaveAgain(3, copies=1),
        ),
    ),
    Workload(
        name="two devices lost one after the other",
        steps=(
            Begin(),
            Save(1),
            Save(2, (0, 1)),
            Lose(2),
            SaveAgain(2, copies=2, ranks=(0, 1)),
            Lose(0),
            SaveAgain(2, copies=1, ranks=(0, 1)),
            Reopen(),
            Save(3),
            Remove((1, 2)),
        ),
        device_count=3,
        world_size=2,
    ),
    Workload(
        name="a device drains",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Collect(1, removes=((1, 1),)),
            Drain(1, cancel=True),
            Save(4),
        ),
    ),
    Workload(
        name="a drained device is retired, and readmitted",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(2),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Retire(2),
            Collect(1, removes=((1, 1),)),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Readmit(2),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 3),)),
        ),
        device_count=3,
        partial_views=True,
    ),
    Workload(
        name="a device is retired while it has what is newest",
        steps=(
            Begin(),
            Drain(1),
            Save(1),
            Complete(1),
            Drain(1, cancel=True),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Retire(1),
            Collect(1, removes=((1, 2),)),
            Reopen(),
            Begin(),
            Save(4),
            Complete(4),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 1), (1, 3))),
        ),
        partial_views=True,
    ),
    Workload(
        name="a missing device is retired, and returns",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Save(2),
            Complete(2),
            Unplug(1),
            Reopen(),
            Save(3),
            Complete(3),
            Collect(1),  # a device is missing
            Retire(1),
            Collect(1, removes=((1, 1),)),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Unplug(1, back=True),
            Reopen(),
            Begin(),
            Save(5),
        ),
    ),
    Workload(
        name="the last device that is well stays",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Break(call="rename_noreplace", device=0),
            Save(2, copies=1),
            Reopen(),
            Break(call="rename_noreplace", device=0, part="/commits"),
            Save(3, copies=1),
            Retire(1, fails=True),
            Reopen(),
            Retire(1),
            Save(4),
        ),
    ),
    Workload(
        name="a failed retirement",
        steps=(
            *_SAVES[:5],
            Break(call="replace", device=0, part="disk.id"),
            Retire(1, fails=True),
            Collect(1),
            Reopen(),
            Break(call="replace", device=0, part="disk.id", nth=2),
            Retire(1, fails=True),
            Collect(1),
            Reopen(),
            Begin(),
            Save(1),
            Complete(1),
            Collect(1, removes=((1, 1),)),
        ),
    ),
    Workload(
        name="a retirement that reached one of two",
        steps=(
            *_SAVES[:5],
            Break(call="replace", device=0, part="disk.id", nth=2),
            Retire(2, fails=True),
            Collect(1),  # not every member knows
            Save(3, copies=1),
            Reopen(),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 1), (1, 2))),
        ),
        device_count=3,
        partial_views=True,
    ),
    Workload(
        name="files written again",
        steps=(
            *_SAVES,
            Collect(1, removes=((1, 1),)),
            Save(4, is_recycled=True, extra=30),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Save(5, is_recycled=True, extra=-30),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Reopen(),
            Save(6, is_recycled=False),
        ),
        recycles=True,
    ),
    Workload(
        name="files written again, and failures",
        steps=(
            *_SAVES,
            Break(call="recycle", device=0),
            Collect(1, removes=((1, 1),)),  # one waits, the other one is unlinked
            Break(call="open_recycled", device=1),
            Save(4, is_recycled=False),
            Complete(4),
            Break(call="recycle", device=0, is_done=True),
            Collect(1, removes=((1, 2),)),
            Break(call="open_recycled", device=1, is_done=True),
            Save(5, is_recycled=False),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Break(call="write_segment", device=1),
            Save(6, copies=1),
            Reopen(),
            Complete(6),
            Break(call="sync_directory", device=1, part="/commits"),
            Collect(1, removes=((1, 4),), fails=True),
            Save(7, copies=1, is_recycled=False),  # what was not removed for sure is not written over
            Reopen(),
            Complete(7),
        ),
        recycles=True,
    ),
    Workload(
        name="a device that drains and leaves has files to write again",
        steps=(
            *_SAVES,
            Collect(1, removes=((1, 1),)),
            Drain(1),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Retire(1),
            Save(6, copies=1),
            Readmit(1),
            Save(7),
        ),
        recycles=True,
    ),
)
