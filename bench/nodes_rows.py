"""Two nodes that each keep a part of the images in memory, beside one node's DataLoader on the same drive.

Two daemons on this machine, each with a cache of SHARE of all images, reach each other over the loopback device; a
process beside each trains on half of every epoch. One drive stands for the storage of both. It is so slow that
DataLoader on one node, whose page cache has as many bytes, waits for nothing else (bench/cached_rows.py): what two
nodes are faster by is bounded by what the processor of one machine can decode for both, and that is said, too.
"""

import contextlib
import importlib.util
import itertools
import os
import secrets
import socket
import time
from collections.abc import Generator
from pathlib import Path

import torch
from augment import augmented
from cached_rows import BATCH, Measured, cached, page_cache_epoch, prepared_bytes_per_s, timed
from child import Child, child
from image_drive import UNTHROTTLED, ImageDrive, Part
from paired import Row, row
from persist_rows import scratch
from rich.console import Console

from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset, DataLoader

SHARE = 0.65
NODES = 2
WORKERS = 2
"""Of each node: as many as one node's DataLoader has, together."""
SLOWER = 16
"""The drive gives this part of what the workers prepare."""
FASTER_GOAL = 5.0
NOTHING = 0.001
"""Of the images' bytes."""
SETTLE_S, REST_S = 30.0, 1.0
console = Console()


class NodesError(Exception):
    """This version has caches of one node only."""


def nodes_rows(drive: ImageDrive, *, images: int, pairs: int) -> list[Row]:
    """Return what two nodes read after their first epoch, and how much faster they are.

    Raises:
        NodesError: there is no cache over nodes.
    """
    if importlib.util.find_spec("everstep.daemon.nodes") is None:
        raise NodesError("this version keeps a cache for one node only")
    part = Part(drive.source, images)
    size_bytes = part.size_bytes()
    prepared = prepared_bytes_per_s(drive, part)
    speed = int(prepared / SLOWER)
    found: list[tuple[Measured, Measured]] = []
    with scratch() as folder, _nodes(drive, part, folder) as nodes:
        for pair in range(pairs):
            if pair % 2:
                ours = _epoch_of(drive, part, nodes, speed)
                found.append((ours, page_cache_epoch(drive, part, SHARE, speed)))
            else:
                theirs = page_cache_epoch(drive, part, SHARE, speed)
                found.append((_epoch_of(drive, part, nodes, speed), theirs))
    ceilings = [theirs.took_s * prepared / size_bytes for _, theirs in found]
    name = f"{NODES} nodes, {SHARE:.0%} each"
    return [
        row(
            f"{name}: bytes read after the first epoch / all",
            [ours.read_bytes / size_bytes for ours, _ in found],
            goal=NOTHING,
            at_most=True,
            unit="share",
        ),
        row(
            f"{name}: epoch, one node's DataLoader / ours",
            [theirs.took_s / ours.took_s for ours, theirs in found],
            goal=FASTER_GOAL,
        ),
        row(f"{name}: the same if nothing but decoding took time", ceilings, goal=None),
    ]


def _epoch_of(drive: ImageDrive, part: Part, nodes: list[Child], speed: int) -> Measured:
    """Run one epoch on both nodes with nothing in the page cache: until the later one is through."""
    drive.drop(part)

    def run() -> float:
        for each in nodes:
            each.start()
        return max(each.value() for each in nodes)

    return timed(drive, run, speed)


@contextlib.contextmanager
def _nodes(drive: ImageDrive, part: Part, folder: Path) -> Generator[list[Child]]:
    """Two nodes that have been through one epoch, and whose caches have come to rest."""
    drive.hold(UNTHROTTLED)
    with contextlib.ExitStack() as held:
        places = held.enter_context(daemons(folder))
        nodes = [held.enter_context(child(_trained, part, *each)) for each in enumerate(places)]
        for each in nodes:
            each.start()
        for each in nodes:
            each.value()
        kept = [each.next() for each in nodes]
        console.print(
            f"after one epoch {NODES} nodes keep {' and '.join(map(str, kept))} of {len(part)} images"
        )
        yield nodes


@contextlib.contextmanager
def daemons(folder: Path) -> Generator[list[Path]]:
    """Run a daemon for each node, members of each other, and yield where they listen."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(NODES)]
    places = [folder / f"node{number}" / "data.sock" for number in range(NODES)]
    with contextlib.ExitStack() as held:
        for address, place in zip(addresses, places, strict=True):
            with _environment(address, addresses, token):
                held.enter_context(daemon_process(place))
        yield places


@contextlib.contextmanager
def _environment(address: str, members: list[str], token: Path) -> Generator[None]:
    """What a private daemon is told of the other nodes."""
    given = {"LISTEN": address, "ADDRESS": address, "MEMBERS": ",".join(members), "TOKEN_FILE": str(token)}
    names = {f"EVERSTEP_CACHE_{name}": value for name, value in given.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def settled(dataset: CachedDataset[torch.Tensor]) -> int:
    """Return how many samples a node keeps once no more come: the other's travel after they were read."""
    until_s, kept = time.monotonic() + SETTLE_S, -1
    while (now := dataset.cache_info().cached_count) != kept and time.monotonic() < until_s:
        kept = now
        time.sleep(REST_S)
    return kept


def _trained(part: Part, rank: int, place: Path) -> Generator[float]:
    os.environ["EVERSTEP_SOCKET"] = str(place)
    torch.set_num_threads(1)
    dataset = cached(part, SHARE, augmented)
    loader = DataLoader(
        dataset, batch_size=BATCH, shuffle=True, seed=0, num_workers=WORKERS, rank=rank, world_size=NODES
    )
    for epoch in itertools.count():
        began_s = time.perf_counter()
        for _ in loader:
            pass
        yield time.perf_counter() - began_s
        if epoch == 0:
            yield settled(dataset)


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
