"""Prometheus metrics of a daemon: node totals, and what each of its few devices does; no run or step as a label.

Nothing starts on import.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from ...checkpoint.device import Device
from ...checkpoint.device_set import DeviceSet, DeviceState
from ...checkpoint.recovery import RecoveryReport
from ...checkpoint.shard_write import DeviceWrite
from ...core.errors import ERROR_CODES
from ...proto import frames
from ..cache.metrics import CacheMetrics
from ..devices.stores import OpenStore
from ..nodes.metrics import PeerMetrics
from ..shared.metrics import ShareMetrics
from ..slot_machine import Drop
from .memory_metrics import MemoryMetrics
from .node_collector import NodeCollector
from .restore_metrics import RestoreMetrics
from .socket_metrics import SocketMetrics

if TYPE_CHECKING:
    from ..node import Node

_Metric = TypeVar("_Metric", Gauge, Histogram)

_PERSIST_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_WRITE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SYNC_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

_RECOVERY: tuple[tuple[str, str, Callable[[RecoveryReport], float]], ...] = (
    ("shards", "Shards found at opening", lambda report: report.shard_count),
    ("shards_damaged", "Shards found at opening that are not offered", lambda report: report.damaged_count),
    ("files_quarantined", "Files moved to quarantine at opening", lambda report: report.quarantined_count),
    ("copies_mended", "Manifest, attempt and floor copies made again", lambda report: report.copy_count),
    ("orphans_removed", "Generations removed that no manifest refers to", lambda report: report.orphan_count),
    ("duration_seconds", "Time that recovery took", lambda report: report.duration_s),
)


HEALTH_CHECK_RESULTS = ("well", "refused")
_COST_PARTS = ("eager", "ranks", "boundary", "guard", "cuda")
"""What is measured as it happens, and only grows; what steps took longer is an estimate."""


def _free_bytes(opened: OpenStore, device: Device) -> float:
    space = opened.space.reading(device.device_id).space
    return math.nan if space is None else float(space.free_bytes)


def _size_bytes(opened: OpenStore, device: Device) -> float:
    space = opened.space.reading(device.device_id).space
    return math.nan if space is None else float(space.total_bytes)


def _is_full(opened: OpenStore, device: Device) -> float:
    space = opened.space.reading(device.device_id).space
    return float(space is not None and bool(opened.store.space.shortage(device, space.free_bytes)))


_PER_DEVICE: tuple[tuple[str, str, Callable[[OpenStore, Device], float]], ...] = (
    (
        "write_bytes_per_second",
        "Speed of a device's own writes, averaged over the last seconds of them; 0 before the first large one",
        lambda opened, device: opened.store.speeds.reading(device.device_id).bytes_per_s or 0.0,
    ),
    (
        "pool_bytes",
        "Bytes of deleted checkpoints that wait to be written over, or to be given back when room is needed",
        lambda opened, device: float(opened.store.pool.size_bytes(device.device_id)),
    ),
    (
        "free_bytes",
        "Bytes that may still be written to a device's file system, as it said last; NaN where it cannot be asked",
        _free_bytes,
    ),
    (
        "size_bytes",
        "Bytes of a device's file system; NaN where it cannot be asked",
        _size_bytes,
    ),
    (
        "space_age_seconds",
        "Since a device was asked for its free bytes; it grows while the device does not answer",
        lambda opened, device: opened.space.reading(device.device_id).age_s,
    ),
    (
        "full",
        "1 for a device that gets nothing more, as it has only the 16 MiB that stay free, 0 for the others",
        _is_full,
    ),
)


class PersistMetrics:
    """What becomes of snapshots and checkpoints."""

    def __init__(self, make: "Maker") -> None:
        self.sealed_total = make.counter("snapshots_sealed", "Snapshots that trainers sealed")
        self.abandoned_total = make.counter(
            "snapshots_abandoned", "Snapshots dropped before they were sealed", "reason"
        )
        for drop in Drop:
            self.abandoned_total.labels(drop.value)
        self.persisted_total = make.counter("shards_persisted", "Shards committed to the devices")
        self.failed_total = make.counter("shards_failed", "Shards that could not be committed", "reason")
        self.retried_total = make.counter(
            "shard_writes_retried",
            "Generations abandoned because a device failed or was full, and written again to the rest",
            "reason",
        )
        for code in ERROR_CODES:
            self.failed_total.labels(code)
            self.retried_total.labels(code)
        self.rewritten_total = make.counter(
            "shards_rewritten", "Committed shards written again because one of their devices was lost"
        )
        self.rewrite_failed_total = make.counter(
            "shards_rewrite_failed", "Committed shards that lost a device and could not be written again"
        )
        self.written_bytes = make.counter("written_bytes", "Bytes of segments committed")
        self.recycled_bytes = make.counter(
            "recycled_bytes", "Bytes of segments that were written over files of deleted checkpoints"
        )
        self.deleted_total = make.counter(
            "checkpoints_deleted", "Checkpoints removed by retention or by hand"
        )
        self.persisting = make.gauge("shards_persisting", "Shards being written now")
        self.last_commit_s = make.gauge(
            "last_commit_timestamp_seconds", "Unix time of the newest commit; 0 before the first"
        )
        self.backlog_bytes = make.gauge(
            "persist_backlog_bytes",
            "Memory of the slots whose snapshots are being written: lost with the node",
        )
        self.backlog_bytes.set_function(self._backlog_bytes)
        self.oldest_s = make.gauge(
            "persist_oldest_pending_seconds",
            "Since the snapshot that is being written for longest was begun; 0 without one",
        )
        self.oldest_s.set_function(self._oldest_s)
        self._pending: dict[tuple[int, int], tuple[float, int]] = {}
        self.persist_s = make.histogram(
            "persist_duration_seconds",
            "From sealed to committed, every fsync and manifest included",
            _PERSIST_BUCKETS_S,
        )

    def begin(self, arena: int, slot: int, now_s: float, size_bytes: int) -> None:
        """A slot's snapshot is being written from now on; `now_s` of the monotonic clock."""
        self._pending[arena, slot] = (now_s, size_bytes)
        self.persisting.inc()

    def end(self, arena: int, slot: int) -> None:
        """Its writing has ended, however."""
        self._pending.pop((arena, slot), None)
        self.persisting.dec()

    @property
    def arenas(self) -> set[int]:
        """Of the snapshots that are being written now. On any thread."""
        return {arena for arena, _ in list(self._pending)}

    def _backlog_bytes(self) -> float:
        return float(sum(size_bytes for _, size_bytes in list(self._pending.values())))

    def _oldest_s(self) -> float:
        began_s = min((began_s for began_s, _ in list(self._pending.values())), default=None)
        return 0.0 if began_s is None else time.monotonic() - began_s


class ReadingMetrics:
    """What is read in the background."""

    def __init__(self, make: "Maker") -> None:
        self.verified_total = make.counter(
            "checkpoints_verified",
            "Checkpoints read in the background: the newest of each run, and what a scrub found damaged",
            "result",
        )
        for result in ("intact", "damaged"):
            self.verified_total.labels(result)
        self.scrubbed_bytes = make.counter("scrubbed_bytes", "Bytes read by scrubs")
        self.damaged_total = make.counter(
            "scrub_damaged_segments",
            "Segments that reading in the background found not to be what was committed",
        )
        self.last_s = make.gauge(
            "scrub_last_completed_timestamp_seconds",
            "Unix time at which the newest scrub had read all, also before a restart; 0 before the first",
        )
        self.late_s = make.gauge(
            "scrub_late_seconds",
            "How much later than promised the scrub that goes on ends, at its share of the devices' speed; 0 in time",
        )


class CostMetrics:
    """What checkpoints cost training, as trainers say."""

    def __init__(self, make: "Maker") -> None:
        self._train_s = make.counter("training_seconds", "Training of all ranks, checkpoints included")
        self._cost_s = make.counter(
            "checkpoint_cost_seconds",
            "Training of all ranks that stood still in run.step() or before an optimizer's step",
            "part",
        )
        for part in _COST_PARTS:
            self._cost_s.labels(part)
        self._plain_s = make.counter(
            "plain_boundary_seconds",
            "Of parts boundary and ranks, boundaries at which no checkpoint was due: no checkpoint's cost",
        )
        self._slower_s = make.gauge(
            "checkpoint_slower_steps_seconds",
            "What steps beside copies and writes took longer than others, as estimated now; all ranks since the start",
        )
        self._skipped_total = make.counter(
            "checkpoints_skipped", "Due checkpoints that a rank did not take", "reason"
        )
        for reason in frames.SkipReason:
            self._skipped_total.labels(reason.value)

    def add(self, before: frames.Costs | None, now: frames.Costs) -> None:
        """Add what a rank's checkpoints have cost since it told it last.

        What slower steps cost is estimated anew each time, so it may become less, too.
        """
        self._train_s.inc(max(0.0, now.train_s - (before.train_s if before else 0.0)))
        known_s = _parts(before) if before else {}
        for part, cost_s in _parts(now).items():
            self._cost_s.labels(part).inc(max(0.0, cost_s - known_s.get(part, 0.0)))
        self._plain_s.inc(max(0.0, now.plain_s - (before.plain_s if before else 0.0)))
        self._slower_s.inc(now.slower_s - (before.slower_s if before else 0.0))
        for reason, count in now.skipped.items():
            known = before.skipped.get(reason, 0) if before else 0
            self._skipped_total.labels(reason.value).inc(max(0, count - known))


class DeviceMetrics:
    """The devices of open stores, and what opening them found."""

    def __init__(self, make: "Maker") -> None:
        self._engine_info = make.gauge(
            "engine_info",
            "Constant 1 for each open device, labelled with its engine and why it has this one",
            "device",
            "engine",
            "direct",
            "reason",
        )
        self._write_cache_info = make.gauge(
            "device_write_cache_info",
            "Constant 1 for each open device, labelled with its drive's write cache as the kernel has it",
            "device",
            "mode",
        )
        self._flush_s = make.gauge(
            "device_flush_seconds",
            "Shortest fsync of 4 KiB when the device was opened; NaN where none was made",
            "device",
        )
        self._per_device = [
            (make.gauge(f"device_{name}", text, "device"), of) for name, text, of in _PER_DEVICE
        ]
        self._state = make.gauge(
            "device_state", "1 for the state that a device is in, 0 for the others", "device", "state"
        )
        self._sync_s = make.histogram(
            "device_sync_duration_seconds",
            "Making a shard's segments durable on a device: cutting, fdatasync, fsync of directories",
            _SYNC_BUCKETS_S,
            "device",
        )
        self._write_s = make.histogram(
            "device_write_duration_seconds",
            "Writing a shard's segments to a device, from the first byte to the last; what waits in its queue included",
            _WRITE_BUCKETS_S,
            "device",
        )
        self._recovery = [
            (make.gauge(f"recovery_{name}", f"{text}; of all open stores"), of)
            for name, text, of in _RECOVERY
        ]
        self._series: dict[DeviceSet, list[tuple[Gauge | Histogram, tuple[str, ...]]]] = {}
        """What each open store has of its own."""

    def add_recovery(self, report: RecoveryReport) -> None:
        """Add what opening a store found and did."""
        for gauge, of in self._recovery:
            gauge.inc(of(report))

    def forget_recovery(self, report: RecoveryReport) -> None:
        """Take back what opening a store found that is closed."""
        for gauge, of in self._recovery:
            gauge.dec(of(report))

    def add_engine(self, devices: DeviceSet, path: Path, engine: str, *, direct: bool, reason: str) -> None:
        """Say which engine a device has and why, and whether it goes past the page cache."""
        self._of_store(devices, self._engine_info, str(path), engine, str(direct).lower(), reason).set(1)

    def add(self, opened: OpenStore) -> None:
        """Show the speed and state of a store's devices from now on, as they are when somebody asks.

        What asks a device itself is sampled (space_watch.py): a scrape never waits for one.
        """
        devices = opened.store
        for device in devices.devices:
            self._of_store(devices, self._sync_s, str(device.path))  # there before its first write
            self._of_store(devices, self._write_s, str(device.path))
            flush = opened.flushes[device.device_id]
            self._of_store(devices, self._write_cache_info, str(device.path), flush.write_cache).set(1)
            self._of_store(devices, self._flush_s, str(device.path)).set(flush.fsync_s or math.nan)
            for gauge, of in self._per_device:
                self._of_store(devices, gauge, str(device.path)).set_function(
                    lambda of=of, device=device: of(opened, device)
                )
        members = {device.device_id: str(device.path) for device in devices.devices}
        members |= {missing.device_id: missing.path for missing in devices.missing}
        for device_id, path in members.items():
            for state in DeviceState:
                self._of_store(devices, self._state, path, state.value).set_function(
                    lambda key=device_id, state=state: float(devices.device_state(key)[0] is state)
                )

    def add_write(self, devices: DeviceSet, write: DeviceWrite) -> None:
        """Add what a device did for a shard."""
        device = devices.device(write.device_id)
        if device is not None:  # it has not left meanwhile
            self._sync_s.labels(str(device.path)).observe(write.sync_s)
            self._write_s.labels(str(device.path)).observe(write.write_s)

    def forget(self, devices: DeviceSet) -> None:
        """Show nothing more of a store that is closed: another one may be opened over the same devices."""
        for gauge, labels in self._series.pop(devices, []):
            gauge.remove(*labels)

    def _of_store(self, devices: DeviceSet, metric: _Metric, *labels: str) -> _Metric:
        self._series.setdefault(devices, []).append((metric, labels))
        return metric.labels(*labels)


class Maker:
    """Makes metrics in one registry, with the prefix of all."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a counter; `_total` is added to its name."""
        return Counter(f"everstep_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a gauge."""
        return Gauge(f"everstep_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Return a histogram."""
        return Histogram(f"everstep_{name}", text, labels, buckets=buckets, registry=self._registry)


class Metrics:
    """All metrics of one daemon, in a registry of its own. Safe to use from any thread."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # a series more for each counter and histogram, which nobody reads
        self.registry = CollectorRegistry()
        make = Maker(self.registry)
        make.gauge("build_info", "Constant 1, labelled with the version", "version").labels(version).set(1)
        self.persists = PersistMetrics(make)
        self.restores = RestoreMetrics(make)
        self.readings = ReadingMetrics(make)
        self.costs = CostMetrics(make)
        self.devices = DeviceMetrics(make)
        self.caches = CacheMetrics(make)
        self.peers = PeerMetrics(make)
        self.shares = ShareMetrics(make)
        self.attached = make.gauge("trainers_attached", "Trainers that hold a lease")
        self.arena_bytes = make.gauge("arena_bytes", "Bytes of all arenas, of caches and of shared batches")
        self.sockets = SocketMetrics(make)
        self.memory = MemoryMetrics(make)
        ProcessCollector(registry=self.registry)
        self.internal_errors_total = make.counter(
            "internal_errors", "Exceptions that nobody expected; the log has each with its traceback"
        )

        self.health_checks_total = make.counter(
            "health_checks", "Times that a job launcher asked whether a job may start here", "result"
        )
        for result in HEALTH_CHECK_RESULTS:
            self.health_checks_total.labels(result)

    def show(self, node: "Node") -> None:
        """Show what a node knows of runs, memory and queues whenever somebody asks."""
        self.registry.register(NodeCollector(node))

    def add_writes(self, devices: DeviceSet, writes: Sequence[DeviceWrite]) -> None:
        """Add what the devices did for a shard."""
        self.persists.written_bytes.inc(sum(write.size_bytes for write in writes))
        self.persists.recycled_bytes.inc(sum(write.recycled_bytes for write in writes))
        for write in writes:
            self.devices.add_write(devices, write)


def _parts(costs: frames.Costs) -> dict[str, float]:
    """Return what was measured of a rank's costs, in parts that do not overlap."""
    others_s = costs.boundary_s - costs.eager_s - costs.wait_s
    parts_s = (costs.eager_s, costs.wait_s, max(0.0, others_s), costs.guard_s, costs.cuda_wait_s)
    return dict(zip(_COST_PARTS, parts_s, strict=True))
