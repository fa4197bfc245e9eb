"""Where no checkpoint is common to all ranks: all of them refuse to begin from nothing, or none does."""

from typing import Any, cast

import pytest

from everstep.core.errors import CorruptDataError
from everstep.hook.restore import RestoreSearch
from everstep.proto.frames import Offer, Offers


class Ranks:
    """This rank and another one, which says the same on each topic."""

    rank, world_size = 0, 2

    def __init__(self, **said: object) -> None:
        self._said = said

    def gather(self, topic: str, value: object) -> list[object]:
        return [value, self._said[topic]]


class Link:
    """A daemon that offers these."""

    def __init__(self, offers: Offers) -> None:
        self.client = self
        self._offers = offers

    def request(self, make: object, deadline_s: float) -> tuple[Offers, None]:
        del make, deadline_s
        return self._offers, None


def search(offers: Offers, *, others_lost: bool) -> object:
    ranks, link = Ranks(offer=[], lost=others_lost), Link(offers)
    made: dict[str, Any] = {"link": link, "ranks": ranks, "components": [], "attempt": 2, "events": None}
    return cast("Any", RestoreSearch(**made)).run()


def offers(*, had_complete: bool, problem: str = "") -> Offers:
    half = Offer(attempt=1, step=2, world_size=2, shards=[0], in_memory=False, problem=problem)
    return Offers(re=1, items=[half], had_complete=had_complete)


def test_a_rank_that_finds_nothing_refuses_with_one_that_finds_what_was_complete() -> None:
    empty = Offers(re=1, items=[], had_complete=False)
    with pytest.raises(CorruptDataError, match="can be restored by all ranks"):
        search(empty, others_lost=True)
    assert search(empty, others_lost=False) is None


def test_what_was_never_complete_is_passed_over_unless_something_is_wrong_with_it() -> None:
    assert search(offers(had_complete=False), others_lost=False) is None
    with pytest.raises(CorruptDataError, match=r"1\.2: a device is missing"):
        search(offers(had_complete=False, problem="a device is missing"), others_lost=False)
    with pytest.raises(CorruptDataError, match="no rank set has all shards"):
        search(offers(had_complete=True), others_lost=False)
