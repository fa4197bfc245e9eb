"""K jobs that share their preparation (SharedLoader) beside K jobs that each prepare for themselves (DataLoader).

The jobs are processes that start together and run EPOCHS epochs, with one worker each; training costs them nothing but
reading every page of each batch, so that preparation is all they wait for. The time of all goes from their start to
the last one's last batch, joining the group included. Images are read past the page cache (O_DIRECT) where there is a
drive whose reads can be counted: what one job has read helps no other.

What is prepared and read in an epoch is counted in one more, from rest to rest: between epochs the group goes on with
the next one until as much is ready as it prepares ahead. Each job prepares the first batch itself, to show that it
prepares what the others do: K - 1 batches more, once, whatever the number of epochs, and a row of its own.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from augment import augmented
from child import Child, child
from image_drive import UNTHROTTLED, ImageDrive, Part, Unbuffered
from loader_cpu import PAGE_BYTES
from node import hook_daemon
from paired import Row, row
from persist_rows import scratch

from everstep.dataloader import SharedLoader
from everstep.dataloader.sources import Source, SourceDataset

JOBS = (2, 4, 8)
BATCH = 32
WORKERS = 1
EPOCHS = 2
REST_S, REST_MAX_S, LOOK_S = 1.0, 60.0, 0.02
"""So long nothing is prepared before a group is at rest, and so long it may take."""
FASTER_SHARE = 0.8
"""Of K."""
ONCE_WITHIN = 1.01
"""Reads and preparations beside 1/K of what separate jobs take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What all jobs needed together."""

    took_s: float
    """For all epochs."""
    prepared_count: float
    """Batches of an epoch."""
    read_bytes: float
    """Of an epoch, from the drive."""
    compared_count: int = 0
    """Batches that others had prepared, too, once."""


def shared_rows(
    source: Source, *, drive: ImageDrive | None, pairs: int, jobs: Iterable[int] = JOBS
) -> list[Row]:
    """Return the rows of each number of jobs."""
    data = SourceDataset[torch.Tensor](source, decode=augmented)
    if drive is not None:
        drive.hold(UNTHROTTLED)
    rows: list[Row] = []
    for count in jobs:
        found: list[tuple[Together, Together]] = []
        for pair in range(pairs):
            if pair % 2:
                ours = _shared(data, count, drive)
                found.append((ours, _separate(data, count, drive)))
            else:
                theirs = _separate(data, count, drive)
                found.append((_shared(data, count, drive), theirs))
        rows += _rows(count, found, has_drive=drive is not None)
    return rows


def _rows(count: int, found: list[tuple[Together, Together]], *, has_drive: bool) -> list[Row]:
    name = f"{count} jobs"
    rows = [
        row(
            f"{name}: time of separate jobs / of shared ones",
            [theirs.took_s / ours.took_s for ours, theirs in found],
            goal=FASTER_SHARE * count,
        ),
        row(
            f"{name}: preparations / separate jobs' x {count}",
            [ours.prepared_count * count / theirs.prepared_count for ours, theirs in found],
            goal=ONCE_WITHIN,
            at_most=True,
        ),
        row(
            f"{name}: batches prepared once more to be compared",
            [float(ours.compared_count) for ours, _ in found],
            goal=None,
            unit="batches",
        ),
    ]
    if has_drive:
        once = [ours.read_bytes * count / theirs.read_bytes for ours, theirs in found]
        rows.append(
            row(f"{name}: bytes read / separate jobs' x {count}", once, goal=ONCE_WITHIN, at_most=True)
        )
    return rows


def _shared(data: SourceDataset[torch.Tensor], count: int, drive: ImageDrive | None) -> Together:
    def loader() -> SharedLoader[torch.Tensor]:
        return SharedLoader(
            data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, group="bench", jobs=count
        )

    with scratch() as folder, hook_daemon(folder), _jobs(_shared_job, loader, count) as jobs:
        took_s = _took_s(jobs)
        rested, before = sum(_all(jobs)), _read_bytes(drive)
        counted = sum(_all(jobs))
        return Together(
            took_s=took_s,
            prepared_count=counted - rested,
            read_bytes=_read_bytes(drive) - before,
            compared_count=count - 1,
        )


def _separate(data: SourceDataset[torch.Tensor], count: int, drive: ImageDrive | None) -> Together:
    def loader() -> Iterable[torch.Tensor]:
        return torch.utils.data.DataLoader(
            data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
        )

    before = _read_bytes(drive)
    with _jobs(_separate_job, loader, count) as jobs:
        took_s = _took_s(jobs)
        return Together(
            took_s=took_s,
            prepared_count=sum(_all(jobs)) / EPOCHS,
            read_bytes=(_read_bytes(drive) - before) / EPOCHS,
        )


@contextlib.contextmanager
def _jobs(
    job: Callable[..., Generator[Any]], loader: Callable[[], object], count: int
) -> Generator[list[Child]]:
    """So many jobs, each a process with its workers, that begin together."""
    with contextlib.ExitStack() as held:
        jobs = [held.enter_context(child(job, loader)) for _ in range(count)]
        _all(jobs)
        yield jobs


def _all(jobs: list[Child]) -> list[Any]:
    """Let all jobs work at once, and return what each says."""
    for each in jobs:
        each.start()
    return [each.value() for each in jobs]


def _took_s(jobs: list[Child]) -> float:
    times = _all(jobs)
    return max(ended_s for _, ended_s in times) - min(began_s for began_s, _ in times)


def _read_bytes(drive: ImageDrive | None) -> int:
    return 0 if drive is None else drive.read_bytes()


def _shared_job(make: Callable[[], SharedLoader[torch.Tensor]]) -> Generator[tuple[float, float] | int]:
    torch.set_num_threads(1)
    loader = make()
    yield 0
    began_s = time.monotonic()
    counted = [_read(loader) for _ in range(EPOCHS)]
    yield began_s, counted[-1][1]
    assert [count for count, _ in counted] == [len(loader)] * EPOCHS, counted
    yield _at_rest(loader)
    _read(loader)
    yield _at_rest(loader)


def _at_rest(loader: SharedLoader[torch.Tensor]) -> int:
    """Return how many batches a job has prepared, once it has nothing to prepare and is given nothing."""
    feed = loader._feed  # pyright: ignore[reportPrivateUsage]
    assert feed is not None
    until_s = time.monotonic() + REST_MAX_S
    busy_s = time.monotonic()
    while (now_s := time.monotonic()) < min(busy_s + REST_S, until_s):
        if feed._supply.load():  # pyright: ignore[reportPrivateUsage]
            busy_s = now_s
        time.sleep(LOOK_S)
    return loader.prepared_count


def _separate_job(make: Callable[[], Iterable[torch.Tensor]]) -> Generator[tuple[float, float] | int]:
    torch.set_num_threads(1)
    loader = make()
    yield 0
    began_s = time.monotonic()
    counted = [_read(loader) for _ in range(EPOCHS)]
    yield began_s, counted[-1][1]
    yield sum(count for count, _ in counted)


def _read(loader: Iterable[torch.Tensor]) -> tuple[int, float]:
    """Read every page of an epoch's batches; return how many there were, and when the last was read."""
    count, ended_s = 0, 0.0
    for batch in loader:
        batch.view(-1)[::PAGE_BYTES].sum()
        count, ended_s = count + 1, time.monotonic()
    return count, ended_s


def unbuffered(drive: ImageDrive, images: int) -> Source:
    """Return so many of a drive's images, read past the page cache."""
    part = Part(drive.source, images)
    drive.drop(part)
    return Unbuffered(part)
