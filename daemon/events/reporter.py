"""From what the parts of the daemon do to events: each of them calls one method here, at one place."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from ...checkpoint.device_set import DeviceState
from ...core.errors import NotFoundError
from ...core.ids import CheckpointId
from ...core.sizes import size_text
from .event_types import Event, EventKind, Facts, RunFacts

if TYPE_CHECKING:
    from ...checkpoint.run_store import RunStore
    from ...core.errors import EverstepError
    from ...proto import frames
    from ..control.views import Verdict
    from ..devices.stores import OpenStore
    from ..registry import RankRecord, RunRecord
    from .event_book import EventBook

SEALED_MAX = 64
"""Checkpoints of one run between their first seal and their end: more are never under way."""

_Key = tuple[int, str]


class Reporter:
    """Owned by the event loop. Remembers only what turns repeated states into changes."""

    def __init__(self, book: "EventBook") -> None:
        self._book = book
        self._intervals: dict[_Key, int] = {}
        self._sealed_s: dict[_Key, dict[CheckpointId, float]] = {}
        """When the first rank of this node sealed each checkpoint that is not complete, by the monotonic clock."""
        self._completed: dict[_Key, CheckpointId] = {}
        self._skipped: dict[_Key, CheckpointId] = {}
        self._given_up: dict[_Key, CheckpointId] = {}
        self._fetched: dict[tuple[_Key, int], tuple[CheckpointId, float]] = {}
        self._devices: dict[str, dict[str, tuple[str, DeviceState]]] = {}
        """Directory and state of each device, by store and id."""

    def add(self, kind: EventKind, text: str, **facts: Unpack[Facts]) -> None:
        """Take an event of the node, or of the user in `owner_uid`; `facts` are fields of Event."""
        self._book.add(Event(kind=kind, unix_s=self._book.now_unix_s(), text=text, **facts))

    def configuration(self, change_count: int, error: "EverstepError | None" = None) -> None:
        """The configuration was read again: it is in use, or wrong."""
        if error is None:
            text = f"the configuration was read again: {_count(change_count, 'key')} changed"
            self.add(EventKind.CONFIG_RELOADED, text, count=change_count)
        else:
            text = f"the configuration was read again and is not taken: {error.message}"
            self.add(EventKind.CONFIG_RELOADED, text, code=error.code, hint=error.hint)

    # -- runs

    def attached(self, run: "RunRecord", world_size: int) -> None:
        """A new attempt is durable."""
        text = f"attempt {run.attempt} of run {run.name!r} began with {_count(world_size, 'rank')}"
        self._of_run(EventKind.RUN_ATTACHED, run, text, attempt=run.attempt, count=world_size)

    def left(self, rank: "RankRecord") -> None:
        """A rank has left cleanly; with the last one the run has ended here."""
        run = rank.run
        if all(each.lease is None for each in run.ranks.values()):
            self._intervals.pop(_key(run), None)
            self._of_run(EventKind.RUN_ENDED, run, f"run {run.name!r} ended", attempt=rank.attempt)

    def left_unsaved(self, rank: "RankRecord", newest: CheckpointId, linger_s: float) -> None:
        """A rank has left cleanly, and its newest snapshot could not be written, or cannot be read back."""
        where = "is in memory only" if rank.unwritten else "can be restored from memory only"
        text = f"rank {rank.rank} of run {rank.run.name!r} left, and {newest} {where}"
        hint = f"it is kept for {linger_s:.0f} s: give its devices room, or mend them, and start it again"
        self._of_rank(EventKind.RANK_LEFT, rank, text, attempt=rank.attempt, checkpoint=newest, hint=hint)

    def gone(self, rank: "RankRecord", linger_s: float) -> None:
        """A trainer died, vanished or failed, or left because its end was announced."""
        kind = EventKind.RANK_LEFT if rank.left else EventKind.RANK_LOST
        why = "" if rank.leave is None else f": {rank.leave.reason}"
        text = f"rank {rank.rank} of run {rank.run.name!r} {'left' if rank.left else 'is gone'}{why}"
        hint = f"what it sealed is kept for {linger_s:.0f} s: start it again"
        self._of_rank(kind, rank, text, attempt=rank.attempt, hint=hint)

    def restored(self, rank: "RankRecord", *, in_memory: bool) -> None:
        """A rank has all of what it fetched last."""
        checkpoint, began_s = self._fetched.pop((_key(rank.run), rank.rank), (None, None))
        where = "memory" if in_memory else "disk"
        self._of_rank(
            EventKind.RESTORED,
            rank,
            f"rank {rank.rank} of run {rank.run.name!r} restored {checkpoint or 'a checkpoint'} from {where}",
            attempt=rank.attempt,
            checkpoint=checkpoint,
            elapsed_s=0.0 if began_s is None else time.monotonic() - began_s,
            code=where,
        )

    def fetching(self, rank: "RankRecord", checkpoint: CheckpointId) -> None:
        """A rank asks for a shard."""
        key = (_key(rank.run), rank.rank)
        known = self._fetched.get(key)
        began_s = known[1] if known is not None and known[0] == checkpoint else time.monotonic()
        self._fetched[key] = (checkpoint, began_s)

    # -- checkpoints

    def sealed(self, rank: "RankRecord", checkpoint: CheckpointId) -> None:
        """A snapshot is complete in memory."""
        began_s = self._sealed_s.setdefault(_key(rank.run), {})
        began_s.setdefault(checkpoint, time.monotonic())
        while len(began_s) > SEALED_MAX:
            del began_s[next(iter(began_s))]
        text = f"rank {rank.rank} of {_title(rank.run, checkpoint)} is sealed in memory"
        self._of_rank(
            EventKind.SNAPSHOT_SEALED, rank, text, attempt=checkpoint.attempt, checkpoint=checkpoint
        )

    def committed(
        self, rank: "RankRecord", checkpoint: CheckpointId, size_bytes: int, persist_s: float
    ) -> None:
        """A shard is durable."""
        self._of_rank(
            EventKind.SHARD_COMMITTED,
            rank,
            f"rank {rank.rank} of {_title(rank.run, checkpoint)} is durable: {size_text(size_bytes)} in"
            f" {persist_s:.2f} s",
            attempt=checkpoint.attempt,
            checkpoint=checkpoint,
            size_bytes=size_bytes,
            elapsed_s=persist_s,
        )

    def failed(self, rank: "RankRecord", checkpoint: CheckpointId, error: "EverstepError") -> None:
        """A shard could not be committed."""
        self._of_rank(
            EventKind.SHARD_FAILED,
            rank,
            f"rank {rank.rank} of {_title(rank.run, checkpoint)} is not durable: {error.message}",
            attempt=checkpoint.attempt,
            checkpoint=checkpoint,
            code=error.code,
            hint=error.hint,
        )

    def completed(self, run: "RunRecord", checkpoint: CheckpointId) -> None:
        """All ranks have committed, as each of them says."""
        key = _key(run)
        if self._completed.get(key, checkpoint) > checkpoint or self._completed.get(key) == checkpoint:
            return
        self._completed[key] = checkpoint
        sealed_s = self._sealed_s.get(key, {})
        began_s = sealed_s.get(checkpoint)
        for older in [each for each in sealed_s if each <= checkpoint]:
            del sealed_s[older]
        try:
            size_bytes = run.store.info(checkpoint).size_bytes
        except NotFoundError:  # its devices are gone
            size_bytes = 0
        self._of_run(
            EventKind.CHECKPOINT_COMPLETE,
            run,
            f"{_title(run, checkpoint)} is complete on all ranks",
            attempt=checkpoint.attempt,
            checkpoint=checkpoint,
            size_bytes=size_bytes,
            elapsed_s=0.0 if began_s is None else time.monotonic() - began_s,
        )

    def removed(
        self, run: "RunStore", checkpoint: CheckpointId | None, *, count: int, freed_bytes: int
    ) -> None:
        """Somebody removed checkpoints by hand; None: all of the run."""
        what = f"{run.name}@{checkpoint}" if checkpoint else f"all checkpoints of run {run.name!r}"
        self.add(
            EventKind.CHECKPOINT_REMOVED,
            f"{what} removed by hand: {size_text(freed_bytes)} given back",
            owner_uid=run.owner_uid,
            run_name=run.name,
            run_id=run.run_id,
            checkpoint=checkpoint,
            count=count,
            size_bytes=freed_bytes,
        )

    def skipped(self, rank: "RankRecord", checkpoint: CheckpointId, code: str, reason: str) -> None:
        """A rank could not take its part of a due checkpoint, or has heard of one that could not."""
        self._skipped[_key(rank.run)] = checkpoint
        text = f"{_title(rank.run, checkpoint)} is skipped, as rank {rank.rank} says: {reason}"
        self._of_rank(
            EventKind.CHECKPOINT_SKIPPED,
            rank,
            text,
            attempt=checkpoint.attempt,
            checkpoint=checkpoint,
            count=1,
            code=code,
        )

    def given_up(self, run: "RunRecord", checkpoint: CheckpointId) -> None:
        """A checkpoint will never be complete, as each rank says; of one that was skipped that is known already."""
        key = _key(run)
        if self._skipped.get(key) != checkpoint and self._given_up.get(key) != checkpoint:
            self._given_up[key] = checkpoint
            text = f"{_title(run, checkpoint)} will not be complete: a rank could not commit it"
            self._of_run(
                EventKind.CHECKPOINT_GIVEN_UP, run, text, attempt=checkpoint.attempt, checkpoint=checkpoint
            )

    def costs(self, rank: "RankRecord", costs: "frames.Costs") -> None:
        """A trainer says what its checkpoints cost, every few seconds."""
        key = _key(rank.run)
        if costs.interval_steps != self._intervals.get(key):
            self._intervals[key] = costs.interval_steps
            self._of_run(
                EventKind.INTERVAL_CHANGED,
                rank.run,
                f"run {rank.run.name!r} takes a checkpoint every {_count(costs.interval_steps, 'step')}:"
                f" {costs.reason}",
                attempt=rank.attempt,
                interval_steps=costs.interval_steps,
            )

    def controller(self, run: "RunRecord", code: str, text: str) -> None:
        """Somebody asks something of a run's controller."""
        self._of_run(EventKind.CONTROLLER_CHANGED, run, text, attempt=run.attempt, code=code)

    # -- devices

    def devices(self, opened: "OpenStore") -> None:
        """A device of a store changed, or the store was opened: what differs from before is told."""
        store = opened.store
        found = {
            device.device_id: (str(device.path), *_state(opened, device.device_id))
            for device in store.devices
        }
        for missing in store.missing:
            found[missing.device_id] = (str(missing.path), DeviceState.MISSING, missing.reason)
        before = self._devices.get(store.store_id, {})
        for device_id, (path, _) in before.items():
            found.setdefault(device_id, (path, DeviceState.RETIRED, ""))
        self._devices[store.store_id] = {each: (path, state) for each, (path, state, _) in found.items()}
        for device_id, (path, state, reason) in found.items():
            if state is not before.get(device_id, (path, DeviceState.OK))[1]:
                text = f"device {path} is {state.value}" + (f": {reason}" if reason else "")
                self.add(EventKind.DEVICE_CHANGED, text, subject=path, code=state.value)

    def scrubbed(self, store_id: str, *, count: int, size_bytes: int, damaged: Sequence[str]) -> None:
        """All committed bytes of a store were read."""
        result = f"{len(damaged)} damaged" if damaged else "all are intact"
        text = f"{_count(count, 'checkpoint')} of store {store_id[:8]} were read ({size_text(size_bytes)}): {result}"
        self.add(EventKind.SCRUB_ENDED, text, subject=store_id, count=count, size_bytes=size_bytes)

    def damaged(self, verdict: "Verdict") -> None:
        """A checkpoint is not what was committed."""
        summary = verdict.summary
        problems = [*verdict.problems, *(each.problem for each in verdict.segments if each.problem)]
        self.add(
            EventKind.DAMAGE_FOUND,
            f"{summary.title} is damaged: {problems[0] if problems else 'it cannot be read'}",
            owner_uid=summary.owner_uid,
            run_name=summary.run_name,
            run_id=summary.run_id,
            attempt=summary.checkpoint.attempt,
            checkpoint=summary.checkpoint,
            hint=f"restores take an older one; `everstep show {summary.title}`",
        )

    # -- parts

    def _of_run(
        self,
        kind: EventKind,
        run: "RunRecord",
        text: str,
        rank: int | None = None,
        **facts: Unpack[RunFacts],
    ) -> None:
        self.add(kind, text, owner_uid=run.uid, run_name=run.name, run_id=run.run_id, rank=rank, **facts)

    def _of_rank(self, kind: EventKind, rank: "RankRecord", text: str, **facts: Unpack[RunFacts]) -> None:
        self._of_run(kind, rank.run, text, rank.rank, **facts)


def _key(run: "RunRecord") -> _Key:
    return run.uid, run.run_id


def _title(run: "RunRecord", checkpoint: CheckpointId) -> str:
    return f"{run.name}@{checkpoint}"


def _state(opened: "OpenStore", device_id: str) -> tuple[DeviceState, str]:
    return opened.store.device_state(device_id)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
