"""EIO and ENOSPC at every n-th call on the devices, for every n: once, and from there on for good.

Nothing is acknowledged that is not so after a restart, no fsync is repeated after it failed, and what was there before
stays whole.
"""

import errno
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import memory_folder

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.device_change import drain
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import FaultyStorage, State, load, make_state, opened, save, save_again
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId, random_id

UID = os.geteuid()
FOREVER = 1 << 30
SYNCS = ("sync_data", "sync_file", "sync_directory", "write_small_new")
CALLS_MAX = 300

OLD = tuple(CheckpointId(1, step) for step in range(1, 5))
FLOOR, NEWEST = OLD[2], OLD[3]
NEW = CheckpointId(1, 5)


@dataclass(frozen=True, slots=True)
class Template:
    """A closed store of two devices that is copied for each n."""

    folder: Path
    states: dict[CheckpointId, State]

    @property
    def dirs(self) -> list[Path]:
        """The devices that are used."""
        return [self.folder / "a", self.folder / "b"]

    def copy(self) -> None:
        """Put both devices back."""
        for path in self.dirs:
            if path.exists():
                shutil.rmtree(path)
            shutil.copytree(self.folder / "template" / path.name, path)


@pytest.fixture(scope="module")
def template() -> Generator[Template]:
    with memory_folder() as folder:
        made = Template(folder, {})
        for path in made.dirs:
            path.mkdir()
        with opened(made.dirs) as (store, _):
            run = store.run(UID, "demo", create=True)
            run.begin_attempt(1, fresh=False)
            for checkpoint in (*OLD, NEW):
                made.states[checkpoint] = make_state(store, checkpoint.step)
            for checkpoint in OLD:
                save(run, made.states[checkpoint], checkpoint)
            run.set_complete_floor(OLD[1])
            run.set_complete_floor(FLOOR)
            add_tag(run, "kept", FLOOR)
        for path in made.dirs:
            shutil.copytree(path, folder / "template" / path.name)
        yield made


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done while a call fails, and what must be so after a restart if it said that it was done."""

    do: Callable[[RunStore, Template], object]
    holds: Callable[[RunStore], bool]
    may_go: tuple[CheckpointId, ...] = ()
    """Checkpoints that it may have removed even when it failed."""
    survives_one: bool = False
    """One failure costs a device and not the operation."""
    recycles: bool = False
    """Segments are written over files of deleted ones."""


def persist(run: RunStore, template: Template) -> None:
    save(run, template.states[NEW], NEW)


def persist_again(run: RunStore, template: Template) -> None:
    run.store.mark_suspect(run.store.devices[0].device_id, StorageError("it hurts"))
    save_again(run, template.states[NEWEST], NEWEST)


def collect(run: RunStore, _: Template) -> None:
    assert collect_garbage(run, keep=Keep(last=1)).removed == (OLD[0],)


def persist_over(run: RunStore, template: Template) -> None:
    collect(run, template)
    persist(run, template)


def drain_one(run: RunStore, _: Template) -> None:
    assert isinstance(run.store, Store)
    drain(run.store, run.store.devices[0].device_id)


def restore(run: RunStore, template: Template) -> None:
    assert load(run, run.manifest(FLOOR, 0)) == template.states[FLOOR].content


def verify(run: RunStore, _: Template) -> None:
    verdict = verify_checkpoint(run, FLOOR)
    if not verdict.is_intact:
        raise StorageError("said to be broken, which only forbids offering it until the next start")


OPERATIONS = {
    "commit": Operation(persist, lambda run: NEW in run.offered(), survives_one=True),
    "commit again": Operation(persist_again, lambda run: NEWEST in run.offered()),
    "completion": Operation(
        lambda run, _: run.set_complete_floor(NEWEST), lambda run: run.complete_floor() == NEWEST
    ),
    "collection": Operation(collect, lambda run: OLD[0] not in run.offered(), (OLD[0],)),
    "removal": Operation(
        lambda run, _: remove_checkpoint(run, OLD[1]), lambda run: OLD[1] not in run.offered(), (OLD[1],)
    ),
    "attempt": Operation(
        lambda run, _: run.begin_attempt(2, fresh=False), lambda run: run.highest_attempt() == 2
    ),
    "commit over old files": Operation(
        persist_over, lambda run: NEW in run.offered(), (OLD[0],), recycles=True
    ),
    "tag": Operation(
        lambda run, _: add_tag(run, "best", OLD[1]), lambda run: run.tags() == {"best": OLD[1], "kept": FLOOR}
    ),
    "untag": Operation(lambda run, _: remove_tag(run, "kept"), lambda run: run.tags() == {}),
    "drain": Operation(drain_one, lambda run: len(run.store.membership.draining) == 1),
    "restore": Operation(restore, lambda run: FLOOR in run.offered()),
    "verify": Operation(verify, lambda run: FLOOR in run.offered()),
}


def check_syncs(ops: FaultyStorage, fail_at: int, times: int) -> None:
    """No file or directory is synced again after that failed; no file's data are synced twice at all."""
    data = [call.path for call in ops.calls if call.name == "sync_data"]
    assert len(data) == len(set(data))
    failed: set[Path] = set()
    again: list[Path] = []
    for number, call in enumerate(ops.calls, start=1):
        if call.name in SYNCS:
            if call.path in failed:
                again.append(call.path)
            elif fail_at <= number < fail_at + times:
                failed.add(call.path)
    assert again == []


def check_restart(template: Template, operation: Operation, *, done: bool, mends: bool = False) -> None:
    """What was acknowledged is so, the rest is whole or absent; no file is left over, nothing had to be put aside."""
    with opened(template.dirs) as (store, report):
        run = store.run(UID, "demo")
        offered = run.offered()
        assert set(OLD) - set(operation.may_go) <= set(offered)
        assert not done or operation.holds(run)
        for checkpoint in offered:
            assert load(run, run.manifest(checkpoint, 0)) == template.states[checkpoint].content
        assert report.damaged_count == 0
        assert mends or (report.quarantined_count, report.problems) == (0, [])
        generations = {path.name for each in template.dirs for path in each.glob("runs/*/*/data/*")}
        assert generations == {ref.generation for shard in run.shards() for ref in shard.segments}


@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "forever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_call_of_an_operation_may_fail(template: Template, name: str, number: int, times: int) -> None:
    operation = OPERATIONS[name]
    failure_count = 0
    for fail_at in range(1, CALLS_MAX):
        template.copy()
        ops = FaultyStorage(RealStorage())
        with opened(template.dirs, ops=ops.as_ops(), recycles=operation.recycles) as (store, _):
            run = store.run(UID, "demo")
            ops.arm(fail_at, times=times, number=number)
            done = False
            try:
                operation.do(run, template)
                done = True
            except StorageError:
                failure_count += 1
            check_syncs(ops, fail_at, times)
            reached = len(ops.calls) >= fail_at
            ops.arm(0)
            for checkpoint in set(OLD) - set(operation.may_go):
                assert load(run, run.manifest(checkpoint, 0)) == template.states[checkpoint].content
        check_restart(template, operation, done=done)
        if not reached:
            assert done
            assert failure_count == 0 if operation.survives_one and times == 1 else failure_count > 1
            return
    pytest.fail("the call count was never reached")


RECOVERED = Operation(
    persist,
    lambda run: (set(run.offered()), run.highest_attempt(), run.complete_floor()) == (set(OLD), 1, FLOOR),
)


def damage(template: Template) -> None:
    """Leave half done whatever recovery mends."""
    first, second = (next(path.glob("runs/*/*")) for path in template.dirs)
    (first / "commits" / f"{OLD[0]}.0.mf").unlink()
    (second / "commits" / f"{FLOOR}.0.mf").write_bytes(b"broken")
    (first / "attempts" / "1").unlink()
    (second / "floor.json").unlink()
    (second / "run.json").unlink()
    (first / "commits" / ".tmp.9").write_bytes(b"x")
    orphan = first / "data" / random_id()
    orphan.mkdir()
    (orphan / "0.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "forever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_every_call_of_a_recovery_may_fail(template: Template, number: int, times: int) -> None:
    for fail_at in range(1, CALLS_MAX):
        template.copy()
        damage(template)
        ops = FaultyStorage(RealStorage())
        ops.arm(fail_at, times=times, number=number)
        try:
            with opened(template.dirs, ops=ops.as_ops()) as (store, _):
                for run in store.runs():
                    assert set(run.offered()) <= set(OLD)
        except StorageError:
            pass
        reached = len(ops.calls) >= fail_at
        check_restart(template, RECOVERED, done=True, mends=True)
        if not reached:
            assert fail_at > 60
            return
    pytest.fail("the call count was never reached")
