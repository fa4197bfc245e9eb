"""Replays a job's failures under a policy, from one checkpoint to the next, and says where its time went. Pure.

What is simplified: steps have no noise; a stretch that a failure ends counts whole steps only where it matters (the
restored one); the store survives the loss of a node.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .frequency_types import FailureKind
from .goodput_failures import Failure, FailureProcess, failures_of
from .goodput_policies import POLICIES, Policy
from .goodput_types import Costs, Job, Outcome, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """A checkpoint under way, or the one that a restart takes."""

    step: int
    work_s: float
    memory: object
    sealed_s: float = 0.0
    persist_s: float = 0.0
    begun_s: float = 0.0
    committed_s: float = 0.0


@dataclass(slots=True)
class _Spent:
    """What did not make progress, by why."""

    stall_s: float = 0.0
    waited_s: float = 0.0
    slower_s: float = 0.0
    lost_s: float = 0.0
    restart_s: float = 0.0
    checkpoints: int = 0
    skipped: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Replay:
    """One job under one policy."""

    job: Job
    policy: Policy
    failures: deque[Failure]
    now_s: float = 0.0
    step: int = 0
    work_s: float = 0.0
    spent: _Spent = field(default_factory=_Spent)
    in_flight: deque[_Snapshot] = field(default_factory=deque[_Snapshot])
    newest: _Snapshot = field(default_factory=lambda: _Snapshot(step=0, work_s=0.0, memory=None))
    """In the node's memory."""
    durable: _Snapshot = field(default_factory=lambda: _Snapshot(step=0, work_s=0.0, memory=None))
    heeded: int = 0
    """Of the checkpoints before the next failure that its announcement makes: these were taken, or are not needed."""

    def run(self) -> Outcome:
        """Train until the job's time is over."""
        while self.now_s < self.job.duration_s:
            if self._train(self.policy.steps_until_look(self.step, self._idle_in_s())):
                self._commit_until(self.now_s)
                if self.policy.is_due(self.step):
                    self._checkpoint()
        spent = self.spent
        return Outcome(
            wall_s=self.now_s,
            useful_s=self.work_s,
            stall_s=spent.stall_s,
            waited_s=spent.waited_s,
            slower_s=spent.slower_s,
            lost_s=spent.lost_s,
            restart_s=spent.restart_s,
            checkpoints=spent.checkpoints,
            skipped=spent.skipped,
            failures=spent.failures,
        )

    # -- training

    def _train(self, steps: int) -> bool:
        """Train so many steps, fewer where costs change or a machine's end is announced; False after a failure."""
        costs = self.job.costs_at(self.now_s)
        until_evaluation = self.job.steps_until_evaluation(self.step)
        if until_evaluation == 0:
            costs, steps = replace(costs, step_s=costs.step_s + self.job.evaluation_s), 1
        elif until_evaluation is not None:
            steps = min(steps, until_evaluation)
        until_s = min(self.job.next_change_s(self.now_s), self.job.duration_s)
        failure = self.failures[0] if self.failures else None
        heed_s = self._heed_s(failure)
        until_s = min(until_s, max(heed_s, self.now_s))
        idle_s = self._idle_in_s()
        # Whole steps: one that is under way when something happens is ended first.
        fitting = _steps_within(until_s - self.now_s, idle_s, costs)
        steps = min(steps, max(1, fitting))
        busy_s = min(idle_s, steps * costs.step_s * (1 + costs.slower))
        slower_s = busy_s * costs.slower / (1 + costs.slower)
        end_s = self.now_s + steps * costs.step_s + slower_s
        if failure is not None and failure.at_s < end_s:
            self._fail(failure, costs)
            return False
        self.now_s, self.step = end_s, self.step + steps
        self.work_s += steps * costs.step_s
        self.spent.slower_s += slower_s
        busy_steps = min(steps, -int(-busy_s // (costs.step_s * (1 + costs.slower))))
        self.policy.trained(
            Stretch(
                at_s=self.now_s, steps=steps, busy_steps=busy_steps, step_s=costs.step_s, slower_s=slower_s
            )
        )
        if failure is not None and heed_s <= self.now_s:
            self._commit_until(self.now_s)
            if self._is_needless(failure) or self._checkpoint():
                self.heeded += 1
            return bool(self.failures) and self.failures[0] is failure
        return True

    def _heed_s(self, failure: Failure | None) -> float:
        """Return when the next checkpoint before an announced failure begins; never where none is to."""
        before = self.policy.before_end_s
        if failure is None or not failure.notice_s or self.heeded >= len(before):
            return math.inf
        return failure.at_s - min(failure.notice_s, before[self.heeded])

    def _is_needless(self, failure: Failure) -> bool:
        """Tell whether the checkpoint that is to begin now may be left out: another one follows in time."""
        later = self.policy.before_end_s[self.heeded + 1 :]
        if not later:
            return False
        last_chance_has_come = self.now_s >= failure.at_s - later[0]
        return last_chance_has_come or bool(self.in_flight) or self.durable.step == self.step

    def _idle_in_s(self) -> float:
        return max(0.0, self.in_flight[-1].committed_s - self.now_s) if self.in_flight else 0.0

    # -- checkpoints

    def _checkpoint(self) -> bool:
        """Begin one; tell whether it could be begun."""
        costs = self.job.costs_at(self.now_s)
        begun_s = max(self.now_s, self._place_at_s())
        if begun_s > self.now_s and not self.policy.waits:
            self.spent.skipped += 1
            self.policy.skipped(self.step)
            return False
        waited_s = begun_s - self.now_s
        if self.failures and self.failures[0].at_s < begun_s + costs.stall_s:
            struck_s = max(self.failures[0].at_s, self.now_s)
            self.spent.waited_s += min(struck_s, begun_s) - self.now_s
            self.spent.stall_s += max(0.0, struck_s - begun_s)
            self.now_s = struck_s
            self._fail(self.failures[0], costs)
            return False
        self.now_s = begun_s + costs.stall_s
        self.spent.waited_s += waited_s
        self.spent.stall_s += costs.stall_s
        self.spent.checkpoints += 1
        sealed_s = begun_s + costs.copy_s
        writes_from_s = max(sealed_s, self.in_flight[-1].committed_s if self.in_flight else 0.0)
        self._commit_until(self.now_s)
        self.in_flight.append(
            _Snapshot(
                step=self.step,
                work_s=self.work_s,
                memory=self.policy.taken(self.step, waited_s + costs.stall_s),
                begun_s=begun_s,
                sealed_s=sealed_s,
                persist_s=costs.persist_s,
                committed_s=writes_from_s + costs.persist_s,
            )
        )
        return True

    def _place_at_s(self) -> float:
        """Return when the next one may begin: once the one before is copied, and a place is free."""
        if not self.in_flight:
            return 0.0
        places = self.policy.in_flight_max
        free_s = self.in_flight[-places].committed_s if len(self.in_flight) >= places else 0.0
        return max(self.in_flight[-1].sealed_s, free_s)

    def _commit_until(self, now_s: float) -> None:
        for snapshot in self.in_flight:
            if snapshot.sealed_s <= now_s:
                self.newest = snapshot
        while self.in_flight and self.in_flight[0].committed_s <= now_s:
            done = self.durable = self.in_flight.popleft()
            self.policy.persisted(done.persist_s, done.committed_s - done.begun_s)

    # -- failures

    def _fail(self, failure: Failure, costs: Costs) -> None:
        """Lose what was done since the checkpoint that is restored, and the step under way."""
        at_s = max(failure.at_s, self.now_s)
        self._commit_until(at_s)
        begun_s = at_s - self.now_s  # of the stretch that it interrupts
        slower_s = min(self._idle_in_s(), begun_s) * costs.slower / (1 + costs.slower)
        self.now_s = at_s
        kind = self._restart()
        in_memory = kind is FailureKind.TRAINER
        restored = self.newest if in_memory else self.durable
        self.spent.slower_s += slower_s
        self.spent.lost_s += self.work_s - restored.work_s + begun_s - slower_s
        self.step, self.work_s = restored.step, restored.work_s
        self.newest = restored
        self.in_flight = deque(each for each in self.in_flight if in_memory and each.step <= restored.step)
        self.heeded = 0
        self.policy.restored(self.step, restored.memory, kind)

    def _restart(self) -> FailureKind:
        """Restart after the next failure, and anew after each one that strikes meanwhile; return the worst of them."""
        kind, until_s = FailureKind.TRAINER, self.now_s
        while self.failures and self.failures[0].at_s <= until_s:
            failure = self.failures.popleft()
            struck_s = max(failure.at_s, self.now_s)
            if kind is FailureKind.TRAINER:  # until now: the daemon has written on
                self._commit_until(struck_s)
                self.in_flight = deque(each for each in self.in_flight if each.sealed_s <= struck_s)
                kind = failure.kind
            self.spent.restart_s += struck_s - self.now_s
            self.spent.failures += 1
            self.now_s = struck_s
            until_s = struck_s + (
                self.job.restart_memory_s if kind is FailureKind.TRAINER else self.job.restart_s
            )
        self.spent.restart_s += until_s - self.now_s
        self.now_s = until_s
        return kind


def _steps_within(wall_s: float, busy_s: float, costs: Costs) -> int:
    """Return how many steps begin within a time of which the first `busy_s` are busy."""
    slow_step_s = costs.step_s * (1 + costs.slower)
    if wall_s <= busy_s:
        return -int(-wall_s // slow_step_s)
    return -int(-(wall_s - busy_s + busy_s / (1 + costs.slower)) // costs.step_s)


def replay(job: Job, failures: Sequence[Failure], policy: Policy) -> Outcome:
    """Return where the time of the job went under this policy."""
    return _Replay(job, policy, deque(failures)).run()


def compare(
    job: Job, processes: Sequence[FailureProcess], *, runs: int = 1, seed: int = 1
) -> Mapping[str, Mapping[FailureProcess, Sequence[Outcome]]]:
    """Return the outcomes of every policy under the same failures, `runs` of each process."""
    return {
        name: {
            process: [
                replay(job, failures_of(process, job.mtbf_s, 2 * job.duration_s, seed + number), make(job))
                for number in range(runs)
            ]
            for process in processes
        }
        for name, make in POLICIES.items()
    }
