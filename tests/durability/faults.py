"""An operation of which one call, or every call from one on, fails: what must be so in the process and after a restart.

Nothing is acknowledged that is not so after a restart, no sync is repeated after it failed, what was there before
stays whole, nothing half is left, and an error is one that the product declares.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_operations import ClosedOperation, Operation
from fault_template import OLD, RUN_NAME, UID, Template

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery_devices import LOST_SUFFIX
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import Call, FaultyStorage, Mode, load, opened
from everstep.core.errors import StorageError

FOREVER = 1 << 30
CALLS_MAX = 500
_SYNCS = ("sync_data", "sync_directory", "write_small_new")
_NOT_OFFERED = "is not offered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """How calls fail."""

    number: int = errno.EIO
    times: int = 1
    """So many calls one after the other."""
    mode: Mode = Mode.NOT_DONE
    device: int | None = None
    """On this one of the devices only."""

    def counts(self, template: Template, call: Call) -> bool:
        """Tell whether a call is one of those that are counted, and fail in the end."""
        return self.device is None or call.path.is_relative_to(template.dirs[self.device])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An operation of which a call failed, or would have."""

    done: bool
    """It said so."""
    reached: bool
    """There were as many calls."""


def fail(
    template: Template, operation: Operation | ClosedOperation, failing: Failing, fail_at: int
) -> Outcome:
    """Do it anew while the call `fail_at` fails; AssertionError where what must be so is not."""
    template.copy()
    ops = FaultyStorage(RealStorage())
    if isinstance(operation, Operation):
        done, calls = _in_opened(template, operation, ops, failing, fail_at)
    else:
        operation.prepare(template)
        _arm(ops, template, failing, fail_at)
        done, calls = _goes(lambda: operation.do(template, ops.as_ops())), ops.calls
    check_restart(template, operation, done=done)
    if isinstance(operation, ClosedOperation) and not done:
        operation.do(template, RealStorage())
        check_restart(template, operation, done=True)
    return Outcome(done=done, reached=len(_counted(calls, template, failing)) >= fail_at)


def _in_opened(
    template: Template, operation: Operation, ops: FaultyStorage, failing: Failing, fail_at: int
) -> tuple[bool, list[Call]]:
    """Return whether it said that it was done, and its calls."""
    with opened(template.dirs, ops=ops.as_ops(), recycles=operation.recycles) as (store, _):
        run = store.run(UID, RUN_NAME)
        operation.before(run, template)
        _arm(ops, template, failing, fail_at)
        done, calls = _goes(lambda: operation.do(run, template)), ops.calls
        ops.arm(0)
        for checkpoint in template.whole - {*operation.may_go}:
            assert load(run, run.manifest(checkpoint, 0)) == template.states[checkpoint].content
    check_syncs(calls, _counted(calls, template, failing)[fail_at - 1 : fail_at - 1 + failing.times])
    return done, calls


def _counted(calls: Sequence[Call], template: Template, failing: Failing) -> list[Call]:
    return [call for call in calls if failing.counts(template, call)]


def _arm(ops: FaultyStorage, template: Template, failing: Failing, fail_at: int) -> None:
    ops.arm(
        fail_at,
        failing.mode,
        times=failing.times,
        number=failing.number,
        only=lambda call: failing.counts(template, call),
    )


def _goes(call: Callable[[], object]) -> bool:
    """Return whether a call said that it was done; any error but a StorageError passes."""
    try:
        call()
    except StorageError:
        return False
    return True


def check_syncs(calls: Sequence[Call], failed: Sequence[Call]) -> None:
    """No file or directory is synced again after that failed; no file's data are synced twice at all."""
    data = [call.path for call in calls if call.name == "sync_data"]
    assert len(data) == len(set(data))
    lost: set[Path] = set()
    for call in calls:
        if call.name in _SYNCS:
            assert call.path not in lost, f"{call} after it failed"
            if any(call is each for each in failed):
                lost.add(call.path)


def check_restart(template: Template, operation: Operation | ClosedOperation, *, done: bool) -> None:
    """What was acknowledged is so, the rest is whole or absent; no file is left over, nothing had to be put aside."""
    may_go = {*operation.may_go}
    mends = isinstance(operation, ClosedOperation) and operation.mends
    with opened(template.dirs) as (store, report):
        run = store.run(UID, RUN_NAME)
        offered = set(run.offered())
        assert template.whole - may_go <= offered
        assert not (done or mends) or operation.holds(run, template)
        assert isinstance(operation, ClosedOperation) or operation.stays(run, template)
        for checkpoint in offered:
            assert load(run, run.manifest(checkpoint, 0)) == template.states[checkpoint].content
        damaged = {shard.checkpoint for shard in run.shards() if shard.problem}
        assert damaged <= may_go | ({*OLD} - template.whole)
        problems = [problem for problem in report.problems if _NOT_OFFERED not in problem]
        assert mends or (report.quarantined_count, problems) == (0, [])
        _check_generations(template, run, is_repair=mends)


def _check_generations(template: Template, run: RunStore, *, is_repair: bool) -> None:
    """Nothing is on a member that no manifest refers to, but for what a manifest in quarantine may."""
    members = [device.path for device in run.store.devices]
    found = {path.name for each in members for path in each.glob("runs/*/*/data/*")}
    known = {ref.generation for shard in run.shards() for ref in shard.segments}
    lost = [path for each in template.dirs for path in each.glob(f"quarantine/*{LOST_SUFFIX}")]
    assert found <= known or (is_repair and lost)
