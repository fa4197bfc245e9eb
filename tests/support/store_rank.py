"""One rank on a node of its own: finds the other nodes' daemons through a TCPStore, then reads what they hold."""

import os
import random
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

from cached import Blocks
from torch._C._distributed_c10d import TCPStore

from everstep.dataloader import CachedDataset, members_from_store
from everstep.dataloader.cache.arena_format import budget_for

BATCH = 32


def run_rank(rank: int, world_size: int, source: Blocks, share: float, parent: Connection) -> None:
    """Take what is asked for: (Store's port, this node's socket); None to read a part of the source; None to read all.

    Each is answered: by the members; that it is read; how many samples came from other nodes.
    """
    parent.send("ready")
    port, socket = parent.recv()
    os.environ["EVERSTEP_SOCKET"] = str(socket)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    members = members_from_store(store, rank=rank, world_size=world_size)
    parent.send(members)
    dataset = CachedDataset[bytes](source, budget=int(budget_for(source.lengths) * share), members=members)
    everything = list(range(len(source)))
    random.Random(rank).shuffle(everything)
    parent.recv()
    _read(dataset, source, range(rank, len(source), world_size))
    assert dataset.flush()
    parent.send("filled")
    parent.recv()
    _read(dataset, source, everything)
    parent.send(dataset.cache_info().peer_count)
    dataset.close()


def _read(dataset: CachedDataset[bytes], source: Blocks, samples: Sequence[int]) -> None:
    for begin in range(0, len(samples), BATCH):
        batch = list(samples[begin : begin + BATCH])
        assert dataset.__getitems__(batch) == [source.content(each) for each in batch]
