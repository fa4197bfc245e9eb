"""The rows of `make bench-stall` that need a GPU: how fast a snapshot leaves it, and what training notices meanwhile.

The best possible copy is the whole state as one tensor into memory that torch has pinned itself. Times of copies are
the device's, from before the first of them until all bytes are there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import Job
from node import hook_daemon
from paired import Row, interleaved, ratios, row
from persist_rows import scratch

import everstep
from everstep.hook.cuda_batch import CudaBatch
from everstep.hook.cuda_turns import Turns
from everstep.hook.run import Run

NEVER = 10**9
RATE_MIN = 0.90
SLOWER_MAX = 0.02
STEPS_MIN = 4
READBACKS = 15


class PinnedCopy:
    """As many bytes as the state's copied once from a GPU to the host, on a stream of their own."""

    def __init__(self, job: Job) -> None:
        self._source = torch.empty(job.size_bytes, dtype=torch.uint8, device=job.device)
        self._target = torch.empty(job.size_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(job.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))

    def enqueue(self) -> None:
        """Begin it."""
        self._begin.record(self._stream)
        with torch.cuda.stream(self._stream):
            self._target.copy_(self._source, non_blocking=True)
        self._end.record(self._stream)

    def __call__(self) -> float:
        """Return the seconds that it took the GPU."""
        self._stream.synchronize()
        self.enqueue()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000


def cuda_rows(name: str, job: Job, place: Path, pairs: int) -> list[Row]:
    """Return the rows of one state."""
    with scratch(place) as folder, hook_daemon(folder):
        storage = folder / "store"
        storage.mkdir()
        with everstep.attach(
            "cuda", model=job.model, optimizer=job.optimizer, storage=storage, every=NEVER
        ) as run:
            _step(job, run)
            run.wait()  # the arena is there
            _copy(job, run)
            extra_bytes = _extra_bytes(job, run)
            pinned = PinnedCopy(job)
            pinned()
            copies: list[_Copy] = []

            def rate() -> float:
                copies.append(_copy(job, run))
                return 1 / copies[-1].copy_s

            rates = interleaved(rate, lambda: 1 / pinned(), pairs)
            from_boundary = [
                each.copy_s / each.from_boundary_s * ratio
                for each, ratio in zip(copies, ratios(rates), strict=True)
            ]
            copy_s = copies[-1].from_boundary_s
            steps = max(STEPS_MIN, round(2 * copy_s / _steps_s(job, run, 1, checkpoint=False)))
            slower = interleaved(
                lambda: _steps_s(job, run, steps, checkpoint=True),
                lambda: _steps_s(job, run, steps, checkpoint=False),
                pairs,
            )
            readbacks = readback_rows(name, job, run, pinned)
            notes = run.report().notes
    for note in notes:
        print(note)
    return [
        row(f"{name}: D2H rate / best pinned copy", ratios(rates), goal=RATE_MIN),
        row(f"{name}: the same from the boundary on, the GPU idle", from_boundary, goal=None),
        row(
            f"{name}: slower beside the copy, {steps} steps",
            [ratio - 1 for ratio in ratios(slower)],
            goal=SLOWER_MAX,
            at_most=True,
        ),
        row(f"{name}: GPU memory added", [extra_bytes / 2**20], goal=0.0, at_most=True, unit="MiB"),
        *readbacks,
    ]


def readback_rows(name: str, job: Job, run: Run, pinned: PinnedCopy) -> list[Row]:
    """Return how long reading a number back from the device takes beside a checkpoint's copy, or a large tensor's."""
    number = torch.ones((), device=job.device)

    def beside(copy: Callable[[], object]) -> list[float]:
        taken: list[float] = []
        for _ in range(READBACKS):
            torch.cuda.synchronize()
            copy()
            began_s = time.perf_counter()
            number.item()
            taken.append(1000 * (time.perf_counter() - began_s))
            assert run.wait()
        return taken

    def checkpoint() -> None:
        """Take one, all of which is enqueued."""
        run.checkpoint()
        run.step()
        run._snapshotter._copier.guard_enqueuing()  # pyright: ignore[reportPrivateUsage]

    what = f"{name}: a number read back"
    return [
        row(f"{what} beside the copy", beside(checkpoint), goal=None, unit="ms"),
        row(f"{what} beside one large copy", beside(pinned.enqueue), goal=None, unit="ms"),
        row(f"{what} beside nothing", beside(lambda: None), goal=None, unit="ms"),
    ]


def _step(job: Job, run: Run) -> None:
    job.step()
    run.step()


@dataclass(frozen=True, slots=True)
class _Copy:
    """How long a checkpoint's copy took a GPU that had nothing else to do: alone, and with what came before it."""

    copy_s: float
    from_boundary_s: float


def _copy(job: Job, run: Run) -> _Copy:
    torch.cuda.synchronize()
    before = run.report()
    begin, to_host = torch.cuda.Event(enable_timing=True), CudaBatch.to_host

    def noted(self: CudaBatch, turns: Turns) -> None:
        begin.record(turns.main)
        to_host(self, turns)

    CudaBatch.to_host = noted
    try:
        run.checkpoint()
        run.step()
        assert run.wait()
    finally:
        CudaBatch.to_host = to_host
    assert run.report().checkpoints_complete == before.checkpoints_complete + 1
    (passage,) = run._snapshotter._cuda._passages.values()  # pyright: ignore[reportPrivateUsage] - nobody else tells
    end = passage.ended
    assert end is not None
    return _Copy(begin.elapsed_time(end) / 1000, passage.boundary.elapsed_time(end) / 1000)


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
