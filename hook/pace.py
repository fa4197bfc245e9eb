"""How often this rank's run takes checkpoints: tells the frequency controller what is measured, and asks it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from ..checkpoint.frequency_format import dump_memory, load_memory
from ..checkpoint.frequency_machine import FixedInterval, Frequency, FrequencyMachine, FrequencyMemory
from ..checkpoint.frequency_meter_machine import PAUSES_MAX
from ..checkpoint.frequency_plan import DEADLINE_ROOM, full_after_bytes
from ..checkpoint.frequency_types import (
    BoundKind,
    CheckpointPersisted,
    CheckpointSkipped,
    CheckpointStalled,
    CheckpointTaken,
    Decision,
    Failed,
    FailureKind,
    Figures,
    Limits,
    Observation,
    SlowerSteps,
    StepEnded,
    StorageKnown,
)
from ..core.errors import EverstepError
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import DeviceCondition
from .steering_machine import Steering

logger = logging.getLogger(__name__)

NEWEST_STEPS = 16
"""Enough that each fourth step may be a long one, as where gradients are accumulated, and is no pause."""


class Pace:
    """One rank's controller. Used by the training thread, but for `persisted`, `failed`, `skipped_elsewhere`, and what
    says that any thread may call it.
    """

    def __init__(self, *, every: int | None, limits: Limits) -> None:
        self._every, self._limits = every, limits
        self._memory: FrequencyMemory | None = None
        self._failed: Failed | None = None
        self._frequency: Frequency = self._make(0)
        self._from_threads: SimpleQueue[Observation] = SimpleQueue()
        self._other_devices: SimpleQueue[Sequence[frames.DeviceInfo]] = SimpleQueue()
        self._begun_s: dict[CheckpointId, float] = {}
        """When the copy of each snapshot that is not durable yet began."""
        self.step_s = 0.0
        """What the newest step took; 0 before the first."""
        self._newest_s = deque[float](maxlen=NEWEST_STEPS)
        self._held_s = self._eager_s = 0.0
        """Of the newest snapshot that became durable, from the begin of its copy on; the newest checkpoint's boundary.

        What the guard waits for lies in the copy.
        """
        self._stalled_s: float | None = None
        """What the newest checkpoint has cost by itself so far, until its copy has ended."""
        self._others_need_s: float | None = None
        self._slots = 2
        self._storage: StorageKnown | None = None
        self._steering, self._steering_lock = Steering(), threading.Lock()
        self._followed = self._steering
        """What the newest decision follows: asked for before it."""

    def _make(self, step: int) -> Frequency:
        if self._every is not None:
            return FixedInterval(self._every)
        return FrequencyMachine(self._limits, step=step, memory=self._memory)

    # -- what operators ask

    def steer(self, steering: Steering) -> None:
        """Take what was asked here or elsewhere, as far as it is newer; from any thread. On rank 0 it decides."""
        with self._steering_lock:
            self._steering = self._steering.with_newer(steering)

    @property
    def steering(self) -> Steering:
        """All that was asked so far."""
        return self._steering

    # -- before training

    def restored(
        self, remembered: object, died: FailureKind | None, *, attempts: int = 1, grown: float = 1.0
    ) -> None:
        """Go on with what an earlier attempt has learnt (`memory`; None: nothing).

        `died`: how the last attempt did, None where it ended by itself; `attempts`: that died since, it included.
        `grown`: so many times as many ranks as that had. What checkpoints cost others is no measure; how long ranks
        last is one.
        """
        self._failed = Failed(kind=died, attempts=attempts) if died is not None else None
        if remembered is None:
            return
        try:
            memory = load_memory(remembered)
            self._memory = memory if grown == 1 else FrequencyMemory(meter=memory.meter.of_ranks(grown))
        except EverstepError as error:
            logger.warning("frequency_unknown reason=%s: what checkpoints cost is measured anew", error)
        self._frequency = self._make(0)

    def has_slots(self, slots: int) -> None:
        """So many snapshots fit in memory at once."""
        self._slots = slots
        if self._storage is not None and self._storage.slot_count != slots:
            self._storage = replace(self._storage, slot_count=slots)
            self._frequency.observe(self._storage)

    def begin(self, step: int, *, devices: Sequence[frames.DeviceInfo]) -> None:
        """Begin to decide about the boundaries after `step`."""
        self._frequency = self._make(step)
        if self._failed is not None:
            self._frequency.observe(self._failed)
        if devices:
            # Ranks that write to the same devices name the same one, and go on to when it is gone.
            self._know(devices, node=min(device.device_id for device in devices))

    def _know(self, devices: Sequence[frames.DeviceInfo], *, node: str) -> None:
        self._storage = StorageKnown(
            slot_count=self._slots, node=node, capacity_bytes=_full_after_bytes(devices)
        )
        self._frequency.observe(self._storage)

    def devices_changed(self, devices: Sequence[frames.DeviceInfo]) -> None:
        """Take that the run's new bytes may go to these from now on; from any thread."""
        self._other_devices.put(devices)

    # -- at boundaries

    def arrived(self, step: StepEnded | None, *, guard_s: float, copying: bool) -> None:
        """A boundary was reached after `step`, in which the guard waited `guard_s`; does the copy still go on?"""
        while True:
            try:
                self._frequency.observe(self._from_threads.get_nowait())
            except Empty:
                break
        while self._storage is not None and not self._other_devices.empty():
            self._know(self._other_devices.get(), node=self._storage.node)
        if self._stalled_s is not None:
            self._stalled_s += guard_s
            if not copying:
                self._tell_stall()
        if step is not None:
            self.step_s = step.step_s
            self._newest_s.append(step.step_s)
            self._frequency.observe(step)

    def taken(self, checkpoint: CheckpointId) -> None:
        """The boundary got a checkpoint: its copy has begun."""
        self._tell_stall()  # of the one before, where this boundary waited for the end of its copy
        self._begun_s[checkpoint] = time.perf_counter()
        self._frequency.observe(CheckpointTaken(step=checkpoint.step))

    def _tell_stall(self) -> None:
        if self._stalled_s is not None:
            self._frequency.observe(CheckpointStalled(stall_s=self._stalled_s))
            self._stalled_s = None

    def skipped(self, step: int) -> None:
        """The boundary was due, but nothing could be begun."""
        self._frequency.observe(CheckpointSkipped(step=step))

    def left(self, stall_s: float, *, taken: bool) -> None:
        """The boundary is passed; it has taken `stall_s`."""
        if taken:
            self._stalled_s = self._eager_s = stall_s

    def due(self, start: int, horizon: int) -> tuple[int, ...]:
        """Return the boundaries among [start, horizon) that get a checkpoint; asked once for each, on rank 0."""
        steering = self._followed = self._steering
        if steering.budget is not None:
            self._frequency.limit(steering.budget)
        if steering.is_paused(time.time()):
            return ()
        return self._frequency.due(start, horizon)

    @property
    def decision(self) -> Decision:
        """How often, and why; meaningful on rank 0, which decides."""
        steering = self._followed
        decision = replace(
            self._frequency.decision,
            budget_asked_unix_s=steering.budget_asked_unix_s,
            pause_asked_unix_s=steering.pause_asked_unix_s,
        )
        if not steering.is_paused(time.time()):
            return decision
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(steering.paused_until_unix_s))
        return replace(
            decision,
            kind=BoundKind.PAUSED,
            reason=f"paused until {until} UTC, as asked",
            goal_missed="",
            cost_share=None,
            cost_half_width=None,
            steps_undecided=0,
            paused_until_unix_s=steering.paused_until_unix_s,
        )

    @property
    def slower_steps(self) -> SlowerSteps:
        """What the steps beside checkpoints of this rank took longer so far."""
        return self._frequency.slower_steps

    @property
    def memory(self) -> object:
        """What the next attempt should know, as a JSON value for the checkpoint."""
        return dump_memory(self._frequency.memory)

    @property
    def mean_step_s(self) -> float:
        """What a step takes on average, as the decision counts it: without pauses; 0 while nobody knows."""
        step = self._frequency.figures.step
        return step.mean if step is not None else 0.0

    @property
    def usual_step_s(self) -> float:
        """What the newest steps took at most, but for as many as may be pauses: evaluations, the end of an epoch.

        0 before the first one.
        """
        longest = sorted(self._newest_s, reverse=True)
        return longest[min(PAUSES_MAX, len(longest) - 1)] if longest else 0.0

    @property
    def needed_s(self) -> float | None:
        """How long a checkpoint takes from its boundary until all ranks have made it durable, with room.

        By the slowest rank, as far as this one has heard; None while nobody knows.
        """
        known = [each for each in (self.own_needed_s, self._others_need_s) if each is not None]
        return max(known, default=None)

    def others_need(self, needed_s: float | None) -> None:
        """Other ranks have said what the slowest of them needs; from any thread."""
        self._others_need_s = needed_s

    @property
    def own_needed_s(self) -> float | None:
        """The same of this rank alone: the newest one's of this process, else what earlier attempts have learnt."""
        if self._held_s:
            return DEADLINE_ROOM * (self._eager_s + self._held_s)
        known = self._frequency.figures
        if known.held is None:
            return None
        # Their stall is with the guard's wait, which nobody has kept apart: too much, until this process has measured.
        return DEADLINE_ROOM * (known.held.mean + (known.stall.mean if known.stall is not None else 0.0))

    # -- among ranks

    @property
    def figures(self) -> Figures:
        """What this rank has measured, for rank 0."""
        return self._frequency.figures

    def hear(self, figures: Sequence[Figures]) -> None:
        """Take the newest figures of the other ranks."""
        self._frequency.hear(figures)

    # -- other threads

    def persisted(self, event: frames.Persisted) -> None:
        """A snapshot of this rank is durable."""
        begun_s = self._begun_s.pop(CheckpointId(event.attempt, event.step), None)
        if begun_s is not None:
            self._held_s = time.perf_counter() - begun_s
            self._from_threads.put(
                CheckpointPersisted(
                    size_bytes=event.size_bytes,
                    persist_s=event.devices_s,
                    held_s=self._held_s,
                )
            )

    def failed(self, checkpoint: CheckpointId, *, skipped: bool) -> None:
        """A snapshot will never be complete: it failed, or another rank could not begin its part."""
        self._begun_s.pop(checkpoint, None)
        if skipped:
            self._from_threads.put(CheckpointSkipped(step=checkpoint.step))


def _full_after_bytes(devices: Sequence[frames.DeviceInfo]) -> int:
    """Return how much is written until the first device that gets any is full; 0 where nobody knows."""
    written = [each for each in devices if each.condition in (DeviceCondition.OK, DeviceCondition.SLOW)]
    return int(full_after_bytes((each.write_bytes_per_s, each.capacity_bytes) for each in written))
