"""Runs in, costs out: the model gives back what was measured, and knows the costs that made the runs."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.calibration_plan import Observed, Probe, calibrate
from everstep.dataloader.analysis.stall_plan import WorkerTimes
from everstep.dataloader.analysis.what_if_plan import Costs, Limit, Setting, limits, predict

SAMPLES = 1000


def runs_of(costs: Costs, *, workers: int, cores: float, with_probe: bool = True) -> Observed:
    """Return what three runs would have shown of a job with these costs."""
    warm = predict(costs, Setting(cached=1.0, workers=workers, cores=cores))
    cold = predict(costs, Setting(cached=0.0, workers=workers, cores=cores))
    queued_s = 0.0
    if warm.limit is Limit.CORES:  # then workers are always at work, or wait for a core
        queued_s = workers * SAMPLES / warm.samples_per_s - SAMPLES * costs.preparation_s
    busy_s = SAMPLES * costs.preparation_s + queued_s
    read_s = costs.latency_s + costs.sample_bytes / costs.storage_bytes_per_s
    return Observed(
        synthetic_s=costs.compute_s,
        warm_s=1 / warm.samples_per_s,
        cold_s=1 / cold.samples_per_s,
        workers=workers,
        cores=cores,
        warm_work=WorkerTimes(samples=SAMPLES, busy_s=busy_s, queued_s=queued_s),
        cpu_s=costs.cpu_s,
        sample_bytes=costs.sample_bytes,
        probe=Probe(read_s=read_s, bytes_per_s=costs.storage_bytes_per_s) if with_probe else None,
    )


@st.composite
def seen(draw: st.DrawFn) -> Observed:
    synthetic_s = draw(st.floats(1e-5, 0.1))
    warm_s = synthetic_s * draw(st.floats(1.0, 10.0))
    cold_s = warm_s * draw(st.floats(1.0, 10.0))
    workers = draw(st.integers(0, 16))
    share = draw(st.floats(0.0, 1.0))
    busy_s = share * max(1, workers) * warm_s * SAMPLES
    queued_s = draw(st.floats(0.0, 1.0)) * busy_s
    size = draw(st.sampled_from([0.0, 1e3, 1e5, 1e6]))
    probe = st.builds(
        Probe,
        read_s=st.floats(0.0, 0.1),
        bytes_per_s=st.floats(1e6, 1e10),
        paced_s=st.none() | st.floats(0.0, 0.1),
    )
    return Observed(
        synthetic_s=synthetic_s,
        warm_s=warm_s,
        cold_s=cold_s,
        workers=workers,
        cores=float(draw(st.integers(1, 16))),
        warm_work=WorkerTimes(samples=SAMPLES, busy_s=busy_s, queued_s=queued_s),
        cpu_s=draw(st.floats(0.0, 0.1)),
        sample_bytes=size,
        probe=draw(st.none() | probe),
        lone_cpu_s=draw(st.none() | st.floats(1e-6, 0.1)),
    )


@given(seen())
def test_the_model_gives_back_the_measured_speeds(seen: Observed) -> None:
    """Cached: the warm run's; of the cold run's within 2 %, where a difference is taken for none."""
    costs = calibrate(seen).costs
    warm = predict(costs, Setting(cached=1.0, workers=seen.workers, cores=seen.cores))
    cold = predict(costs, Setting(cached=0.0, workers=seen.workers, cores=seen.cores))
    assert warm.samples_per_s == pytest.approx(1 / seen.warm_s, rel=0.021)
    assert cold.samples_per_s == pytest.approx(1 / seen.cold_s, rel=0.021)


FETCH_BOUND = Costs(
    compute_s=0.0005, handover_s=0.0, preparation_s=0.002, cpu_s=0.0005, latency_s=0.001,
    sample_bytes=100_000, storage_bytes_per_s=50e6,
)  # fmt: skip
LATENCY_BOUND = Costs(
    compute_s=0.0002, handover_s=0.0, preparation_s=0.001, cpu_s=0.0005, latency_s=0.008,
    sample_bytes=100_000, storage_bytes_per_s=500e6,
)  # fmt: skip
CORE_BOUND = Costs(
    compute_s=0.0005, handover_s=0.0, preparation_s=0.002, cpu_s=0.003, latency_s=0.0,
    sample_bytes=100_000, storage_bytes_per_s=80e6,
)  # fmt: skip


@pytest.mark.parametrize("costs", [FETCH_BOUND, LATENCY_BOUND, CORE_BOUND])
def test_other_settings_are_predicted_from_one(costs: Costs) -> None:
    """18 settings, calibrated on 4 workers with nothing and with everything cached."""
    cores = 4.0
    found = calibrate(runs_of(costs, workers=4, cores=cores)).costs
    for cached, workers in itertools.product((0.0, 0.35, 0.5, 0.65, 0.9, 1.0), (2, 4, 8)):
        setting = Setting(cached=cached, workers=workers, cores=cores)
        truth = predict(costs, setting).samples_per_s
        assert predict(found, setting).samples_per_s == pytest.approx(truth, rel=0.1), setting


@pytest.mark.parametrize(
    ("costs", "limit"),
    [(FETCH_BOUND, Limit.WORKERS), (CORE_BOUND, Limit.CORES)],
)
def test_what_bounds_the_warm_run_is_read_off_the_workers(costs: Costs, limit: Limit) -> None:
    assert calibrate(runs_of(costs, workers=3, cores=4.0)).warm_limit is limit


def test_waiting_for_cores_that_others_use_is_no_lack_of_cores() -> None:
    seen = dataclasses.replace(runs_of(CORE_BOUND, workers=3, cores=4.0), cpu_s=0.0001)
    assert calibrate(seen).warm_limit is Limit.WORKERS


def test_idle_workers_mean_that_the_trainer_is_slow_to_take_batches() -> None:
    idle = WorkerTimes(samples=SAMPLES, busy_s=0.1 * 4 * 0.002 * SAMPLES)
    seen = Observed(
        synthetic_s=0.001, warm_s=0.002, cold_s=0.002, workers=4, cores=8.0, warm_work=idle, cpu_s=0.001,
        sample_bytes=0.0,
    )  # fmt: skip
    found = calibrate(seen)
    assert found.warm_limit is Limit.COMPUTE
    assert found.costs.handover_s == pytest.approx(0.001)


def test_two_workers_that_work_half_of_the_time_wait_for_the_trainer() -> None:
    """Measured (2 cores, 2026-11-25): one worker alone gave 1,570 samples a second, two 1,585, three 1,580."""
    seen = Observed(
        synthetic_s=0.00051, warm_s=0.000648, cold_s=0.000681, workers=2, cores=2.0, cpu_s=0.000769,
        warm_work=WorkerTimes(samples=2288, busy_s=1.528, queued_s=0.069), sample_bytes=102_400.0,
        trainer_cpu_s=0.000043, lone_cpu_s=0.000746,
    )  # fmt: skip
    found = calibrate(seen)
    assert found.warm_limit is Limit.COMPUTE
    one, three = (predict(found.costs, Setting(cached=1.0, workers=k, cores=2.0)) for k in (1, 3))
    assert one.samples_per_s == pytest.approx(1570, rel=0.1)
    assert three.samples_per_s == pytest.approx(1580, rel=0.1)


def test_storage_that_many_workers_fill_is_told_from_slow_single_reads() -> None:
    full = calibrate(runs_of(FETCH_BOUND, workers=8, cores=16.0)).costs
    assert full.storage_bytes_per_s == pytest.approx(50e6)
    slow = calibrate(runs_of(LATENCY_BOUND, workers=2, cores=16.0)).costs
    assert slow.latency_s == pytest.approx(0.008, rel=0.05)
    more = predict(slow, Setting(cached=0.0, workers=8, cores=16.0)).samples_per_s
    assert more == pytest.approx(4 * predict(slow, Setting(cached=0.0, workers=2, cores=16.0)).samples_per_s)


def test_without_a_probe_full_storage_is_assumed() -> None:
    found = calibrate(runs_of(FETCH_BOUND, workers=8, cores=16.0, with_probe=False)).costs
    assert found.storage_bytes_per_s == pytest.approx(50e6)
    assert limits(found, Setting(cached=0.5, workers=8, cores=16.0))[Limit.STORAGE] == pytest.approx(1000.0)


BUDGETED = Costs(
    compute_s=0.0005, handover_s=0.0, preparation_s=0.0018, cpu_s=0.0015, latency_s=0.0, alone_s=0.0003,
    sample_bytes=100_000, storage_bytes_per_s=30e6,
)  # fmt: skip


def test_storage_with_a_budget_is_told_by_a_read_after_a_pause() -> None:
    """One reader without pauses sees no more than the bandwidth, from which a lone worker would be taken for slow."""
    seen = runs_of(BUDGETED, workers=2, cores=8.0)
    paced = Probe(read_s=100_000 / 30e6, bytes_per_s=30e6, paced_s=0.0003)
    found = calibrate(dataclasses.replace(seen, probe=paced)).costs
    assert found.alone_s == 0.0003
    assert found.storage_bytes_per_s == pytest.approx(30e6)
    one = Setting(cached=0.65, workers=1, cores=8.0)
    assert predict(found, one).samples_per_s == pytest.approx(1 / (0.0018 + 0.35 * 0.0003), rel=0.01)
    without = calibrate(dataclasses.replace(seen, probe=dataclasses.replace(paced, paced_s=None))).costs
    assert predict(without, one).samples_per_s < 0.8 * predict(found, one).samples_per_s


def test_cores_that_slow_each_other_are_told_by_one_worker_alone() -> None:
    work = WorkerTimes(samples=SAMPLES, busy_s=0.0024 * SAMPLES)
    seen = Observed(
        synthetic_s=0.0005, warm_s=0.0012, cold_s=0.0012, workers=2, cores=2.0, warm_work=work, cpu_s=0.0024,
        sample_bytes=0.0, lone_cpu_s=0.0018,
    )  # fmt: skip
    found = calibrate(seen).costs
    assert found.crowding == pytest.approx(0.0024 / 0.0018)
    alone = predict(found, Setting(cached=1.0, workers=1, cores=2.0)).samples_per_s
    assert alone == pytest.approx(1 / 0.0018, rel=0.01)
    assert predict(found, Setting(cached=1.0, workers=2, cores=2.0)).samples_per_s == pytest.approx(
        1 / 0.0012, rel=0.01
    )
