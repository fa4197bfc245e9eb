"""A run as the training loop sees it."""

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import NoReturn
from weakref import WeakSet

from msgspec.structs import asdict, replace

from ..checkpoint.catalogue import BOUNDARY_NOTE, FINISHED_NOTE
from ..checkpoint.lineage_plan import Goal
from ..core.errors import CorruptDataError, EverstepError, FencedError, UsageError, error_from_code
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import Reply
from .end_machine import SIGTERM, Ask
from .environment import environment_notes, notes_on_own_buffers
from .epoch_places import begin_epochs, next_epoch
from .forgotten import Forgotten
from .guard import OptimizerGuard, notes_on_overlap
from .history import History
from .link import Link
from .load_hooks import notes_on_loading
from .loaders import Unmoved, forget_looks, loop_of, note_on_leading
from .notice import Preemption
from .pace import Pace
from .rank_protocol import Ranks
from .reentry import named_calls, refuse_within
from .report import CostBook, Report
from .restore import Restored, check_may_restore, check_may_train
from .rng_state import RngState
from .run_checkpoints import RunCheckpoints, RunParts
from .run_end import RunEnd
from .run_messages import say_closed, say_not_closed, say_steps_too_short
from .run_restore import RunRestore
from .run_state import RunState
from .shard_stream import StreamEvents
from .snapshot import Snapshotter
from .state_additions import notes_on_additions, notes_on_lazy
from .state_protocol import Component
from .steering_machine import Steering
from .storage_notes import StorageNotes

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 600.0
"""How long leaving a run waits for its last checkpoint to be complete."""

LEAVE_DEADLINE_S = 1.0
"""How long a run that is cut short waits for the daemon to hear why."""

COSTS_S = 5.0


class Run:
    """One rank of a run. Made by `everstep.attach`; used by the thread that trains; a context manager.

    `restore()` first, then `step()` at the end of each iteration. Leaving the `with` block normally takes a last
    boundary and waits until it is complete; leaving it by an exception takes none, and what is sealed is still
    persisted.
    """

    _forked_from = 0
    """The process that attached, in a forked child of it, where no thread of the run is; else 0.

    A plain attribute: `optimizer.step()`, with its hooks, may be compiled by torch.
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
        goal: Goal | None = None,
    ) -> None:
        self.name, self.attempt = name, attempt
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._link, self._ranks = link, ranks
        self._pace = pace
        pace.has_slots(slots)
        self._state = RunState(lambda: pace.memory, lambda: loop_of(objects))
        self._history = History()
        self._rng = RngState()
        self._components: list[Component] = [self._state, self._rng, self._history, *components]
        self._objects, self._unmoved = objects, Unmoved()
        self._costs = CostBook()
        self._storage_notes = StorageNotes(name, link.devices, self._costs)
        self._unusable: FencedError | CorruptDataError | None = None
        self._stream_events: StreamEvents = SimpleQueue()
        self._refusal = ""
        """What `restore()` raised."""
        self._asked_restore = self._started = self._closed = self._told_too_short = False
        self._guard_s = self._costs_at_s = 0.0
        self._goal = goal
        self._notes = environment_notes() | notes_on_own_buffers(objects)
        self._snapshotter = self._make_snapshotter(
            slots=slots, replicated=replicated, debug=debug, device_first=device_first
        )
        with contextlib.ExitStack() as made:  # Ctrl-C, or a script's `state_dict()`, may raise
            made.callback(self._snapshotter.close)
            self._guard = OptimizerGuard(objects, self._before_optimizer)
            made.callback(self._guard.close)
            self._forgotten = Forgotten(objects, self._say_forgotten)
            made.callback(self._forgotten.close)
            self._say_notes(objects)
            self._end = RunEnd(name, ranks, pace, preemption)
            made.callback(self._end.close)
            self._checkpoints = self._make_checkpoints()
            _attached.add(self)
            made.pop_all()

    def _say_notes(self, objects: Mapping[str, object]) -> None:
        """Say what of these objects a checkpoint, or a restore, does not do as somebody may expect."""
        self._costs.notes.extend(notes_on_overlap(objects))
        for text in notes_on_additions(objects):
            self._say_forgotten("state_dict_adds", text)
        for text in notes_on_loading(objects):
            self._say_forgotten("load_not_called", text)
        for text in notes_on_lazy(objects):
            self._say_forgotten("module_is_lazy", text)

    def _make_snapshotter(
        self, *, slots: int, replicated: bool, debug: bool, device_first: bool
    ) -> Snapshotter:
        return Snapshotter(
            self._link,
            self._components,
            rank=self.rank,
            world_size=self.world_size,
            slot_count=slots,
            replicated=replicated,
            debug=debug,
            device_first=device_first,
            costs=self._costs,
            on_sealed=self._ranks.sealed,
            on_failed=self._ranks.failed,
            on_slots=self._pace.has_slots,
        )

    def _make_checkpoints(self) -> RunCheckpoints:
        parts = RunParts(
            name=self.name,
            attempt=self.attempt,
            link=self._link,
            ranks=self._ranks,
            pace=self._pace,
            end=self._end,
            costs=self._costs,
            state=self._state,
            snapshotter=self._snapshotter,
        )
        return RunCheckpoints(parts, self._checkpoint_notes)

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
            CorruptDataError: checkpoints exist, but none can be restored, or not the one to go `back_to`. The objects
                may hold parts of one: this run goes no further.
            NotFoundError: the one to go `back_to` is not there for all ranks; nothing was changed.
            StateMismatchError: the objects given do not fit. Nothing was changed, unless an object has refused its part
                by itself: then they may hold parts of a checkpoint, too.

        What it raises ends the run: `step()` and `epochs()` refuse, since checkpoints of a training that begins
        from nothing would take the place of those that exist.
        """
        self._check_usable()
        check_may_restore(started=self._started, restored=self._asked_restore)
        self._asked_restore = True
        restore = RunRestore(
            name=self.name,
            attempt=self.attempt,
            link=self._link,
            ranks=self._ranks,
            objects=self._objects,
            components=self._components,
            state=self._state,
            rng=self._rng,
            pace=self._pace,
            snapshotter=self._snapshotter,
            events=self._stream_events,
            unmoved=self._unmoved,
            goal=self._goal,
            notes=self._notes,
        )
        try:
            restored = restore.run()
        except BaseException as error:
            self._refusal = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._unusable = restore.mixture or self._unusable
        self._checkpoints.parent = restored.checkpoint if restored is not None else None
        return restored

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, beginning in the one that was restored."""
        self._start()
        if (note := note_on_leading(self._objects)) and note not in self._costs.notes:
            self._say_forgotten("no_loader_leads", note)
        begin_epochs(self._state, self._objects)
        if self._state.epoch >= count:
            logger.warning(
                "run_finished run=%s epochs=%d: nothing left to train; more epochs, or attach(..., fresh=True)",
                self.name,
                self._state.epoch,
            )
        while self._state.epoch < count:
            self._state.finished = False
            yield self._state.epoch
            next_epoch(self._state, self._objects)
        self._state.finished = True

    def step(self) -> None:
        """Mark a boundary: everything of one iteration has moved. Takes a checkpoint when one is due.

        Raises:
            FencedError: another trainer has taken the run over.
            StateTypeError: an attached object cannot be saved; the path says which.
            UsageError: the run is closed; two objects have leaves of one name; or a handler of a signal called it in
                the middle of another call that waits.
            SystemExit: the end that was announced has come; its checkpoint is as durable as time allowed.
        """
        arrived_s = time.perf_counter()
        refuse_within(self, self._CALLS, "run.step()")
        self._start()
        self._state.step += 1  # first: an exception in what follows (Ctrl-C) is caught by scripts that go on
        guard_s, self._guard_s = self._guard_s, 0.0
        copying = self._snapshotter.copying  # first: once it has ended, what devices waited is known
        cuda_wait_s = self._snapshotter.take_cuda_wait_s()
        ended = self._costs.arrived(arrived_s, guard_s=guard_s, cuda_wait_s=cuda_wait_s)
        self._pace.arrived(ended, guard_s=guard_s + cuda_wait_s, copying=copying)
        self._unmoved.passed()
        self._end.at_boundary(self._checkpoints.progress)
        waits_s = time.perf_counter()
        due = self._ranks.is_due(self._state.step)
        if self._ranks.world_size > 1:
            self._costs.wait_s += time.perf_counter() - waits_s
        self._checkpoints.passed(self._state.step)
        self._checkpoints.keep_daemon()
        if end := self._ranks.end_after(self._state.step):
            self._leave(end, due=due)
        begun = False
        try:
            if due:
                begun = self._checkpoints.take()
            elif self._costs.steps == 0 and not self._link.broken:
                self._snapshotter.prepare()
        finally:
            self._pass_boundary(begun=begun, due=due)

    def _pass_boundary(self, *, begun: bool, due: bool) -> None:
        """It counts, too, where its state could not be read and the script goes on."""
        self._guard.boundary()
        self._forgotten.boundary()
        saving = begun or self._checkpoints.is_saving
        busy = saving or self._checkpoints.busy
        left_s = time.perf_counter()
        boundary_s = self._costs.left(left_s, opens_busy=busy, due=due, only_memory=not saving)
        self._pace.left(boundary_s, taken=begun)
        self._tell_costs(left_s)

    def _tell_costs(self, now_s: float) -> None:
        """Let the daemon's status and metrics know what checkpoints cost, every few seconds."""
        if now_s >= self._costs_at_s:
            self._costs_at_s = now_s + COSTS_S
            report = self.report()
            if report.steps_too_short and not self._told_too_short:
                self._told_too_short = True
                say_steps_too_short(self.name, report.steps_too_short)
            said = report.as_frame()
            self._link.tell(replace(said, step=self._state.step, step_s=self._pace.mean_step_s))

    def checkpoint(self) -> None:
        """Ask for a checkpoint at the next boundary (with several ranks: at one of the next, the same on all)."""
        self._check_usable()
        self._ranks.ask_for_checkpoint(Ask())

    def lease(self, seconds: float, *, ends: bool = True) -> None:
        """Say how long this process has from now on, as schedulers that work in rounds do; a new one replaces the old.

        At the last boundary from which a checkpoint still becomes durable in that time one is taken; another one at
        once while nobody knows how long that takes. Then `step()` raises SystemExit(0), or with `ends=False` goes on.
        All ranks call it alike: of several, rank 0's counts.
        """
        self._check_usable()
        self._end.lease(seconds, ends=ends)

    @contextlib.contextmanager
    def mutating(self) -> Generator[None]:
        """Wrap code that writes to parameters or optimizer state outside `optimizer.step()`: it waits for the copy.

        Raises:
            UsageError: a handler of a signal called it in the middle of `run.step()` or another call that waits.
        """
        refuse_within(self, self._CALLS, "run.mutating()")
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

        Returns False when time, the daemon or the other ranks ran out. A rank that does not answer is named in the log
        and in the report: at once if it died on this node, else after $EVERSTEP_RANK_DEADLINE_S (60).

        Raises:
            UsageError: a handler of a signal called it in the middle of `run.step()` or another call that waits.
        """
        refuse_within(self, self._CALLS, "run.wait()")
        self._check_own()
        self._checkpoints.passed(self._state.step + 1)
        return self._checkpoints.wait(deadline_s)

    def close(self) -> None:
        """End the run normally: a last boundary, complete before this returns (or its failure is logged).

        Raises:
            UsageError: a handler of a signal called it in the middle of `run.step()` or another call that waits.
        """
        refuse_within(self, self._CALLS, "run.close()")
        self._close()

    def __enter__(self) -> "Run":
        """Return the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; by an exception without a last boundary."""
        self._close(error)

    # -- boundaries

    def _start(self) -> None:
        self._check_usable()
        if self._started:
            return
        check_may_train(self._goal, asked=self._asked_restore, refusal=self._refusal)
        self._started = True
        if not self._asked_restore and self._link.opened.highest_attempt > 0:
            logger.warning(
                "restore_not_called run=%s: earlier attempts exist; this one begins from the given objects",
                self.name,
            )
        if self._checkpoints.parent is None:
            forget_looks(self._objects)
        self._checkpoints.start()
        self._pace.begin(self._state.step, devices=self._link.devices)
        self._ranks.start(self._state.step, self._checkpoints)

    def _check_own(self) -> None:
        if self._forked_from:
            raise UsageError(
                f"run {self.name!r} was attached by process {self._forked_from}, and this is a forked child of it",
                hint="only the process that attached calls the run",
            )

    def _check_usable(self) -> None:
        self._check_own()
        if self._closed:
            raise UsageError(f"run {self.name!r} is closed", hint="attach again")
        if self._unusable is not None:
            raise self._unusable

    def _checkpoint_notes(self) -> dict[str, str]:
        return self._notes | {
            "epoch": str(self._state.epoch),
            FINISHED_NOTE: str(self._state.finished).lower(),
            BOUNDARY_NOTE: str(self._state.step),
        }

    def _say_forgotten(self, event: str, text: str) -> None:
        self._costs.notes.append(text)
        if self.rank == 0:
            logger.warning("%s run=%s: %s", event, self.name, text)

    def _before_optimizer(self) -> None:
        if self._forked_from:
            return
        waited_s = self._snapshotter.guard()
        self._guard_s += waited_s
        self._costs.guard_s += waited_s

    # -- what the daemon says (the link's reader thread)

    def on_event(self, event: Reply) -> None:
        """Take a frame of the daemon that answers no request; called on the link's reader thread."""
        match event:
            case frames.SlotFree():
                self._snapshotter.slot_free(event.arena, event.slot)
            case frames.SegmentWritten():
                self._snapshotter.segment_written(event)
            case frames.Chunk() | frames.StreamEnd():
                self._stream_events.put(event)
            case frames.Persisted() | frames.PersistFailed():
                self._written(event)
            case frames.DevicesChanged():
                self._storage_notes.take(event)
                self._pace.devices_changed(event.devices)
            case frames.Notice():
                self._storage_notes.take(event)
            case frames.RankGone():
                self._ranks.gone(event.rank)
            case frames.Force() | frames.Steer():
                self._asked(event)
            case frames.Fenced():
                self._unusable = FencedError(event.message, hint="stop this process")
                self._checkpoints.fenced = event.message
            case frames.Failure(code=FencedError.__name__) if self._closed:
                logger.info("told_after_end run=%s message=%s", self.name, event.message)
            case frames.Failure():
                logger.error("daemon_refused code=%s message=%s", event.code, event.message)
                self._costs.fail(event.message)
            case _:
                logger.error("frame_unexpected kind=%s", type(event).__name__)

    def _written(self, event: frames.Persisted | frames.PersistFailed) -> None:
        """A shard is durable, or will not be; what an attempt before this one has left to be written is none of its."""
        checkpoint = CheckpointId(event.attempt, event.step)
        if checkpoint.attempt != self.attempt:
            return
        if isinstance(event, frames.Persisted):
            self._pace.persisted(event)
            self._snapshotter.durable(checkpoint)
            self._checkpoints.committed(checkpoint)
            return
        error = error_from_code(event.code, event.message, event.hint)
        if not self._snapshotter.given_up(checkpoint, error):
            self._ranks.failed(checkpoint, str(error))

    def _asked(self, event: frames.Force | frames.Steer) -> None:
        """An operator asks something of the controller."""
        if isinstance(event, frames.Force):
            self._checkpoints.force(event)
        else:
            self._ranks.steer(Steering(**asdict(event)))
            self._costs_at_s = 0.0  # the daemon waits to hear that it holds

    # -- the end

    def _leave(self, reason: str, *, due: bool) -> None:
        """Save what all ranks have time for: this boundary if it is `due`, or only what is under way; then end.

        When that has come to its end rank 0 looks again: there may be time for this boundary, too.
        """
        until_s, checkpoints = self._end.until_s, self._checkpoints
        self._costs.left(time.perf_counter(), opens_busy=checkpoints.busy, due=due)
        if not due:
            self._see_complete(until_s)
            is_open = checkpoints.saved_step < self._state.number and not checkpoints.alone
            has_time = is_open and self._end.has_time(checkpoints.progress)
            due = self._ranks.saves_after_all(has_time, until_s)
        begun = due and checkpoints.take_last(until_s)
        if begun:
            self._see_complete(until_s)
        self._ended(reason, skipped=due and not begun)

    def _ended(self, reason: str, *, skipped: bool = False) -> NoReturn:
        last_complete = self.report().last_complete
        taken = self._checkpoints.last_taken_step
        begun = str(CheckpointId(self.attempt, taken)) if self._started else last_complete
        self._end.leave(
            reason,
            last_complete=last_complete,
            in_time=not skipped and last_complete == begun,
            unsaved_steps=self._checkpoints.unsaved_steps,
        )

    def _close(self, error: BaseException | None = None) -> None:
        """End the run: as it wants to, or by what was raised in it."""
        if self._closed or self._forked_from:
            return
        is_well, unsaved = False, ""
        try:
            if error is None and self._unusable is None:
                unsaved = self._finish()
                is_well = True
            else:
                self._snapshotter.drain(CLOSE_DEADLINE_S)
                is_well = self._end.has_left and not self._checkpoints.busy
        except BaseException as raised:
            error = raised  # Ctrl-C, for one: the daemon hears that nobody waits
            raise
        finally:
            self._closed = True
            self._let_go(error, is_well=is_well)
            say_closed(self.name, self._state.step, self.report())
        # It stands in the way of nothing that is raised already, and of no other run's last boundary.
        is_free = error is None and sys.exc_info()[1] is None and not any(map(_is_open, _attached))
        if is_free and self._end.is_told:
            self._ended(SIGTERM, skipped=bool(unsaved))

    def _let_go(self, error: BaseException | None, *, is_well: bool) -> None:
        """Give everything back, though Ctrl-C may come in the middle of any part: nobody can close this run again."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._link.close)
            ends.callback(self._snapshotter.close)
            ends.callback(self._end.close)
            ends.callback(self._ranks.close, stays=self._may_stay)
            if not is_well:
                self._ranks.close()
            self._guard.close()
            self._forgotten.close()
            if not self._link.broken:
                self._tell_costs(self._costs_at_s)
            if not self._link.broken:
                self._say_end(error)

    def _may_stay(self) -> bool:
        """Tell whether this process, all done, may wait for others: nobody ends it yet."""
        return not self._end.is_told and (not self._end.has_left or time.monotonic() < self._end.until_s)

    def _finish(self) -> str:
        """Take the last boundary and see it complete; all ranks take it again when the daemon of one dies with it.

        Return why the newest state is not saved; empty where it is.
        """
        checkpoints, until_s = self._checkpoints, time.monotonic() + CLOSE_DEADLINE_S
        checkpoints.passed(self._state.step + 1)
        self._ranks.ends()
        if self._last_boundary(until_s):
            self._see_complete(until_s)
        reason = checkpoints.last_unsaved() if self._started else ""
        if reason:
            logger.error("close_incomplete run=%s reason=%s", self.name, reason)
        return reason

    def _see_complete(self, until_s: float) -> None:
        """See what was taken complete, or failed; the state is taken again where it died with some rank's daemon."""
        checkpoints = self._checkpoints
        while not checkpoints.wait(max(0.0, until_s - time.monotonic())) or checkpoints.died_with_daemon:
            if checkpoints.alone or time.monotonic() >= until_s:
                return
            checkpoints.keep_daemon()
            if checkpoints.died_with_daemon and not self._last_boundary(until_s):
                return

    def _last_boundary(self, until_s: float) -> bool:
        """Take the final state, if anything moved since the last snapshot; wait for room until then.

        Tell whether there is nothing to take, or it has begun.
        """
        is_saved = self._checkpoints.saved_step == self._state.number and self._costs.steps == 0
        if not self._started or is_saved:
            return True
        self._state.beyond += 1
        if self._ranks.lost is not None:
            return False
        return self._checkpoints.take_last(until_s)

    def _say_end(self, error: BaseException | None) -> None:
        """Wait until the daemon has settled what was sealed; or tell it why nobody waits for that."""

        def last(number: int) -> frames.Detach | frames.Leave:
            return frames.Detach(request_id=number) if error is None else self._end.farewell(number, error)

        try:
            self._link.client.request(last, CLOSE_DEADLINE_S if error is None else LEAVE_DEADLINE_S)
        except EverstepError as failure:
            logger.error("detach_failed run=%s reason=%s", self.name, failure)

    def _at_exit(self) -> None:
        """The interpreter ends: say so where nobody has closed the run, and nobody was told to end it."""
        unsaved_steps = self._checkpoints.unsaved_steps
        if unsaved_steps and not self._end.has_left and self.rank == 0:
            say_not_closed(self.name, self.report().last_complete, unsaved_steps)

    _CALLS = named_calls(step=step, wait=wait, close=_close, mutating=_before_optimizer)
    """What waits for other threads, or holds what they wait for."""


_attached = WeakSet[Run]()


def _is_open(run: Run) -> bool:
    return not (run._closed or run._forked_from)  # pyright: ignore[reportPrivateUsage]


def _in_child() -> None:
    for run in _attached:
        run._forked_from = run._forked_from or os.getppid()  # pyright: ignore[reportPrivateUsage]


def _at_exit() -> None:
    for run in filter(_is_open, _attached):
        run._at_exit()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
