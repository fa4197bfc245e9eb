"""What a node knows of runs, slots, memory and queues, as metrics: read when somebody asks, not kept up to date.

A scrape comes in a thread of its own: it copies each table in one step before it walks it, and asks no device.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..access.certificate_format import expiry_unix_s
from ..devices.queue_counts import DirectionCounts
from ..node_memory import memory_bounds_now
from ..registry import RankRecord
from ..slot_machine import SlotState
from .views import RankState

if TYPE_CHECKING:
    from ..node import Node

_OfDirection = Callable[[DirectionCounts], float]

_COUNTERS: tuple[tuple[str, str, _OfDirection], ...] = (
    (
        "device_moved_bytes",
        "Bytes moved from and to a device: checkpoints, restores, scrubs",
        lambda counts: float(counts.moved_bytes),
    ),
    (
        "device_transfers_failed",
        "Transfers of a device that ended with an error",
        lambda counts: float(counts.failed_count),
    ),
    (
        "device_busy_seconds",
        "Time that pieces of transfers took; several move at once, so that it may grow by more than 1 a second",
        lambda counts: counts.busy_s,
    ),
    (
        "device_wait_seconds",
        "Time that transfers waited for their first turn",
        lambda counts: counts.waited_s,
    ),
)


class NodeCollector(Collector):
    """Everything that is looked up at a scrape."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now."""
        ranks = [rank for run in list(self._node.registry.runs.values()) for rank in list(run.ranks.values())]
        yield _gauge("runs", "Runs that this daemon knows of", float(len(self._node.registry.runs)))
        yield _by_label("ranks", "Ranks of the runs that this daemon knows of", "state", _count_ranks(ranks))
        yield from _checkpoint_families([rank for rank in ranks if rank.lease is not None])
        yield _by_label("slots", "Slots of all arenas for snapshots", "state", _count_slots(ranks))
        yield _gauge(
            "arenas_not_stored",
            "Arenas that end with the daemon, though its service manager keeps descriptors",
            float(self._count_not_stored(ranks)),
        )
        yield from self._memory()
        yield _gauge("connections", "Clients of the data socket", float(len(self._node.sessions)))
        yield from self._queues()
        yield from self._certificates()

    def _count_not_stored(self, ranks: Iterable[RankRecord]) -> int:
        if not self._node.fd_store.enabled:
            return 0
        arenas = (arena for rank in ranks for arena in list(rank.arenas.values()))
        return sum(arena.stored is None and not arena.is_ring for arena in arenas)

    def _memory(self) -> Iterator[Metric]:
        bounds = self._node.arenas.bounds
        available_bytes = min(bound.available_bytes for bound in memory_bounds_now())
        yield _gauge(
            "memory_available_bytes",
            "What the node, or the tightest of the daemon's cgroups, has left",
            float(available_bytes),
        )
        yield _gauge(
            "memory_reserve_bytes",
            "What memory.reserve_bytes leaves free: no arena is made that would take of it",
            float(bounds.reserve_bytes),
        )
        yield _gauge(
            "arena_limit_bytes",
            "What all arenas together may take (memory.arena_max_bytes)",
            float(bounds.arena_max_bytes),
        )

    def _certificates(self) -> Iterator[Metric]:
        """Return when the certificates end that callers are shown: by the files as they are now."""
        config = self._node.config
        files = {
            "cache": config.cache.certificate_file,
            "control": config.control.certificate_file,
            "metrics": config.metrics.certificate_file,
        }
        family = GaugeMetricFamily(
            "everstep_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate of a section of the configuration ends; 0 where it cannot be read",
            labels=("section",),
        )
        for section, file in files.items():
            if file:
                family.add_metric((section,), _expiry_unix_s(Path(file)))
        yield family

    def _queues(self) -> Iterator[Metric]:
        """Return the counts of each device: several stores never have the same one."""
        found = [
            (str(device.path), opened.queues[device.device_id].counts)
            for opened in list(self._node.stores.stores)
            for device in list(opened.store.devices)
            if device.device_id in opened.queues
        ]
        rows = [
            (path, name, counts)
            for path, both in found
            for name, counts in (("read", both.read), ("write", both.write))
        ]
        for name, text, of in _COUNTERS:
            counter = CounterMetricFamily(f"everstep_{name}", text, labels=("device", "operation"))
            for path, operation, counts in rows:
                counter.add_metric((path, operation), of(counts))
            yield counter
        queued = GaugeMetricFamily(
            "everstep_device_queued_bytes",
            "Bytes of transfers that have not ended, moving or waiting for their turn",
            labels=("device", "operation"),
        )
        for path, operation, counts in rows:
            queued.add_metric((path, operation), float(counts.queued_bytes))
        yield queued


def _checkpoint_families(attached: list[RankRecord]) -> Iterator[Metric]:
    """Return how attached ranks are served: of each number the worst, so that no rank need be a label."""
    now_s = time.monotonic()
    costs = [rank.costs for rank in attached if rank.costs is not None]
    unpaused = [
        rank for rank in attached if rank.costs is None or rank.costs.paused_until_unix_s <= time.time()
    ]
    yield _gauge(
        "checkpoint_age_seconds",
        "Longest time that an attached rank has been without a new committed shard, or attached if that is less; "
        "without those whose checkpoints somebody has paused",
        max((rank.commits.age_s(now_s) for rank in unpaused), default=0.0),
    )
    yield _gauge(
        "checkpoint_interval_seconds",
        "Longest time between the two newest commits of an attached rank; 0 where none has two",
        max((rank.commits.interval_s or 0.0 for rank in attached), default=0.0),
    )
    yield _gauge(
        "checkpoint_interval_steps",
        "Most steps from checkpoint to checkpoint of an attached rank, as its controller has decided last",
        float(max((each.interval_steps for each in costs), default=0)),
    )
    yield _gauge(
        "checkpoint_cost_ratio",
        "Largest share that checkpoints have added to an attached rank's training, since it attached",
        max((each.added_share for each in costs), default=0.0),
    )
    yield _gauge(
        "checkpoint_budgets_exceeded",
        "Attached ranks whose checkpoints have cost more than their own budget since they attached, "
        "or since somebody changed it",
        float(sum(rank.exceeds_budget for rank in attached)),
    )
    yield _gauge(
        "checkpoint_goals_missed",
        "Attached ranks that may lose more work than their trainer allows: the interval that would do costs too much",
        float(sum(bool(each.goal_missed) for each in costs)),
    )


def _expiry_unix_s(path: Path) -> float:
    try:
        return expiry_unix_s(path.read_bytes())
    except (OSError, ValueError):
        return 0.0


def _count_ranks(ranks: Iterable[RankRecord]) -> dict[str, int]:
    found = Counter(_state(rank).value for rank in ranks)
    return {state.value: found[state.value] for state in RankState}


def _state(rank: RankRecord) -> RankState:
    if rank.lease is not None:
        return RankState.ATTACHED
    return RankState.CLOSED if rank.kept_until_s is None else RankState.LINGERING


def _count_slots(ranks: Iterable[RankRecord]) -> dict[str, int]:
    found = Counter(
        slot.state.value
        for rank in ranks
        for arena in list(rank.arenas.values())
        for slot in list(arena.machine.slots)
    )
    return {state.value: found[state.value] for state in SlotState}


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"everstep_{name}", text, value=value)


def _by_label(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"everstep_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), float(count))
    return family
