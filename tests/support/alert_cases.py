"""For each alert of deploy/prometheus/rules.yml what makes it fire and what must leave it silent, as promtool has it.

A series is `first+stepxcount`. What fires is looked at after `after_min` minutes, and just before
its `for:` is over: there it must be silent still.
"""

from collections.abc import Mapping
from dataclasses import dataclass

INSTANCE = 'job="everstep",instance="n0:9100"'


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCase:
    """`fires`: series with which only this alert fires; `quiet`: the same ones, as they are when all is well."""

    fires: Mapping[str, str]
    quiet: Mapping[str, str]
    after_min: int
    silent_min: int | None = None
    """With `fires`, here it does not fire yet; None: it has no `for:`."""
    step: str = "1m"
    """Between two values, and between two looks of the rules."""


def one(name: str, labels: str = "") -> str:
    """Return a series of one daemon."""
    return f"{name}{{{INSTANCE}{',' + labels if labels else ''}}}"


def single(
    name: str, labels: str, bad: str, good: str, *, after_min: int, silent_min: int | None = None
) -> AlertCase:
    """Return the case of an alert on one series."""
    series = one(name, labels)
    return AlertCase(fires={series: bad}, quiet={series: good}, after_min=after_min, silent_min=silent_min)


DEVICE = 'device="/mnt/nvme0"'
GIB = 2**30

CASES: dict[str, AlertCase] = {
    "EverstepDaemonDown": single("up", "", "1 1 0+0x9", "1+0x11", after_min=5, silent_min=3),
    "EverstepDaemonRestarting": single(
        "process_start_time_seconds", "", "100 100 200 200 300 300 400+0x4", "100 200+0x10", after_min=10
    ),
    "EverstepInternalErrors": single(
        "everstep_internal_errors_total", "", "0 0 1+0x8", "3+0x10", after_min=5
    ),
    "EverstepRequestsRefused": single(
        "everstep_requests_refused_total",
        'reason="UsageError"',
        "0+120x40",
        "0+6x40",
        after_min=30,
        silent_min=8,
    ),
    "EverstepEventLoopSlow": AlertCase(
        fires={
            one("everstep_event_loop_delay_seconds_bucket", 'le="0.3"'): "0+10x40",
            one("everstep_event_loop_delay_seconds_bucket", 'le="1"'): "0+60x40",
            one("everstep_event_loop_delay_seconds_bucket", 'le="+Inf"'): "0+60x40",
        },
        quiet={
            one("everstep_event_loop_delay_seconds_bucket", 'le="0.3"'): "0+60x40",
            one("everstep_event_loop_delay_seconds_bucket", 'le="1"'): "0+60x40",
            one("everstep_event_loop_delay_seconds_bucket", 'le="+Inf"'): "0+60x40",
        },
        after_min=30,
        silent_min=8,
    ),
    "EverstepDescriptorsShort": AlertCase(
        fires={one("process_open_fds"): "900+0x20", one("process_max_fds"): "1024+0x20"},
        quiet={one("process_open_fds"): "100+0x20", one("process_max_fds"): "1024+0x20"},
        after_min=10,
        silent_min=4,
    ),
    "EverstepCertificateExpiring": single(
        "everstep_certificate_expiry_timestamp_seconds",
        'section="control"',
        f"{3 * 86400}+0x30",
        f"{30 * 86400}+0x30",
        after_min=20,
        silent_min=9,
    ),
    "EverstepCheckpointTooOld": AlertCase(
        fires={
            one("everstep_checkpoint_age_seconds"): "0+60x40",
            one("everstep_checkpoint_interval_seconds"): "300+0x40",
        },
        # As old, but this run takes one every 15 minutes.
        quiet={
            one("everstep_checkpoint_age_seconds"): "0+60x40",
            one("everstep_checkpoint_interval_seconds"): "900+0x40",
        },
        after_min=20,
        silent_min=14,
    ),
    "EverstepPersistFailing": AlertCase(
        fires={
            one("everstep_shards_failed_total", 'reason="StorageError"'): "0 0 1+0x8",
            one("everstep_shards_failed_total", 'reason="NoSpaceError"'): "0+0x10",
        },
        quiet={
            one("everstep_shards_failed_total", 'reason="StorageError"'): "7+0x10",
            one("everstep_shards_failed_total", 'reason="NoSpaceError"'): "0+0x10",
        },
        after_min=5,
    ),
    "EverstepPersistBehind": single(
        "everstep_persist_oldest_pending_seconds",
        "",
        "0+60x20",
        "0 60 0 60 110 0+0x15",
        after_min=5,
        silent_min=3,
    ),
    "EverstepCheckpointsSkipped": AlertCase(
        fires={
            one("everstep_checkpoints_skipped_total", 'reason="slot"'): "0+3x60",
            one("everstep_snapshots_sealed_total"): "0+1x60",
        },
        # As many again, but while the arena is being made.
        quiet={
            one("everstep_checkpoints_skipped_total", 'reason="arena"'): "0+3x60",
            one("everstep_checkpoints_skipped_total", 'reason="slot"'): "0+0x60",
            one("everstep_snapshots_sealed_total"): "0+1x60",
        },
        after_min=40,
        silent_min=9,
    ),
    "EverstepBudgetExceeded": single(
        "everstep_checkpoint_budgets_exceeded", "", "1+0x50", "0+0x50", after_min=40, silent_min=29
    ),
    "EverstepGoalMissed": single(
        "everstep_checkpoint_goals_missed", "", "2+0x30", "0+0x30", after_min=20, silent_min=14
    ),
    "EverstepRestoreFailing": single(
        "everstep_restores_failed_total", 'reason="CorruptDataError"', "0 0 1+0x8", "2+0x10", after_min=5
    ),
    "EverstepRedundancyLost": single(
        "everstep_shards_rewrite_failed_total", "", "0 0 1+0x8", "2+0x10", after_min=5
    ),
    "EverstepMemoryShort": AlertCase(
        fires={
            one("everstep_memory_available_bytes"): f"{GIB // 2}+0x20",
            one("everstep_memory_reserve_bytes"): f"{GIB}+0x20",
        },
        quiet={
            one("everstep_memory_available_bytes"): f"{8 * GIB}+0x20",
            one("everstep_memory_reserve_bytes"): f"{GIB}+0x20",
        },
        after_min=10,
        silent_min=4,
    ),
    "EverstepDeviceSuspect": single(
        "everstep_device_state", f'{DEVICE},state="suspect"', "0 0 1+0x8", "0+0x10", after_min=5
    ),
    "EverstepDeviceMissing": single(
        "everstep_device_state", f'{DEVICE},state="missing"', "0 0 1+0x8", "0+0x10", after_min=5, silent_min=2
    ),
    "EverstepDeviceSlow": single(
        "everstep_device_state",
        f'{DEVICE},state="slow"',
        "0 0 1+0x18",
        "0 1 0+0x18",
        after_min=15,
        silent_min=6,
    ),
    "EverstepDeviceSilent": single(
        "everstep_device_space_age_seconds", DEVICE, "0 1 60+60x8", "0.5+0x10", after_min=5, silent_min=1
    ),
    "EverstepDeviceFull": single(
        "everstep_device_full", DEVICE, "0 0 1+0x8", "0+0x10", after_min=5, silent_min=2
    ),
    "EverstepDeviceFilling": AlertCase(
        # 600 GiB, and 1 less each minute: empty in 10 hours.
        fires={
            one("everstep_device_free_bytes", DEVICE): f"{600 * GIB}-{GIB}x300",
            one("everstep_device_pool_bytes", DEVICE): "0+0x300",
        },
        # What is deleted waits in the pool: nothing gets less.
        quiet={
            one("everstep_device_free_bytes", DEVICE): f"{600 * GIB}-{GIB}x300",
            one("everstep_device_pool_bytes", DEVICE): f"0+{GIB}x300",
        },
        after_min=240,
        silent_min=50,
    ),
    "EverstepDeviceErrors": single(
        "everstep_device_transfers_failed_total",
        f'{DEVICE},operation="write"',
        "0 0 1+0x8",
        "4+0x10",
        after_min=5,
    ),
    "EverstepJobsRefused": single(
        "everstep_health_checks_total", 'result="refused"', "0 0 1+0x8", "2+0x10", after_min=5
    ),
    "EverstepEngineNotDirect": AlertCase(
        fires={
            one("everstep_engine_info", f'{DEVICE},engine="plain",direct="false",reason="tmpfs"'): "1+0x90"
        },
        quiet={one("everstep_engine_info", f'{DEVICE},engine="uring",direct="true",reason=""'): "1+0x90"},
        after_min=80,
        silent_min=59,
    ),
    "EverstepDamageFound": single(
        "everstep_scrub_damaged_segments_total", "", "0 0 1+0x8", "2+0x10", after_min=5
    ),
    "EverstepQuarantined": single(
        "everstep_recovery_files_quarantined", "", "0 0 3+0x8", "0+0x10", after_min=5
    ),
    "EverstepScrubLate": single(
        "everstep_scrub_late_seconds", "", "3600+0x90", "0 3600 0+0x88", after_min=80, silent_min=59
    ),
    "EverstepScrubStopped": AlertCase(
        # promtool's clock begins at 0, which means here that no scrub has ended yet.
        fires={one("everstep_scrub_last_completed_timestamp_seconds"): "1+0x345"},
        quiet={one("everstep_scrub_last_completed_timestamp_seconds"): "0+0x345"},
        after_min=340 * 60,
        silent_min=337 * 60,
        step="1h",
    ),
    "EverstepDataStall": AlertCase(
        fires={
            one("everstep_share_wait_duration_seconds_sum"): "0+40x40",
            one("everstep_share_jobs"): "2+0x40",
        },
        quiet={
            one("everstep_share_wait_duration_seconds_sum"): "0+4x40",
            one("everstep_share_jobs"): "2+0x40",
        },
        after_min=30,
        silent_min=8,
    ),
    "EverstepCacheShort": single(
        "everstep_caches_short", "", "1+0x30", "0+0x30", after_min=20, silent_min=14
    ),
    "EverstepCachePeersUnreachable": single(
        "everstep_cache_peers_left_alone", "", "1+0x20", "0 1 0+0x18", after_min=10, silent_min=4
    ),
}


def promtool_tests(name: str, case: AlertCase) -> list[dict[str, object]]:
    """Return both of promtool's tests of an alert: which alerts fire when, by their names."""
    at_end = _expected((name,), case.after_min)
    before = [] if case.silent_min is None else [_expected((), case.silent_min)]
    return [
        _test(f"{name} fires", case.step, case.fires, [*before, at_end]),
        _test(f"{name} is silent", case.step, case.quiet, [_expected((), case.after_min)]),
    ]


def _test(
    name: str, step: str, series: Mapping[str, str], expected: list[dict[str, object]]
) -> dict[str, object]:
    return {
        "name": name,
        "interval": step,
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": expected,
    }


def _expected(names: tuple[str, ...], minute: int) -> dict[str, object]:
    return {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
    }
