"""The checkpoints of one run: begun at boundaries, waited for, and what ranks and daemon say of them."""

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import EverstepError
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import SkipReason
from .client import DaemonClient
from .end_machine import Ask, Progress
from .link import Link
from .pace import Pace
from .rank_protocol import DAEMON_LOST, Ranks
from .report import CostBook
from .run_end import RunEnd, text_of
from .run_state import RunState
from .skip_reasons import NO_ARENA, PASSING, PINNING, skip_reason
from .snapshot import SnapshotFacts, Snapshotter
from .thinned_lines import is_said

logger = logging.getLogger(__name__)

SKIPPED = "skipped: "
LEFT_BEFORE = "run.step() was left by an exception before it was begun"

_FIGURES = re.compile(r"[0-9]+")
_NAMES = re.compile(r"[0-9]+\.[0-9]+")

_RETRY_S, _RETRY_S_MOST = 0.01, 0.2
"""How soon the last boundary is tried again; each time twice as long while the daemon is asked for memory anew."""
_LOSS_POLL_S = 0.1
"""How soon a wait notices that the daemon or the ranks are gone: nothing else would wake it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What the checkpoints of a run are made with, and by whom."""

    name: str
    attempt: int
    link: Link
    ranks: Ranks
    pace: Pace
    end: RunEnd
    costs: CostBook
    state: RunState
    snapshotter: Snapshotter


class RunCheckpoints:
    """Begins them on the training thread; as the ranks' listener it hears of their ends on other threads."""

    def __init__(self, parts: RunParts, notes: Callable[[], dict[str, str]]) -> None:
        """`notes` returns what `everstep show` tells of a checkpoint."""
        self._parts, self._notes = parts, notes
        self._link, self._ranks, self._pace = parts.link, parts.ranks, parts.pace
        self._costs, self._state, self._snapshotter = parts.costs, parts.state, parts.snapshotter
        self._under_way: dict[CheckpointId, bool] = {}
        """And whether this rank's part is durable already."""
        self._lock = threading.RLock()
        """Entered itself: Ctrl-C in the middle of `Condition.__enter__`, which is Python, leaves it locked."""
        self._settled = threading.Condition(self._lock)
        self._lost: DaemonClient | None = None
        """Whose loss was told."""
        self._unsaved = ""
        """Why the checkpoint of which that was heard last is not complete."""
        self._silent_told: set[CheckpointId] = set()
        self.fenced = ""
        """Who has the run now, if no longer this process."""
        self.parent: CheckpointId | None = None
        """What the attempt started from."""
        self.saved_step = -1
        """The newest boundary of which a snapshot was begun, or with which the attempt started."""
        self._complete_step = self._tried_step = -1
        self._died_step: int | None = None
        self._failing, self._failed_alike = "", 0
        """What the newest failures in a row say, but for figures, and how many they are."""
        self._taken_steps: set[int] = set()
        """From the newest complete one on, without those that another rank has skipped before the last one."""

    @property
    def last_taken_step(self) -> int:
        """The newest boundary that was taken, and that no other rank is known to have skipped, but for the last one."""
        with self._lock:
            return max(self._taken_steps, default=self.saved_step)

    @property
    def unsaved_steps(self) -> int:
        """Boundaries since the newest one that is complete, or since the attempt's start; 0 before that."""
        with self._lock:
            return max(0, self._state.step - self._complete_step) if self._complete_step >= 0 else 0

    @property
    def died_with_daemon(self) -> bool:
        """Tell whether what was taken last is lost since some rank's daemon went away before it had written it."""
        return self._died_step == self.saved_step

    @property
    def is_saving(self) -> bool:
        """Tell whether a checkpoint is under way."""
        return bool(self._under_way) or self._snapshotter.copying

    @property
    def busy(self) -> bool:
        """Tell whether a checkpoint is under way, or memory for one."""
        return bool(self._under_way) or self._snapshotter.busy

    @property
    def progress(self) -> Progress:
        """How far this rank is."""
        with self._lock:
            under_way = [checkpoint.step for checkpoint in self._under_way]
            saved = max(self._complete_step, *under_way) if under_way else self._complete_step
        return Progress(
            step=self._state.number,
            saved=saved,
            tried=self._tried_step,
            under_way=bool(under_way),
            is_busy=bool(under_way) or self._snapshotter.busy,
        )

    # -- on the training thread

    def start(self) -> None:
        """Training begins with the state as it is, which need not be saved."""
        self.saved_step = self._complete_step = self._tried_step = self._state.number

    def take(self) -> bool:
        """Begin the checkpoint of this boundary, or count and say why not."""
        reason = self._begin()
        if reason is not None:
            self._skip(reason)
        return reason is None

    def passed(self, step: int) -> None:
        """Say of the boundaries before `step` that were due and never tried that they are skipped: an exception had the
        script leave them, and other ranks may have begun theirs.
        """
        for each in self._ranks.passed(step):
            if each > self._tried_step:
                self._tried_step = each
                self._skip(LEFT_BEFORE, each)

    def take_last(self, until_s: float) -> bool:
        """Begin the attempt's last one; wait for room until then. Tell whether it has begun."""
        self._state.is_last = True
        before_s = self._costs.eager_s
        try:
            return self._begin_last(until_s)
        except BaseException:
            self._state.is_last = False  # the script may go on
            raise
        finally:
            self._costs.beyond(self._costs.eager_s - before_s)

    def _begin_last(self, until_s: float) -> bool:
        eager_s, pause_s = self._costs.eager_s, _RETRY_S
        may_be_old = (
            True  # memory may have been refused that an earlier boundary had asked for: this one asks anew
        )
        while (reason := self._begin(until_s)) is not None:
            kind = skip_reason(reason)
            is_passing = kind in PASSING or (kind is SkipReason.ERROR and may_be_old)
            if self.alone or not is_passing or time.monotonic() > until_s:
                self._skip(reason)
                return False
            may_be_old = False
            self._costs.eager_s = eager_s  # what is tried in vain while it waits holds up no training
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S_MOST) if kind is SkipReason.ARENA else _RETRY_S
            self.keep_daemon()
        return True

    def force(self, wanted: frames.Force) -> None:
        """Ask all ranks for a checkpoint, and say from which boundary on it is one that was asked for; any thread.

        Where they are lost nobody hears that: say at once that there will be none.
        """
        first, lost = self._next_step, self._ranks.lost
        heard = frames.ForceHeard(number=wanted.number, attempt=self._parts.attempt, step=first)
        self._link.tell(heard)
        if lost is not None:
            self._tell_skipped(first, SkipReason.ERROR, str(lost))
        self._ranks.ask_for_checkpoint(Ask())

    @property
    def _next_step(self) -> int:
        """The first boundary that is not decided yet; one may be in the middle of it."""
        step = self._state.number
        return step + 1 if self._tried_step >= step else step

    def wait(self, deadline_s: float) -> bool:
        """Wait until memory asked for is there or refused, and all that was taken is complete or has failed.

        Returns False when time, the daemon or the other ranks ran out; which ranks do not answer is logged and noted.
        """
        until_s = time.monotonic() + deadline_s
        if not self._snapshotter.settle(deadline_s):
            return False
        while self._may_settle() and (left_s := until_s - time.monotonic()) > 0:
            with self._lock:
                self._settled.wait_for(lambda: not self._under_way, min(left_s, _LOSS_POLL_S))
        if self._under_way and self._ranks.silent:
            self._say_silent()
        return not self._under_way and self._ranks.lost is None

    def _may_settle(self) -> bool:
        """What this rank has written, or said to have failed, others may still complete without its daemon."""
        is_news = self._link.broken and self._lost is not self._link.client
        return bool(self._under_way) and not is_news and not self.alone

    def last_unsaved(self) -> str:
        """Return why the state as it is now is in no complete checkpoint, and count that as failed; empty: it is."""
        last = CheckpointId(self._parts.attempt, self._state.number)
        with self._lock:
            if self._complete_step >= last.step:
                return ""
            late = "not complete in time" if last in self._under_way else self._unsaved
        reason = self.alone or late
        said = {name for text in list(self._costs.failures) for name in _NAMES.findall(text)}
        if str(last) not in said and self._ranks.lost is None:
            self._costs.fail(f"{last}: {reason}")
        return reason

    @property
    def alone(self) -> str:
        """Why no checkpoint can become complete, as far as is known; empty: it can."""
        return self._others or self.fenced

    @property
    def _others(self) -> str:
        """Which other ranks do not take part any more, and why."""
        return str(self._ranks.lost or self._ranks.silent)

    def _say_silent(self) -> None:
        with self._lock:
            new = sorted(self._under_way.keys() - self._silent_told)
            self._silent_told.update(new)
        if new:
            text = f"{', '.join(map(str, new))} is not complete: {self._ranks.silent}"
            self._costs.fail(text)
            logger.error("ranks_silent run=%s reason=%s", self._parts.name, text)

    def keep_daemon(self) -> None:
        """Notice that the daemon is gone, and look for another one beside training."""
        client = self._link.client
        if client.broken is None:
            return
        if self._lost is not client:
            self._daemon_lost()
            self._lost = client  # last: who is interrupted in the middle has lost it still
        self._link.keep_up(lambda: None)

    def _daemon_lost(self) -> None:
        logger.warning(
            "daemon_lost run=%s: training goes on, checkpoints are skipped meanwhile", self._parts.name
        )
        self._snapshotter.daemon_lost()
        with self._lock:
            lost = [checkpoint for checkpoint, is_durable in self._under_way.items() if not is_durable]
        for checkpoint in lost:
            self._ranks.failed(checkpoint, DAEMON_LOST)

    def committed(self, checkpoint: CheckpointId) -> None:
        """This rank's part is durable, whatever becomes of the daemon; called on the link's reader thread."""
        with self._lock:
            if checkpoint in self._under_way:
                self._under_way[checkpoint] = True
        self._ranks.committed(checkpoint)

    def _skip(self, reason: str, step: int | None = None) -> None:
        """Count and say that the checkpoint of this boundary, or of another one, is not taken."""
        step, kind = self._state.number if step is None else step, skip_reason(reason)
        if kind in PASSING and self.alone:  # what others do not end stays in its slot, and is under way
            kind, reason = SkipReason.PEER if self._others else SkipReason.ERROR, self.alone
        self._unsaved = reason
        self._costs.skip(kind, reason)
        self._pace.skipped(step)
        self._tell_skipped(step, kind, reason)
        self._say_skipped(kind, f"step={step}", reason)
        if self._ranks.world_size > 1:
            self._ranks.failed(CheckpointId(self._parts.attempt, step), f"{SKIPPED}{reason}")

    def _say_skipped(self, kind: SkipReason, which: str, reason: str) -> None:
        """Log it: of each kind the first, the 10th, the 100th and so on. The report and the metrics count all.

        The first of every run waits for its memory, which is no news to anybody.
        """
        count = self._costs.skipped[kind].count
        if is_said(count):
            alike = f" (with {count - 1} more skipped so)" if count > 1 else ""
            level = logging.INFO if count == 1 and reason in (NO_ARENA, PINNING) else logging.WARNING
            text = "checkpoint_skipped run=%s %s reason=%s%s"
            logger.log(level, text, self._parts.name, which, reason, alike)

    def _begin(self, until_s: float = math.inf) -> str | None:
        """Begin the snapshot of this boundary, before that time; return the reason when that is not possible now."""
        checkpoint = CheckpointId(self._parts.attempt, self._state.number)
        self._tried_step = checkpoint.step
        try:
            with self._lock:
                self._under_way[checkpoint] = False
            reason = self._snapshotter.begin(
                SnapshotFacts(checkpoint=checkpoint, parent=self.parent, notes=self._notes()), until_s=until_s
            )
        except BaseException as error:
            self._settle(checkpoint)
            if self._ranks.world_size > 1:
                # The script may catch it and go on, and the others have begun theirs.
                self._ranks.failed(checkpoint, text_of(error))
            raise
        if reason is None:
            self.saved_step = self._state.number
            with self._lock:
                self._taken_steps.add(self.saved_step)
            self._pace.taken(checkpoint)
            return None
        self._settle(checkpoint)
        return reason

    def _settle(self, checkpoint: CheckpointId) -> None:
        with self._lock:
            self._under_way.pop(checkpoint, None)
            self._settled.notify_all()

    # -- what the ranks say (Listener)

    def saves_last_boundary(self) -> bool:
        """Tell whether the last boundary is saved, or time is only left for what is under way."""
        return self._parts.end.saves_last(self.progress)

    def end_heard(self, left_s: float) -> None:
        """Some rank is ended then, and with it all."""
        self._parts.end.others_end_in(left_s)

    def end_confirmed(self) -> None:
        """All ranks were told to end."""
        self._parts.end.confirmed()

    def ranks_lost(self, error: EverstepError) -> None:
        """What is under way may become complete on the devices, but no rank will hear of it: it counts as failed."""
        self._parts.end.ranks_lost()
        with self._lock:
            names = ", ".join(map(str, sorted(self._under_way)))
            self._under_way.clear()
            self._settled.notify_all()
        unknown = f"; what became of {names} is not known" if names else ""
        self._tell_skipped(self._next_step, SkipReason.ERROR, str(error))  # who has asked before waits for it
        self._costs.fail(f"{error}{unknown}")
        logger.error("ranks_lost run=%s reason=%s%s", self._parts.name, error, unknown)

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        """Every rank holds it, in memory or on the devices."""
        self._link.tell(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))

    def complete(self, checkpoint: CheckpointId) -> None:
        """Every rank has committed it."""
        if self._ranks.world_size > 1:
            self._link.tell(frames.Complete(attempt=checkpoint.attempt, step=checkpoint.step))
        self._costs.completed(checkpoint)
        self._take_back_failure(checkpoint)
        self._failing, self._failed_alike = "", 0
        with self._lock:
            self._complete_step = max(self._complete_step, checkpoint.step)
            self._taken_steps = {step for step in self._taken_steps if step >= self._complete_step}
        self._settle(checkpoint)

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        """It will never be complete; without all ranks in memory it is of no use at all."""
        if SKIPPED in reason and not self._is_mine(reason):
            self._tell_skipped(checkpoint.step, SkipReason.PEER, reason)
        self._link.tell(frames.GiveUp(attempt=checkpoint.attempt, step=checkpoint.step, in_memory=in_memory))
        self._pace.failed(checkpoint, skipped=SKIPPED in reason)
        if DAEMON_LOST in reason:
            self._died_step = max(checkpoint.step, self._died_step or 0)  # they may be heard in any order
        self._unsaved = reason
        if SKIPPED in reason:
            self._skipped_elsewhere(checkpoint, reason)
        else:
            self._costs.fail(f"{checkpoint}: {reason}")
            self._say_failed(checkpoint, reason)
        self._settle(checkpoint)

    def _take_back_failure(self, checkpoint: CheckpointId) -> None:
        """The daemon died with it, and the next one has written it all the same."""
        for said in [each for each in list(self._costs.failures) if each.startswith(f"{checkpoint}: ")]:
            self._costs.take_back(said)
            logger.warning(
                "checkpoint_outlived run=%s checkpoint=%s: it is complete, though it was said to have failed",
                self._parts.name,
                checkpoint,
            )

    def _say_failed(self, checkpoint: CheckpointId, reason: str) -> None:
        """Log it; of those that fail alike, one after the other, the first, the 10th, the 100th and so on."""
        kind = _FIGURES.sub("", reason)
        self._failed_alike = self._failed_alike + 1 if kind == self._failing else 1
        self._failing, count = kind, self._failed_alike
        if not is_said(count):
            return
        alike = f" (as the {count - 1} before it)" if count > 1 else ""
        logger.error(
            "checkpoint_failed run=%s checkpoint=%s reason=%s%s", self._parts.name, checkpoint, reason, alike
        )

    def _skipped_elsewhere(self, checkpoint: CheckpointId, reason: str) -> None:
        """A rank had no room or no arena for its part: counted here unless it was this rank, which knows already."""
        is_last = self._state.is_last and checkpoint.step == self._state.number
        if not is_last:  # which was to be saved: it is lost, whoever has skipped it
            with self._lock:
                self._taken_steps.discard(checkpoint.step)
        if not self._is_mine(reason):
            self._costs.skip(SkipReason.PEER, reason)
            self._say_skipped(SkipReason.PEER, f"checkpoint={checkpoint}", reason)

    def _is_mine(self, reason: str) -> bool:
        return reason.startswith(f"rank {self._ranks.rank}: ")

    def _tell_skipped(self, step: int, reason: SkipReason, text: str) -> None:
        """Let the daemon know at once: somebody may wait for this checkpoint."""
        said = frames.Skipped(
            attempt=self._parts.attempt, step=step, reason=reason, text=text[: frames.SHORT_TEXT_MAX]
        )
        self._link.tell(said)
