"""The what-if model against a simulation of loaders: what it says of settings that were not run."""

import itertools
import math
import os
import statistics
from dataclasses import replace

import pytest
from loading_simulation import BATCH, Job, Seen, simulate, synthetic_s

from everstep.dataloader.analysis.calibration_plan import Observed, Probe, calibrate
from everstep.dataloader.analysis.stall_plan import WorkerTimes
from everstep.dataloader.analysis.what_if_plan import Setting, predict

SAMPLE_BYTES = 100_000
SEEDS = int(os.environ.get("EVERSTEP_SIMULATED_RUNS", "1"))
SHARES, FACTORS = (0.0, 0.35, 0.65, 1.0), (1.0, 2.0)

JOBS = {
    "fetch": Job(compute_s=0.0005, preparation_s=0.002, transfer_s=0.002),
    "balanced": Job(compute_s=0.0005, preparation_s=0.002, transfer_s=0.001),
    "varied": Job(compute_s=0.0005, preparation_s=0.002, variation=0.5, transfer_s=0.001),
    "latency": Job(compute_s=0.0002, preparation_s=0.001, latency_s=0.008, transfer_s=0.0002),
    "cores": Job(compute_s=0.0005, preparation_s=0.002, variation=0.3, transfer_s=0.00125, cores=2.0),
    "computing": Job(
        compute_s=0.0, compute_cpu_s=0.0006, preparation_s=0.002, variation=0.3, transfer_s=0.001, cores=2.0
    ),
    "budget": Job(compute_s=0.0005, preparation_s=0.002, transfer_s=0.0034, budget_s=0.1, cores=4.0),
    "crowded": Job(
        compute_s=0.0005, preparation_s=0.0018, variation=0.2, transfer_s=0.0034, crowding=1.2, cores=2.0
    ),
    "rig": Job(
        compute_s=0.0005,
        preparation_s=0.0018,
        variation=0.2,
        transfer_s=0.0034,
        budget_s=0.1,
        crowding=1.2,
        cores=2.0,
    ),
    "trainer": Job(compute_s=0.002, preparation_s=0.002, variation=0.5, transfer_s=0.001),
}


def observed(job: Job) -> Observed:
    """Return the three runs of a job, and the probe of its storage, as the analysis has them."""
    warm, cold = simulate(replace(job, cached=1.0)), simulate(replace(job, cached=0.0))
    return Observed(
        synthetic_s=synthetic_s(job),
        warm_s=warm.sample_s,
        cold_s=cold.sample_s,
        workers=job.workers,
        cores=job.cores,
        warm_work=_work(warm),
        cpu_s=warm.cpu_s,
        trainer_cpu_s=job.compute_cpu_s,
        sample_bytes=SAMPLE_BYTES,
        lone_cpu_s=job.preparation_s if job.workers > 1 else None,
        probe=Probe(
            read_s=job.latency_s + job.transfer_s,
            bytes_per_s=SAMPLE_BYTES / job.transfer_s,
            paced_s=job.latency_s + max(0.0, job.transfer_s - job.budget_s),
        ),
    )


def _work(seen: Seen) -> WorkerTimes:
    count = 1000
    return WorkerTimes(
        samples=count,
        busy_s=count * seen.busy_s,
        fetch_s=count * seen.fetch_s,
        queued_s=count * seen.queued_s,
    )


def errors(job: Job, workers: tuple[int, ...]) -> dict[tuple[float, int, float], float]:
    """Return (share in the cache, workers, bandwidth) -> predicted over simulated speed, less 1."""
    costs = calibrate(observed(job)).costs
    found: dict[tuple[float, int, float], float] = {}
    for cached, count, factor in itertools.product(SHARES, workers, FACTORS):
        other = replace(job, cached=cached, workers=count, transfer_s=job.transfer_s / factor)
        speed = 1 / statistics.median(simulate(other, seed=1 + seed).sample_s for seed in range(SEEDS))
        bandwidth = factor * costs.storage_bytes_per_s
        setting = Setting(
            cached=cached,
            workers=count,
            cores=job.cores,
            storage_bytes_per_s=bandwidth if math.isfinite(bandwidth) else None,
        )
        found[cached, count, factor] = predict(costs, setting).samples_per_s / speed - 1
    return found


def test_a_simulated_job_by_hand() -> None:
    """Fetch and preparation add up in a worker, storage is shared, the trainer is the least of them here."""
    job = Job(compute_s=0.0005, preparation_s=0.002, transfer_s=0.001, cached=1.0, workers=2)
    assert simulate(job).sample_s == pytest.approx(0.001, rel=0.02)
    assert simulate(replace(job, workers=8)).sample_s == pytest.approx(0.0005, rel=0.02)
    assert simulate(replace(job, workers=0)).sample_s == pytest.approx(0.0025, rel=0.001)
    assert simulate(replace(job, workers=8, cores=2.0)).sample_s == pytest.approx(0.001, rel=0.02)
    cold = replace(job, cached=0.0)
    assert simulate(cold).sample_s == pytest.approx(0.0015, rel=0.02)
    assert simulate(replace(cold, workers=8)).sample_s == pytest.approx(0.001, rel=0.02)
    assert synthetic_s(job) == pytest.approx(0.0005, rel=0.01)
    assert BATCH == 16


@pytest.mark.parametrize("name", JOBS)
def test_other_settings_are_within_a_tenth_of_the_simulation(name: str) -> None:
    """24 settings of each job, from a calibration with two workers; none is off by more."""
    found = errors(JOBS[name], (1, 2, 3))
    worst = max(found, key=lambda setting: abs(found[setting]))
    assert abs(found[worst]) <= 0.10, f"{worst}: {found[worst]:+.1%}"
