"""From three measured runs, and a probe of the storage, to what a sample costs. Arithmetic only.

The costs are anchored: the model gives back exactly the speeds that were measured with everything cached and with
nothing cached. What bounded the warm run is read off the workers: idle workers mean that the trainer was slow to take
batches, workers that waited for a core mean that cores are short, and else preparation itself was slow.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .stall_plan import WorkerTimes
from .what_if_plan import Costs, Limit, Setting, predict

SAME = 1.02
"""Two runs whose times differ by less are equal: what repeated runs of one script differ by on a quiet machine."""
BUSY = 0.75
"""Workers that work for this share of the time are what bounds the speed: those that a slow trainer keeps waiting, who
has prefetched batches enough, sleep at least for the rest. Of two workers one would nearly be enough where each works
half of the time: taking a batch of 16 can cost the trainer 2 ms."""
QUEUED = 0.1
"""Share of their work in which workers waited for a core, from which on cores are short."""
FILLED = 0.7
"""Cores are short by the job's own doing if it uses this share of them; else somebody else does."""
EXACT = 1e-4
"""How far the model may be from the runs that it was made of."""
HALVES = 40
CROWDED = 0.25
"""How busy the other cores must have been in the warm run, to say what that costs."""
CROWDING_MAX = 2.0
"""Two cores that share all their units are each half as fast; what is more is noise."""
BUDGETED = 0.8
"""Storage has a budget if a read after a pause takes less than this share of what it takes at the full bandwidth."""
UNSATURATED = 1.1
"""Storage is not what bounds the cold run if workers that have it for themselves would be at most this much faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What storage does beside training: measured by reading files that were dropped from memory."""

    read_s: float
    """Of one reader, for the bytes of one sample."""
    bytes_per_s: float
    """Of many readers together."""
    paced_s: float | None = None
    """Of one reader that pauses after each read, for the bytes of one sample."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        assert min(self.read_s, self.paced_s or 0.0) >= 0.0
        assert self.bytes_per_s > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Three runs of one script: seconds per sample by the clock, and what was seen of the workers."""

    synthetic_s: float
    warm_s: float
    cold_s: float
    workers: int
    cores: float
    warm_work: WorkerTimes
    cpu_s: float
    """Processor time of all processes per sample, in the warm run."""
    sample_bytes: float
    """Read from storage per sample, in the cold run."""
    probe: Probe | None = None
    trainer_cpu_s: float = 0.0
    """The trainer's part of `cpu_s`."""
    lone_cpu_s: float | None = None
    """Processor time of a worker per sample, with one worker and an idle trainer."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        assert min(self.synthetic_s, self.warm_s, self.cold_s) > 0.0
        assert min(self.workers, self.cpu_s, self.trainer_cpu_s, self.sample_bytes) >= 0.0
        assert self.cores > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The costs, and what bounded the speed in the warm run."""

    costs: Costs
    warm_limit: Limit


def calibrate(seen: Observed) -> Calibrated:
    """Return the costs with which the model gives back the measured speeds."""
    warm_s = max(seen.warm_s, seen.synthetic_s)
    cold_s = max(seen.cold_s, warm_s)
    limit = _warm_limit(seen, warm_s)
    samples = max(1, seen.warm_work.samples)
    preparation_s = seen.warm_work.preparation_s / samples
    handover_s = 0.0
    if limit is Limit.SERIAL:
        preparation_s = warm_s - seen.synthetic_s
    elif limit is Limit.WORKERS:
        preparation_s = seen.workers * warm_s
    else:
        preparation_s = min(preparation_s, seen.workers * warm_s)
    if limit is Limit.COMPUTE:
        handover_s = warm_s - seen.synthetic_s
    cpu_s = seen.cores * warm_s if limit is Limit.CORES else min(seen.cpu_s, seen.cores * warm_s)
    costs = Costs(
        compute_s=seen.synthetic_s,
        handover_s=handover_s,
        preparation_s=preparation_s,
        cpu_s=cpu_s,
        trainer_cpu_s=min(seen.trainer_cpu_s, cpu_s),
        latency_s=0.0,
        sample_bytes=seen.sample_bytes,
        storage_bytes_per_s=math.inf,
        crowding=_crowding(seen, warm_s),
    )
    if seen.workers:
        costs = _with_preparation(costs, seen, warm_s)
    costs = _with_storage(costs, seen, warm_s=warm_s, cold_s=cold_s)
    return Calibrated(costs=_with_fetch(costs, seen, cold_s) if seen.workers else costs, warm_limit=limit)


def _with_preparation(costs: Costs, seen: Observed, warm_s: float) -> Costs:
    """Return the costs with no more preparation than gives back the warm run: workers slow each other on the cores."""
    setting = Setting(cached=1.0, workers=seen.workers, cores=seen.cores)

    def changed(preparation_s: float) -> Costs:
        return replace(costs, preparation_s=preparation_s)

    if _is_given_back(costs, setting, warm_s):
        return costs
    return changed(
        _largest(lambda each: _seconds(changed(each), setting) <= (1.0 + EXACT) * warm_s, costs.preparation_s)
    )


def _with_fetch(costs: Costs, seen: Observed, cold_s: float) -> Costs:
    """Return the costs with as much latency, or as little transfer time, as gives back the cold run."""
    setting = Setting(cached=0.0, workers=seen.workers, cores=seen.cores)
    transfer_s = costs.sample_bytes / costs.storage_bytes_per_s

    def changed(fetch_s: float) -> Costs:
        if costs.alone_s is not None:
            return replace(costs, alone_s=fetch_s)
        if fetch_s >= transfer_s:
            return replace(costs, latency_s=fetch_s - transfer_s)
        return replace(costs, latency_s=0.0, storage_bytes_per_s=_rate(costs.sample_bytes, fetch_s))

    if _is_given_back(costs, setting, cold_s):
        return costs
    most_s = seen.workers * cold_s + transfer_s
    return changed(_largest(lambda each: _seconds(changed(each), setting) <= (1.0 + EXACT) * cold_s, most_s))


def _is_given_back(costs: Costs, setting: Setting, sample_s: float) -> bool:
    return abs(_seconds(costs, setting) - sample_s) <= EXACT * sample_s


def _seconds(costs: Costs, setting: Setting) -> float:
    return 1.0 / predict(costs, setting).samples_per_s


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """Return the largest number up to `most` for which something holds that holds for all smaller ones; by halves."""
    low, high = 0.0, most
    for _ in range(HALVES):
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _warm_limit(seen: Observed, warm_s: float) -> Limit:
    if not seen.workers:
        return Limit.SERIAL
    if warm_s <= SAME * seen.synthetic_s or not seen.warm_work.samples:
        return Limit.COMPUTE
    work = seen.warm_work
    if work.busy_s < BUSY * seen.workers * warm_s * work.samples:
        return Limit.COMPUTE
    is_short = work.queued_s > QUEUED * work.busy_s and fills_cores(seen)
    return Limit.CORES if is_short else Limit.WORKERS


def fills_cores(seen: Observed) -> bool:
    """Return whether the job itself kept most of the cores busy in the warm run."""
    return seen.cpu_s >= FILLED * seen.cores * seen.warm_s


def _crowding(seen: Observed, warm_s: float) -> float:
    """Return how many times as long preparation takes while all other cores compute: 1 where nothing tells."""
    lone_s = seen.lone_cpu_s
    if not (lone_s and seen.workers and seen.cores > 1.0):
        return 1.0
    cpu_s = seen.cpu_s - seen.trainer_cpu_s
    others = (1.0 - 1.0 / seen.workers) * cpu_s / warm_s + seen.trainer_cpu_s / warm_s
    busy = min(1.0, others / (seen.cores - 1.0))
    if busy < CROWDED or cpu_s <= lone_s:
        return 1.0
    return min(CROWDING_MAX, 1.0 + (cpu_s / lone_s - 1.0) / busy)


def _with_storage(costs: Costs, seen: Observed, *, warm_s: float, cold_s: float) -> Costs:
    """Return the costs with what storage takes."""
    probe, size = seen.probe, seen.sample_bytes
    if probe and size and probe.paced_s is not None and probe.paced_s < BUDGETED * size / probe.bytes_per_s:
        return _with_budget(costs, seen, probe.paced_s, cold_s=cold_s)
    latency_s, bytes_per_s = _storage(seen, costs.preparation_s, warm_s=warm_s, cold_s=cold_s)
    return replace(costs, latency_s=latency_s, storage_bytes_per_s=bytes_per_s)


def _with_budget(costs: Costs, seen: Observed, alone_s: float, *, cold_s: float) -> Costs:
    """Return the costs of storage that is faster than its bandwidth as long as it is little used."""
    unbound = replace(costs, alone_s=alone_s)  # by the bandwidth, which is infinite still
    setting = Setting(cached=0.0, workers=seen.workers, cores=seen.cores)
    is_full = UNSATURATED * _seconds(unbound, setting) < cold_s
    if is_full or seen.probe is None:
        return replace(unbound, storage_bytes_per_s=seen.sample_bytes / cold_s)
    bytes_per_s = max(seen.probe.bytes_per_s, seen.sample_bytes / cold_s)
    if not seen.workers:
        alone_s = max(0.0, cold_s - _seconds(replace(costs, alone_s=0.0), setting))
    return replace(costs, alone_s=alone_s, storage_bytes_per_s=bytes_per_s)


def _storage(seen: Observed, preparation_s: float, *, warm_s: float, cold_s: float) -> tuple[float, float]:
    """Return the latency of a sample and the bandwidth, in seconds and bytes per second."""
    size, probe = seen.sample_bytes, seen.probe
    # What a worker can have spent on fetching a sample, if it did nothing but fetch and prepare.
    fetch_s = cold_s - warm_s if not seen.workers else max(0.0, seen.workers * cold_s - preparation_s)
    if not size:
        return (0.0 if cold_s <= SAME * warm_s else fetch_s), math.inf
    # The runs say that storage is at least this fast.
    at_least = max(_rate(size, fetch_s), size / cold_s if seen.workers else 0.0)
    told = max(at_least, probe.bytes_per_s if probe else 0.0)
    alone_s = probe.read_s if probe else 0.0
    if cold_s <= SAME * warm_s:  # nothing to see in the runs: only the probe knows
        return max(0.0, min(alone_s, fetch_s) - size / told), told
    if seen.workers > 1 and UNSATURATED * (preparation_s + alone_s) < seen.workers * cold_s:
        return max(0.0, alone_s - size / at_least), at_least
    return max(0.0, fetch_s - size / told), told


def _rate(size: float, seconds: float) -> float:
    return size / seconds if seconds > 0.0 else math.inf
