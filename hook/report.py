"""What checkpointing cost this run, measured, and what went wrong: nothing is hidden from the training loop."""

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..checkpoint.frequency_types import BUDGET_DEFAULT, Decision, SlowerSteps, StepEnded
from ..core.durations import duration_text
from ..core.ids import CheckpointId
from ..dataloader import data_wait
from ..proto import frames
from ..proto.frames import SkipReason

STEPS_KEPT = 2000
"""Step times kept per kind: enough for a steady median, 16 KiB each."""

BOUNDARIES_KEPT, BOUNDARIES_NEEDED = 256, 64
"""The same of boundaries; from so many on they are spoken of: the first ones compile, and ask for memory."""
FAIR_SHARE = 0.5
"""Of the budget that boundaries without a checkpoint may take: more, and steps are too short for one after each."""

FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Due checkpoints that were not taken for reasons of one kind."""

    count: int
    example: str
    """What the newest one said, figures included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole cost so far. Times in seconds, sums over this process unless a name says otherwise."""

    world_size: int
    steps: int
    """Boundaries passed by this process."""
    checkpoints_sealed: int
    checkpoints_complete: int
    """Committed on every rank."""
    last_complete: str
    """`<attempt>.<step>` of the newest one, empty before the first."""
    skipped: Mapping[SkipReason, Skipped]
    """Due checkpoints that were not taken, by the kind of reason."""
    failures: tuple[str, ...]
    """The newest, in order; `failed_count` counts all."""
    notes: tuple[str, ...]
    """What happened to devices and to writes that were repeated, newest last."""
    boundary_s: float
    """What `run.step()` took but for its last accounts; `eager_s` and `wait_s` are its large parts."""
    eager_s: float
    """Within snapshots' begin: the state was walked, and what may change at once copied."""
    largest_eager_leaf: str
    eager_bytes: int
    """Of the newest snapshot."""
    guard_s: float
    """Optimizers waited for the copy to end."""
    wait_s: float
    """At boundaries: waiting for other ranks' decision; 0 of one rank."""
    copy_s: float
    """Beside training: the copy thread's work."""
    copied_on_device_first: int
    """Snapshots of which a part was copied on its CUDA device first, and from there to the host."""
    cuda_copies: str
    """Why copies from CUDA devices go the way they do; empty: at once to the host, for which there is time enough."""
    cuda_wait_s: float
    """CUDA devices waited for the copy before an optimizer's step, while the host went on; in no other part."""
    quiet_steps: int
    """Steps without anything beside them."""
    busy_steps: int
    """Steps beside which, at any time, an arena was allocated or a snapshot copied or written.

    Or in which a CUDA device's wait for that showed.
    """
    saving_steps: int
    """Of the busy steps, those beside a snapshot that was copied or written: what others cost is not known."""
    step_quiet_s: float
    """Median of the newest quiet steps; 0 while there was none, and nobody knows how much slower the busy ones are."""
    step_busy_s: float
    """Median of the newest busy steps; they may be other steps than the quiet ones, where steps change."""
    compared_steps: int
    """Busy steps with quiet ones soon before the next checkpoint, to compare them with."""
    slower_steps_s: float
    """What checkpoints cost beside training: what those took longer, for all `saving_steps`; 0 while there is none."""
    train_s: float
    """From the first boundary to the end of the last, and what optimizers have waited since."""
    decision: Decision
    """How often checkpoints are taken now, and why."""
    data_wait_s: float = 0.0
    """Of `train_s`: the loop waited for batches of everstep's loaders. No cost of checkpoints."""
    seal_s: float = 0.0
    """Beside training, after the copies: the copy thread described the snapshots and handed them to the daemon."""
    plain_s: float = 0.0
    """Of `boundary_s`: boundaries at which no checkpoint was due. No interval makes that less."""
    plain_boundary_s: float = 0.0
    """Median of the newest of those; 0 while there were few."""
    failed_count: int = 0
    """Checkpoints that failed, and what else went wrong."""
    ahead_s: float = 0.0
    """The host, ahead of its CUDA devices, waited at boundaries for copies while they had work: in steps, no cost."""

    def as_frame(self) -> frames.Costs:
        """Return what the daemon is told of it."""
        return frames.Costs(
            train_s=self.train_s,
            boundary_s=self.boundary_s,
            eager_s=self.eager_s,
            wait_s=self.wait_s,
            guard_s=self.guard_s,
            cuda_wait_s=self.cuda_wait_s,
            slower_s=self.slower_steps_s,
            skipped={reason: each.count for reason, each in self.skipped.items()},
            interval_steps=self.decision.interval_steps,
            reason=self.decision.reason[: frames.SHORT_TEXT_MAX],  # it may name what others said
            goal_missed=self.decision.goal_missed,
            steps=self.steps,
            data_s=self.data_wait_s,
            bound=self.decision.kind.value,
            budget=self.decision.budget,
            cost_share=self.decision.cost_share,
            cost_half_width=self.decision.cost_half_width,
            steps_undecided=self.decision.steps_undecided,
            paused_until_unix_s=self.decision.paused_until_unix_s,
            plain_s=self.plain_s,
            budget_asked_unix_s=self.decision.budget_asked_unix_s,
            pause_asked_unix_s=self.decision.pause_asked_unix_s,
        )

    def __str__(self) -> str:
        """Return all of it for people, some lines."""
        skipped = "; ".join(f"{each.count} x {each.example}" for each in self.skipped.values())
        lines = {
            "checkpoints": f"{self.checkpoints_complete} complete, the newest is {self.last_complete or 'none'}",
            "interval": self._interval(),
            "  at this rate": self._rate(),
            "goal missed": self.decision.goal_missed,
            "cost": self._cost(),
            "steps too short": self.steps_too_short,
            "  boundaries": self._boundaries(),
            "  guard": f"{duration_text(self.guard_s)} in optimizers",
            "  slower steps": self._slower_steps(),
            "copy thread": f"{duration_text(self.copy_s)}, sealing {duration_text(self.seal_s)}, beside training",
            "CUDA": self._cuda(),
            "skipped": skipped,
            "failed": self._failed(),
            "notes": "; ".join(self.notes),
        }
        return "\n".join(f"{name:<15} {text}" for name, text in lines.items() if text)

    def _interval(self) -> str:
        is_paused = self.decision.paused_until_unix_s > 0
        every = "no checkpoint" if is_paused else f"{self.decision.interval_steps} steps"
        return f"{every}, {self.decision.reason}"

    def _cost(self) -> str:
        if not self.train_s:
            return "not known: nothing was trained yet"
        if self._without_s <= 0:
            return f"all of {duration_text(self.train_s)} of training"
        text = f"{100 * self.slowdown:.2f} % on top of {duration_text(self._without_s)} of training"
        checkpoints, plain = 100 * self.checkpoint_share, 100 * self.plain_share
        return f"{text}: checkpoints {checkpoints:.2f} %, boundaries without one {plain:.2f} %"

    @property
    def steps_too_short(self) -> str:
        """What boundaries take of steps too short for one after each, and what to do; empty where they are not.

        The budget cannot be kept by any interval then: that decides about checkpoints alone.
        """
        step_s = self.step_quiet_s or self.step_busy_s
        allowed_s = FAIR_SHARE * (self.decision.budget or BUDGET_DEFAULT) * step_s
        if not step_s or self.plain_boundary_s <= allowed_s:
            return ""
        boundary, step = duration_text(self.plain_boundary_s), duration_text(step_s)
        share, steps = 100 * self.plain_boundary_s / step_s, math.ceil(self.plain_boundary_s / allowed_s)
        return (
            f"run.step() takes {boundary} without a checkpoint, {share:.3g} % of a step of {step}, whatever the "
            f"interval; call it once in {steps} such steps"
        )

    def _failed(self) -> str:
        kept = len(self.failures)
        of_all = f"{self.failed_count} in all, of the newest {kept}: " if self.failed_count > kept else ""
        return of_all + "; ".join(_grouped(self.failures))

    def _rate(self) -> str:
        """Return what the interval costs by what is known now, and how well that is known."""
        share, half_width = self.decision.cost_share, self.decision.cost_half_width
        if share is None:
            return ""
        text = f"checkpoints take {100 * share:.2f} % of training"
        if half_width is not None:
            low, high = max(share - half_width, self.decision.cost_least), share + half_width
            text = f"{text}, by 95 % confidence {100 * low:.2f} to {100 * high:.2f} %"
        if (left := self.decision.steps_undecided) > 0:
            text = f"{text}; whether slower steps keep the budget is known in about {left} steps"
        return text

    def _boundaries(self) -> str:
        others = f", other ranks {duration_text(self.wait_s)}" if self.world_size > 1 else ""
        return f"{duration_text(self.boundary_s)}, of it eager copies {duration_text(self.eager_s)}{others}"

    def _cuda(self) -> str:
        first, waited = self.copied_on_device_first, duration_text(self.cuda_wait_s)
        parts = [
            self.cuda_copies,
            f"{first} snapshots went over the device so far" if first else "",
            f"optimizers waited {waited} on devices" if self.cuda_wait_s else "",
            f"the host was ahead, and waited {duration_text(self.ahead_s)} at no cost"
            if self.ahead_s
            else "",
        ]
        return "; ".join(part for part in parts if part)

    def _slower_steps(self) -> str:
        if not self.quiet_steps and not self.busy_steps:
            return "not known: there was no whole step yet"
        if not self.quiet_steps or not self.busy_steps:
            return "not known: all steps were " + ("busy" if self.busy_steps else "quiet")
        if not self.compared_steps:
            return f"not known: none of {self.busy_steps} busy steps could be compared with quiet ones yet"
        # Below nothing is noise: work beside training speeds no step up.
        total = (
            duration_text(self.slower_steps_s)
            if self.slower_steps_s > 0
            else "none that stands out from the noise"
        )
        compared = f"{self.compared_steps} compared with quiet ones of their time"
        others = self.busy_steps - self.saving_steps
        memory = f"; not known of {others} beside the allocation of memory" if others else ""
        return f"{total} in {self.saving_steps} of {self.steps} steps, {compared}{memory}"

    @property
    def stall_s(self) -> float:
        """Seconds that the training loop, or its CUDA devices, stood still for checkpoints."""
        return self.boundary_s + self.guard_s + self.cuda_wait_s

    @property
    def stall_per_checkpoint_s(self) -> float:
        """Mean stall of one sealed checkpoint, without what boundaries take at which none is due."""
        return (self.stall_s - self.plain_s) / self.checkpoints_sealed if self.checkpoints_sealed else 0.0

    @property
    def slowdown(self) -> float:
        """The whole cost as a share of the time without it: `checkpoint_share` and `plain_share` together."""
        return self._share(self._cost_s)

    @property
    def checkpoint_share(self) -> float:
        """What checkpoints cost, as such a share: the interval keeps this within the budget."""
        return self._share(self._cost_s - self.plain_s)

    @property
    def plain_share(self) -> float:
        """What boundaries without a checkpoint cost, as such a share, whatever the interval."""
        return self._share(self.plain_s)

    @property
    def _cost_s(self) -> float:
        return self.stall_s + max(self.slower_steps_s, 0.0)

    def _share(self, part_s: float) -> float:
        if part_s <= 0:
            return 0.0
        return part_s / self._without_s if self._without_s > 0 else math.inf

    @property
    def _without_s(self) -> float:
        """What training has taken without all of the cost."""
        return self.train_s - self._cost_s


_FIGURES = re.compile(r"[0-9]+")


def _grouped(texts: Iterable[str]) -> list[str]:
    """Return one text for those that differ in figures only, the newest, with their count."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(_FIGURES.sub("", text), []).append(text)
    return [f"{len(alike)} x {alike[-1]}" if len(alike) > 1 else alike[0] for alike in kinds.values()]


@dataclass(slots=True)
class CostBook:
    """Collects what a Report shows. Written by the training thread and, for single counters, by the hook's threads."""

    world_size: int = 1
    """The snapshotter tells it."""
    steps: int = 0
    sealed: int = 0
    complete: int = 0
    newest_complete: CheckpointId | None = None
    skipped: dict[SkipReason, Skipped] = field(default_factory=dict[SkipReason, Skipped])
    failures: deque[str] = field(default_factory=lambda: deque[str](maxlen=FAILURES_KEPT))
    failed_count: int = 0
    notes: deque[str] = field(default_factory=lambda: deque[str](maxlen=FAILURES_KEPT))
    eager_s: float = 0.0
    eager_bytes: int = 0
    largest_eager_leaf: str = ""
    guard_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    seal_s: float = 0.0
    device_first: int = 0
    cuda_copies: str = ""
    cuda_wait_s: float = 0.0
    ahead_s: float = 0.0
    train_s: float = 0.0
    boundary_s: float = 0.0
    plain_s: float = 0.0
    _plain: deque[float] = field(default_factory=lambda: deque[float](maxlen=BOUNDARIES_KEPT))
    _quiet: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _busy: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _quiet_count: int = 0
    _busy_count: int = 0
    _saving_count: int = 0
    _arrived_s: float = 0.0
    _data_before_s: float = 0.0
    _left_s: float | None = None
    _cuda_owed_s: float = 0.0
    _ahead_now_s: float = 0.0
    _guarded_s: float = 0.0
    """Of `guard_s`, before the newest boundary."""
    _opened_busy: bool = False
    _opened_saving: bool = False

    def arrived(self, arrived_s: float, *, guard_s: float, cuda_wait_s: float = 0.0) -> StepEnded | None:
        """A boundary was reached: the step before it took from the last one until now, less what was waited.

        That is by the guard, and by CUDA devices as far as that became known now. A host that is ahead of its devices
        sees their wait in a later step: what this one has not taken is left to that. Until all is taken, steps are
        busy: only their sum is known. Returns the step; None at the first boundary, since nobody knows when its step
        began.
        """
        self._cuda_owed_s += cuda_wait_s
        self._arrived_s, self._ahead_now_s, self._guarded_s = arrived_s, 0.0, self.guard_s
        if self._left_s is None:
            self._left_s, self._data_before_s = arrived_s, data_wait.total_s()
            return None
        is_busy = self._opened_busy or self._cuda_owed_s > 0
        step_s = arrived_s - self._left_s - guard_s
        waited_s = min(self._cuda_owed_s, max(0.0, step_s))
        step_s, self._cuda_owed_s = step_s - waited_s, self._cuda_owed_s - waited_s
        (self._busy if is_busy else self._quiet).append(step_s)
        self._busy_count += is_busy
        self._saving_count += is_busy and (self._opened_saving or not self._opened_busy)
        self._quiet_count += not is_busy
        return StepEnded(at_s=arrived_s, step_s=step_s, is_busy=is_busy)

    def was_ahead(self, waited_s: float) -> None:
        """The host has waited at this boundary while its devices had work."""
        self.ahead_s += waited_s
        self._ahead_now_s += waited_s

    def left(self, left_s: float, *, opens_busy: bool, due: bool = False, only_memory: bool = False) -> float:
        """The boundary is passed; return what it took. `due`: it should have got a checkpoint.

        What the host waited while its devices had work is theirs: a part of the step that begins.

        `opens_busy`: as it is left, something runs beside training. Only boundaries begin such work, so a step that
        opens without any has none in it, and one that opens with some is busy however soon that ends. `only_memory`:
        that is an arena which is allocated or pinned, and no checkpoint.
        """
        assert self._left_s is not None
        left_s -= self._ahead_now_s
        took_s = left_s - self._arrived_s
        self.train_s += left_s - self._left_s
        self.boundary_s += took_s
        if not due:
            self.plain_s += took_s
            self._plain.append(took_s)
        self.steps += 1
        self._left_s, self._opened_busy = left_s, opens_busy
        self._opened_saving = opens_busy and not only_memory
        return took_s

    def beyond(self, eager_s: float) -> None:
        """The checkpoint after the last boundary has taken so long to begin."""
        self.train_s += eager_s
        self.boundary_s += eager_s

    def fail(self, text: str) -> None:
        """A checkpoint failed, or something else went wrong."""
        self.failures.append(text)
        self.failed_count += 1

    def take_back(self, text: str) -> None:
        """It did not fail after all."""
        self.failures.remove(text)
        self.failed_count -= 1

    def skip(self, reason: SkipReason, text: str) -> None:
        """A due checkpoint was not taken."""
        before = self.skipped.get(reason)
        self.skipped[reason] = Skipped(count=1 + (before.count if before is not None else 0), example=text)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Every rank has committed a checkpoint; several are under way at once, and any of them may end first."""
        self.complete += 1
        self.newest_complete = max(checkpoint, self.newest_complete or checkpoint)

    def report(self, decision: Decision, slower: SlowerSteps) -> Report:
        """Return the figures as they are now.

        `slower`: of those busy steps that could be compared. Medians of all busy and all quiet steps would compare
        steps of different times: of 20 ms before a change and of 5 ms after it.
        """
        return Report(
            world_size=self.world_size,
            steps=self.steps,
            checkpoints_sealed=self.sealed,
            checkpoints_complete=self.complete,
            last_complete=str(self.newest_complete or ""),
            skipped=dict(self.skipped),
            failures=tuple(self.failures),
            failed_count=self.failed_count,
            notes=tuple(self.notes),
            boundary_s=self.boundary_s,
            eager_s=self.eager_s,
            largest_eager_leaf=self.largest_eager_leaf,
            eager_bytes=self.eager_bytes,
            guard_s=self.guard_s,
            wait_s=self.wait_s,
            copy_s=self.copy_s,
            seal_s=self.seal_s,
            copied_on_device_first=self.device_first,
            cuda_copies=self.cuda_copies,
            cuda_wait_s=self.cuda_wait_s,
            quiet_steps=self._quiet_count,
            busy_steps=self._busy_count,
            saving_steps=self._saving_count,
            step_quiet_s=statistics.median(self._quiet) if self._quiet else 0.0,
            step_busy_s=statistics.median(self._busy) if self._busy else 0.0,
            compared_steps=slower.steps,
            slower_steps_s=slower.total_s / slower.steps * self._saving_count if slower.steps else 0.0,
            train_s=self.train_s + self.guard_s - self._guarded_s,
            decision=decision,
            plain_s=self.plain_s,
            ahead_s=self.ahead_s,
            plain_boundary_s=statistics.median(self._plain) if len(self._plain) >= BOUNDARIES_NEEDED else 0.0,
            data_wait_s=0.0 if self._left_s is None else data_wait.total_s() - self._data_before_s,
        )
