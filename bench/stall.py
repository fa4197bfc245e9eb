"""make bench-stall: what a checkpoint costs training, beside copying the state once, and beside what others stop for.

Ratios taken in one run (bench/paired.py), with real steps of a small GPT, on the CPU and on a GPU where there is one.
`memcpy` is the state copied once by one thread into memory that has been written before: the least that any snapshot
must do. On a GPU it is the best copy to the host: one tensor as large as the state, into memory that torch has pinned.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from dataclasses import dataclass
from pathlib import Path

import torch
from boundary import boundary_rows
from floors import CheckedCopy, WrittenCopy
from gpt import Job, job_of
from meter import cpu_s
from node import hook_daemon
from paired import PAIRS_MIN, Row, interleaved, publish, ratios, row, write
from persist_rows import scratch
from plot import draw_results
from rich.console import Console
from stall_cuda import PinnedCopy, cuda_rows
from stall_restore import restore_rows
from stall_rivals import rivals

import everstep
from everstep.hook.report import Report
from everstep.hook.run import Run

MIB = 2**20
SIZES_MIB = (64, 512, 2048)
BATCHES = {64: 4, 512: 2, 2048: 1}
"""So that forward and backward take longer than the copy."""
STALL_MAX, STALL_MAX_S = 0.10, 0.002
WHOLE_MAX = 1.1
BUDGET = 0.035
CORES_MAX = 1.0
SEAL_S = 60.0
"""No snapshot takes so long to be sealed."""
FITS_MAX = 1.0
SLOTS = 3
"""One is copied, one written, one a moment from free: no checkpoint at each step is skipped."""
NEVER = 10**9
WHOLE_S = 90.0
"""The whole cost of a checkpoint is the difference of two long times: of many pairs, as many as this allows."""
CUDA_BATCHES = {64: (512, 32), 512: (128,), 2048: (32,)}
"""So that the GPU is busy for a tenth of a second in each step; and one so small that it waits for Python."""
CUDA_WHOLE_S = 10.0
"""The same on a GPU, where neither time varies much."""
CPU_CHECKPOINTS = 16
CYCLE_MIN = 4
"""Steps of one arm, at least; they must hold the copy and the write."""
CUDA_SLOTS = CYCLE_MIN + 2
"""A GPU's steps may be shorter than a write: one for each checkpoint of `each_step_rows`."""
WITHOUT_CUDA = {
    "CUDA: rate of the copy, slower training, memory added, stall": "no CUDA device",
    "stall / DCP async_save, process with pinned staging": "no CUDA device",
}

console = Console()


class Memcpy:
    """The state copied once into warm memory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._targets = [
            torch.zeros_like(each, memory_format=torch.contiguous_format) for each in job.tensors()
        ]

    def __call__(self) -> float:
        """Return the seconds that it took."""
        sources = self._job.tensors()
        began_s = time.perf_counter()
        for target, source in zip(self._targets, sources, strict=True):
            memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        return time.perf_counter() - began_s


Copy = Memcpy | PinnedCopy


@dataclass(frozen=True, slots=True)
class Stall:
    """What stood still for one checkpoint, in seconds."""

    visible_s: float
    """Eager copy, guard and waits."""
    whole_s: float
    """With all else that its boundary and the next one took, as `run.report()` counts it."""


class Trained:
    """A job attached to everstep."""

    def __init__(self, job: Job, run: Run) -> None:
        self.job, self.run = job, run

    def step(self) -> None:
        """One iteration and its boundary."""
        self.job.step()
        self.run.step()

    def stall_s(self) -> float:
        """Return how long training stood still for one checkpoint, all told."""
        return self.stall().whole_s

    def stall(self) -> Stall:
        """Return how long training stood still for one checkpoint."""
        self.job.synchronize()
        before = self.run.report()
        self.run.checkpoint()
        self.step()
        self.step()
        assert self.run.wait()
        if self.job.device.type == "cuda":  # what it waited is known at the next boundary
            self.job.synchronize()
            self.step()
        after = self.run.report()
        assert after.checkpoints_complete == before.checkpoints_complete + 1, after
        return Stall(_visible_s(after) - _visible_s(before), after.stall_s - before.stall_s)

    def passes_s(self) -> float:
        """Return the time of one forward and backward."""
        self.job.synchronize()
        began_s = time.perf_counter()
        self.job.passes_s()
        self.job.synchronize()
        return time.perf_counter() - began_s

    def steps_s(self, count: int, *, checkpoint: bool) -> float:
        """Return the time of so many steps, the first of which ends with a checkpoint."""
        self.job.synchronize()
        began_s = time.perf_counter()
        if checkpoint:
            self.run.checkpoint()
        for _ in range(count):
            self.step()
        self.job.synchronize()
        took_s = time.perf_counter() - began_s
        assert self.run.wait()
        return took_s


def _visible_s(report: Report) -> float:
    return report.eager_s + report.guard_s + report.wait_s + report.cuda_wait_s


def stall_rows(name: str, trained: Trained, memcpy: Copy, pairs: int) -> list[Row]:
    """Compare one checkpoint's stall with one copy of the state."""
    stalls: list[Stall] = []

    def visible_s() -> float:
        stalls.append(trained.stall())
        return stalls[-1].visible_s

    found = interleaved(visible_s, memcpy, pairs)
    copy_s = statistics.median(theirs for _, theirs in found)
    passes_s = [trained.passes_s() for _ in range(pairs)]
    return [
        row(
            f"{name}: memcpy / forward and backward",
            [copy_s / pass_s for pass_s in passes_s],
            goal=FITS_MAX,
            at_most=True,
        ),
        row(
            f"{name}: stall / memcpy",
            ratios(found),
            goal=max(STALL_MAX, STALL_MAX_S / copy_s),
            at_most=True,
        ),
        row(f"{name}: stall", [each.visible_s * 1e3 for each in stalls], goal=None, unit="ms"),
        row(
            f"{name}: stall and all else of two boundaries",
            [each.whole_s * 1e3 for each in stalls],
            goal=None,
            unit="ms",
        ),
    ]


def rival_rows(name: str, trained: Trained, folder: Path, pairs: int) -> Generator[list[Row]]:
    """Compare one checkpoint's stall with what others stop for."""
    with rivals(trained.job, folder) as others:
        for rival, stall in others.items():
            stall()  # staging memory is made at its first use
            pair = ratios(interleaved(trained.stall_s, stall, pairs))
            yield [row(f"{name}: stall / {rival}", pair, goal=1.0, at_most=True)]


def whole_cost_row(name: str, trained: Trained, memcpy: Copy, pairs: int) -> Row:
    """Compare what a checkpoint adds to some steps, all told, with one copy of the state."""
    count, cycle_s = _cycle(trained)
    whole_s = CUDA_WHOLE_S if trained.job.device.type == "cuda" else WHOLE_S
    copies_s: list[float] = []

    def without() -> float:
        copies_s.append(memcpy())
        return trained.steps_s(count, checkpoint=False)

    found = interleaved(
        lambda: trained.steps_s(count, checkpoint=True), without, max(pairs, round(whole_s / (2 * cycle_s)))
    )
    costs = [(ours - theirs) / copy_s for (ours, theirs), copy_s in zip(found, copies_s, strict=True)]
    return row(f"{name}: whole cost / memcpy, {count} steps", costs, goal=WHOLE_MAX, at_most=True)


def processor_row(name: str, trained: Trained, pairs: int) -> Row:
    """Return how many cores the trainer uses from a checkpoint's boundary until its snapshot is sealed.

    Training stands still meanwhile, so that nothing else uses a processor.
    """

    def cores() -> float:
        run = trained.run
        trained.job.synchronize()
        began_s, used_s = time.perf_counter(), time.process_time()
        run.checkpoint()
        run.step()
        assert run._snapshotter.drain(SEAL_S)  # pyright: ignore[reportPrivateUsage] - nothing else waits so short
        used_s, took_s = time.process_time() - used_s, time.perf_counter() - began_s
        assert run.wait()
        return used_s / took_s

    what = f"{name}: processor time / time from the boundary until it is sealed"
    return row(what, [cores() for _ in range(pairs)], goal=CORES_MAX, at_most=True)


def processors_row(name: str, trained: Trained, memcpy: Memcpy | PinnedCopy, daemon: int, pairs: int) -> Row:
    """Compare the processor time of trainer and daemon for a checkpoint, shared by all cores, with one copy.

    Where training keeps every core busy no whole cost can be less.
    """

    def used_s() -> float:
        began_s = time.process_time() + cpu_s(daemon)
        for _ in range(CPU_CHECKPOINTS):  # the kernel counts a process's time in hundredths of a second
            trained.run.checkpoint()
            trained.run.step()
            assert trained.run.wait()
        return (time.process_time() + cpu_s(daemon) - began_s) / CPU_CHECKPOINTS / (os.cpu_count() or 1)

    pair = ratios(interleaved(used_s, memcpy, pairs))
    return row(f"{name}: processor time of trainer and daemon / cores / memcpy", pair, goal=None)


def _cycle(trained: Trained) -> tuple[int, float]:
    """Return as many steps as one checkpoint and its write take, and some more; and the seconds that they take."""
    began_s = time.perf_counter()
    trained.run.checkpoint()
    trained.step()
    assert trained.run.wait()
    held_s = time.perf_counter() - began_s
    step_s = trained.steps_s(1, checkpoint=False)
    count = max(CYCLE_MIN, round(1.5 * held_s / step_s))
    return count, count * step_s


def each_step_rows(name: str, trained: Trained, memcpy: Copy, pairs: int) -> list[Row]:
    """Compare training that takes a checkpoint at each step with training that takes none.

    Four times as much is to be seen as in the whole cost of one in four steps, beside the same noise.

    The clock begins after a first checkpoint, so that beside each step within it a copy is made. Each step is waited
    for, as by training that reads its loss: a host ahead of its GPU is at the next boundary before the copy begins.
    """
    count = CYCLE_MIN
    run = trained.run

    def steps(*, checkpoint: bool) -> float:
        before = run.report().checkpoints_sealed
        began_s = 0.0
        for _ in range(count + 1):
            if checkpoint:
                run.checkpoint()
            trained.step()
            trained.job.synchronize()
            began_s = began_s or time.perf_counter()
        took_s = time.perf_counter() - began_s
        assert run.wait()
        assert run.report().checkpoints_sealed == before + checkpoint * (count + 1), run.report()
        return took_s

    copies_s: list[float] = []

    def without() -> float:
        copies_s.append(memcpy())
        return steps(checkpoint=False)

    found = interleaved(lambda: steps(checkpoint=True), without, pairs)
    step_s = statistics.median(theirs for _, theirs in found) / count
    copy_s = statistics.median(copies_s)
    takes_cpu = trained.job.device.type == "cpu"  # a GPU's copy engine takes no core
    allowed = BUDGET + (copy_s / (torch.get_num_threads() * step_s) if takes_cpu else 0.0)
    slower = [ratio - 1 for ratio in ratios(found)]
    costs = [(ours - theirs) / count / copy_s for (ours, theirs), copy_s in zip(found, copies_s, strict=True)]
    return [
        row(f"{name}: slower with a checkpoint at each step", slower, goal=allowed, at_most=True),
        row(f"{name}: whole cost / memcpy, one at each step", costs, goal=WHOLE_MAX, at_most=True),
    ]


def floor_rows(
    name: str, trained: Trained, memcpy: Copy, pairs: int, *, what: str, act: Callable[[], object]
) -> list[Row]:
    """Compare training beside which a thread does nothing but `act` at each step with training alone.

    No snapshot that has to do as much can cost less: it says what of the rows before is the machine's and not ours.
    """
    count = CYCLE_MIN
    copies_s: list[float] = []
    with ThreadPoolExecutor(1) as pool:

        def beside() -> float:
            trained.job.synchronize()
            began_s = time.perf_counter()
            for _ in range(count):
                acting = pool.submit(act)
                trained.step()
                acting.result()
            trained.job.synchronize()
            return time.perf_counter() - began_s

        def alone() -> float:
            copies_s.append(memcpy())
            return trained.steps_s(count, checkpoint=False)

        found = interleaved(beside, alone, pairs)
    costs = [(ours - theirs) / count / copy_s for (ours, theirs), copy_s in zip(found, copies_s, strict=True)]
    return [
        row(f"{name}: slower beside {what} at each step", [each - 1 for each in ratios(found)], goal=None),
        row(f"{name}: cost of {what} / memcpy", costs, goal=None),
    ]


def measure(mib: int, place: Path, pairs: int, devices: Sequence[str]) -> Generator[list[Row]]:
    """Yield the rows of one size."""
    if "cpu" in devices:
        job = job_of(mib * MIB, batch=BATCHES[mib])
        yield from training_rows(f"{job.size_bytes / MIB:.0f} MiB", job, place, pairs)
        with scratch(place) as folder, hook_daemon(folder):
            storage = folder / "store"
            storage.mkdir()
            yield restore_rows(f"{mib} MiB", mib, storage, pairs)
    if "cuda" in devices:
        for batch in CUDA_BATCHES[mib]:
            job = job_of(mib * MIB, batch=batch, device="cuda")
            name = f"CUDA, {job.size_bytes / MIB:.0f} MiB, batch {batch}"
            yield cuda_rows(name, job, place, pairs)
            yield from training_rows(name, job, place, pairs)


def training_rows(name: str, job: Job, place: Path, pairs: int) -> Generator[list[Row]]:
    """Yield the rows of one state about training on the CPU or on a GPU."""
    on_cuda = job.device.type == "cuda"
    memcpy = PinnedCopy(job) if on_cuda else Memcpy(job)
    memcpy()
    slots = CUDA_SLOTS if on_cuda else SLOTS
    with scratch(place) as folder, hook_daemon(folder) as daemon:
        storage = folder / "store"
        storage.mkdir()
        with everstep.attach(
            "stall", model=job.model, optimizer=job.optimizer, storage=storage, every=NEVER, slots=slots
        ) as run:
            trained = Trained(job, run)
            trained.step()
            run.wait()  # the arena is there
            trained.stall_s()
            yield stall_rows(name, trained, memcpy, pairs)
            yield [whole_cost_row(name, trained, memcpy, pairs)]
            yield [processor_row(name, trained, pairs)]
            if not on_cuda:  # a GPU trains on while processors work
                yield [processors_row(name, trained, memcpy, daemon, pairs)]
            yield each_step_rows(name, trained, memcpy, pairs)
            yield floor_rows(name, trained, memcpy, pairs, what="a bare copy", act=memcpy)
            if not on_cuda:
                checked = CheckedCopy(job)
                yield floor_rows(name, trained, memcpy, pairs, what="a copy with checksums", act=checked)
                with WrittenCopy(job, folder / "written") as written:
                    what = "a copy with checksums, written"
                    yield floor_rows(name, trained, memcpy, pairs, what=what, act=written)
            yield from rival_rows(name, trained, folder, pairs)


def main() -> int:
    """Run the benchmark; exit status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, default=Path("/var/tmp"), help="a directory for checkpoints")
    parser.add_argument("--mib", type=int, nargs="+", choices=SIZES_MIB, default=SIZES_MIB)
    parser.add_argument("--pairs", type=int, default=PAIRS_MIN)
    parser.add_argument("--output", type=Path, default=Path("build/bench/stall.json"))
    found = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=found, default=found)
    args = parser.parse_args()
    left_out = {} if "cuda" in args.devices else WITHOUT_CUDA
    rows = boundary_rows(args.devices)
    for mib in args.mib:
        for found in measure(mib, args.place, args.pairs, args.devices):
            rows += found
            write(rows, args.output, left_out)
    met = publish("everstep bench-stall", rows, args.output, left_out)
    draw_results([args.output], args.output.with_suffix(".png"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
