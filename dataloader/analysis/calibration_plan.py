"""From three measured runs, and a probe of the storage, to what a sample costs. Arithmetic only.

The costs are anchored: the model gives back exactly the speeds that were measured with everything cached and with
nothing cached. What bounded the warm run is read off the workers: idle workers mean that the trainer was slow to take
batches, workers that waited for a core mean that cores are short, and else preparation itself was slow.
"""

import math
from dataclasses import dataclass

from .stall_plan import WorkerTimes
from .what_if_plan import Costs, Limit

SAME = 1.02
"""Two runs whose times differ by less are equal: what repeated runs of one script differ by on a quiet machine."""
BUSY = 0.5
"""Workers that work for this share of the time are what bounds the speed: of those that wait for a slow trainer, who
has prefetched batches enough, most sleep."""
QUEUED = 0.1
"""Share of their work in which workers waited for a core, from which on cores are short."""
FILLED = 0.7
"""Cores are short by the job's own doing if it uses this share of them; else somebody else does."""
UNSATURATED = 1.1
"""Storage is not what bounds the cold run if workers that have it for themselves would be at most this much faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What storage does beside training: measured by reading files that were dropped from memory."""

    read_s: float
    """Of one reader, for the bytes of one sample."""
    bytes_per_s: float
    """Of many readers together."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        assert self.read_s >= 0.0
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

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        assert min(self.synthetic_s, self.warm_s, self.cold_s) > 0.0
        assert min(self.workers, self.cpu_s, self.sample_bytes) >= 0.0
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
    latency_s, bytes_per_s = _storage(seen, preparation_s, warm_s=warm_s, cold_s=cold_s)
    costs = Costs(
        compute_s=seen.synthetic_s,
        handover_s=handover_s,
        preparation_s=preparation_s,
        cpu_s=cpu_s,
        latency_s=latency_s,
        sample_bytes=seen.sample_bytes,
        storage_bytes_per_s=bytes_per_s,
    )
    return Calibrated(costs=costs, warm_limit=limit)


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
