"""What a job gives to its group, in an order that only refusals bring about."""

from typing import Any, cast

import torch

from everstep.core.errors import MemoryRefusedError
from everstep.dataloader.shared.batch_bytes import BatchBytes
from everstep.dataloader.shared.exchange import Exchange
from everstep.dataloader.shared.link import ShareLink
from everstep.proto.frames import Done
from everstep.proto.share_frames import FailShare


class Narrow:
    """The end of a connection whose daemon has room for small batches only."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.sent: list[Any] = []
        self.answers: list[tuple[Any, int | None]] = []

    def publish(self, batch: int, prepared: BatchBytes, left_out: object = ()) -> int:
        if prepared.size_bytes > 10:
            raise MemoryRefusedError(f"a batch of {prepared.size_bytes} bytes")
        self.published.append(batch)
        return 100 + batch

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def frames(self) -> list[tuple[Any, int | None]]:
        answers, self.answers = self.answers, []
        return answers


def sized(size_bytes: int) -> BatchBytes:
    return BatchBytes(torch.zeros(size_bytes, dtype=torch.uint8), 0, {})


def test_a_batch_that_is_refused_does_not_hold_back_those_behind_it() -> None:
    link = Narrow()
    exchange = Exchange(cast(ShareLink, link), helps_while_waiting=False)
    for batch, size_bytes in enumerate((1, 20, 30, 2)):
        exchange.give(batch, sized(size_bytes))
    assert (link.published, exchange.count) == ([0], 4)
    link.answers = [(Done(re=100), None)]
    exchange.receive(lease=lambda _: None, take=lambda *_: True, learn=lambda _: None)
    assert link.sent == [FailShare(batch=1), FailShare(batch=2)]
    assert (link.published, exchange.count) == ([0, 3], 1)
