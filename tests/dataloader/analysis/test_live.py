"""The meter that is left on, and the analyzer within a script: on storage that is a shared token bucket."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Subset

from everstep.core.errors import UsageError
from everstep.dataloader import DataLoader
from everstep.dataloader.analysis import StallAnalyzer, StallMeter, live
from everstep.dataloader.analysis.device_clock import CopyWatch
from everstep.dataloader.analysis.measured_format import Phase
from everstep.dataloader.analysis.work_meter import begin_meter, end_meter, timed
from everstep.dataloader.analysis.worker_counters import Counters

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]
SAMPLE_BYTES = 100_000


class Bucket:
    """Storage of a fixed bandwidth, shared by all processes: a read sleeps until its bytes have had their turn."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.state = torch.zeros(2, dtype=torch.float64).share_memory_()
        self.lock: Lock = multiprocessing.get_context("fork").Lock()

    def set_cold(self, is_cold: bool) -> None:
        self.state[1] = float(is_cold)

    def read(self) -> None:
        if not self.state[1]:
            return
        with self.lock:
            free_at = max(time.monotonic(), float(self.state[0])) + SAMPLE_BYTES / self.bytes_per_s
            self.state[0] = free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


class Stored(Dataset[torch.Tensor]):
    def __init__(self, bucket: Bucket, work: int = 0) -> None:
        self.bucket = bucket
        self.work = work

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        self.bucket.read()
        sample = torch.full((64, 64), float(index))
        for _ in range(self.work):
            sample = (sample @ sample).tanh()
        return sample


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)


class OpenedByNativeCode(Dataset[float]):
    """Each sample is a file, opened without an audit event and held open."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{number}.bin" for number in range(24)]
        self.held: list[int] = []
        for path in self.paths:
            path.write_bytes(bytes(4096))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> float:
        self.held.append(ctypes.CDLL(None).open(bytes(self.paths[index]), os.O_RDONLY))
        return float(len(os.read(self.held[-1], 4096)))


class InMemory:
    """A source: its reads are fetch, whatever they spend their time with."""

    def __len__(self) -> int:
        return 40

    def get_bytes(self, index: int) -> bytes:
        end_s = time.perf_counter() + 0.002
        while time.perf_counter() < end_s:
            pass
        return bytes([index])

    def fingerprint(self) -> str:
        return "in-memory"


class Decoded(Dataset[int]):
    def __init__(self, source: InMemory) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> int:
        return self.source.get_bytes(index)[0]


def analyzer(dataset: Stored, workers: int) -> StallAnalyzer:
    weight = torch.ones(64, 64)

    def step(batch: torch.Tensor) -> None:
        torch.matmul(batch, weight).sum()

    return StallAnalyzer(
        step,
        TorchDataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers),
        make_cold=lambda: dataset.bucket.set_cold(True),
        make_warm=lambda: dataset.bucket.set_cold(False),
        sample_bytes=SAMPLE_BYTES,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_storage_is_found_and_the_cache_advised(workers: int) -> None:
    """1.25 MB/s: a sample takes 80 ms, whoever reads; nothing else takes a tenth of it, on a busy machine either.

    Unless it stands still for a second: the first of three tries counts in which it did not.
    """
    tries = (analyzer(Stored(Bucket(1.25e6)), workers).run(steps=8, warmup=4 * workers) for _ in range(3))
    found = next(tries)
    while found.runs[1].samples_per_s < 50 or found.runs[2].samples_per_s < 8:
        found = next(tries)
    assert found.advice.bound.startswith("fetch")
    assert found.advice.cached is not None
    assert found.advice.cached > 0.5
    assert "in the cache removes the fetch stall" in found.advice.sentence
    cold = found.runs[2]
    assert (cold.phase, cold.samples_per_s) == (Phase.COLD, pytest.approx(12.5, rel=0.5))
    assert cold.fetch_s > cold.preparation_s
    at_half = next(row for row in found.what_if.cache if row.cached == 0.5)
    assert at_half.samples_per_s > 1.5 * cold.samples_per_s
    assert found.what_if.storage


def test_an_analyzer_leaves_loader_and_generators_as_they_were() -> None:
    dataset = Stored(Bucket(1e9))
    tool = analyzer(dataset, 0)
    before = torch.get_rng_state()
    tool.run(steps=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(dataset) is Stored


@pytest.mark.parametrize("workers", [0, 1])
def test_an_analyzer_says_what_native_code_opened(tmp_path: Path, workers: int) -> None:
    """The cold run drops the same files from memory, by Python: that must not make them Python's."""
    dataset = OpenedByNativeCode(tmp_path)
    try:
        loader = TorchDataLoader(dataset, batch_size=2, num_workers=workers)
        found = StallAnalyzer(lambda batch: batch.sum(), loader).run(steps=4, warmup=1)
    finally:
        for fd in dataset.held:
            os.close(fd)
    ours = [name for name in found.unseen_files if name.startswith(str(tmp_path))]
    assert len(ours) >= 2 * 4
    assert found.runs[2].is_bound
    assert found.runs[2].reasons[0].startswith("native code opened files by itself: ")


def test_our_loader_begins_its_epoch_again() -> None:
    loader = DataLoader(Stored(Bucket(1e9)), batch_size=4, shuffle=True, seed=3)
    expected = [int(value) for value in next(iter(loader))[:, 0, 0]]
    loader.reset()
    found = StallAnalyzer(lambda batch: batch.sum(), loader).run(steps=4)
    assert found.loader.kind == "everstep.dataloader.loader.DataLoader"
    assert [int(value) for value in next(iter(loader))[:, 0, 0]] == expected


def test_epochs_too_short_to_count() -> None:
    loader = TorchDataLoader(Subset(Stored(Bucket(1e9)), range(8)), batch_size=4)
    with pytest.raises(UsageError, match="an epoch has 2 batches, and 3 of each do not count"):
        StallAnalyzer(lambda batch: batch.sum(), loader).run(steps=4, warmup=3)


def test_what_is_no_loader_is_refused() -> None:
    loader: Any = [1, 2]
    with pytest.raises(UsageError, match="list is not derived from"):
        StallAnalyzer(lambda batch: batch, loader)


@pytest.mark.parametrize(
    ("make", "workers"),
    [(TorchDataLoader, 0), (TorchDataLoader, 2), (DataLoader, 0), (DataLoader, 2)],
)
def test_a_meter_sees_the_fetch_of_a_running_training(make: Callable[..., Any], workers: int) -> None:
    """2.5 MB/s: a sample takes 40 ms, and no wait for a core is as long."""
    bucket = Bucket(2.5e6)
    bucket.set_cold(True)
    dataset = Subset(Stored(bucket), range(40))
    loader = make(dataset, batch_size=2, num_workers=workers)
    meter = StallMeter(loader, period=4)
    seen = [int(batch[0, 0, 0]) for batch in meter]
    assert seen == list(range(0, 40, 2))
    assert len(meter) == 20
    assert meter.batch_size == 2
    times = meter.times()
    assert times.steps == 20
    assert times.fetch_s > 0.5 * 40 * SAMPLE_BYTES / 2.5e6
    assert times.fetch_s > times.preparation_s
    assert meter.split().step_s == pytest.approx(
        (times.fetch_s + times.preparation_s + times.copy_s + times.compute_s) / 20
    )
    before = times
    bucket.set_cold(False)
    for _ in meter:
        pass
    assert meter.times().since(before).steps == 20
    meter.close()
    assert type(dataset) is Subset
    assert [int(batch[0, 0, 0]) for batch in loader] == seen


def test_a_meter_over_anything_counts_the_wait_as_preparation() -> None:
    meter = StallMeter([1, 2, 3])
    assert list(meter) == [1, 2, 3]
    assert meter.times().steps == 3
    assert meter.times().fetch_s == 0.0
    meter.close()


def test_a_loop_that_is_left_and_a_stream() -> None:
    meter = StallMeter(TorchDataLoader(Streamed(), batch_size=4))
    for _ in meter:
        break
    assert len(list(meter)) == 5
    assert meter.times().steps == 5, "the step that was left has no end"
    meter.close()


class FakeCopies(CopyWatch):
    """Says what events of a device would: each step copied for 5 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_s = 0.0

    def install(self) -> None:
        pass

    def total_s(self) -> float:
        return self.copied_s


def test_copies_are_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for, copied and computed sums up to the time of the steps, in each look at the meter."""
    monkeypatch.setattr(live, "CopyWatch", FakeCopies)
    meter = StallMeter([0] * 8, period=4)
    copies = meter._copies  # pyright: ignore[reportPrivateUsage]
    assert isinstance(copies, FakeCopies)
    begun_s = time.perf_counter()
    for _ in meter:
        time.sleep(0.01)
        copies.copied_s += 0.005
    whole_s = time.perf_counter() - begun_s
    times = meter.times()
    assert times.steps == 8
    assert times.copy_s == pytest.approx(8 * 0.005)
    assert times.compute_s > 8 * 0.004, "the rest of at least 10 ms"
    in_steps_s = times.fetch_s + times.preparation_s + times.copy_s + times.compute_s
    assert 8 * 0.01 <= in_steps_s <= whole_s
    assert meter.split().copy_s == pytest.approx(0.005)
    copies.copied_s += 0.1  # after the last step: of the next ones
    assert meter.times() == times
    meter.close()


def test_reads_of_a_source_are_fetch_exactly() -> None:
    """It computes, so that an estimate by blocked time would call it preparation."""
    dataset = Decoded(InMemory())
    counters = Counters()
    meter = begin_meter(counters.path, None, counts_bytes=False)
    assert meter is not None
    restore = timed(dataset, meter)
    assert [dataset[index] for index in range(10)] == list(range(10))
    meter.batch_done(10)
    restore()
    end_meter(counters.path)
    totals = counters.totals()
    assert meter.has_source
    assert (totals.batches, totals.samples) == (1, 10)
    assert 0.02 <= totals.fetch_s <= totals.busy_s
    assert type(dataset) is Decoded
    assert type(dataset.source) is InMemory
    counters.close()
