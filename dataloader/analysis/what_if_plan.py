"""How fast training would be with other data loading: a model of a step, in plain arithmetic.

DS-Analyzer predicts min(F, P, G) of fetch, preparation and compute. PyTorch's workers fetch and prepare one after the
other, and share cores with the trainer, so the model here has five limits, in samples per second:

    compute      1 / (compute + hand-over)               the trainer, its batches always ready
    workers      k / (preparation + fetch of a sample)   each worker fetches, then prepares
    cores        cores / (CPU of a sample, everywhere)
    storage      bandwidth / (bytes of a sample x share that is read from storage)
    network      bandwidth / (bytes of a sample x share that peers give)

Without workers everything happens one after the other, and the first two become one sum. What is cached costs what it
costs when files are in memory: that is part of preparation.
"""

import math
from dataclasses import dataclass
from enum import Enum

ENOUGH = 0.99
"""Share of the speed without a stall at which the stall counts as removed: the last percent may need any amount."""


class Limit(Enum):
    """What bounds the speed."""

    COMPUTE = "compute"
    WORKERS = "workers"
    CORES = "cores"
    STORAGE = "storage"
    NETWORK = "network"
    SERIAL = "serial"
    """No workers: fetch, preparation and compute one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a sample costs, measured: seconds per sample, and what storage and network can do."""

    compute_s: float
    """Of the trainer, copy to the device included."""
    handover_s: float
    """Of the trainer, to take a batch that is ready: unpickling, pinning."""
    preparation_s: float
    """Of a worker, once the bytes are in memory."""
    cpu_s: float
    """Processor time in all processes together."""
    latency_s: float
    """Of a worker, for each sample from storage, beyond its transfer."""
    sample_bytes: float
    """That storage delivers for a sample that is not cached."""
    storage_bytes_per_s: float
    """Infinite where nothing was read from storage."""

    def __post_init__(self) -> None:
        """Refuse what cannot be a cost."""
        values = (self.compute_s, self.handover_s, self.preparation_s, self.cpu_s, self.latency_s)
        assert all(value >= 0.0 and math.isfinite(value) for value in values), values
        assert self.compute_s + self.preparation_s > 0.0
        assert self.sample_bytes >= 0.0
        assert self.storage_bytes_per_s > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Other nodes whose memory is asked before storage; each holds `cached` of the dataset, none what another does."""

    count: int
    cached: float
    bytes_per_s: float
    latency_s: float = 0.0005

    def __post_init__(self) -> None:
        """Refuse what is no set of peers."""
        assert self.count >= 0
        assert 0.0 <= self.cached <= 1.0
        assert self.bytes_per_s > 0.0
        assert self.latency_s >= 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to load data."""

    cached: float
    """Share of the dataset in this node's memory, 0 to 1."""
    workers: int
    cores: float
    storage_bytes_per_s: float | None = None
    """None: as measured."""
    peers: Peers | None = None

    def __post_init__(self) -> None:
        """Refuse what is no setting."""
        assert 0.0 <= self.cached <= 1.0, self.cached
        assert self.workers >= 0
        assert self.cores > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Samples per second, and what bounds them."""

    samples_per_s: float
    limit: Limit


def predict(costs: Costs, setting: Setting) -> Prediction:
    """Return the speed of training in a setting: the least of the limits."""
    found = limits(costs, setting)
    limit = min(found, key=lambda each: found[each])
    return Prediction(samples_per_s=found[limit], limit=limit)


def limits(costs: Costs, setting: Setting) -> dict[Limit, float]:
    """Return each limit in samples per second, infinite where it does not apply."""
    from_peers, from_storage = _shares(setting)
    fetch_s = from_storage * _storage_s(costs, setting) + from_peers * _peer_s(costs, setting)
    found: dict[Limit, float] = {}
    if setting.workers:
        found[Limit.COMPUTE] = _rate(1.0, costs.compute_s + costs.handover_s)
        found[Limit.WORKERS] = _rate(setting.workers, costs.preparation_s + fetch_s)
    else:
        found[Limit.SERIAL] = _rate(1.0, costs.compute_s + costs.preparation_s + fetch_s)
    found[Limit.CORES] = _rate(setting.cores, costs.cpu_s)
    found[Limit.STORAGE] = _rate(_bandwidth(costs, setting), costs.sample_bytes * from_storage)
    if setting.peers is not None:
        found[Limit.NETWORK] = _rate(setting.peers.bytes_per_s, costs.sample_bytes * from_peers)
    return found


def _shares(setting: Setting) -> tuple[float, float]:
    """Return what part of the samples comes from peers, and what part from storage."""
    rest = 1.0 - setting.cached
    from_peers = min(rest, setting.peers.count * setting.peers.cached) if setting.peers else 0.0
    return from_peers, max(0.0, rest - from_peers)


def _bandwidth(costs: Costs, setting: Setting) -> float:
    return costs.storage_bytes_per_s if setting.storage_bytes_per_s is None else setting.storage_bytes_per_s


def _storage_s(costs: Costs, setting: Setting) -> float:
    return costs.latency_s + costs.sample_bytes / _bandwidth(costs, setting)


def _peer_s(costs: Costs, setting: Setting) -> float:
    peers = setting.peers
    return peers.latency_s + costs.sample_bytes / peers.bytes_per_s if peers else 0.0


def _rate(amount: float, cost: float) -> float:
    return amount / cost if cost > 0.0 else math.inf


def attainable(costs: Costs, *, cores: float) -> float:
    """Return the speed without a stall, in samples per second: what trainer and cores allow, less the last percent."""
    return ENOUGH * min(_rate(1.0, costs.compute_s + costs.handover_s), _rate(cores, costs.cpu_s))


def workers_needed(costs: Costs, *, cores: float, cached: float = 1.0) -> int:
    """Return the fewest workers with which workers are not what bounds the speed, with this share in memory.

    Where the cores bound it first: the fewest that keep them busy.
    """
    fetch_s = costs.latency_s + costs.sample_bytes / costs.storage_bytes_per_s
    worker_s = costs.preparation_s + (1.0 - cached) * fetch_s
    return max(1, math.ceil(attainable(costs, cores=cores) * worker_s * (1.0 - 1e-9)))


def cache_for_storage(costs: Costs, *, cores: float) -> float:
    """Return the least share in memory with which the storage's bandwidth is enough, a whole percent, 0 to 1."""
    left = _rate(costs.storage_bytes_per_s, costs.sample_bytes * attainable(costs, cores=cores))
    return max(0.0, math.ceil(100.0 * (1.0 - left) - 1e-9) / 100.0)


def cache_needed(costs: Costs, setting: Setting) -> float:
    """Return the least share of the dataset in memory that removes the fetch stall, a whole percent, 0 to 1."""
    whole = predict(costs, _with_cache(setting, 1.0)).samples_per_s
    for percent in range(101):
        if predict(costs, _with_cache(setting, percent / 100)).samples_per_s >= ENOUGH * whole:
            return percent / 100
    raise AssertionError("everything cached is always enough")


def _with_cache(setting: Setting, cached: float) -> Setting:
    return Setting(
        cached=cached,
        workers=setting.workers,
        cores=setting.cores,
        storage_bytes_per_s=setting.storage_bytes_per_s,
        peers=setting.peers,
    )
