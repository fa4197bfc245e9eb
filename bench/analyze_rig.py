"""Errors of the what-if model: predicted from one calibration, against runs of every other setting.

    sudo python bench/analyze_rig.py                 # a throttled drive (bench/rig.py), files in or out of memory
    python bench/analyze_rig.py --simulated          # a token bucket instead of a drive; needs no root

The calibration is `StallAnalyzer` on CALIBRATED_WORKERS workers: three runs. Then every setting (share in the cache,
workers, bandwidth) is run RUNS times, interleaved so that no drift favours one, and its median is compared with the
prediction. One setting is run twice as often: the difference of its two medians is the A/A spread, below which an error
says nothing. A share in the cache is the page cache: all files leave memory, then that share of them is read.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rig
import torch
from paired import Row, publish, row
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from everstep.dataloader.analysis import StallAnalyzer
from everstep.dataloader.analysis.measured_format import Analysis
from everstep.dataloader.analysis.page_cache import drop
from everstep.dataloader.analysis.what_if_plan import Costs, Setting, predict

RUNS = 5
CALIBRATED_WORKERS = 2
EPOCHS = 4
"""Of each run of the calibration: a second alone differs from the next by more than the goal."""
SAMPLE_BYTES = 100_000
SAMPLES = 1_000
BATCH = 16
WARMUP = 8
GOAL = 0.10
ROOM_BYTES = 400 * rig.MB
MB_S = 30.0
WORK = 12
SHARES, WORKERS, FACTORS = (0.0, 0.35, 0.65, 1.0), (1, 2, 3), (1.0, 2.0)
"""24 settings; the bandwidth is that of the calibration times a factor."""
FEW_SHARES, FEW_WORKERS = (0.0, 0.35, 0.65), (1, 3)
"""12 settings, none of them the calibration's."""


@dataclass(frozen=True, slots=True)
class Config:
    """One setting of the bench."""

    cached: float
    workers: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    shares: Sequence[float] = SHARES
    workers: Sequence[int] = WORKERS
    factors: Sequence[float] = FACTORS
    runs: int = RUNS
    work: int = WORK

    def settings(self) -> list[Config]:
        """Return all settings."""
        return [Config(*each) for each in itertools.product(self.shares, self.workers, self.factors)]


class Storage:
    """Where so many samples are: in files, or in a token bucket that all workers share."""

    def __init__(
        self, count: int, folder: Path | None, bytes_per_s: float, throttle: Callable[[float], None]
    ) -> None:
        self.count = count
        self.folder = folder
        self.bytes_per_s = bytes_per_s
        self._throttle = throttle
        self.state = torch.zeros(
            3, dtype=torch.float64
        ).share_memory_()  # free at, bytes per second, share cached
        self.state[1] = bytes_per_s
        self.lock = multiprocessing.Lock()

    def set(self, cached: float, factor: float) -> None:
        """Make the storage as a setting wants it."""
        self.state[1], self.state[2] = factor * self.bytes_per_s, cached
        if self.folder is None:
            return
        self._throttle(factor * self.bytes_per_s)
        paths = sorted(map(str, self.folder.iterdir()))
        drop(paths)
        random.Random(0).shuffle(paths)
        self._throttle(0.0)
        for path in paths[: round(cached * len(paths))]:
            Path(path).read_bytes()
        self._throttle(factor * self.bytes_per_s)

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        if self.folder is not None:
            return (self.folder / f"{index:05}").read_bytes()
        if (index * 0.6180339887) % 1.0 >= float(self.state[2]):
            with self.lock:
                free_at = max(time.monotonic(), float(self.state[0])) + SAMPLE_BYTES / float(self.state[1])
                self.state[0] = free_at
            time.sleep(max(0.0, free_at - time.monotonic()))
        return bytes(SAMPLE_BYTES)


class Prepared(Dataset[torch.Tensor]):
    """A read and a fixed amount of computing for each sample."""

    def __init__(self, storage: Storage, work: int) -> None:
        self.storage = storage
        self.work = work

    def __len__(self) -> int:
        return self.storage.count

    def __getitem__(self, index: int) -> torch.Tensor:
        raw = self.storage.read(index)
        sample = torch.frombuffer(bytearray(raw[:65536]), dtype=torch.uint8).float().view(256, 256)
        for _ in range(self.work):
            sample = (sample * 1.01).sin()
        return sample[:64, :64]


def loader_of(storage: Storage, workers: int, work: int) -> DataLoader[torch.Tensor]:
    """Return the loader of a setting."""
    return DataLoader(Prepared(storage, work), batch_size=BATCH, shuffle=True, num_workers=workers)


def step(batch: torch.Tensor) -> None:
    """Compute: a device's work, during which the processor is free."""
    del batch
    time.sleep(BATCH * 0.0005)


def samples_per_s(storage: Storage, config: Config, work: int) -> float:
    """Run one epoch of a setting and return its speed, its first batches not counted."""
    storage.set(config.cached, config.factor)
    begun_s, count = 0.0, 0
    for number, batch in enumerate(loader_of(storage, config.workers, work)):
        if number == WARMUP:
            begun_s = time.perf_counter()
        step(batch)
        count += number >= WARMUP
    return BATCH * count / (time.perf_counter() - begun_s)


def calibrated(storage: Storage, work: int) -> Analysis:
    """Return what three runs say, and of files a probe of the storage."""
    storage.set(1.0, 1.0)
    steps, loader = (
        EPOCHS * (storage.count // BATCH - WARMUP - 1),
        loader_of(storage, CALIBRATED_WORKERS, work),
    )
    if storage.folder is not None:
        return StallAnalyzer(step, loader).run(steps=steps, warmup=WARMUP)
    return StallAnalyzer(
        step,
        loader,
        make_cold=lambda: storage.set(0.0, 1.0),
        make_warm=lambda: storage.set(1.0, 1.0),
        sample_bytes=SAMPLE_BYTES,
    ).run(steps=steps, warmup=WARMUP)


def costs_of(found: Analysis) -> Costs:
    """Return the model of a result."""
    model = found.model
    assert model.storage_bytes_per_s is not None
    return Costs(
        compute_s=model.compute_s,
        handover_s=model.handover_s,
        preparation_s=model.preparation_s,
        cpu_s=model.cpu_s,
        trainer_cpu_s=model.trainer_cpu_s,
        latency_s=model.latency_s,
        sample_bytes=model.sample_bytes,
        storage_bytes_per_s=model.storage_bytes_per_s,
        alone_s=model.alone_s,
        crowding=model.crowding,
    )


@contextmanager
def storage_on_rig(mb_s: float, count: int) -> Generator[Storage]:
    """Yield files on one throttled drive."""
    speed = int(2 * mb_s * rig.MB)
    with rig.rig([speed], size_bytes=2 * count * SAMPLE_BYTES + ROOM_BYTES, checked=False) as (drive,):
        files = drive.mount / "files"
        files.mkdir()
        rig.throttle(drive, 0)
        for index in range(count):
            (files / f"{index:05}").write_bytes(random.Random(index).randbytes(SAMPLE_BYTES))
        yield Storage(count, files, mb_s * rig.MB, lambda speed: rig.throttle(drive, int(speed)))


def simulated(mb_s: float, count: int) -> Storage:
    """Return a token bucket."""
    return Storage(count, None, mb_s * rig.MB, lambda _: None)


def rows(count: int = SAMPLES) -> list[Row]:
    """Return the rows of `make bench-data`: 12 settings on the rig.

    Raises:
        RigError: there can be none here.
    """
    with storage_on_rig(MB_S, count) as storage:
        return measure(storage, Plan(shares=FEW_SHARES, workers=FEW_WORKERS), None)


def main() -> int:
    """Print a table of the errors, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--simulated", action="store_true", help="a token bucket instead of a throttled drive"
    )
    parser.add_argument("--mb-s", type=float, default=MB_S, help="of the drive (default: %(default)g)")
    parser.add_argument(
        "--work", type=int, default=WORK, help="of a sample's preparation (default: %(default)d)"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--json", type=Path, help="all runs")
    parser.add_argument("--output", type=Path, default=Path("build/bench/analyze.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(
        shares=options.shares, workers=options.workers, factors=options.factors, runs=options.runs, work=options.work
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        storage = (
            simulated(options.mb_s, options.samples)
            if options.simulated
            else held.enter_context(storage_on_rig(options.mb_s, options.samples))
        )
        found = measure(storage, plan, options.json)
    return 0 if publish("errors of the prediction", found, options.output) else 1


def measure(storage: Storage, plan: Plan, path: Path | None) -> list[Row]:
    """Calibrate, run all settings, print; the runs go to `path`."""
    found = calibrated(storage, plan.work)
    costs = costs_of(found)
    twin = Config(0.0, CALIBRATED_WORKERS, 1.0)
    speeds: dict[Config, list[float]] = {config: [] for config in plan.settings()}
    twins: tuple[list[float], list[float]] = ([], [])
    for _ in range(plan.runs):
        for config, samples in speeds.items():
            samples.append(samples_per_s(storage, config, plan.work))
        for each in twins:
            each.append(samples_per_s(storage, twin, plan.work))
    spread = abs(statistics.median(twins[0]) / statistics.median(twins[1]) - 1.0)
    errors = report(found, costs, speeds)
    if path is not None:
        path.write_text(json.dumps({"rows": errors, "spread": spread, "model": asdict(costs)}, indent=1))
    sizes = [abs(each["error"]) for each in errors]
    name = f"prediction of {len(sizes)} settings"
    return [
        row(f"{name}: largest error", [max(sizes)], goal=GOAL, at_most=True, unit="share"),
        row(f"{name}: error", sizes, goal=None, unit="share"),
        row(f"{name}: A/A spread", [spread], goal=None, unit="share"),
    ]


def report(found: Analysis, costs: Costs, speeds: dict[Config, list[float]]) -> list[dict[str, Any]]:
    """Print the table of all settings, and return it."""
    table = Table(box=None, title=f"advice: {found.advice.sentence}", title_justify="left")
    for head in ("CACHED", "WORKERS", "STORAGE", "MEASURED", "PREDICTED", "ERROR", "BOUND BY"):
        table.add_column(head, justify="right")
    errors: list[dict[str, Any]] = []
    for config, samples in speeds.items():
        measured = statistics.median(samples)
        bandwidth = config.factor * costs.storage_bytes_per_s
        setting = Setting(
            cached=config.cached,
            workers=config.workers,
            cores=found.model.cores,
            storage_bytes_per_s=bandwidth,
        )
        predicted = predict(costs, setting)
        error = predicted.samples_per_s / measured - 1.0
        errors.append(
            {**asdict(config), "samples": samples, "predicted": predicted.samples_per_s, "error": error}
        )
        table.add_row(
            f"{config.cached:.0%}", str(config.workers), f"{bandwidth / 1e6:.1f} MB/s", f"{measured:.1f}",
            f"{predicted.samples_per_s:.1f}", f"{error:+.1%}", predicted.limit.value,
        )  # fmt: skip
    Console(width=100).print(table)
    return errors


if __name__ == "__main__":
    sys.exit(main())
