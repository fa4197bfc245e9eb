"""What is done to a store while calls on its devices fail, and what is so after a restart if it said so."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from errno import EIO, ENOSPC
from pathlib import Path

from fault_template import FLOOR, NEW, NEWEST, OLD, RUN_NAME, UID, Kind, Template
from ring_stream import stream

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.damage import record_damage
from everstep.checkpoint.device_change import cancel_drain, drain, find_device, retire
from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import FsckReport, fsck
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.readmission import prepare_readmission
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import DAMAGED_NAME, RunStore
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.store_format import decode_damage
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import HOLDER, load, opened, save, save_again
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import CorruptDataError, StorageError
from everstep.core.ids import CheckpointId, random_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What is done in an opened store, and what must be so after a restart if it said that it was done."""

    do: Callable[[RunStore, Template], object]
    holds: Callable[[RunStore, Template], bool]
    stays: Callable[[RunStore, Template], bool] = lambda _run, _template: True
    """What must be so after a restart in any case."""
    on: Kind = Kind.PLAIN
    before: Callable[[RunStore, Template], object] = lambda _run, _template: None
    """Done first, without a failure."""
    may_go: tuple[CheckpointId, ...] = ()
    """Checkpoints that it may have removed even when it failed."""
    survives_one: tuple[int, ...] = ()
    """One such failure costs a device and not the operation."""
    recycles: bool = False
    """Segments are written over files of deleted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedOperation:
    """What is done to a closed store; where it fails, the same again goes on where it ended."""

    prepare: Callable[[Template], object]
    do: Callable[[Template, StorageOps], object]
    holds: Callable[[RunStore, Template], bool]
    on: Kind = Kind.PLAIN
    may_go: tuple[CheckpointId, ...] = ()
    mends: bool = False
    """It finds what a crash or a person has spoilt: so does the next recovery, if this did not come to its end."""


# --- in an opened store ---------------------------------------------------------------------------------------------


def _persist(run: RunStore, template: Template) -> None:
    save(run, template.states[NEW], NEW)


def _persist_again(run: RunStore, template: Template) -> None:
    run.store.mark_suspect(run.store.devices[0].device_id, StorageError("it hurts"))
    save_again(run, template.states[NEWEST], NEWEST)


def _stream(run: RunStore, template: Template) -> None:
    stream(run, template.states[NEW], NEW, window_count=2)


def _collect(run: RunStore, _: Template) -> None:
    assert collect_garbage(run, keep=Keep(last=1)).removed == (OLD[0],)


def _persist_over(run: RunStore, template: Template) -> None:
    _collect(run, template)
    _persist(run, template)


def _store_of(run: RunStore) -> Store:
    assert isinstance(run.store, Store)
    return run.store


def _last(run: RunStore, template: Template) -> str:
    return find_device(_store_of(run), str(template.dirs[-1]))


def _restore(run: RunStore, template: Template) -> None:
    assert load(run, run.manifest(FLOOR, 0)) == template.states[FLOOR].content


def _verify(run: RunStore, _: Template) -> None:
    verdict = verify_checkpoint(run, FLOOR)
    if not verdict.is_intact:
        raise StorageError("said to be broken, which only forbids offering it until the next start")


def _mark(run: RunStore, checkpoint: CheckpointId) -> None:
    """Keep that a checkpoint is damaged; an error where no device has taken it, which only the log says."""
    error, generation = CorruptDataError("it has rotted"), run.shard(checkpoint, 0).generation
    record_damage(run, checkpoint, 0, error, generation=generation)
    assert checkpoint not in run.offered()
    _raise_unkept(run)


def _disprove(run: RunStore, _: Template) -> None:
    if not verify_checkpoint(run, OLD[0]).is_intact:
        raise StorageError("it could not be read, so nothing was taken back")
    assert OLD[0] in run.offered()
    _raise_unkept(run)


def _raise_unkept(run: RunStore) -> None:
    known = {shard.checkpoint for shard in run.shards() if shard.bad_content}
    paths = [run.path_on(device) / DAMAGED_NAME for device in run.store.devices]
    kept = [decode_damage(path.read_bytes(), str(path)).shards for path in paths if path.exists()]
    if not any({shard.checkpoint for shard in shards} == known for shards in kept):
        raise StorageError("no device has taken what is damaged")


OPERATIONS = {
    "commit": Operation(do=_persist, holds=lambda run, _: NEW in run.offered(), survives_one=(EIO, ENOSPC)),
    "commit again": Operation(do=_persist_again, holds=lambda run, _: NEWEST in run.offered()),
    "commit through a ring": Operation(do=_stream, holds=lambda run, _: NEW in run.offered()),
    "commit over old files": Operation(
        do=_persist,
        before=_collect,
        holds=lambda run, _: NEW in run.offered(),
        may_go=OLD[:1],
        recycles=True,
        survives_one=(EIO, ENOSPC),
    ),
    "collection and a commit over its files": Operation(
        do=_persist_over, holds=lambda run, _: NEW in run.offered(), may_go=OLD[:1], recycles=True
    ),
    "completion": Operation(
        do=lambda run, _: run.set_complete_floor(NEWEST),
        holds=lambda run, _: run.complete_floor() == NEWEST,
        survives_one=(EIO,),
    ),
    "collection": Operation(do=_collect, holds=lambda run, _: OLD[0] not in run.offered(), may_go=OLD[:1]),
    "removal": Operation(
        do=lambda run, _: remove_checkpoint(run, OLD[1]),
        holds=lambda run, _: OLD[1] not in run.offered(),
        may_go=OLD[1:2],
    ),
    "attempt": Operation(
        do=lambda run, _: run.begin_attempt(2, fresh=False),
        holds=lambda run, _: run.highest_attempt() == 2,
        survives_one=(EIO,),
    ),
    "another run": Operation(
        do=lambda run, _: _store_of(run).run(UID, "another", create=True),
        holds=lambda run, _: _store_of(run).run(UID, "another").name == "another",
        survives_one=(EIO,),
    ),
    "tag": Operation(
        do=lambda run, _: add_tag(run, "best", OLD[1]),
        holds=lambda run, _: run.tags() == {"best": OLD[1], "kept": FLOOR},
    ),
    "untag": Operation(do=lambda run, _: remove_tag(run, "kept"), holds=lambda run, _: run.tags() == {}),
    "drain": Operation(
        do=lambda run, template: drain(_store_of(run), _last(run, template)),
        holds=lambda run, _: len(run.store.membership.draining) == 1,
    ),
    "end of a drain": Operation(
        on=Kind.LEAVING,
        do=lambda run, template: cancel_drain(_store_of(run), _last(run, template)),
        holds=lambda run, _: not run.store.membership.draining,
    ),
    "retirement": Operation(
        on=Kind.LEAVING,
        do=lambda run, template: retire(_store_of(run), _last(run, template), force=True, now_unix_s=1.0),
        holds=lambda run, _: len(run.store.membership.retired) == 1,
        may_go=OLD[:2],
    ),
    "a mark of damage": Operation(
        do=lambda run, _: _mark(run, OLD[1]),
        holds=lambda run, _: OLD[1] not in run.offered(),
        may_go=OLD[1:2],
        survives_one=(EIO, ENOSPC),
    ),
    "another mark of damage": Operation(
        before=lambda run, _: _mark(run, OLD[0]),
        do=lambda run, _: _mark(run, OLD[1]),
        holds=lambda run, _: OLD[1] not in run.offered(),
        stays=lambda run, _: OLD[0] not in run.offered(),
        may_go=OLD[:2],
        survives_one=(EIO, ENOSPC),
    ),
    "damage disproved": Operation(
        before=lambda run, _: _mark(run, OLD[0]),
        do=_disprove,
        holds=lambda run, _: OLD[0] in run.offered(),
        may_go=OLD[:1],
    ),
    "restore": Operation(do=_restore, holds=lambda run, _: FLOOR in run.offered()),
    "verify": Operation(do=_verify, holds=lambda run, _: FLOOR in run.offered()),
}


# --- on a closed store ----------------------------------------------------------------------------------------------


def _run_path(path: Path) -> Path:
    return next(path.glob("runs/*/*"))


def _half_done(template: Template) -> None:
    """Leave half done whatever recovery mends."""
    first, second = map(_run_path, template.dirs[:2])
    (first / "commits" / f"{OLD[0]}.0.mf").unlink()
    (second / "commits" / f"{FLOOR}.0.mf").write_bytes(b"broken")
    (first / "attempts" / "1").unlink()
    (second / "floor.json").unlink()
    (second / "run.json").unlink()
    (first / "commits" / ".tmp.9").write_bytes(b"x")
    orphan = first / "data" / random_id()
    orphan.mkdir()
    (orphan / "0.safetensors").write_bytes(b"x")


def _recover(template: Template, ops: StorageOps) -> None:
    with opened(template.dirs, ops=ops) as (store, report):
        for run in store.runs():
            assert set(run.offered()) <= template.whole
        _raise_told(report.problems)


def _spoil(template: Template) -> None:
    """Beside what a crash leaves: a segment that is gone, and a tag on its checkpoint."""
    with opened(template.dirs) as (store, _):
        add_tag(store.run(UID, RUN_NAME), "first", OLD[0])
    _half_done(template)
    mark = f'"step":"{OLD[0].step:020d}"'.encode()
    segments = _run_path(template.dirs[1]).glob("data/*/*.safetensors")
    next(path for path in segments if mark in path.read_bytes()[:512]).unlink()


def _raise_told(problems: Iterable[str]) -> None:
    """Raise where a device's error is told of, which is what makes it declared."""
    told = [problem for problem in problems if re.search(r"\[E[A-Z]+\]", problem)]
    if told:
        raise StorageError("; ".join(told))


def _fsck(template: Template, ops: StorageOps, *, repair: bool) -> FsckReport:
    return fsck(template.dirs, ops=ops, holder=HOLDER, uid=UID, repair=repair, data=True)


def _repair(template: Template, ops: StorageOps) -> None:
    """Repair, and where no error is told of: nothing that can be repaired is left."""
    report = _fsck(template, ops, repair=True)
    _raise_told([finding.problem for finding in report.findings])
    if not report.is_repaired:
        raise StorageError("nothing was repaired, as was said")
    again = _fsck(template, RealStorage(), repair=False)
    assert not [each for each in again.findings if each.severity is Severity.REPAIRABLE], again.findings


def _readmit(template: Template, ops: StorageOps) -> None:
    ready = prepare_readmission(template.dirs, template.dirs[-1], ops=ops, holder=HOLDER, uid=UID)
    with open_store(template.dirs, ops=ops, holder=HOLDER, uid=UID, adopt=ready.adopt) as store:
        recover(store)


CLOSED_OPERATIONS = {
    "recovery": ClosedOperation(
        prepare=_half_done,
        do=_recover,
        holds=lambda run, _: (run.highest_attempt(), run.complete_floor()) == (1, FLOOR),
        mends=True,
    ),
    "fsck --repair": ClosedOperation(
        prepare=_spoil,
        do=_repair,
        holds=lambda run, _: OLD[0] not in run.offered() and run.tags().get("kept") == FLOOR,
        may_go=OLD[:1],
        mends=True,
    ),
    "readmission": ClosedOperation(
        on=Kind.RETIRED,
        prepare=lambda _: None,
        do=_readmit,
        holds=lambda run, template: len(run.store.membership.members) == len(template.dirs),
    ),
}
