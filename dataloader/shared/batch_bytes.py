"""A batch as the bytes that jobs exchange, made by whoever prepares it; and back, checked against its place."""

from collections.abc import Collection
from typing import NamedTuple

import torch
import xxhash
from torch.utils.data import get_worker_info

from ...core.errors import CorruptDataError
from ..batch_maker import AnyTicket, BatchMaker, MadeBatch, Ticket
from ..tensor_tree import Classes, decode_batch, encode_batch, octets_of
from ..workers.packing import new_shared_storage


class BatchBytes(NamedTuple):
    """What `EncodingMaker` puts in the place of a batch."""

    octets: torch.Tensor
    xxh3: int
    classes: dict[str, type]
    """Named tuples that the batch holds, by name."""

    @property
    def size_bytes(self) -> int:
        """Return how many there are."""
        return self.octets.numel()


class EncodingMaker(BatchMaker):
    """Makes batches as bytes; in a worker straight into memory that the trainer maps."""

    is_sent_as_collated = False

    def make(self, ticket: AnyTicket, *, is_solo: bool = False) -> MadeBatch:
        """Return the batch of one ticket, its data as `BatchBytes`; StateTypeError with the path to a bad leaf."""
        made = super().make(ticket, is_solo=is_solo)
        encoded = encode_batch(made.ids, made.data)
        octets = _memory(encoded.size_bytes)
        target, at = octets_of(octets).data, 0
        for piece in encoded.pieces:
            size_bytes = memoryview(piece).nbytes
            target[at : at + size_bytes] = piece
            at += size_bytes
        return made._replace(data=BatchBytes(octets, xxhash.xxh3_64_intdigest(target), encoded.classes))


def read_batch(
    data: memoryview,
    ticket: Ticket,
    left_out: Collection[int],
    classes: Classes,
    *,
    is_ours: bool = False,
    pin_memory: bool = False,
) -> MadeBatch:
    """Return the batch that these bytes hold. Its tensors are copies, unless the bytes are theirs now (`is_ours`).

    Where all samples of the ticket are `left_out`, it is of another sample, a stand-in.

    Raises:
        CorruptDataError: they are no batch, or one of other samples than the ticket's without those left out.
    """
    ids, content = decode_batch(data, classes, is_ours=is_ours, pin_memory=pin_memory)
    expected = [each for each in ticket.ids if each not in left_out]
    if expected and ids != expected:
        raise CorruptDataError(
            f"the batch at {ticket.cursor} of epoch {ticket.epoch} has other samples than its place"
        )
    return MadeBatch(
        ticket.cursor,
        torch.tensor(expected, dtype=torch.int64).numpy(),  # pyright: ignore[reportUnknownMemberType]
        content,
        left_out=tuple(each for each in ticket.ids if each in left_out),
        is_stand_in=not expected,
    )


def _memory(size_bytes: int) -> torch.Tensor:
    if get_worker_info() is None:
        return torch.empty(size_bytes, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(new_shared_storage(size_bytes))  # pyright: ignore[reportUnknownMemberType, reportCallIssue, reportArgumentType]
