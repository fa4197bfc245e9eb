"""Samples that come from other nodes, or go to them, in the words of `Filling`."""

import asyncio
from collections.abc import Sequence

import xxhash

from ...proto import frames
from ..nodes.outbox_plan import Parcel
from .arena import Item
from .staging import Bytes


class CopyFiller:
    """This daemon, with copies of what it fetched for a reader: nobody waits for what becomes of them."""

    pid = 0

    def send(self, frame: frames.Reply) -> None:
        """Nobody asked."""


class OfferFiller:
    """Another node, which waits for the answer."""

    pid = 0

    def __init__(self) -> None:
        self._answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send(self, frame: frames.Reply) -> None:
        """Hear what became of the samples."""
        assert isinstance(frame, frames.CacheFilled)
        if not self._answer.done():
            self._answer.set_result(frame.published_count + frame.known_count)

    async def held_count(self) -> int:
        """Return how many of them are in the cache now."""
        return await self._answer


def read_parcels(staging: Bytes, items: Sequence[Item]) -> list[Parcel]:
    """Return those of the samples whose bytes have the digest that the reader sent; for a thread."""
    parcels: list[Parcel] = []
    for item in items:
        data = bytearray(item.length)
        if staging.read_into(memoryview(data), item.offset_bytes) and (
            xxhash.xxh3_64_intdigest(data) == item.digest
        ):
            parcels.append(Parcel(item.sample, item.digest, bytes(data)))
    return parcels
