"""What the node's cache saves on a slow drive: bytes read in an epoch, and its time beside DataLoader's.

Bytes: all images, each share of them in the cache, the page cache dropped before each epoch (no image is read twice in
one). Nothing is decoded, since that changes no byte.

Time: a part of the images, decoded and augmented by WORKERS workers, on a drive so slow that both loaders wait for it
even with the largest share cached. DataLoader runs in a memory cgroup that leaves the page cache as many bytes as ours
has for its cache, and has read all images WARM_EPOCHS times in random order before. What it then reads of the drive is
its miss share; an ideal cache of that size is faster by miss share / uncached share, which is what ours is held to.
"""

import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch.utils.data
from augment import augmented
from child import Child, child
from image_drive import UNTHROTTLED, ImageDrive, Part
from node import hook_daemon
from page_cache_group import page_cache_group
from paired import Row, row
from persist_rows import scratch
from rich.console import Console

from everstep.dataloader import CachedDataset, DataLoader
from everstep.dataloader.sources import Source, SourceDataset

SHARES = (0.35, 0.50, 0.65)
WORKERS = 4
"""More than the cores of a small machine: some wait for the drive while others decode."""
BATCH = 64
BYTES_WITHIN = 0.01
EPOCHS_MEASURED = 2
TIME_GOAL = 0.95
WARM_EPOCHS = 4
FETCH_BOUND = 0.5
"""How fast the drive is: with the largest share cached so much of what the workers can prepare."""
PROBE_IMAGES = 1500
MB = 10**6

console = Console()

Loaders = Callable[[], Iterable[Any]]


class Stored(torch.utils.data.Dataset[int]):
    """A source's samples, read and not decoded; only their lengths go to the training process."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def __getitem__(self, index: int) -> int:
        """Return the length of a sample."""
        return len(self._source.get_bytes(index))


def cached(part: Part, share: float, decode: Callable[[bytes], Any] | None = None) -> CachedDataset[Any]:
    """Return a dataset with room for this share of a part's bytes, in a cache of its own."""
    return CachedDataset(
        part,
        budget=int(share * part.size_bytes()),
        decode=decode,
        fingerprint=f"{part.fingerprint()[-100:]} at {share}",
    )


def filled(dataset: CachedDataset[Any], source: Source) -> CachedDataset[Any]:
    """Return a dataset whose cache is as full as its budget allows, with samples from anywhere in it."""
    for number, index in enumerate(random.Random(0).sample(range(len(source)), len(source))):
        dataset.get_bytes(index)
        if not number % 64 and not dataset.flush():
            raise RuntimeError("the daemon takes no samples")
    if not dataset.flush() or dataset.cache_info().deferred_count:
        raise RuntimeError(f"the daemon did not take all samples: {dataset.cache_info()}")
    return dataset


def bytes_rows(drive: ImageDrive) -> list[Row]:
    """Return how much of the images is read from the drive in an epoch, at each share in the cache."""
    part = Part(drive.source, len(drive.source))
    drive.hold(UNTHROTTLED)

    def read_bytes(source: Source) -> int:
        drive.drop(part)
        before = drive.read_bytes()
        with child(_epochs, lambda: _stored(source)) as work:
            work.next()
        return drive.read_bytes() - before

    whole = read_bytes(part)
    rows: list[Row] = []
    for share in SHARES:
        with scratch() as folder, hook_daemon(folder):
            dataset = filled(cached(part, share), part)
            read = [read_bytes(dataset) / whole for _ in range(EPOCHS_MEASURED)]
            dataset.close()
        console.print(
            f"{share:.0%} cached: {', '.join(f'{each:.4f}' for each in read)} of {whole / MB:.0f} MB read"
        )
        rows += [
            row(f"bytes read in an epoch / all, {share:.0%} cached", read, goal=None),
            row(
                f"bytes read / the uncached share, off by, {share:.0%} cached",
                [abs(each / (1 - share) - 1) for each in read],
                goal=BYTES_WITHIN,
                at_most=True,
                unit="share",
            ),
        ]
    return rows


def _stored(source: Source) -> Iterable[Any]:
    return DataLoader(Stored(source), batch_size=BATCH, shuffle=True, num_workers=2)


def epoch_rows(drive: ImageDrive, *, images: int, pairs: int) -> list[Row]:
    """Return how much faster an epoch is than DataLoader's, at each share in the cache."""
    part = Part(drive.source, images)
    size_bytes = part.size_bytes()
    prepared = prepared_bytes_per_s(drive, part)
    speed = int(FETCH_BOUND * (1 - max(SHARES)) * prepared)
    console.print(
        f"workers prepare {prepared / MB:.1f} MB/s, the drive gives {speed / MB:.1f}; "
        f"{len(part)} images of {size_bytes / len(part) / 1000:.1f} KB"
    )
    rows: list[Row] = []
    for share in SHARES:
        drive.hold(UNTHROTTLED)
        with scratch() as folder, hook_daemon(folder), child(_ours, part, share) as work:
            work.next()  # its cache is full from here on
            found = [
                _pair(drive, part, share, speed, work, ours_first=bool(pair % 2)) for pair in range(pairs)
            ]
        rows += _epoch_rows(share, found, speed, size_bytes)
    return rows


def prepared_bytes_per_s(drive: ImageDrive, part: Part) -> float:
    """Return how fast the workers decode and augment images that are in memory."""
    few = Part(drive.source, min(PROBE_IMAGES, len(part)))
    drive.hold(UNTHROTTLED)
    with child(_epochs, lambda: _theirs(few)) as work:
        work.next()
        return few.size_bytes() / work.next()


class Measured:
    """One epoch: seconds, bytes read from the drive, bytes of the page cache meanwhile (0: not asked)."""

    def __init__(self, took_s: float, read_bytes: int, page_cache_bytes: float = 0.0) -> None:
        self.took_s, self.read_bytes, self.page_cache_bytes = took_s, read_bytes, page_cache_bytes


def _pair(
    drive: ImageDrive, part: Part, share: float, speed: int, ours: Child, *, ours_first: bool
) -> tuple[Measured, Measured]:
    if ours_first:
        found = _cached_epoch(drive, part, ours, speed)
        return found, page_cache_epoch(drive, part, share, speed)
    theirs = page_cache_epoch(drive, part, share, speed)
    return _cached_epoch(drive, part, ours, speed), theirs


def _cached_epoch(drive: ImageDrive, part: Part, ours: Child, speed: int) -> Measured:
    """Run one epoch of ours with the cache full and nothing in the page cache."""
    drive.drop(part)
    return timed(drive, ours.next, speed)


def page_cache_epoch(drive: ImageDrive, part: Part, share: float, speed: int) -> Measured:
    """Run one epoch of DataLoader with a page cache of the same size, warm."""
    drive.hold(UNTHROTTLED)
    drive.drop(part)
    with page_cache_group() as group:
        with child(_warm_theirs, part) as work:
            group.add(work.pid)
            with group.holding(int(share * part.size_bytes())):
                work.next()
                group.held_bytes()
                found = timed(drive, work.next, speed)
                held = group.held_bytes()
        drive.drop(part)
    return Measured(found.took_s, found.read_bytes, statistics.mean(held))


def timed(drive: ImageDrive, run: Callable[[], float], speed: int) -> Measured:
    """Run an epoch while the drive is held to a speed."""
    drive.hold(speed)
    before = drive.read_bytes()
    try:
        took_s = run()
        return Measured(took_s, drive.read_bytes() - before)
    finally:
        drive.hold(UNTHROTTLED)


def _epoch_rows(
    share: float, found: Sequence[tuple[Measured, Measured]], speed: int, size_bytes: int
) -> list[Row]:
    faster = [theirs.took_s / ours.took_s for ours, theirs in found]
    missed = [max(theirs.read_bytes, 1) / size_bytes for _, theirs in found]
    ideal = [each / (1 - share) for each in missed]
    name = f"{share:.0%} cached"
    held = statistics.mean(theirs.page_cache_bytes for _, theirs in found) / size_bytes
    used = [each.read_bytes / each.took_s / speed for pair in found for each in pair]
    console.print(
        f"{name}: page cache {held:.1%} of the images; the drive was used at {min(used):.0%} to {max(used):.0%}"
    )
    return [
        row(
            f"epoch, DataLoader / ours, of its ideal, {name}",
            [each / best for each, best in zip(faster, ideal, strict=True)],
            goal=TIME_GOAL,
        ),
        row(f"epoch, DataLoader / ours, {name}", faster, goal=None),
        row(f"its miss share / the uncached share, {name}", ideal, goal=None),
        row(f"DataLoader's miss share of bytes, {name}", missed, goal=None),
        row(
            f"ours, bytes read / all, {name}", [ours.read_bytes / size_bytes for ours, _ in found], goal=None
        ),
    ]


def _epochs(make: Loaders) -> Generator[float]:
    """Yield the seconds of one epoch after the other."""
    torch.set_num_threads(1)
    loader = make()
    while True:
        began_s = time.perf_counter()
        for _ in loader:
            pass
        yield time.perf_counter() - began_s


def _theirs(part: Part) -> Iterable[Any]:
    data = SourceDataset[torch.Tensor](part, decode=augmented)
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=WORKERS)


def _warm_theirs(part: Part) -> Generator[float]:
    for epoch in range(WARM_EPOCHS):
        for index in random.Random(epoch).sample(range(len(part)), len(part)):
            part.get_bytes(index)
    yield 0.0
    yield from _epochs(lambda: _theirs(part))


def _ours(part: Part, share: float) -> Generator[float]:
    dataset = filled(cached(part, share, augmented), part)
    yield 0.0
    yield from _epochs(lambda: DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS))
