"""What peers send for one request of a reader, checked and put into the reader's inbox.

An inbox is a memfd like a staging, filled by the daemon alone. Each peer of a request has a part of it of its own.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import xxhash

from ...proto import peer_pb2 as pb
from ..blocking import in_executor
from ..cache.staging import Staging


class LyingPeerError(Exception):
    """A peer sent what was not asked for, or other bytes than it says."""


@dataclass(frozen=True, slots=True)
class Received:
    """One sample of a peer, whose digest holds."""

    sample: int
    digest: int
    data: bytes
    offset_bytes: int


class Delivery:
    """Of one peer: `take` gets its messages one after the other."""

    def __init__(
        self, inbox: Staging, threads: Executor, begin_bytes: int, size_bytes: int, wanted: Sequence[int]
    ) -> None:
        self.received: list[Received] = []
        self.left_out: list[int] = []
        self.size_bytes = size_bytes
        self._inbox, self._threads = inbox, threads
        self._at, self._end = begin_bytes, begin_bytes + size_bytes
        self._wanted = set(wanted)

    async def take(self, message: pb.FetchResponse) -> None:
        """Put the samples of a message into the inbox.

        Raises:
            LyingPeerError: it holds a sample that was not asked for, or came before, more than was allowed, or bytes
                that its digest is not of. What came before of this peer counts no more either.
        """
        try:
            await self._take(message)
        except LyingPeerError:
            self.received, self.left_out = [], []
            raise

    async def _take(self, message: pb.FetchResponse) -> None:
        coming: list[Received] = []
        for each in message.samples:
            self._tick_off(each.number)
            data = each.data
            if self._at + len(data) > self._end:
                raise LyingPeerError(f"more than {self.size_bytes} bytes")
            coming.append(Received(each.number, each.digest, data, self._at))
            self._at += len(data)
        for number in message.left_out:
            self._tick_off(number)
            self.left_out.append(number)
        await in_executor(self._threads, lambda: self._store(coming))
        self.received += coming

    def _tick_off(self, number: int) -> None:
        if number not in self._wanted:
            raise LyingPeerError(f"sample {number}, which was not asked for, or came before")
        self._wanted.discard(number)

    def _store(self, coming: Sequence[Received]) -> None:
        """Check and write; for a thread."""
        for each in coming:
            if xxhash.xxh3_64_intdigest(each.data) != each.digest:
                raise LyingPeerError(f"sample {each.sample} with other bytes than its digest is of")
            self._inbox.write_at(each.offset_bytes, each.data)
