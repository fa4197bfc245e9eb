"""What goes to peers and comes from them has threads of its own, a fixed number: checkpoints never wait behind it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from everstep.daemon.blocking import in_thread
from everstep.daemon.cache.arena import Found
from everstep.daemon.nodes.delivery import Delivery
from everstep.daemon.nodes.peer_book import PEER_THREADS
from everstep.daemon.nodes.service import PeerService
from everstep.proto import peer_pb2 as pb

CALLS = 40
DATA = b"sample"
DIGEST = xxhash.xxh3_64_intdigest(DATA)


class Gate:
    """Memory whose every copy waits until the test lets it go on; `taken` is set once peers have all their threads."""

    def __init__(self) -> None:
        self.opened, self.taken = threading.Event(), asyncio.Event()
        self._loop, self._lock = asyncio.get_running_loop(), threading.Lock()
        self.count = 0
        self.size_bytes = 1 << 20

    def _wait(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == PEER_THREADS:
                self._loop.call_soon_threadsafe(self.taken.set)
        assert self.opened.wait(60)

    def write_at(self, offset_bytes: int, data: bytes) -> None:
        self._wait()

    def read(self, found: Sequence[Found]) -> list[bytes]:
        self._wait()
        return [DATA for _ in found]

    def find(self, sample: int) -> Found:
        return Found(sample=sample, place=0, length=len(DATA), digest=DIGEST)

    space = SimpleNamespace(sample_count=1)


def receiving(gate: Gate, threads: ThreadPoolExecutor) -> list[Awaitable[object]]:
    message = pb.FetchResponse(samples=[pb.Sample(number=0, digest=DIGEST, data=DATA)])
    inbox: Any = gate
    return [Delivery(inbox, threads, 0, 1 << 20, [0]).take(message) for _ in range(CALLS)]


def serving(gate: Gate, threads: ThreadPoolExecutor) -> list[Awaitable[object]]:
    cache = SimpleNamespace(arena=gate, pinned=nullcontext)
    peers: Any = SimpleNamespace(
        threads=threads,
        metrics=SimpleNamespace(count=lambda *_: None),
        sharing=lambda _: SimpleNamespace(digest=0),
    )
    caches: Any = SimpleNamespace(find=lambda _: cache)
    credentials: Any = SimpleNamespace(name_holds=lambda _: True)
    context: Any = SimpleNamespace(time_remaining=lambda: 50.0, auth_context=dict)
    service = PeerService(peers, caches, credentials)
    request = pb.FetchRequest(
        dataset=pb.Dataset(uid=1, content="raw", fingerprint="f", sample_count=1),
        samples=[0],
        size_bytes_max=1 << 20,
    )

    async def drained(messages: AsyncIterator[object]) -> list[object]:
        return [each async for each in messages]

    return [drained(service.Fetch(request, context)) for _ in range(CALLS)]


@pytest.mark.parametrize("work", [receiving, serving])
def test_a_checkpoint_gets_a_thread_while_peers_keep_all_of_theirs(
    work: Callable[[Gate, ThreadPoolExecutor], list[Awaitable[object]]],
) -> None:
    async def run() -> None:
        gate, threads = Gate(), ThreadPoolExecutor(PEER_THREADS)
        calls = [asyncio.ensure_future(each) for each in work(gate, threads)]
        try:
            async with asyncio.timeout(20):
                await gate.taken.wait()
                assert await asyncio.gather(*(in_thread(int, each) for each in range(100))) == list(
                    range(100)
                )
            assert gate.count == PEER_THREADS
        finally:
            gate.opened.set()
            await asyncio.gather(*calls)
            threads.shutdown()
        assert gate.count == CALLS

    asyncio.run(run())
