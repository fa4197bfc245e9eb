"""How fast training would be with other data loading: a model of a step, in plain arithmetic.

DS-Analyzer predicts min(F, P, G) of fetch, preparation and compute. PyTorch's workers fetch and prepare one after the
other, and share cores with the trainer, so the model here has five limits, in samples per second:

    compute      1 / (compute + hand-over)               the trainer, its batches always ready
    workers      k / (preparation + fetch of a sample)   each worker fetches, then prepares; less where they meet
    cores        cores / (CPU of a sample, everywhere)
    storage      bandwidth / (bytes of a sample x share that is read from storage)
    network      bandwidth / (bytes of a sample x share that peers give)

Without workers everything happens one after the other, and the first two become one sum. What is cached costs what it
costs when files are in memory: that is part of preparation.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

ENOUGH = 0.99
"""Share of the speed without a stall at which the stall counts as removed: the last percent may need any amount."""


NEARLY = 0.95
"""Share of what the cores, or storage, allow from which on they count as what bounds the speed: the last percents take
ever more workers."""
FEW = 32
"""So many workers are counted one by one; of more the mean says enough."""
WORKERS_MAX = 1024
"""Nobody has more on a node: where that many are not enough, none are."""


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
    """Of a worker, once the bytes are in memory, while the other cores have nothing to do."""
    cpu_s: float
    """Processor time in all processes together."""
    trainer_cpu_s: float = 0.0
    """Of it, the trainer's."""
    latency_s: float
    """Of a worker, for each sample from storage, beyond its transfer."""
    sample_bytes: float
    """That storage delivers for a sample that is not cached."""
    storage_bytes_per_s: float
    """Infinite where nothing was read from storage."""
    alone_s: float | None = None
    """Of a worker, for each sample from storage that is well below its bandwidth, where that is less than a transfer
    at the bandwidth: cloud volumes and throttled drives have a budget, which they save up while nobody reads. None:
    the latency and the transfer."""
    crowding: float = 1.0
    """How many times as long preparation takes while all other cores compute: cores share caches, memory and, two by
    two, their units."""

    def __post_init__(self) -> None:
        """Refuse what cannot be a cost."""
        values = (
            self.compute_s,
            self.handover_s,
            self.preparation_s,
            self.cpu_s,
            self.trainer_cpu_s,
            self.latency_s,
            self.alone_s or 0.0,
            self.crowding - 1.0,
        )
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
    speed = found.pop(limit)
    if limit is Limit.WORKERS:  # that meet where something is full: it is what more of would help
        full = min(found, key=lambda each: found[each])
        limit = full if NEARLY * found[full] <= speed else limit
    return Prediction(samples_per_s=speed, limit=limit)


def limits(costs: Costs, setting: Setting) -> dict[Limit, float]:
    """Return each limit in samples per second, infinite where it does not apply."""
    from_peers, from_storage = _shares(setting)
    fetch_s = from_storage * sum(_read_s(costs, setting)) + from_peers * _peer_s(costs, setting)
    found: dict[Limit, float] = {}
    if setting.workers:
        found[Limit.COMPUTE] = _rate(1.0, costs.compute_s + costs.handover_s)
        found[Limit.WORKERS] = last(worker_rates(costs, setting))
    else:
        found[Limit.SERIAL] = _rate(1.0, costs.compute_s + costs.preparation_s + fetch_s)
    found[Limit.CORES] = _rate(setting.cores, costs.cpu_s)
    found[Limit.STORAGE] = _rate(_bandwidth(costs, setting), costs.sample_bytes * from_storage)
    if setting.peers is not None:
        found[Limit.NETWORK] = _rate(setting.peers.bytes_per_s, costs.sample_bytes * from_peers)
    return found


def worker_rates(costs: Costs, setting: Setting) -> Iterator[float]:
    """Yield what 1, 2, … workers reach together that fetch and prepare, up to the setting's, in samples per second.

    They meet at storage and on the cores, so that k workers are less than k times as fast as one, also where neither
    is full: mean value analysis of a closed queue (Reiser and Lavenberg 1980), one worker added at a time, who finds
    the others where they are on average without him. Storage serves one transfer at a time, each of the same length.
    Where all samples come from it, workers fall into step behind each other and do not wait; where some are cached,
    they come at random. Where storage has a budget nobody waits before it is used up.
    """
    from_peers, from_storage = _shares(setting)
    latency_s, transfer_s = _read_s(costs, setting)
    idle_s = from_storage * latency_s + from_peers * _peer_s(costs, setting)
    cpu_s = min(costs.preparation_s, max(0.0, costs.cpu_s - costs.trainer_cpu_s))
    rate = at_storage = transferring = computing = 0.0
    for count in range(1, setting.workers + 1):
        trainer = min(1.0, rate * costs.trainer_cpu_s)
        slower = _stretch(count - 1, computing, trainer, setting.cores)
        preparation_s = costs.preparation_s * crowded(
            costs.crowding, busy=(count - 1) * computing + trainer, cores=setting.cores
        )
        ahead = min(1.0, at_storage - transferring / 2.0)
        stay_s = transfer_s * (1.0 + (1.0 - from_storage) * ahead)
        cycle_s = preparation_s + cpu_s * (slower - 1.0) + idle_s + from_storage * stay_s
        rate = max(rate, _rate(count, cycle_s))
        yield rate
        if math.isfinite(rate):
            transferring = min(1.0, rate * from_storage * transfer_s)
            at_storage = rate * from_storage * stay_s
            computing = min(1.0, cpu_s * slower / cycle_s)


def last(rates: Iterable[float]) -> float:
    """Return the last of some numbers."""
    *_, rate = rates
    return rate


def crowded(crowding: float, *, busy: float, cores: float) -> float:
    """Return how many times as long computing takes while so many of the other cores compute."""
    return 1.0 + (crowding - 1.0) * min(1.0, busy / max(1.0, cores - 1.0))


def _stretch(others: int, computing: float, trainer: float, cores: float) -> float:
    """Return how much longer computing takes: the mean of max(1, who wants a core / cores).

    Each of the others wants one for the share `computing` of the time, the trainer for the share `trainer`.
    """
    if others + 2 <= cores:
        return 1.0
    if others > FEW:
        return max(1.0, (1.0 + others * computing + trainer) / cores)
    mean = 0.0
    for number in range(others + 1):
        chance = math.comb(others, number) * computing**number * (1.0 - computing) ** (others - number)
        without, with_it = max(1.0, (1.0 + number) / cores), max(1.0, (2.0 + number) / cores)
        mean += chance * ((1.0 - trainer) * without + trainer * with_it)
    return mean


def _shares(setting: Setting) -> tuple[float, float]:
    """Return what part of the samples comes from peers, and what part from storage."""
    rest = 1.0 - setting.cached
    from_peers = min(rest, setting.peers.count * setting.peers.cached) if setting.peers else 0.0
    return from_peers, max(0.0, rest - from_peers)


def _bandwidth(costs: Costs, setting: Setting) -> float:
    return costs.storage_bytes_per_s if setting.storage_bytes_per_s is None else setting.storage_bytes_per_s


def _read_s(costs: Costs, setting: Setting) -> tuple[float, float]:
    """Return a sample's latency, during which others are served, and its transfer, during which they wait."""
    transfer_s = costs.sample_bytes / _bandwidth(costs, setting)
    if costs.alone_s is None:
        return costs.latency_s, transfer_s
    return (costs.alone_s, 0.0) if costs.alone_s < transfer_s else (costs.alone_s - transfer_s, transfer_s)


def _peer_s(costs: Costs, setting: Setting) -> float:
    peers = setting.peers
    return peers.latency_s + costs.sample_bytes / peers.bytes_per_s if peers else 0.0


def _rate(amount: float, cost: float) -> float:
    return amount / cost if cost > 0.0 else math.inf


def attainable(costs: Costs, *, cores: float) -> float:
    """Return the speed without a stall, in samples per second: what trainer and cores allow, less the last percents."""
    trainer = _rate(1.0, costs.compute_s + costs.handover_s)
    return min(ENOUGH * trainer, NEARLY * _rate(cores, costs.cpu_s))


def workers_needed(costs: Costs, *, cores: float, cached: float = 1.0) -> int:
    """Return the fewest workers with which workers are not what bounds the speed, with this share in memory.

    Where the cores bound it first: the fewest that keep them busy.
    """
    goal = attainable(costs, cores=cores) * (1.0 - 1e-9)
    setting = Setting(cached=cached, workers=WORKERS_MAX, cores=cores)
    rates = enumerate(worker_rates(costs, setting), start=1)
    return next((count for count, rate in rates if rate >= goal), WORKERS_MAX)


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
    return replace(setting, cached=cached)
