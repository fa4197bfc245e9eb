"""The metrics as Prometheus gets them: over HTTP, from a real daemon."""

import contextlib
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pausing import wait_until
from scraping import scrape

from everstep.checkpoint.recovery import RecoveryReport
from everstep.checkpoint.testing import opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.control.metrics import Metrics
from everstep.daemon.devices.drive_flush import look_at_flush
from everstep.daemon.slot_machine import Drop
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames
from everstep.proto.frames import SkipReason

SLOT = SkipReason.SLOT
_RESTORES_FAILED = "everstep_restores_failed_total{CorruptDataError}"
_PERSIST_S = "everstep_persist_duration_seconds_sum"


def test_a_scrape_tells_what_has_happened(node_config: Path, devices: list[Path], socket_path: Path) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        before = scrape(port)
        assert before["everstep_shards_persisted_total"] == before["everstep_trainers_attached"] == 0
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")])
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            refusal = trainer.begin_attempt(0)
            assert isinstance(refusal, frames.Failure)
            after = scrape(port)
            assert after["everstep_arena_bytes"] == arena.ready.slot_size_bytes * arena.ready.slot_count
            arena.close()
    assert after["everstep_trainers_attached"] == 1
    assert after["everstep_snapshots_sealed_total"] == after["everstep_shards_persisted_total"] == 1
    assert after["everstep_persist_duration_seconds_count"] == 1
    assert after["everstep_written_bytes_total"] > 0
    assert after["everstep_last_commit_timestamp_seconds"] > 1.7e9
    assert after[f"everstep_requests_refused_total{{{refusal.code}}}"] == 1
    assert after["everstep_internal_errors_total"] == 0
    for device in devices:
        assert after[f"everstep_device_state{{{device},ok}}"] == 1
        assert after[f"everstep_device_state{{{device},suspect}}"] == 0
        assert after[f"everstep_device_sync_duration_seconds_count{{{device}}}"] == 1
        assert 0 < after[f"everstep_device_sync_duration_seconds_sum{{{device}}}"] < after[_PERSIST_S]
        assert (
            after[f"everstep_device_write_bytes_per_second{{{device}}}"] == 0
        )  # too little was written to tell
    assert _engines(after) == [str(device) for device in devices]


def test_dropped_snapshots_are_counted_by_what_became_of_them(node_config: Path, socket_path: Path) -> None:
    def counted() -> dict[str, float]:
        found = {
            drop.value: scrape(port)[f"everstep_snapshots_abandoned_total{{{drop.value}}}"] for drop in Drop
        }
        return {reason: count for reason, count in found.items() if count}

    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")])
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            assert counted() == {}
            arena.begin(CheckpointId(1, 1))
            trainer.send(frames.Abandon(arena=arena.ready.arena, slot=0, reason="a leaf has changed"))
            trainer.offers()  # answered after it
            assert counted() == {"given_up": 1}
            arena.begin(CheckpointId(1, 2))
            arena.seal_draft(CheckpointId(1, 2), b"no draft")
            assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
            assert counted() == {"given_up": 1, "draft": 1}
            arena.begin(CheckpointId(1, 3))
            trainer.offers()
            arena.close()
        wait_until(lambda: counted() == {"given_up": 1, "draft": 1, "trainer_gone": 1})


def test_a_restore_counts_when_the_trainer_has_verified_it(node_config: Path, socket_path: Path) -> None:
    """What lies in memory is handed over as it is; only the trainer knows whether it was right."""
    memory, disk = "everstep_restores_total{memory}", "everstep_restores_total{disk}"
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")])
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
        with FakeTrainer(socket_path) as again:
            again.open_run([Path("nvme0"), Path("nvme1")])
            assert isinstance(again.fetch(CheckpointId(1, 1)), frames.Fetched)
            os.close(again.reader.take_fd())
            shard = again.fetch(CheckpointId(1, 1), from_devices=True)
            assert isinstance(shard, frames.Streaming)
            assert not again.stream(shard)[1].code
            found = scrape(port)
            assert (found[memory], found[disk], found[_RESTORES_FAILED]) == (0, 0, 1)
            again.send(frames.Restored(in_memory=False))
            wait_until(lambda: scrape(port)[disk] == 1)
            again.send(frames.Restored(in_memory=True))
            wait_until(lambda: scrape(port)[memory] == 1)


def test_who_is_paused_has_no_checkpoint_that_is_too_old(node_config: Path, socket_path: Path) -> None:
    def told(paused_until_unix_s: float) -> frames.Costs:
        return frames.Costs(
            train_s=1.0,
            boundary_s=0.0,
            eager_s=0.0,
            wait_s=0.0,
            guard_s=0.0,
            slower_s=0.0,
            skipped={},
            interval_steps=0,
            reason="",
            goal_missed="",
            bound="paused",
            budget=0.1,
            cost_share=0.0,
            step=1,
            paused_until_unix_s=paused_until_unix_s,
        )

    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")])
            trainer.begin_attempt(1)
            wait_until(lambda: scrape(port)["everstep_checkpoint_age_seconds"] > 0)
            trainer.send(told(time.time() + 600))
            wait_until(lambda: scrape(port)["everstep_checkpoint_age_seconds"] == 0)
            trainer.send(told(time.time()))  # it is over
            wait_until(lambda: scrape(port)["everstep_checkpoint_age_seconds"] > 0)


def test_the_signals_of_a_save_and_a_restore(
    node_config: Path, devices: list[Path], socket_path: Path
) -> None:
    """Latency, traffic, errors and saturation of the data socket, the devices and memory."""
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        assert scrape(port)["everstep_checkpoint_age_seconds"] == 0  # nobody is attached
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")])
            trainer.begin_attempt(1)
            wait_until(lambda: scrape(port)["everstep_checkpoint_age_seconds"] > 0.3)
            arena = trainer.make_arena(trainer.layout())
            arena.begin(CheckpointId(1, 1))
            wait_until(lambda: scrape(port)["everstep_slots{copying}"] == 1)
            arena.fill(1)
            arena.seal(CheckpointId(1, 1))
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            waited = scrape(port)
            assert waited["everstep_checkpoint_age_seconds"] < 0.3
            assert waited["everstep_checkpoint_interval_seconds"] == 0  # there was one only
            arena.save(CheckpointId(1, 2), seed=2, slot=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            assert scrape(port)["everstep_checkpoint_interval_seconds"] > 0
            shard = trainer.fetch(CheckpointId(1, 2), from_devices=True)
            assert isinstance(shard, frames.Streaming)
            assert scrape(port)["everstep_restores_streaming"] == 1
            chunks, end = trainer.stream(shard)
            assert not end.code
            trainer.send(frames.Release(arena=shard.arena))
            wait_until(lambda: scrape(port)["everstep_restores_streaming"] == 0)
            found = scrape(port)
            arena.close()
    streamed_bytes = sum(len(data) for segment in chunks.values() for data in segment.values())
    assert found["everstep_restore_streamed_bytes_total"] == streamed_bytes
    assert found["everstep_restore_duration_seconds_count"] == 1
    assert found["everstep_restore_first_chunk_duration_seconds_count"] == 1
    for device in devices:
        assert found[f"everstep_device_moved_bytes_total{{{device},write}}"] > 0
        assert found[f"everstep_device_busy_seconds_total{{{device},write}}"] > 0
        assert found[f"everstep_device_queued_bytes{{{device},write}}"] == 0
        assert found[f"everstep_device_write_duration_seconds_count{{{device}}}"] == 2
    read_bytes = sum(found[f"everstep_device_moved_bytes_total{{{device},read}}"] for device in devices)
    assert read_bytes >= streamed_bytes
    assert found["everstep_requests_total{OpenRun}"] == found["everstep_requests_total{BeginAttempt}"] == 1
    assert found["everstep_request_duration_seconds_count{MakeArena}"] == 1
    assert found["everstep_requests_answering"] == found["everstep_persist_backlog_bytes"] == 0
    assert (
        found["everstep_arena_allocation_duration_seconds_count"] == 2
    )  # the arena, and the ring of the restore
    assert (
        found["everstep_arena_allocated_bytes_total"] >= arena.ready.slot_size_bytes * arena.ready.slot_count
    )
    assert found["everstep_memory_available_bytes"] > found["everstep_memory_reserve_bytes"] == 1 << 30
    assert found["everstep_ranks{attached}"] == found["everstep_runs"] == 1


def _engines(samples: dict[str, float]) -> list[str]:
    """Return the devices that have an engine, each as often as it is named."""
    found = [name for name in samples if name.startswith("everstep_engine_info")]
    return sorted(name.partition("{")[2].split(",")[0] for name in found)


def test_the_write_cache_and_the_flush_of_each_drive_are_shown(
    node_config: Path, devices: list[Path], socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        found = scrape(client.status().daemon.metrics_port)
    for device in devices:
        expected = look_at_flush(device)
        assert found[f"everstep_device_write_cache_info{{{device},{expected.write_cache}}}"] == 1
        assert found[f"everstep_device_flush_seconds{{{device}}}"] > 0 or expected.fsync_s is None


def test_a_device_that_is_taken_back_is_there_once(
    node_config: Path, devices: list[Path], socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        client.retire_device(str(devices[1]), force=True, dry_run=False)
        client.readmit_device(str(devices[1]))
        found = scrape(port)
    assert _engines(found) == [str(device) for device in devices]
    states = [name for name, value in found.items() if "device_state" in name and value]
    assert sorted(states) == [f"everstep_device_state{{{device},ok}}" for device in devices]


def test_what_the_recovery_of_a_closed_store_found_counts_no_more() -> None:
    metrics, first, second = Metrics("0"), RecoveryReport(shard_count=3), RecoveryReport(shard_count=4)
    metrics.devices.add_recovery(first)
    metrics.devices.add_recovery(second)
    assert metrics.registry.get_sample_value("everstep_recovery_shards") == 7
    metrics.devices.forget_recovery(first)
    assert metrics.registry.get_sample_value("everstep_recovery_shards") == 4


def test_what_recovery_found_is_among_them(node_config: Path, devices: list[Path], socket_path: Path) -> None:
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        for step in (1, 2):
            arena.save(CheckpointId(1, step), seed=step, slot=step - 1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
    (copy,) = devices[0].glob("runs/*/*/commits/1.1.0.mf")
    copy.unlink()
    for lost in (device.glob("runs/*/*/commits/1.2.0.mf") for device in devices):
        next(lost).write_bytes(b"not a manifest")
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        found = scrape(client.status().daemon.metrics_port)
    assert found["everstep_recovery_shards"] == 1
    assert found["everstep_recovery_files_quarantined"] == 2
    assert found["everstep_recovery_copies_mended"] == 1
    assert found["everstep_recovery_duration_seconds"] > 0
    with opened(devices, read_only=True) as (store, _):
        assert [str(info.checkpoint) for info in store.runs()[0].checkpoints()] == ["1.1"]


def costs(
    train_s: float, slower_s: float, skipped: dict[frames.SkipReason, int] | None = None
) -> frames.Costs:
    return frames.Costs(
        train_s=train_s,
        boundary_s=1.0,
        eager_s=0.625,
        wait_s=0.25,
        guard_s=2.0,
        cuda_wait_s=0.5,
        slower_s=slower_s,
        skipped=skipped or {},
        interval_steps=1,
        reason="",
        goal_missed="",
    )


def test_what_checkpoints_cost_is_summed_over_ranks() -> None:
    metrics = Metrics("1.2.3")
    first, second = costs(100.0, 3.0, {SLOT: 1}), costs(150.0, 2.5, {SLOT: 2, SkipReason.PEER: 4})
    first = msgspec.structs.replace(first, plain_s=0.125)
    second = msgspec.structs.replace(second, plain_s=0.25)
    metrics.costs.add(None, first)
    metrics.costs.add(first, second)
    metrics.costs.add(None, first)
    value = metrics.registry.get_sample_value
    assert value("everstep_training_seconds_total") == 250.0
    parts = [
        value("everstep_checkpoint_cost_seconds_total", {"part": part})
        for part in ("eager", "ranks", "boundary", "guard", "cuda")
    ]
    assert parts == [1.25, 0.5, 0.25, 4.0, 1.0]
    assert value("everstep_plain_boundary_seconds_total") == 0.25 + 0.125
    assert value("everstep_checkpoint_slower_steps_seconds") == 2.5 + 3.0
    skipped = {
        reason: value("everstep_checkpoints_skipped_total", {"reason": reason.value}) for reason in SkipReason
    }
    assert skipped == dict.fromkeys(SkipReason, 0) | {SLOT: 3, SkipReason.PEER: 4}


def test_a_rank_is_held_against_its_own_budget(node_config: Path, socket_path: Path) -> None:
    told = msgspec.structs.replace(costs(100.0, 0.0), cuda_wait_s=0.0)  # 3 s in 97
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
        for budget, plain_s, exceeded in (
            (0.035, 0, 0),
            (0.03, 0, 1),
            (None, 0, 0),
            (0.03, 0, 1),
            (0.03, 0.5, 0),
        ):
            trainer.send(msgspec.structs.replace(told, budget=budget, plain_s=plain_s))
            wait_until(
                lambda expected=exceeded: scrape(port)["everstep_checkpoint_budgets_exceeded"] == expected
            )


def test_a_budget_that_an_operator_lowers_is_kept_from_then_on(node_config: Path, socket_path: Path) -> None:
    """What a higher one has allowed before is no breach of it."""
    told = msgspec.structs.replace(costs(100.0, 0.0), cuda_wait_s=0.0, budget=0.035)  # 3 s in 97
    asked = msgspec.structs.replace(told, budget=0.01, budget_asked_unix_s=1.0)
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
        trainer.send(told)
        for train_s, boundary_s, exceeded in ((200.0, 0.5, 0), (200.0, 2.5, 1), (300.0, 2.5, 0)):
            trainer.send(
                msgspec.structs.replace(
                    asked, train_s=told.train_s + train_s, boundary_s=told.boundary_s + boundary_s
                )
            )
            trainer.offers()  # it is read now
            assert scrape(port)["everstep_checkpoint_budgets_exceeded"] == exceeded
        assert scrape(port)["everstep_checkpoint_cost_ratio"] > 0.01


@pytest.mark.parametrize("is_same_daemon", [True, False])
def test_the_costs_of_an_attempt_count_once_though_its_trainer_attaches_anew(
    node_config: Path, socket_path: Path, is_same_daemon: bool
) -> None:
    """A daemon after this one counts what comes from then on: what was before stands in the series of the first."""
    devices, series = [Path("nvme0"), Path("nvme1")], "everstep_training_seconds_total"
    with contextlib.ExitStack() as held:
        held.enter_context(node_daemon(node_config, socket_path))
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as client:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            trainer.send(costs(100.0, 0.0))
            port = client.status().daemon.metrics_port
            wait_until(lambda: scrape(port)[series] == 100)
        if not is_same_daemon:
            held.close()
            held.enter_context(node_daemon(node_config, socket_path))
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as client:
            trainer.open_run(devices)
            trainer.begin_attempt(1, again=True)
            port = client.status().daemon.metrics_port
            shown = "everstep_checkpoint_slower_steps_seconds"
            for train_s, slower_s in ((101.0, 10.0), (105.0, 6.0)):
                trainer.send(costs(train_s, slower_s))
                expected = train_s if is_same_daemon else train_s - 101
                wait_until(lambda expected=expected: scrape(port)[series] == expected)
                wait_until(
                    lambda slower_s=slower_s: scrape(port)[shown] == slower_s
                )  # an estimate: as it is now
        with FakeTrainer(socket_path) as trainer:  # another process: its costs begin anew
            trainer.open_run(devices)
            trainer.begin_attempt(2)
            trainer.send(costs(3.0, 0.0))
            wait_until(lambda: scrape(port)[series] == (108 if is_same_daemon else 7))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_an_estimate_that_goes_up_and_down_ends_where_it_stands(told_s: list[float]) -> None:
    metrics, before = Metrics("1.2.3"), None
    for slower_s in told_s:
        now = costs(1.0, slower_s)
        metrics.costs.add(before, now)
        before = now
    shown = metrics.registry.get_sample_value("everstep_checkpoint_slower_steps_seconds")
    assert shown == pytest.approx(told_s[-1], abs=1e-6)
