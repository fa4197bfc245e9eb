"""Errors of what `everstep analyze` predicts for the memory of another node, against two nodes.

One node is calibrated alone: `StallAnalyzer` over images on a throttled drive, three runs. Then two daemons on this
machine keep SHARES of the images each, none what the other keeps, and one of the nodes trains on all images: what it
has comes from its own memory, what the other has over the loopback device, and the rest from the drive. Every share is
run RUNS times, interleaved; the median is compared with the prediction for one peer. What a sample from the peer costs
a reader is measured, as the storage's costs are: nothing but such samples is read, in batches. With the network that
the report takes, which knows of none, the error is a row of its own, without a goal. The first share is run twice as
often: the difference of its two medians is the A/A spread.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import torch
from analyze_rig import BATCH, GOAL, RUNS, WARMUP, costs_of, step
from augment import augmented
from cached_rows import cached, prepared_bytes_per_s
from child import Child, child
from image_drive import UNTHROTTLED, ImageDrive, Part
from nodes_rows import daemons, settled
from paired import Row, row
from persist_rows import scratch
from rich.console import Console

from everstep.dataloader import CachedDataset, DataLoader
from everstep.dataloader.analysis import StallAnalyzer
from everstep.dataloader.analysis.measured_format import Analysis
from everstep.dataloader.analysis.report_plan import PEER_BYTES_PER_S
from everstep.dataloader.analysis.what_if_plan import Peers, Setting, predict
from everstep.dataloader.sources import SourceDataset

SHARES = (0.15, 0.30, 0.45)
"""Of each node: below a half, so that a node keeps nothing but what it owns."""
WORKERS = 2
SLOWER = 6
"""The drive gives this part of what the workers prepare: it bounds the speed but where the nodes keep nearly all."""
EPOCHS = 3
"""Of each run of the calibration."""
console = Console()


def peers_rows(drive: ImageDrive, *, images: int, runs: int = RUNS) -> list[Row]:
    """Return the errors of the predictions, and the A/A spread."""
    part = Part(drive.source, images)
    speed = int(prepared_bytes_per_s(drive, part) / SLOWER)
    found = _calibrated(drive, part, speed)
    measured: dict[float, list[float]] = {share: [] for share in SHARES}
    twin: list[float] = []
    with scratch() as folder, daemons(folder) as places, contextlib.ExitStack() as held:
        nodes = {  # each has a cache of its own in the same daemons
            share: held.enter_context(_filled(drive, part, share, places)) for share in SHARES
        }
        peer_s = {share: node.next() for share, node in nodes.items()}
        for _ in range(runs):
            for share, node in nodes.items():
                measured[share].append(_speed_of(drive, part, node, speed))
            twin.append(_speed_of(drive, part, nodes[SHARES[0]], speed))
    medians = {share: statistics.median(speeds) for share, speeds in measured.items()}
    errors = [_error(found, share, medians[share], _network(found, peer_s[share])) for share in SHARES]
    as_shown = [_error(found, share, medians[share], Network(PEER_BYTES_PER_S)) for share in SHARES]
    spread = abs(statistics.median(measured[SHARES[0]]) / statistics.median(twin) - 1.0)
    name = f"prediction of a peer, {len(SHARES)} shares"
    return [
        row(f"{name}: largest error", [max(errors)], goal=GOAL, at_most=True, unit="share"),
        row(f"{name}: error", errors, goal=None, unit="share"),
        row(f"{name}: error with the report's network", as_shown, goal=None, unit="share"),
        row(f"{name}: A/A spread", [spread], goal=None, unit="share"),
    ]


class Network(NamedTuple):
    """What stands between the nodes."""

    bytes_per_s: float
    latency_s: float = 0.0005
    """The report's."""


def _network(found: Analysis, peer_s: float) -> Network:
    """Return the network in which a sample takes a reader so long: what is no transfer is latency."""
    return Network(PEER_BYTES_PER_S, max(0.0, peer_s - found.model.sample_bytes / PEER_BYTES_PER_S))


def _error(found: Analysis, share: float, measured: float, network: Network) -> float:
    peers = Peers(count=1, cached=share, bytes_per_s=network.bytes_per_s, latency_s=network.latency_s)
    setting = Setting(cached=share, workers=WORKERS, cores=found.model.cores, peers=peers)
    predicted = predict(costs_of(found), setting)
    error = predicted.samples_per_s / measured - 1.0
    console.print(
        f"{share:.0%} on each node, {1000 * network.latency_s:.2f} ms a sample from the peer: {measured:.1f} samples/s,"
        f" predicted {predicted.samples_per_s:.1f} ({error:+.1%}), bound by {predicted.limit.value}"
    )
    return abs(error)


def _calibrated(drive: ImageDrive, part: Part, speed: int) -> Analysis:
    """Return what three runs of one node say, the drive held to its speed and all images in memory before."""
    drive.hold(UNTHROTTLED)
    for index in range(len(part)):
        part.get_bytes(index)
    drive.hold(speed)
    try:
        with child(_analyzed, part) as work:
            return work.next()
    finally:
        drive.hold(UNTHROTTLED)


def _analyzed(part: Part) -> Generator[Analysis]:
    torch.set_num_threads(1)
    data = SourceDataset[torch.Tensor](part, decode=augmented)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    steps = EPOCHS * (len(loader) - WARMUP - 1)
    yield StallAnalyzer(step, loader).run(steps=steps, warmup=WARMUP, seconds=600.0)


@contextlib.contextmanager
def _filled(drive: ImageDrive, part: Part, share: float, places: list[Path]) -> Generator[Child]:
    """The node that trains, both nodes' caches full and at rest."""
    drive.hold(UNTHROTTLED)
    with contextlib.ExitStack() as held:
        nodes = [held.enter_context(child(_trained, part, share, place)) for place in places]
        for each in nodes:
            each.next()
        kept = [each.next() for each in nodes]
        console.print(f"{share:.0%}: the nodes keep {' and '.join(map(str, kept))} of {len(part)} images")
        yield nodes[0]


def _trained(part: Part, share: float, place: Path) -> Generator[float]:
    os.environ["EVERSTEP_SOCKET"] = str(place)
    torch.set_num_threads(1)
    dataset = cached(part, share, augmented)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    yield _epoch(loader)
    yield settled(dataset)
    yield _peer_s(dataset)
    while True:
        yield _epoch(loader)


def _peer_s(dataset: CachedDataset[torch.Tensor]) -> float:
    """Return the seconds that a sample of the other node's memory takes, read in batches of such samples only."""
    theirs: list[int] = []
    for index in range(len(dataset)):
        before = dataset.cache_info().peer_count
        if dataset.peek(index) is None:
            dataset.get_bytes(index)
        if dataset.cache_info().peer_count > before:
            theirs.append(index)
    began_s = time.perf_counter()
    for begin in range(0, len(theirs), BATCH):
        batch = theirs[begin : begin + BATCH]
        dataset.will_read(batch)
        for index in batch:
            dataset.get_bytes(index)
    return (time.perf_counter() - began_s) / len(theirs)


def _epoch(loader: DataLoader[torch.Tensor]) -> float:
    """Return the samples per second of an epoch, its first batches not counted."""
    begun_s, count = 0.0, 0
    for number, batch in enumerate(loader):
        if number == WARMUP:
            begun_s = time.perf_counter()
        step(batch)
        count += len(batch) if number >= WARMUP else 0
    return count / (time.perf_counter() - begun_s)


def _speed_of(drive: ImageDrive, part: Part, node: Child, speed: int) -> float:
    """Run one epoch with nothing in the page cache, the drive held to its speed."""
    drive.drop(part)
    drive.hold(speed)
    try:
        return node.next()
    finally:
        drive.hold(UNTHROTTLED)
