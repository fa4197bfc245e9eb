"""Training and its checkpoints on a clock of its own: a test decides what they cost, and is told the truth."""

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.checkpoint.frequency_format import dump_memory, load_memory
from everstep.checkpoint.frequency_machine import FrequencyMachine, FrequencyMemory
from everstep.checkpoint.frequency_types import (
    CheckpointPersisted,
    CheckpointSkipped,
    CheckpointStalled,
    CheckpointTaken,
    Decision,
    Failed,
    FailureKind,
    Limits,
    StepEnded,
    StorageKnown,
)

GUARD_AT = 0.9
"""Share of a step after which its optimizer wants to change the state."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a step and a checkpoint really cost. Times in seconds."""

    step_s: float = 0.2
    noise: float = 0.0
    """Coefficient of variation of a step."""
    eager_s: float = 0.005
    copy_s: float = 0.1
    persist_s: float = 0.8
    drive_noise: float = 0.0
    """Coefficient of variation of a write."""
    commit_s: float = 0.0
    """For syncs, and for other ranks; the devices are free meanwhile."""
    slower: float = 0.02
    """What a step is slower by, of itself, beside which something is copied or written."""
    late_s: float = 0.0
    late_after: int = 0
    """Each checkpoint makes one step longer by so much, so many steps after it: memory that is given back, a commit."""
    once_s: float = 0.0
    once_count: int = 1
    """So many first checkpoints of a process stall so much longer: memory is touched, CUDA begins."""
    always_busy: bool = False
    """Something else runs beside each step."""
    pause_s: float = 0.0
    """Of an evaluation, each `pause_every` steps."""
    pause_every: int = 100


@dataclass(frozen=True)
class Change:
    """An interval that was changed."""

    step: int
    checkpoint: int
    """Checkpoints taken before."""
    before: int
    after: int


@dataclass(frozen=True)
class Durable:
    """What a restart finds."""

    step: int
    attempt: int
    memory: FrequencyMemory


@dataclass
class Training:
    """A run in simulation. `world` says what holds at each step."""

    world: Callable[[int], World]
    limits: Limits = field(default_factory=Limits)
    slots: int = 2
    seed: int = 1
    lookahead: int = 1
    """Boundaries that are decided ahead; 1: a run of one rank."""

    def __post_init__(self) -> None:
        self.machine = FrequencyMachine(self.limits)
        self._random = random.Random(self.seed)
        self.step, self.now_s = 0, 0.0
        self._guard_until_s: float | None = None
        self._eager_s = 0.0
        self._in_flight: deque[tuple[float, CheckpointPersisted, Durable]] = deque()
        self._durable: Durable | None = None
        self._attempt = 1
        self._taken_before = 0
        self._device_free_s = 0.0
        self._due: set[int] = set()
        self._horizon = 1
        self.taken: list[int] = []
        self.skipped: list[int] = []
        self.changes: list[Change] = []
        self.base_s: list[float] = [0.0]
        """Of each step, what it takes without checkpoints."""
        self.excess_s: list[float] = [0.0]
        """Of each step, what checkpoints really added."""
        self._know_storage()

    @property
    def decision(self) -> Decision:
        """What the controller thinks."""
        return self.machine.decision

    def run(self, steps: int) -> "Training":
        """Train so many steps."""
        for _ in range(steps):
            self._train()
        return self

    def run_checkpoints(self, count: int, steps_max: int = 200_000) -> "Training":
        """Train until so many more checkpoints are taken."""
        until, last = len(self.taken) + count, self.step + steps_max
        while len(self.taken) < until:
            assert self.step < last, f"only {len(self.taken)} checkpoints: {self.decision}"
            self._train()
        return self

    def restart(self, kind: FailureKind | None = FailureKind.TRAINER) -> None:
        """Die, and go on from the newest durable checkpoint, with the memory that lies in it as JSON."""
        found = self._durable
        assert found is not None, "nothing to go on from"
        self._attempt += 1
        self.step = found.step
        self.machine = FrequencyMachine(
            self.limits,
            step=self.step,
            memory=load_memory(json.loads(json.dumps(dump_memory(found.memory)))),
        )
        self._know_storage()
        if kind is not None:
            self.machine.observe(Failed(kind=kind, attempts=self._attempt - found.attempt))
        self.taken = [step for step in self.taken if step <= self.step]
        self._taken_before = len(self.taken)
        self._in_flight.clear()
        self._due.clear()
        self._horizon, self._guard_until_s = self.step + 1, None
        del self.base_s[self.step + 1 :], self.excess_s[self.step + 1 :]

    def share(self, since: int) -> float:
        """Return the true whole cost of all cycles since step `since`, as a share of the time without checkpoints."""
        cycles = [step for step in self.taken if step >= since]
        assert len(cycles) > 1, "no cycle since then"
        begin, end = cycles[0] + 1, cycles[-1] + 1
        return sum(self.excess_s[begin:end]) / sum(self.base_s[begin:end])

    def interval_since(self, since: int) -> float:
        """Return the mean distance of checkpoints since step `since`."""
        cycles = [step for step in self.taken if step >= since]
        return (cycles[-1] - cycles[0]) / (len(cycles) - 1)

    # -- one step

    def _know_storage(self) -> None:
        self.machine.observe(StorageKnown(slot_count=self.slots, node="node", capacity_bytes=0))

    def _train(self) -> None:
        self.step += 1
        world = self.world(self.step)
        is_busy = bool(self._in_flight) or world.always_busy
        base_s = world.step_s * self._noise(world.noise)
        pause_s = world.pause_s if world.pause_s and self.step % world.pause_every == 0 else 0.0
        is_late = self.step - world.late_after in self.taken[-8:]
        step_s = base_s * (1 + world.slower * is_busy) + world.late_s * is_late
        guard_s = 0.0
        if self._guard_until_s is not None:
            guard_s = max(0.0, self._guard_until_s - self.now_s - GUARD_AT * step_s)
            self.machine.observe(CheckpointStalled(stall_s=self._eager_s + guard_s))
            self._guard_until_s = None
        self.now_s += step_s + pause_s + guard_s
        self.base_s.append(base_s)
        self.excess_s.append(step_s - base_s + guard_s)
        self._persisted()
        self.machine.observe(StepEnded(at_s=self.now_s, step_s=step_s + pause_s, is_busy=is_busy))
        if self._is_due():
            self._checkpoint(world)

    def _noise(self, variation: float) -> float:
        """Return a factor with mean 1; a gamma distribution is never negative and skewed, as steps are."""
        if not variation:
            return 1.0
        shape = variation**-2
        return self._random.gammavariate(shape, 1 / shape)

    def _is_due(self) -> bool:
        before = self.machine.interval_steps
        if self.step >= self._horizon - self.lookahead // 2:
            begin = max(self._horizon, self.step)
            self._horizon = begin + self.lookahead
            self._due |= set(self.machine.due(begin, self._horizon))
        after = self.machine.interval_steps
        if before != after:
            self.changes.append(Change(self.step, len(self.taken), before, after))
        return self.step in self._due

    def _checkpoint(self, world: World) -> None:
        if len(self._in_flight) >= self.slots:
            self.skipped.append(self.step)
            self.machine.observe(CheckpointSkipped(step=self.step))
            return
        eager_s = world.eager_s
        if len(self.taken) - self._taken_before < world.once_count:
            eager_s += world.once_s
        self.taken.append(self.step)
        holds = Durable(self.step, self._attempt, self.machine.memory)
        self.machine.observe(CheckpointTaken(step=self.step))
        begun_s = self.now_s
        self.now_s += eager_s
        self._eager_s = eager_s
        self.excess_s[-1] += eager_s
        copied_s = self.now_s + world.copy_s
        self._guard_until_s = copied_s
        persist_s = world.persist_s * self._noise(world.drive_noise)
        self._device_free_s = max(copied_s, self._device_free_s) + persist_s
        committed_s = self._device_free_s + world.commit_s
        told = CheckpointPersisted(size_bytes=10**9, persist_s=persist_s, held_s=committed_s - begun_s)
        self._in_flight.append((committed_s, told, holds))

    def _persisted(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self.now_s:
            _, told, self._durable = self._in_flight.popleft()
            self.machine.observe(told)
