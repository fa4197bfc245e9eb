"""The rows of `make bench-stall` that need a GPU: how fast a snapshot leaves it, and what training notices meanwhile.

The best possible copy is the whole state as one tensor into memory that torch has pinned itself.
"""

import time
from pathlib import Path

import torch
from gpt import Job, job_of
from node import hook_daemon
from paired import Row, interleaved, ratios, row
from persist_rows import scratch

import everstep
from everstep.hook.run import Run

NEVER = 10**9
RATE_MIN = 0.90
SLOWER_MAX = 0.02
BATCH = 32
"""So that a step is longer than the copy: then nothing but bandwidth is shared."""
STEPS_MIN = 4


def cuda_rows(mib: int, place: Path, pairs: int) -> list[Row]:
    """Return the rows of one size."""
    job = job_of(mib * 2**20, batch=BATCH, device="cuda")
    name = f"CUDA, {job.size_bytes / 2**20:.0f} MiB"
    with scratch(place) as folder, hook_daemon(folder):
        storage = folder / "store"
        storage.mkdir()
        with everstep.attach(
            "cuda", model=job.model, optimizer=job.optimizer, storage=storage, every=NEVER
        ) as run:
            _step(job, run)
            run.wait()  # the arena is there
            _copy_s(job, run)
            extra_bytes = _extra_bytes(job, run)
            rates = interleaved(lambda: 1 / _copy_s(job, run), lambda: 1 / _pinned_s(job), pairs)
            steps = max(STEPS_MIN, round(2 * _copy_s(job, run) / _steps_s(job, run, 1, checkpoint=False)))
            slower = interleaved(
                lambda: _steps_s(job, run, steps, checkpoint=True),
                lambda: _steps_s(job, run, steps, checkpoint=False),
                pairs,
            )
            notes = run.report().notes
    for note in notes:
        print(note)
    return [
        row(f"{name}: D2H rate / best pinned copy", ratios(rates), goal=RATE_MIN),
        row(
            f"{name}: slower beside the copy, {steps} steps",
            [ratio - 1 for ratio in ratios(slower)],
            goal=SLOWER_MAX,
            at_most=True,
        ),
        row(f"{name}: GPU memory added", [extra_bytes / 2**20], goal=0.0, at_most=True, unit="MiB"),
    ]


def _step(job: Job, run: Run) -> None:
    job.step()
    run.step()


def _copy_s(job: Job, run: Run) -> float:
    """Return how long the copy of one checkpoint took while the GPU had nothing else to do."""
    torch.cuda.synchronize()
    before = run.report()
    run.checkpoint()
    run.step()
    assert run.wait()
    after = run.report()
    assert after.checkpoints_complete == before.checkpoints_complete + 1, after
    return after.copy_s - before.copy_s


def _pinned_s(job: Job) -> float:
    source = torch.empty(job.size_bytes, dtype=torch.uint8, device=job.device)
    target = torch.empty(job.size_bytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def _steps_s(job: Job, run: Run, count: int, *, checkpoint: bool) -> float:
    """Return the time of so many steps, the first of which begins beside a copy."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    if checkpoint:
        run.checkpoint()
        run.step()
    for _ in range(count):
        _step(job, run)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    assert run.wait()
    return took_s


def _extra_bytes(job: Job, run: Run) -> float:
    """Return by how much a step with a checkpoint beside it takes more GPU memory than one without.

    As asked for: blocks that torch's allocator gives differ by up to a MiB from one step to the next.
    """
    peaks: list[int] = []
    for checkpoint in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _steps_s(job, run, 1, checkpoint=checkpoint)
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return peaks[1] - peaks[0]
