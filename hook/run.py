"""A run as the training loop sees it."""

import contextlib
import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType

from ..checkpoint.frequency_types import FailureKind
from ..core.errors import CorruptDataError, EverstepError, FencedError, UsageError, error_from_code
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import Reply
from .environment import environment_notes
from .guard import OptimizerGuard, notes_on_overlap
from .history import History
from .ledger_merge import adopt_ledgers
from .link import Link
from .loaders import all_loaders, position_loader, put_back_on_first_batch
from .notice import Preemption
from .pace import Pace
from .rank_protocol import Ranks
from .report import CostBook, Report
from .restore import Fetched, Restored, RestoreSearch, check_may_restore
from .rng_state import RngState
from .run_end import RunEnd
from .run_messages import say_closed, say_nothing_restored, say_restored
from .run_state import RunState
from .shard_stream import StreamEvents
from .skip_reasons import NO_ARENA, NO_DAEMON, NO_SLOT, OTHER_RANK_SKIPPED, STILL_COPYING
from .snapshot import SnapshotFacts, Snapshotter
from .state_protocol import Component
from .storage_notes import StorageNotes

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 600.0
"""How long leaving a run waits for its last checkpoint to be complete."""

COSTS_S = 5.0
SKIPPED = "skipped: "

_RETRY_S = 0.01
_LINK_POLL_S = 0.1
"""How soon a wait notices that the daemon is gone: nothing else would wake it."""
_WAIT_REASONS = (NO_ARENA, NO_SLOT, STILL_COPYING, NO_DAEMON)
"""What the last boundary waits for: it is not taken again."""


class Run:
    """One rank of a run. Made by `everstep.attach`; used by the thread that trains; a context manager.

    `restore()` first, then `step()` at the end of each iteration. Leaving the `with` block normally takes a last
    boundary and waits until it is complete; leaving it by an exception takes none, and what is sealed is still
    persisted.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        *,
        name: str,
        link: Link,
        ranks: Ranks,
        attempt: int,
        components: Sequence[Component],
        objects: dict[str, object],
        slots: int,
        replicated: bool,
        debug: bool,
        device_first: bool,
        pace: Pace,
        preemption: Preemption,
    ) -> None:
        self.name, self.attempt = name, attempt
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._link, self._ranks = link, ranks
        self._pace = pace
        pace.has_slots(slots)
        self._state = RunState(lambda: pace.memory)
        self._history = History()
        self._rng = RngState()
        self._components: list[Component] = [self._state, self._rng, self._history, *components]
        self._loader = position_loader(objects)
        self._loaders = all_loaders(objects)
        self._costs = CostBook()
        self._storage_notes = StorageNotes(name, link.devices, self._costs)
        self._outstanding: set[CheckpointId] = set()
        self._settled = threading.Condition()
        self._unusable: FencedError | CorruptDataError | None = None
        self._stream_events: StreamEvents = SimpleQueue()
        self._parent: CheckpointId | None = None
        self._restored: Restored | None = None
        self._asked_restore = self._started = self._closed = self._told_loss = False
        self._saved_step = -1
        self._guard_s = self._costs_at_s = 0.0
        self._notes = environment_notes()
        self._snapshotter = Snapshotter(
            link,
            self._components,
            rank=self.rank,
            world_size=self.world_size,
            slot_count=slots,
            replicated=replicated,
            debug=debug,
            device_first=device_first,
            costs=self._costs,
            on_sealed=self._on_sealed,
            on_failed=self._on_failed,
            on_slots=pace.has_slots,
        )
        self._guard = OptimizerGuard(objects, self._before_optimizer)
        self._end = RunEnd(name, ranks, pace, preemption)
        self._costs.notes.extend(notes_on_overlap(objects))

    # -- what a training script uses

    @property
    def steps(self) -> int:
        """Boundaries passed along the lineage of this run."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Epoch that `epochs()` is in, or will begin with."""
        return self._state.epoch

    @property
    def finished(self) -> bool:
        """Tell whether `epochs()` came to its end, in this process or before the restored checkpoint."""
        return self._state.finished

    def restore(self) -> Restored | None:
        """Bring the newest complete checkpoint back into the attached objects; None when there is none, and say why.

        All ranks restore the same one. Nothing is changed before every rank has found that its objects fit; then each
        block is verified and copied while the next ones are read. A checkpoint that does not hold is skipped with its
        reason, and the next older one taken.

        Raises:
            CorruptDataError: checkpoints exist, but none can be restored. The objects may hold parts of one: this run
                goes no further.
            StateMismatchError: the objects given do not fit; nothing was changed.
        """
        check_may_restore(started=self._started, restored=self._asked_restore)
        self._asked_restore = True
        began_s = time.perf_counter()
        search = RestoreSearch(
            link=self._link,
            ranks=self._ranks,
            components=self._components,
            attempt=self.attempt,
            events=self._stream_events,
        )
        found = None
        try:
            found = search.run()
            if found is not None:
                search.is_mixed = True  # until all of it is in its place: an object may refuse its part
                self._apply(found, search)
                search.is_mixed = False
        finally:
            if search.is_mixed:
                if found is not None:
                    search.give_back(found)
                self._unusable = CorruptDataError(
                    "restore() failed: the objects hold parts of a checkpoint that could not be restored to its end",
                    hint="build them anew in a new process",
                )
        if found is None:
            say_nothing_restored(self.name, self._link)
            return None
        self._learn_from(found)
        self._restored = Restored(
            attempt=found.choice.checkpoint.attempt,
            step=found.choice.checkpoint.step,
            epoch=self._state.epoch,
            source="memory" if found.is_in_memory else "disk",
            restore_s=time.perf_counter() - began_s,
            world_size=found.choice.world_size,
            skipped=tuple(search.skipped),
            left_as_given=tuple(each.name for each in self._components if found.lacks(each.name)),
            not_attached=tuple(set(found.stored.components) - {each.name for each in self._components}),
        )
        say_restored(self.name, self._restored, found.manifest.notes)
        return self._restored

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, beginning in the one that was restored."""
        self._start()
        if self._loader is not None:
            self._state.epoch = max(self._state.epoch, self._loader.epoch)
        if self._state.epoch >= count:
            logger.warning(
                "run_finished run=%s epochs=%d: nothing left to train; more epochs, or attach(..., fresh=True)",
                self.name,
                self._state.epoch,
            )
        while self._state.epoch < count:
            self._state.finished = False
            yield self._state.epoch
            self._state.epoch += 1
        self._state.finished = True

    def step(self) -> None:
        """Mark a boundary: everything of one iteration has moved. Takes a checkpoint when one is due.

        Raises:
            FencedError: another trainer has taken the run over.
            StateTypeError: an attached object cannot be saved; the path says which.
            SystemExit: the end that was announced has come; its checkpoint is as durable as time allowed.
        """
        self._start()
        arrived_s = time.perf_counter()
        guard_s, self._guard_s = self._guard_s, 0.0
        ended = self._costs.arrived(arrived_s, guard_s=guard_s)
        self._pace.arrived(ended, guard_s=guard_s, copying=self._snapshotter.copying)
        self._state.step += 1
        self._end.mind_deadlines(under_way=bool(self._outstanding) or self._snapshotter.busy)
        waits_s = time.perf_counter()
        due = self._ranks.is_due(self._state.step)
        self._costs.wait_s += time.perf_counter() - waits_s
        self._keep_daemon()
        if end := self._ranks.end_after(self._state.step):
            self._leave(end, due=due)
        begun = False
        if due:
            begun = self._take()
        elif self._costs.steps == 0 and not self._link.broken:
            self._snapshotter.prepare()
        self._guard.boundary()
        busy = begun or self._snapshotter.busy or bool(self._outstanding)
        left_s = time.perf_counter()
        self._costs.left(left_s, opens_busy=busy)
        self._pace.left(left_s - arrived_s, taken=begun)
        self._tell_costs(left_s)

    def _tell_costs(self, now_s: float) -> None:
        """Let the daemon's status and metrics know what checkpoints cost, every few seconds."""
        if now_s >= self._costs_at_s:
            self._costs_at_s = now_s + COSTS_S
            self._link.tell(self.report().as_frame())

    def checkpoint(self) -> None:
        """Ask for a checkpoint at the next boundary (with several ranks: at one of the next, the same on all)."""
        self._check_usable()
        self._ranks.ask_for_checkpoint()

    def lease(self, seconds: float, *, ends: bool = True) -> None:
        """Say how long this process has from now on, as schedulers that work in rounds do; a new one replaces the old.

        At the last boundary from which a checkpoint still becomes durable in that time one is taken; another one at
        once while nobody knows how long that takes. Then `step()` raises SystemExit(0), or with `ends=False` goes on.
        All ranks call it alike.
        """
        self._check_usable()
        self._end.lease(seconds, ends=ends)

    @contextlib.contextmanager
    def mutating(self) -> Generator[None]:
        """Wrap code that writes to parameters or optimizer state outside `optimizer.step()`: it waits for the copy."""
        self._before_optimizer()
        yield

    def log(self, **values: float) -> None:
        """Append values to the run's histories, at the step in progress; they are part of every checkpoint.

        Numbers or tensors of one element. A CUDA tensor is read here, which waits for the device.
        """
        self._history.append(self._state.step, values)

    def history(self, key: str) -> list[tuple[int, float]]:
        """Return what was logged under `key` along the lineage, as (step, value)."""
        return self._history.series(key)

    def report(self) -> Report:
        """Return what checkpointing has cost so far, and what went wrong."""
        return self._costs.report(self._ranks.decision, self._pace.slower_steps)

    def wait(self, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Wait until memory asked for is there or refused, and every checkpoint taken is complete or has failed.

        Returns False when time or the daemon ran out.
        """
        until_s = time.monotonic() + deadline_s
        if not self._snapshotter.settle(deadline_s):
            return False
        with self._settled:
            while self._outstanding and not self._link.broken and (left_s := until_s - time.monotonic()) > 0:
                self._settled.wait(min(left_s, _LINK_POLL_S))
            return not self._outstanding

    def close(self) -> None:
        """End the run normally: a last boundary, complete before this returns (or its failure is logged)."""
        self._close(final=True)

    def __enter__(self) -> "Run":
        """Return the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; by an exception without a last boundary."""
        self._close(final=kind is None)

    # -- boundaries

    def _start(self) -> None:
        self._check_usable()
        if self._started:
            return
        self._started = True
        if not self._asked_restore and self._link.opened.highest_attempt > 0 and self._parent is None:
            logger.warning(
                "restore_not_called run=%s: earlier attempts exist; this one begins from the given objects",
                self.name,
            )
        self._saved_step = self._state.step
        self._pace.begin(self._state.step, devices=self._link.devices)
        self._ranks.start(self._state.step, self)

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError(f"run {self.name!r} is closed", hint="attach again")
        if self._unusable is not None:
            raise self._unusable

    def _take(self) -> bool:
        """Begin the snapshot of this boundary, or count and say why not."""
        reason = self._begin_snapshot()
        if reason is not None:
            self._skip(reason)
        return reason is None

    def _skip(self, reason: str) -> None:
        self._costs.skipped[reason] += 1
        self._pace.skipped(self._state.step)
        logger.warning("checkpoint_skipped run=%s step=%d reason=%s", self.name, self._state.step, reason)
        if self.world_size > 1:
            self._ranks.failed(CheckpointId(self.attempt, self._state.step), f"{SKIPPED}{reason}")

    def _begin_snapshot(self) -> str | None:
        """Begin the snapshot of this boundary; return the reason when that is not possible now."""
        checkpoint = CheckpointId(self.attempt, self._state.step)
        notes = self._notes | {"epoch": str(self._state.epoch), "finished": str(self._state.finished).lower()}
        with self._settled:
            self._outstanding.add(checkpoint)
        try:
            reason = self._snapshotter.begin(
                SnapshotFacts(checkpoint=checkpoint, parent=self._parent, notes=notes)
            )
        except BaseException:
            self._settle(checkpoint)
            raise
        if reason is None:
            self._saved_step = self._state.step
            self._pace.taken(checkpoint)
            return None
        self._settle(checkpoint)
        return reason

    def _before_optimizer(self) -> None:
        waited_s = self._snapshotter.guard()
        self._guard_s += waited_s
        self._costs.guard_s += waited_s

    def _keep_daemon(self) -> None:
        """Notice that the daemon is gone, and look for another one beside training."""
        if not self._link.broken:
            self._told_loss = False
            return
        if not self._told_loss:
            self._told_loss = True
            self._daemon_lost()
        self._link.keep_up(lambda: None)

    def _daemon_lost(self) -> None:
        logger.warning("daemon_lost run=%s: training goes on, checkpoints are skipped meanwhile", self.name)
        self._snapshotter.daemon_lost()
        with self._settled:
            lost = list(self._outstanding)
        for checkpoint in lost:
            self._ranks.failed(checkpoint, "the daemon went away before it was committed")

    def saves_last_boundary(self) -> bool:
        """Listener: the last boundary is saved, unless time is only left for what is under way."""
        return not self._outstanding or self._end.has_time

    def _leave(self, reason: str, *, due: bool) -> None:
        """Save what all ranks have time for: this boundary if it is `due`, or only what is under way; then end."""
        until_s = self._end.until_s
        skipped = due and not self._begin_patiently(until_s)
        self.wait(max(0.0, until_s - time.monotonic()))
        last_complete, begun = self.report().last_complete, CheckpointId(self.attempt, self._saved_step)
        self._end.leave(
            reason, last_complete=last_complete, in_time=not skipped and last_complete == str(begun)
        )

    # -- what happened to snapshots (other threads)

    def _on_sealed(self, checkpoint: CheckpointId) -> None:
        self._ranks.sealed(checkpoint)

    def _on_failed(self, checkpoint: CheckpointId, reason: str) -> None:
        self._ranks.failed(checkpoint, reason)

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        """Listener: every rank holds it in memory."""
        self._link.tell(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))

    def complete(self, checkpoint: CheckpointId) -> None:
        """Listener: every rank has committed it."""
        if self.world_size > 1:
            self._link.tell(frames.Complete(attempt=checkpoint.attempt, step=checkpoint.step))
        self._costs.completed(checkpoint)
        self._settle(checkpoint)

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        """Listener: it will never be complete; without all ranks in memory it is of no use at all."""
        self._link.tell(frames.GiveUp(attempt=checkpoint.attempt, step=checkpoint.step, in_memory=in_memory))
        self._pace.failed(checkpoint, skipped=SKIPPED in reason)
        if SKIPPED in reason:
            self._skipped_elsewhere(checkpoint, reason)
        else:
            self._costs.failures.append(f"{checkpoint}: {reason}")
            logger.error("checkpoint_failed run=%s checkpoint=%s reason=%s", self.name, checkpoint, reason)
        self._settle(checkpoint)

    def _skipped_elsewhere(self, checkpoint: CheckpointId, reason: str) -> None:
        """A rank had no room or no arena for its part: counted here unless it was this rank, which knows already."""
        if not reason.startswith(f"rank {self.rank}: "):
            self._costs.skipped[OTHER_RANK_SKIPPED] += 1
            logger.warning("checkpoint_skipped run=%s checkpoint=%s reason=%s", self.name, checkpoint, reason)

    def on_event(self, event: Reply) -> None:
        """Take a frame of the daemon that answers no request; called on the link's reader thread."""
        match event:
            case frames.SlotFree():
                self._snapshotter.slot_free(event.arena, event.slot)
            case frames.SegmentWritten():
                self._snapshotter.segment_written(event)
            case frames.Chunk() | frames.StreamEnd():
                self._stream_events.put(event)
            case frames.Persisted():
                self._pace.persisted(event)
                self._ranks.committed(CheckpointId(event.attempt, event.step))
            case frames.PersistFailed():
                error = error_from_code(event.code, event.message, event.hint)
                checkpoint = CheckpointId(event.attempt, event.step)
                if not self._snapshotter.given_up(checkpoint, error):
                    self._ranks.failed(checkpoint, str(error))
            case frames.DevicesChanged() | frames.Notice():
                self._storage_notes.take(event)
            case frames.Fenced():
                self._unusable = FencedError(event.message, hint="stop this process")
            case frames.Failure():
                logger.error("daemon_refused code=%s message=%s", event.code, event.message)
                self._costs.failures.append(event.message)
            case _:
                logger.error("frame_unexpected kind=%s", type(event).__name__)

    def _settle(self, checkpoint: CheckpointId) -> None:
        with self._settled:
            self._outstanding.discard(checkpoint)
            self._settled.notify_all()

    # -- restore

    def _apply(self, found: Fetched, search: RestoreSearch) -> None:
        same_size = found.choice.world_size == self.world_size
        for component in self._components:
            if (component is not self._rng or same_size) and not found.lacks(component.name):
                component.apply(found.stored)
        if not same_size:
            loaders = {name: loader for name, loader in self._loaders.items() if not found.lacks(name)}
            adopt_ledgers(loaders, found, search, rank=self.rank)
        if self._loader is not None:
            put_back_on_first_batch(self._loader, self._rng)
        self._parent = found.choice.checkpoint
        if found.is_in_memory:
            found.stored.close()
            self._snapshotter.adopt(found.arena)
        else:
            search.give_back(found)

    def _learn_from(self, found: Fetched) -> None:
        """Go on with what the controller has learnt, if as many ranks wrote it.

        An attempt that did not end by itself has died, and so have all that began after it: they left no checkpoint.
        """
        kind = FailureKind.TRAINER if found.is_in_memory else FailureKind.NODE
        died = self.attempt - found.choice.checkpoint.attempt - self._state.restored_last
        remembered = self._state.restored_learnt if found.choice.world_size == self.world_size else None
        self._pace.restored(remembered, kind if died else None, attempts=max(died, 1))

    # -- the end

    def _close(self, *, final: bool) -> None:
        if self._closed:
            return
        try:
            if final and self._unusable is None:
                self._finish()
            else:
                self._snapshotter.drain(CLOSE_DEADLINE_S)
        finally:
            self._closed = True
            self._end.close()
            self._guard.close()
            self._ranks.close()
            if not self._link.broken:
                self._tell_costs(self._costs_at_s)
            if final and not self._link.broken:
                self._detach()
            self._snapshotter.close()
            self._link.close()
            say_closed(self.name, self._state.step, self.report())

    def _finish(self) -> None:
        """Take the last boundary and see it complete; taken again when the daemon dies with it."""
        until_s = time.monotonic() + CLOSE_DEADLINE_S
        self._last_boundary()
        while not self.wait(max(0.0, until_s - time.monotonic())):
            if not self._link.broken:
                logger.error("close_incomplete run=%s after_s=%.0f", self.name, CLOSE_DEADLINE_S)
                return
            self._keep_daemon()
            self._last_boundary()

    def _last_boundary(self) -> None:
        """Take the final state, if anything moved since the last snapshot; wait for room as long as it takes."""
        if not self._started or (self._saved_step == self._state.step and not self._moved_since_saved()):
            return
        self._state.step += 1
        self._begin_patiently(time.monotonic() + CLOSE_DEADLINE_S)

    def _begin_patiently(self, until_s: float) -> bool:
        """Begin the attempt's last snapshot; wait for room until then. Tell whether it has begun."""
        self._state.is_last = True
        while (reason := self._begin_snapshot()) is not None:
            if reason not in _WAIT_REASONS or time.monotonic() > until_s:
                self._skip(reason)
                return False
            time.sleep(_RETRY_S)
            self._keep_daemon()
        return True

    def _moved_since_saved(self) -> bool:
        return self._costs.steps > 0

    def _detach(self) -> None:
        try:
            self._link.client.request(lambda number: frames.Detach(request_id=number), CLOSE_DEADLINE_S)
        except EverstepError as error:
            logger.error("detach_failed run=%s reason=%s", self.name, error)
