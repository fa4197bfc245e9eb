"""Shares of a stream: who is asked for the next batch, and where a share is begun anew; no dataset, no process.

A stream without random access is read in shares, one per worker, each by the worker of the same number. The batches
of an epoch are those of the shares in turn: 0, 1, … and 0 again, less the shares that are at their end. What a worker
has made in advance has moved its stream, so each batch says where its share stands behind it.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

Shard = dict[str, object]
"""Where one share stands: {"own": what the stream said of itself, "seen": its samples, "is_over": bool}."""


class Standing(NamedTuple):
    """Where a share stands behind a batch of it. Without samples the batch only says that the share is at its end."""

    share: int
    sample_count: int
    shard: Shard


class StreamTicket(NamedTuple):
    """The next batch of one share, as it goes to the worker that reads the share."""

    seed: int
    epoch: int
    rank: int
    world_size: int
    share: int
    share_count: int
    begin: Shard | None
    """Open the stream here; None: go on behind the batch before."""

    @property
    def ids(self) -> list[int]:
        """Nothing: samples of a stream have no numbers."""
        return []

    @property
    def worker(self) -> int | None:
        """Who alone can make it."""
        return self.share


def begin_of_share() -> Shard:
    """Return where a share stands at its begin."""
    return {"own": None, "seen": 0, "is_over": False}


class StreamShares:
    """The shares of one rank's stream from one iter() to the end of the epoch: tickets out, standings in."""

    def __init__(
        self,
        *,
        seed: int,
        epoch: int,
        ranks: tuple[int, int],
        begins: Sequence[Shard | None],
        first_share: int,
    ) -> None:
        """Begin each share where `begins` says (None: at its begin), with the turn of `first_share`.

        `ranks` are (rank, world size).
        """
        assert 0 <= first_share < len(begins), (first_share, len(begins))
        self._of = seed, epoch, *ranks
        self._latest = [deepcopy(each) or begin_of_share() for each in begins]
        self._first_share = first_share

    @property
    def share_count(self) -> int:
        """The number of shares."""
        return len(self._latest)

    def tickets(self) -> Iterator[StreamTicket]:
        """Yield tickets, share by share in turn, until all have said that they are at their end."""
        share, opened = self._first_share, set[int]()
        while not all(shard["is_over"] for shard in self._latest):
            if not self._latest[share]["is_over"]:
                yield self.opening(share) if share not in opened else self._ticket(share, None)
                opened.add(share)
            share = (share + 1) % self.share_count

    def came(self, standing: Standing) -> None:
        """Note a batch that a worker has made; those of one share come in their order."""
        self._latest[standing.share] = standing.shard

    def can_be_opened(self, share: int) -> bool:
        """Whether another worker can go on behind the last batch of a share that came."""
        shard = self._latest[share]
        return bool(shard["is_over"] or shard["own"] is not None or not shard["seen"])

    def opening(self, share: int) -> StreamTicket:
        """Return a ticket that opens a share behind the last batch of it that came."""
        return self._ticket(share, deepcopy(self._latest[share]))

    def _ticket(self, share: int, begin: Shard | None) -> StreamTicket:
        return StreamTicket(*self._of, share, self.share_count, begin)
