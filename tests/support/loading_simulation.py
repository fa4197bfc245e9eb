"""A discrete-event simulation of training with torch's DataLoader: what the what-if model is compared with.

Batch b belongs to worker b mod k, as torch deals them out, and may be begun once batch b - 2k has been handed to the
loop (prefetch_factor 2). A worker fetches and prepares one sample after the other; the trainer takes the batches in
order. Storage serves one transfer at a time, in the order of their coming, after a latency that overlaps; with a budget
it is at once with a transfer for which it has saved up. Processor time is shared evenly between all that are at work
when they are more than the cores, which may slow each other.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace

BATCH = 16
PREFETCH = 2
BATCHES = 145
WARMUP = 24
_EPS = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Costs of one sample in seconds, and the machine."""

    compute_s: float
    """Of the trainer, beside the processor: a device's work."""
    compute_cpu_s: float = 0.0
    """Of the trainer, on one core."""
    preparation_s: float
    """Of a worker, on one core; mean."""
    variation: float = 0.0
    """Standard deviation of the preparation over its mean."""
    latency_s: float = 0.0
    transfer_s: float
    """Of storage, for a sample that is not cached."""
    budget_s: float = 0.0
    """Of transfers, that storage saves up while nobody reads."""
    crowding: float = 1.0
    """How many times as long computing takes while all cores compute."""
    cached: float = 0.0
    workers: int = 2
    cores: float = 16.0


@dataclass(slots=True)
class Seen:
    """What the simulated run shows: seconds, per sample where not said otherwise."""

    sample_s: float
    busy_s: float
    """Of all workers, in fetch, preparation and waiting for a core, each."""
    fetch_s: float
    queued_s: float
    cpu_s: float


_Wait = tuple[str, float]
"""("cpu" | "storage" | "time", seconds) or ("batch", number): what a process waits for."""


class _Run:
    """Processes as generators that say what they wait for, and the machine that lets them go on."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self._random = random.Random(seed)
        self.now = 0.0
        self._timers: list[tuple[float, int, Generator[_Wait]]] = []
        self._order = itertools.count()
        self._working: dict[Generator[_Wait], float] = {}
        self._storage_free_s = 0.0
        self._waiting: dict[int, deque[Generator[_Wait]]] = {}
        self._happened: set[int] = set()
        self.handed_s: list[float] = []
        self.busy_s = self.fetch_s = 0.0
        self._core_s: dict[Generator[_Wait], float] = {}
        self.done = 0

    def simulate(self) -> Seen:
        workers = [self._worker(number) for number in range(self.job.workers)]
        for each in workers:
            self._go_on(each)
        self._go_on(self._trainer())
        while len(self.handed_s) < BATCHES:
            self._advance()
        count = BATCH * (BATCHES - 1 - WARMUP)
        samples = max(1, self.done)
        core_s = sum(self._core_s.get(each, 0.0) for each in workers)
        return Seen(
            sample_s=(self.handed_s[-1] - self.handed_s[WARMUP]) / count,
            busy_s=self.busy_s / samples,
            fetch_s=self.fetch_s / samples,
            queued_s=max(0.0, self.busy_s - self.fetch_s - core_s) / samples,
            cpu_s=core_s / samples + self.job.compute_cpu_s,
        )

    def _worker(self, number: int) -> Generator[_Wait]:
        job = self.job
        for batch in range(number, BATCHES + PREFETCH * job.workers, job.workers):
            if batch >= PREFETCH * job.workers:
                yield "batch", -1 - (batch - PREFETCH * job.workers)  # handed to the loop
            for _ in range(BATCH):
                begun_s = self.now
                if self._random.random() >= job.cached:
                    yield "storage", job.transfer_s
                    yield "time", job.latency_s
                    self.fetch_s += self.now - begun_s
                yield "cpu", self._preparation()
                self.busy_s += self.now - begun_s
                self.done += 1
            self._happen(batch)

    def _serial(self) -> Generator[_Wait]:
        job = self.job
        for _ in range(BATCH):
            if self._random.random() >= job.cached:
                yield "storage", job.transfer_s
                yield "time", job.latency_s
            yield "cpu", self._preparation()

    def _trainer(self) -> Generator[_Wait]:
        job = self.job
        for batch in range(BATCHES):
            if job.workers:
                yield "batch", batch
            else:
                yield from self._serial()
            self.handed_s.append(self.now)
            self._happen(-1 - batch)
            yield "cpu", BATCH * job.compute_cpu_s
            yield "time", BATCH * job.compute_s

    def _preparation(self) -> float:
        mean, variation = self.job.preparation_s, self.job.variation
        return self._random.gammavariate(variation**-2, mean * variation**2) if variation else mean

    def _happen(self, what: int) -> None:
        self._happened.add(what)
        for process in self._waiting.pop(what, ()):
            self._go_on(process)

    def _go_on(self, process: Generator[_Wait]) -> None:
        """Let a process go on until it has to wait."""
        for kind, amount in process:
            if kind == "batch":
                if int(amount) in self._happened:
                    continue
                self._waiting.setdefault(int(amount), deque()).append(process)
            elif amount <= 0.0:
                continue
            elif kind == "cpu":
                self._working[process] = amount
            else:
                if kind == "storage":
                    saved_until_s = max(self.now - self.job.budget_s, self._storage_free_s)
                    self._storage_free_s = saved_until_s + amount
                    at_s = max(self.now, self._storage_free_s)
                else:
                    at_s = self.now + amount
                heapq.heappush(self._timers, (at_s, next(self._order), process))
            return

    def _rate(self, working: int) -> float:
        """Return how fast each of so many computes."""
        busy = min(1.0, (working - 1) / max(1.0, self.job.cores - 1.0))
        return min(1.0, self.job.cores / working) / (1.0 + (self.job.crowding - 1.0) * busy)

    def _advance(self) -> None:
        """Go to the next moment at which something ends, and let what ended go on."""
        rate = self._rate(len(self._working)) if self._working else 1.0
        cpu_at_s = self.now + min(self._working.values()) / rate if self._working else float("inf")
        timer_at_s = self._timers[0][0] if self._timers else float("inf")
        at_s = min(cpu_at_s, timer_at_s)
        passed = (at_s - self.now) * rate
        ended = [process for process, left in self._working.items() if left - passed <= _EPS]
        on_core_s = (at_s - self.now) * min(1.0, self.job.cores / max(1, len(self._working)))
        self.now = at_s
        for process in self._working:
            self._working[process] -= passed
            self._core_s[process] = self._core_s.get(process, 0.0) + on_core_s
        for process in ended:
            del self._working[process]
        while self._timers and self._timers[0][0] <= at_s + _EPS:
            ended.append(heapq.heappop(self._timers)[2])
        for process in ended:
            self._go_on(process)


def simulate(job: Job, *, seed: int = 0) -> Seen:
    """Return what a run of a job would show."""
    return _Run(job, seed).simulate()


def synthetic_s(job: Job) -> float:
    """Return the seconds per sample of the trainer alone."""
    return simulate(replace(job, preparation_s=1e-9, variation=0.0, cached=1.0, workers=1)).sample_s
