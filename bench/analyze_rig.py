"""Errors of the what-if model: predicted from one calibration, against runs of every other setting.

    sudo python bench/analyze_rig.py                 # a throttled drive (bench/rig.py), files in or out of memory
    python bench/analyze_rig.py --simulated          # a token bucket instead of a drive; needs no root

The calibration is `StallAnalyzer` on CALIBRATED_WORKERS workers: three runs. Then every setting (share in the cache,
workers, bandwidth) is run RUNS times, interleaved so that no drift favours one, and its median is compared with the
prediction. One setting is run twice as often: the difference of its two medians is the A/A spread, below which an error
says nothing. A share in the cache is the page cache: all files leave memory, then that share of them is read.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import rig
import torch
from paired import row
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from everstep.dataloader.analysis import StallAnalyzer
from everstep.dataloader.analysis.measured_format import Analysis
from everstep.dataloader.analysis.page_cache import drop
from everstep.dataloader.analysis.what_if_plan import Costs, Setting, predict

RUNS = 5
CALIBRATED_WORKERS = 2
SAMPLE_BYTES = 100_000
SAMPLES = 1_200
BATCH = 16
WARMUP = 8
GOAL = 0.10
SHARES, WORKERS, FACTORS = (0.0, 0.35, 0.65, 1.0), (1, 2, 3), (1.0, 2.0)
"""24 settings; the bandwidth is that of the calibration times a factor."""


@dataclass(frozen=True, slots=True)
class Config:
    """One setting of the bench."""

    cached: float
    workers: int
    factor: float


class Storage:
    """Where samples are: in files, or in a token bucket that all workers share."""

    def __init__(self, folder: Path | None, bytes_per_s: float, throttle: Callable[[float], None]) -> None:
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
        return SAMPLES

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
    """Return what three runs say."""
    return StallAnalyzer(
        step,
        loader_of(storage, CALIBRATED_WORKERS, work),
        make_cold=lambda: storage.set(0.0, 1.0),
        make_warm=lambda: storage.set(1.0, 1.0),
        sample_bytes=SAMPLE_BYTES,
    ).run(steps=SAMPLES // BATCH - WARMUP - 1, warmup=WARMUP)


def costs_of(found: Analysis) -> Costs:
    """Return the model of a result."""
    model = found.model
    assert model.storage_bytes_per_s is not None
    return Costs(
        compute_s=model.compute_s,
        handover_s=model.handover_s,
        preparation_s=model.preparation_s,
        cpu_s=model.cpu_s,
        latency_s=model.latency_s,
        sample_bytes=model.sample_bytes,
        storage_bytes_per_s=model.storage_bytes_per_s,
    )


@contextmanager
def storage_on_rig(mb_s: float) -> Generator[Storage]:
    """Yield files on one throttled drive."""
    with tempfile.TemporaryDirectory() as folder:
        (drive,) = rig.up([int(2 * mb_s * rig.MB)], size_bytes=2**30, folder=Path(folder))
        try:
            files = drive.mount / "files"
            files.mkdir()
            rig.throttle(drive, 0)
            for index in range(SAMPLES):
                (files / f"{index:05}").write_bytes(random.Random(index).randbytes(SAMPLE_BYTES))
            yield Storage(files, mb_s * rig.MB, lambda speed: rig.throttle(drive, int(speed)))
        finally:
            rig.down()


def main() -> None:
    """Print a table of the errors, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--simulated", action="store_true", help="a token bucket instead of a throttled drive"
    )
    parser.add_argument("--mb-s", type=float, default=30.0, help="of the drive (default: %(default)g)")
    parser.add_argument(
        "--work", type=int, default=12, help="of a sample's preparation (default: %(default)d)"
    )
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulated:
        measure(Storage(None, options.mb_s * 1e6, lambda _: None), options)
        return
    with storage_on_rig(options.mb_s) as storage:
        measure(storage, options)


def measure(storage: Storage, options: argparse.Namespace) -> None:
    """Calibrate, run all settings, print."""
    found = calibrated(storage, options.work)
    costs = costs_of(found)
    configs = [Config(*each) for each in itertools.product(options.shares, options.workers, options.factors)]
    twin = Config(0.0, CALIBRATED_WORKERS, 1.0)
    speeds: dict[Config, list[float]] = {config: [] for config in configs}
    twins: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.runs):
        for config in configs:
            speeds[config].append(samples_per_s(storage, config, options.work))
        for each in twins:
            each.append(samples_per_s(storage, twin, options.work))
    spread = abs(statistics.median(twins[0]) / statistics.median(twins[1]) - 1.0)
    report(found, costs, speeds, spread, options.json)


def report(
    found: Analysis, costs: Costs, speeds: dict[Config, list[float]], spread: float, path: Path | None
) -> None:
    """Print the table, and write it where asked."""
    table = Table(box=None, title=f"advice: {found.advice.sentence}", title_justify="left")
    for head in ("CACHED", "WORKERS", "STORAGE", "MEASURED", "PREDICTED", "ERROR", "BOUND BY"):
        table.add_column(head, justify="right")
    rows: list[dict[str, object]] = []
    errors: list[float] = []
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
        errors.append(abs(error))
        rows.append(
            {**asdict(config), "samples": samples, "predicted": predicted.samples_per_s, "error": error}
        )
        table.add_row(
            f"{config.cached:.0%}", str(config.workers), f"{bandwidth / 1e6:.1f} MB/s", f"{measured:.1f}",
            f"{predicted.samples_per_s:.1f}", f"{error:+.1%}", predicted.limit.value,
        )  # fmt: skip
    console = Console(width=100)
    console.print(table)
    worst = row("largest error of the prediction", [max(errors)], goal=GOAL, at_most=True, unit="share")
    console.print(
        f"{len(errors)} settings: error {statistics.median(errors):.1%} in the median, at most {worst.value:.1%}"
        f" (goal {GOAL:.0%}: {'met' if worst.met else 'missed'}); A/A spread {spread:.1%}"
    )
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "spread": spread, "model": asdict(costs)}, indent=1))


if __name__ == "__main__":
    main()
