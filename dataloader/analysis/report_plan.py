"""From three measured runs to the whole result: stalls, model, predictions, advice. Arithmetic only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .advice_plan import NOTABLE, advise
from .calibration_plan import Observed, Probe, calibrate, fills_cores
from .cold_plan import cold_reasons, warm_reasons
from .measured_format import (
    AdviceReport,
    Analysis,
    Measured,
    ModelReport,
    Phase,
    PredictionReport,
    RunReport,
    StallReport,
    WhatIf,
)  # fmt: skip
from .stall_plan import Stalls, WorkerTimes, split_step, stalls_of
from .what_if_plan import Costs, Peers, Setting, predict

PEER_CACHED = 0.35
PEER_BYTES_PER_S = 1.25e9
"""10 Gbit/s, what a node of a small cluster has."""
PEER_COUNTS = (0, 1, 2, 3)
STORAGE_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
WORKERS_MORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that was measured."""

    synthetic: Measured
    warm: Measured
    cold: Measured
    cores: float
    probe: Probe | None = None
    unseen_files: Sequence[str] = ()
    written_files: Sequence[str] = ()
    notes: Sequence[str] = ()
    sample_bytes: float | None = None
    """What a sample takes from storage, where no files tell."""

    def with_probe(self, probe: Probe | None) -> "Seen":
        """Return the same with what a probe of the storage found."""
        return replace(self, probe=probe)


def analysis_of(seen: Seen, *, subject: str, version: str) -> Analysis:
    """Return the whole result."""
    observed = observed_in(seen)
    costs = calibrate(observed).costs
    batch = batch_size(seen)
    loader = seen.warm.loader
    stalls = stalls_of(synthetic_s=observed.synthetic_s, warm_s=observed.warm_s, cold_s=observed.cold_s)
    now = Setting(cached=0.0, workers=loader.workers, cores=seen.cores)
    length = loader.dataset_length
    dataset_bytes = costs.sample_bytes * length if length and costs.sample_bytes else None
    advice = advise(stalls, costs, now, dataset_bytes=dataset_bytes)
    return Analysis(
        version=version,
        subject=subject,
        loader=loader,
        device=seen.warm.device,
        dataset_bytes=dataset_bytes,
        runs=[_run(each, seen, batch) for each in (seen.synthetic, seen.warm, seen.cold)],
        stalls=_stalls(stalls, batch),
        model=_model(costs, now),
        what_if=what_if(costs, now),
        advice=AdviceReport(
            bound=advice.bound.value, cached=advice.cached, workers=advice.workers,
            lacking_cores=advice.lacking_cores, samples_per_s=advice.samples_per_s, sentence=advice.sentence,
        ),
        unseen_files=list(seen.unseen_files),
        written_files=list(seen.written_files),
        notes=[
            *seen.notes,
            *(f"{each.phase.value} run: {note}" for each in (seen.warm, seen.cold) for note in each.notes),
            *_doubts(observed, stalls, seen),
        ],
    )  # fmt: skip


def _doubts(observed: Observed, stalls: Stalls, seen: Seen) -> list[str]:
    """Return a note where the runs differ otherwise than by what the workers saw of fetching."""
    work = worker_times(seen.cold)
    if observed.warm_s > (1.0 + NOTABLE) * observed.cold_s:
        return ["the warm run was slower than the cold one: the machine was busy otherwise; run it again"]
    ready = seen.warm.times.wait_s < NOTABLE * seen.warm.times.mean_s
    if ready and stalls.preparation_share >= NOTABLE and not fills_cores(observed):
        return [
            (
                "the trainer was slower in the warm run than in the synthetic one, though its batches were ready and"
                " the job left cores idle: the machine was busy otherwise; run it again"
            )
        ]
    if stalls.fetch_share < NOTABLE or not work.samples:
        return []
    explained_s = work.fetch_s / work.samples / max(1, observed.workers)
    if explained_s >= stalls.fetch_stall_s / 2:
        return []
    return [
        (
            "the cold run was slower than the warm one by more than workers waited for files: the machine was busy"
            " otherwise, or the dataset reads in threads of its own; run it again"
        )
    ]


def batch_size(seen: Seen) -> float:
    """Return the samples of a mean batch: of the longest look at the loader."""
    return max(seen.warm.loader.batch_size, 1e-9)


def observed_in(seen: Seen) -> Observed:
    """Return the runs in seconds per sample, as the calibration takes them."""
    batch = batch_size(seen)
    warm, cold = seen.warm, seen.cold
    worker_cpu_s = warm.work.cpu_s / warm.work.samples if warm.work.samples and warm.loader.workers else 0.0
    trainer_cpu_s = warm.trainer_cpu_s / (warm.times.count * batch)
    read = max(cold.work.storage_bytes, cold.work.file_bytes)
    size = read / cold.work.samples if cold.work.samples else 0.0
    return Observed(
        synthetic_s=seen.synthetic.times.mean_s / batch,
        warm_s=warm.times.mean_s / batch,
        cold_s=cold.times.mean_s / batch,
        workers=warm.loader.workers,
        cores=seen.cores,
        warm_work=worker_times(warm),
        cpu_s=worker_cpu_s + trainer_cpu_s,
        trainer_cpu_s=trainer_cpu_s,
        lone_cpu_s=warm.lone_cpu_s,
        sample_bytes=size if seen.sample_bytes is None else seen.sample_bytes,
        probe=seen.probe,
    )


def worker_times(measured: Measured) -> WorkerTimes:
    """Return what the workers of a run did, as the arithmetic takes it."""
    work = measured.work
    return WorkerTimes(
        samples=round(work.samples),
        busy_s=max(0.0, work.busy_s),
        fetch_s=min(max(0.0, work.fetch_s), max(0.0, work.busy_s)),
        queued_s=max(0.0, work.queued_s),
    )


def what_if(costs: Costs, now: Setting) -> WhatIf:
    """Return the predictions that a report shows: one thing changed in each table."""
    counts = sorted(
        {*range(max(0, now.workers - 2), now.workers + WORKERS_MORE + 1), max(1, round(now.cores))}
    )
    storage = costs.storage_bytes_per_s
    return WhatIf(
        cache=[_predicted(costs, now, cached=percent / 100) for percent in range(0, 101, 5)],
        workers=[_predicted(costs, now, cached=1.0, workers=count) for count in counts],
        storage=[
            _predicted(costs, now, storage=factor * storage)
            for factor in STORAGE_FACTORS
            if math.isfinite(storage)
        ],
        peers=[
            _predicted(
                costs, now, cached=PEER_CACHED,
                peers=Peers(count=count, cached=PEER_CACHED, bytes_per_s=PEER_BYTES_PER_S),
            )
            for count in PEER_COUNTS
        ],
        peer_cached=PEER_CACHED,
        peer_bytes_per_s=PEER_BYTES_PER_S,
    )  # fmt: skip


def _predicted(
    costs: Costs,
    now: Setting,
    *,
    cached: float = 0.0,
    workers: int | None = None,
    storage: float | None = None,
    peers: Peers | None = None,
) -> PredictionReport:
    setting = Setting(
        cached=cached,
        workers=now.workers if workers is None else workers,
        cores=now.cores,
        storage_bytes_per_s=storage,
        peers=peers,
    )
    found = predict(costs, setting)
    bandwidth = costs.storage_bytes_per_s if storage is None else storage
    return PredictionReport(
        cached=cached, workers=setting.workers,
        storage_bytes_per_s=bandwidth if math.isfinite(bandwidth) else None,
        peers=peers.count if peers else 0, samples_per_s=found.samples_per_s, limit=found.limit.value,
    )  # fmt: skip


def _run(measured: Measured, seen: Seen, batch: float) -> RunReport:
    times, work = measured.times, worker_times(measured)
    split = split_step(step_s=times.mean_s, wait_s=times.wait_s, copy_s=measured.copy_s, work=work)
    reasons = _reasons(measured, seen)
    return RunReport(
        phase=measured.phase, samples_per_s=batch / times.mean_s, times=times, fetch_s=split.fetch_s,
        preparation_s=split.preparation_s, copy_s=split.copy_s, compute_s=split.compute_s,
        is_bound=bool(reasons), reasons=reasons,
    )  # fmt: skip


def _reasons(measured: Measured, seen: Seen) -> list[str]:
    work = measured.work
    match measured.phase:
        case Phase.SYNTHETIC:
            return []
        case Phase.WARM:
            return warm_reasons(file_bytes=work.file_bytes, storage_bytes=work.storage_bytes)
        case Phase.COLD:
            return cold_reasons(
                file_bytes=work.file_bytes,
                storage_bytes=work.storage_bytes,
                unseen=seen.unseen_files,
                kept=measured.kept_in_memory,
            )


def _stalls(stalls: Stalls, batch: float) -> StallReport:
    return StallReport(
        compute_s=batch * stalls.compute_s, preparation_stall_s=batch * stalls.preparation_stall_s,
        fetch_stall_s=batch * stalls.fetch_stall_s, preparation_share=stalls.preparation_share,
        fetch_share=stalls.fetch_share,
    )  # fmt: skip


def _model(costs: Costs, now: Setting) -> ModelReport:
    bandwidth = costs.storage_bytes_per_s
    return ModelReport(
        compute_s=costs.compute_s, handover_s=costs.handover_s, preparation_s=costs.preparation_s,
        cpu_s=costs.cpu_s, trainer_cpu_s=costs.trainer_cpu_s, latency_s=costs.latency_s,
        sample_bytes=costs.sample_bytes, alone_s=costs.alone_s, crowding=costs.crowding,
        storage_bytes_per_s=bandwidth if math.isfinite(bandwidth) else None, cores=now.cores, workers=now.workers,
    )  # fmt: skip
