"""Write the Grafana dashboards of deploy/grafana from the panels below; `--check` only tells whether they are fresh."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
SCHEMA_VERSION = 38
"""Of Grafana 10: later ones raise it when they open a dashboard."""
COLUMNS = 24
PANEL_HEIGHT = 8
ON = '{instance=~"$instance"}'
OF_DEVICE = '{instance=~"$instance",device=~"$device"}'
GREEN_ONLY = ((None, "green"),)
BAD_IF_ANY = ((None, "green"), (1, "red"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph or number. `queries`: PromQL and what its lines are called."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    thresholds: tuple[tuple[float | None, str], ...] = GREEN_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]
    has_devices: bool = False


def rate(name: str, by: str = "", extra: str = "") -> str:
    """Return the PromQL of a counter's increase a second, summed over all labels but these."""
    labels = ", ".join(each for each in ("instance", by) if each)
    return f'sum by ({labels}) (rate({name}{{instance=~"$instance"{extra}}}[$__rate_interval]))'


def quantile(name: str, share: float, by: str = "") -> str:
    """Return the PromQL of a quantile of a histogram."""
    labels = ", ".join(each for each in ("instance", "le", by) if each)
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{ON}[$__rate_interval])))"


OVERVIEW = Board(
    uid="everstep-overview",
    title="everstep / Overview",
    text="Is every node's daemon well, and is anything at risk? Latency, traffic, errors and saturation.",
    panels=(
        Panel(
            title="Daemons that answer",
            text="Prometheus reached them at its last scrape. Alert: EverstepDaemonDown.",
            unit="short",
            kind="stat",
            width=4,
            queries=(('sum(up{job="everstep",instance=~"$instance"})', "up"),),
        ),
        Panel(
            title="Trainers attached",
            text="Ranks whose trainer holds a lease now.",
            unit="short",
            kind="stat",
            width=4,
            queries=((f"sum(everstep_trainers_attached{ON})", "trainers"),),
        ),
        Panel(
            title="Oldest newest checkpoint",
            text="Longest time that an attached rank has been without a new commit. Alert: EverstepCheckpointTooOld.",
            unit="s",
            kind="stat",
            width=4,
            thresholds=((None, "green"), (300, "orange"), (600, "red")),
            queries=((f"max(everstep_checkpoint_age_seconds{ON})", "age"),),
        ),
        Panel(
            title="Sick devices",
            text="Suspect, missing or slow ones. Alerts: EverstepDeviceSuspect and its like.",
            unit="short",
            kind="stat",
            width=4,
            thresholds=BAD_IF_ANY,
            queries=(
                ('sum(everstep_device_state{instance=~"$instance",state=~"suspect|missing|slow"})', "sick"),
            ),
        ),
        Panel(
            title="Damaged segments found",
            text="By scrubs since the daemons started. Alert: EverstepDamageFound.",
            unit="short",
            kind="stat",
            width=4,
            thresholds=BAD_IF_ANY,
            queries=((f"sum(everstep_scrub_damaged_segments_total{ON})", "damaged"),),
        ),
        Panel(
            title="Versions",
            text="How many daemons run which version.",
            unit="short",
            kind="stat",
            width=4,
            queries=((f"count by (version) (everstep_build_info{ON})", "{{version}}"),),
        ),
        Panel(
            title="Saving: latency",
            text="From sealed to committed, every fsync included: median and 99th percentile.",
            unit="s",
            queries=(
                (quantile("everstep_persist_duration_seconds", 0.5), "{{instance}} p50"),
                (quantile("everstep_persist_duration_seconds", 0.99), "{{instance}} p99"),
            ),
        ),
        Panel(
            title="Saving: traffic",
            text="Bytes of segments committed.",
            unit="Bps",
            queries=((rate("everstep_written_bytes_total"), "{{instance}}"),),
        ),
        Panel(
            title="Saving: errors",
            text="Shards that could not be committed, and writes that were tried again, by the class of the error.",
            unit="ops",
            thresholds=BAD_IF_ANY,
            queries=(
                (rate("everstep_shards_failed_total", "reason"), "{{instance}} failed: {{reason}}"),
                (rate("everstep_shard_writes_retried_total", "reason"), "{{instance}} again: {{reason}}"),
            ),
        ),
        Panel(
            title="Saving: saturation",
            text="Memory of the snapshots that are being written. It grows where devices are slower than checkpoints.",
            unit="bytes",
            queries=((f"everstep_persist_backlog_bytes{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Restoring: latency",
            text="Reading a shard from the devices; to its first chunk, and to its last.",
            unit="s",
            queries=(
                (quantile("everstep_restore_first_chunk_duration_seconds", 0.99), "{{instance}} first p99"),
                (quantile("everstep_restore_duration_seconds", 0.99), "{{instance}} all p99"),
            ),
        ),
        Panel(
            title="Restoring: traffic and errors",
            text="Shards taken whole by where they came from, and those that failed verification.",
            unit="ops",
            queries=(
                (rate("everstep_restores_total", "source"), "{{instance}} from {{source}}"),
                (rate("everstep_restores_failed_total"), "{{instance}} failed"),
            ),
        ),
        Panel(
            title="Data socket: latency",
            text="99th percentile of the time to an answer, by what was asked; and how late the event loop is.",
            unit="s",
            queries=(
                (quantile("everstep_request_duration_seconds", 0.99, "request"), "{{instance}} {{request}}"),
                (quantile("everstep_event_loop_delay_seconds", 0.99), "{{instance}} event loop"),
            ),
        ),
        Panel(
            title="Data socket: traffic and errors",
            text="Frames of clients, and requests answered with an error.",
            unit="ops",
            queries=(
                (rate("everstep_requests_total"), "{{instance}} asked"),
                (rate("everstep_requests_refused_total"), "{{instance}} refused"),
            ),
        ),
        Panel(
            title="Data socket: saturation",
            text="Clients, requests that wait for an answer, and open descriptors against their limit.",
            unit="short",
            queries=(
                (f"everstep_connections{ON}", "{{instance}} clients"),
                (f"everstep_requests_answering{ON}", "{{instance}} answering"),
                ('process_open_fds{job="everstep",instance=~"$instance"}', "{{instance}} descriptors"),
            ),
        ),
        Panel(
            title="Memory",
            text="What the node has left, what is kept free, and what arenas take. Alert: EverstepMemoryShort.",
            unit="bytes",
            queries=(
                (f"everstep_memory_available_bytes{ON}", "{{instance}} left"),
                (f"everstep_memory_reserve_bytes{ON}", "{{instance}} reserve"),
                (f"everstep_arena_bytes{ON}", "{{instance}} arenas"),
            ),
        ),
        Panel(
            title="Daemon: processor and memory",
            text="Processor seconds a second.",
            unit="percentunit",
            queries=(
                (
                    'rate(process_cpu_seconds_total{job="everstep",instance=~"$instance"}[$__rate_interval])',
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Daemon: resident memory",
            text="Of the process, arenas that it touched included.",
            unit="bytes",
            queries=(
                ('process_resident_memory_bytes{job="everstep",instance=~"$instance"}', "{{instance}}"),
            ),
        ),
    ),
)

RUN = Board(
    uid="everstep-run",
    title="everstep / Runs",
    text="What checkpoints cost the training of a node, how often they are taken, and what would be lost now.",
    panels=(
        Panel(
            title="Runs and ranks",
            text="Runs that the daemon knows of, and their ranks by state.",
            unit="short",
            queries=(
                (f"everstep_runs{ON}", "{{instance}} runs"),
                (f"everstep_ranks{ON}", "{{instance}} {{state}}"),
            ),
        ),
        Panel(
            title="Age of the newest checkpoint",
            text="Of the rank that has waited longest, beside its last interval. Alert: EverstepCheckpointTooOld.",
            unit="s",
            thresholds=((None, "green"), (600, "red")),
            queries=(
                (f"everstep_checkpoint_age_seconds{ON}", "{{instance}} age"),
                (f"everstep_checkpoint_interval_seconds{ON}", "{{instance}} interval"),
            ),
        ),
        Panel(
            title="Steps between checkpoints",
            text="What the controllers have decided; the largest of a node.",
            unit="short",
            queries=((f"everstep_checkpoint_interval_steps{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Cost",
            text="What checkpoints add to training: now, by what stood still, and since the ranks attached. "
            "Alert: EverstepBudgetExceeded.",
            unit="percentunit",
            thresholds=((None, "green"), (0.035, "red")),
            queries=(
                ("everstep:checkpoint_cost:ratio_rate30m" + ON, "{{instance}} half an hour"),
                (f"everstep_checkpoint_cost_ratio{ON}", "{{instance}} dearest rank"),
            ),
        ),
        Panel(
            title="Cost by part",
            text="Seconds that training stood still, of each second of a rank's training.",
            unit="percentunit",
            queries=(
                (
                    rate("everstep_checkpoint_cost_seconds_total", "part")
                    + " / on (instance) group_left "
                    + rate("everstep_training_seconds_total"),
                    "{{instance}} {{part}}",
                ),
            ),
        ),
        Panel(
            title="Slower steps",
            text="What steps beside copies and writes took longer, of all ranks since the daemon's start; an estimate.",
            unit="s",
            queries=((f"everstep_checkpoint_slower_steps_seconds{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Snapshots",
            text="Sealed, dropped before, and shards committed.",
            unit="ops",
            queries=(
                (rate("everstep_snapshots_sealed_total"), "{{instance}} sealed"),
                (
                    rate("everstep_snapshots_abandoned_total", "reason"),
                    "{{instance}} abandoned: {{reason}}",
                ),
                (rate("everstep_shards_persisted_total"), "{{instance}} committed"),
            ),
        ),
        Panel(
            title="Skipped checkpoints",
            text="Due ones that a rank did not take, by reason. Alert: EverstepCheckpointsSkipped.",
            unit="ops",
            queries=((rate("everstep_checkpoints_skipped_total", "reason"), "{{instance}} {{reason}}"),),
        ),
        Panel(
            title="Goals missed",
            text="Ranks that may lose more work than their trainer allows. Alert: EverstepGoalMissed.",
            unit="short",
            thresholds=BAD_IF_ANY,
            queries=((f"everstep_checkpoint_goals_missed{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Slots",
            text="Room for snapshots in memory, by state.",
            unit="short",
            queries=((f"everstep_slots{ON}", "{{instance}} {{state}}"),),
        ),
        Panel(
            title="Making arenas",
            text="Seconds that a GiB of memory takes to allocate and touch, beside the first steps.",
            unit="s",
            queries=(("everstep:arena_allocation:seconds_per_gib" + ON, "{{instance}}"),),
        ),
        Panel(
            title="Deleted checkpoints",
            text="By retention or by hand.",
            unit="ops",
            queries=((rate("everstep_checkpoints_deleted_total"), "{{instance}}"),),
        ),
    ),
)

DEVICES = Board(
    uid="everstep-devices",
    title="everstep / Devices",
    text="How each device is, how fast, how full, and whether what lies on it is what was committed.",
    has_devices=True,
    panels=(
        Panel(
            title="State",
            text="1 for the state that a device is in. Alerts: EverstepDeviceSuspect, EverstepDeviceMissing, "
            "EverstepDeviceSlow.",
            unit="short",
            queries=((f"everstep_device_state{OF_DEVICE} == 1", "{{instance}} {{device}} {{state}}"),),
        ),
        Panel(
            title="Engine",
            text="How bytes reach a device, and why so. Alert: EverstepEngineNotDirect.",
            unit="short",
            queries=((f"everstep_engine_info{OF_DEVICE}", "{{device}} {{engine}} direct={{direct}}"),),
        ),
        Panel(
            title="Room",
            text="What may still be written, deleted checkpoints that can be given back included. "
            "Alerts: EverstepDeviceFull, EverstepDeviceFilling.",
            unit="bytes",
            queries=(
                (f"everstep:device_room:bytes{OF_DEVICE}", "{{instance}} {{device}} room"),
                (f"everstep_device_size_bytes{OF_DEVICE}", "{{instance}} {{device}} size"),
            ),
        ),
        Panel(
            title="Traffic",
            text="Bytes moved: checkpoints, restores, scrubs.",
            unit="Bps",
            queries=(
                (
                    f"rate(everstep_device_moved_bytes_total{OF_DEVICE}[$__rate_interval])",
                    "{{instance}} {{device}} {{operation}}",
                ),
            ),
        ),
        Panel(
            title="Speed of its own writes",
            text="Averaged over the last seconds of them.",
            unit="Bps",
            queries=((f"everstep_device_write_bytes_per_second{OF_DEVICE}", "{{instance}} {{device}}"),),
        ),
        Panel(
            title="Latency of writing a shard",
            text="99th percentile: to the last byte, and making it durable.",
            unit="s",
            queries=(
                (quantile("everstep_device_write_duration_seconds", 0.99, "device"), "{{device}} write"),
                (quantile("everstep_device_sync_duration_seconds", 0.99, "device"), "{{device}} sync"),
            ),
        ),
        Panel(
            title="Saturation",
            text="Bytes of transfers that have not ended.",
            unit="bytes",
            queries=((f"everstep_device_queued_bytes{OF_DEVICE}", "{{instance}} {{device}} {{operation}}"),),
        ),
        Panel(
            title="Transfers in progress",
            text="Mean number of pieces that move at once; a device has 4 lanes.",
            unit="short",
            queries=(
                (
                    f"rate(everstep_device_busy_seconds_total{OF_DEVICE}[$__rate_interval])",
                    "{{instance}} {{device}} {{operation}}",
                ),
            ),
        ),
        Panel(
            title="Waiting for a turn",
            text="Mean number of transfers that wait.",
            unit="short",
            queries=(
                (
                    f"rate(everstep_device_wait_seconds_total{OF_DEVICE}[$__rate_interval])",
                    "{{instance}} {{device}} {{operation}}",
                ),
            ),
        ),
        Panel(
            title="Errors",
            text="Transfers that failed. Alert: EverstepDeviceErrors.",
            unit="ops",
            thresholds=BAD_IF_ANY,
            queries=(
                (
                    f"rate(everstep_device_transfers_failed_total{OF_DEVICE}[$__rate_interval])",
                    "{{instance}} {{device}} {{operation}}",
                ),
            ),
        ),
        Panel(
            title="Last answer",
            text="Since a device was asked for its free space. Alert: EverstepDeviceSilent.",
            unit="s",
            thresholds=((None, "green"), (30, "red")),
            queries=((f"everstep_device_space_age_seconds{OF_DEVICE}", "{{instance}} {{device}}"),),
        ),
        Panel(
            title="Full",
            text="1 for a device that gets nothing more. Alert: EverstepDeviceFull.",
            unit="short",
            thresholds=BAD_IF_ANY,
            queries=((f"everstep_device_full{OF_DEVICE}", "{{instance}} {{device}}"),),
        ),
        Panel(
            title="Scrub: traffic",
            text="Bytes read to look for damage.",
            unit="Bps",
            queries=((rate("everstep_scrubbed_bytes_total"), "{{instance}}"),),
        ),
        Panel(
            title="Scrub: damage",
            text="Segments that are not what was committed, and checkpoints read. Alert: EverstepDamageFound.",
            unit="short",
            queries=(
                (f"everstep_scrub_damaged_segments_total{ON}", "{{instance}} segments damaged"),
                (f"everstep_checkpoints_verified_total{ON}", "{{instance}} checkpoints {{result}}"),
            ),
        ),
        Panel(
            title="Scrub: lateness",
            text="How much after its time it ends. Alert: EverstepScrubLate.",
            unit="s",
            queries=((f"everstep_scrub_late_seconds{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Opening: found",
            text="What the newest opening of the stores found. Alert: EverstepQuarantined.",
            unit="short",
            queries=(
                (f"everstep_recovery_shards{ON}", "{{instance}} shards"),
                (f"everstep_recovery_shards_damaged{ON}", "{{instance}} damaged"),
                (f"everstep_recovery_files_quarantined{ON}", "{{instance}} quarantined"),
            ),
        ),
        Panel(
            title="Opening: duration",
            text="Time that recovery took.",
            unit="s",
            queries=((f"everstep_recovery_duration_seconds{ON}", "{{instance}}"),),
        ),
        Panel(
            title="Written again",
            text="Committed shards that lost a device. Alert: EverstepRedundancyLost.",
            unit="short",
            queries=(
                (f"everstep_shards_rewritten_total{ON}", "{{instance}} again"),
                (f"everstep_shards_rewrite_failed_total{ON}", "{{instance}} failed"),
            ),
        ),
    ),
)

DATA = Board(
    uid="everstep-data",
    title="everstep / Data",
    text="What samples are read from, what the caches hold, and whether jobs wait for their batches.",
    panels=(
        Panel(
            title="Cache: hits",
            text="Share of samples that came from memory.",
            unit="percentunit",
            queries=(("everstep:cache_hits:ratio_rate5m" + ON, "{{instance}}"),),
        ),
        Panel(
            title="Cache: reads",
            text="Samples by where they came from.",
            unit="ops",
            queries=((rate("everstep_cache_reads_total", "source"), "{{instance}} {{source}}"),),
        ),
        Panel(
            title="Cache: traffic",
            text="Bytes of these.",
            unit="Bps",
            queries=((rate("everstep_cache_read_bytes_total", "source"), "{{instance}} {{source}}"),),
        ),
        Panel(
            title="Cache: memory",
            text="Used, allocated, and what the budgets allow. Alert: EverstepCacheShort.",
            unit="bytes",
            queries=(
                (f"everstep_cache_bytes{ON}", "{{instance}} used"),
                (f"everstep_cache_allocated_bytes{ON}", "{{instance}} allocated"),
                (f"everstep_cache_budget_bytes{ON}", "{{instance}} budget"),
            ),
        ),
        Panel(
            title="Cache: filling",
            text="Samples put in, and those not admitted by reason.",
            unit="ops",
            queries=(
                (rate("everstep_cache_filled_samples_total"), "{{instance}} filled"),
                (rate("everstep_cache_refused_samples_total", "reason"), "{{instance}} {{reason}}"),
            ),
        ),
        Panel(
            title="Cache: readers",
            text="Processes that read a cache, caches, and those short of memory.",
            unit="short",
            queries=(
                (f"everstep_cache_clients{ON}", "{{instance}} readers"),
                (f"everstep_caches{ON}", "{{instance}} caches"),
                (f"everstep_caches_short{ON}", "{{instance}} short"),
            ),
        ),
        Panel(
            title="Peers: reachable",
            text="Nodes that share caches, and those left alone after failures. Alert: EverstepCachePeersUnreachable.",
            unit="short",
            queries=(
                (f"everstep_cache_members{ON}", "{{instance}} members"),
                (f"everstep_cache_peers_left_alone{ON}", "{{instance}} left alone"),
            ),
        ),
        Panel(
            title="Peers: traffic",
            text="Bytes to and from other nodes.",
            unit="Bps",
            queries=((rate("everstep_cache_peer_bytes_total", "flow"), "{{instance}} {{flow}}"),),
        ),
        Panel(
            title="Peers: latency and errors",
            text="99th percentile of fetching samples; calls that failed a second.",
            unit="short",
            queries=(
                (quantile("everstep_cache_peer_fetch_seconds", 0.99), "{{instance}} p99 in s"),
                (rate("everstep_cache_peer_failures_total", "reason"), "{{instance}} {{reason}}"),
            ),
        ),
        Panel(
            title="Shared preparation: waiting",
            text="Share of its time that a job waits for batches. Alert: EverstepDataStall.",
            unit="percentunit",
            thresholds=((None, "green"), (0.2, "red")),
            queries=(("everstep:share_wait:ratio_rate10m" + ON, "{{instance}}"),),
        ),
        Panel(
            title="Shared preparation: batches",
            text="Prepared for others, given to jobs, and prepared by a job for itself.",
            unit="ops",
            queries=(
                (rate("everstep_share_batches_published_total"), "{{instance}} published"),
                (rate("everstep_share_batches_taken_total"), "{{instance}} taken"),
                (rate("everstep_share_private_answers_total"), "{{instance}} private"),
            ),
        ),
        Panel(
            title="Shared preparation: jobs and memory",
            text="Bytes of prepared batches.",
            unit="bytes",
            queries=((f"everstep_share_bytes{ON}", "{{instance}}"),),
        ),
    ),
)

BOARDS = {"overview": OVERVIEW, "run": RUN, "devices": DEVICES, "data": DATA}


def rendered(board: Board) -> str:
    """Return a dashboard as Grafana imports it."""
    return (
        json.dumps(
            {
                "uid": board.uid,
                "title": board.title,
                "description": board.text,
                "tags": ["everstep"],
                "schemaVersion": SCHEMA_VERSION,
                "version": 1,
                "editable": True,
                "refresh": "30s",
                "time": {"from": "now-1h", "to": "now"},
                "templating": {"list": _variables(board)},
                "links": [
                    {"type": "dashboards", "tags": ["everstep"], "title": "everstep", "asDropdown": True}
                ],
                "annotations": {"list": []},
                "panels": _placed(board.panels),
            },
            indent=1,
        )
        + "\n"
    )


def _variables(board: Board) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _label_variable("instance", "everstep_build_info"),
    ]
    if board.has_devices:
        found.append(_label_variable("device", 'everstep_device_state{instance=~"$instance"}'))
    return found


def _label_variable(label: str, metric: str) -> dict[str, object]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values({metric}, {label})", "refId": "A"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, object]]:
    """Return the panels in rows from left to right."""
    found: list[dict[str, object]] = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        height = PANEL_HEIGHT // 2 if panel.kind == "stat" else PANEL_HEIGHT
        if x + panel.width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        found.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x, row_height = x + panel.width, max(row_height, height)
    return found


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {
                    "mode": "absolute",
                    "steps": [{"value": value, "color": color} for value, color in panel.thresholds],
                },
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Write what changed; with `--check` nothing, and 1 if something would."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a file is not fresh")
    is_check = parser.parse_args().check
    stale: list[Path] = []
    for name, board in BOARDS.items():
        path, text = FOLDER / f"{name}.json", rendered(board)
        if not path.is_file() or path.read_text() != text:
            stale.append(path)
            if not is_check:
                path.write_text(text)
    for path in stale:
        done = "is stale: tools/dashboards.py makes it" if is_check else "written"
        print(f"{path.relative_to(FOLDER.parents[1])} {done}")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
