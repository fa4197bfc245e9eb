"""Where no checkpoint is common to all ranks: all of them refuse to begin from nothing, or none does."""

from typing import Any, cast

import pytest

from everstep.core.errors import CorruptDataError, DeadlineError, EverstepError, StateMismatchError
from everstep.hook.restore import Fetched, RestoreSearch
from everstep.hook.restore_plan import Choice
from everstep.proto.frames import Offer, Offers


class Ranks:
    """This rank and another one, which says the same on each topic."""

    rank, world_size = 0, 2

    def __init__(self, **said: object) -> None:
        self._said = said

    def gather(self, topic: str, value: object, *, deadline_s: float | None = None) -> list[object]:
        del deadline_s
        return [value, self._said.get(topic)]


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


def test_what_keeps_another_rank_from_its_offers_is_raised() -> None:
    ranks = Ranks(offer={"code": "DeadlineError", "message": "no answer within 3600 s", "hint": ""})
    link = Link(offers(had_complete=True))
    made: dict[str, Any] = {"link": link, "ranks": ranks, "components": [], "attempt": 2, "events": None}
    with pytest.raises(DeadlineError, match="rank 1: no answer"):
        RestoreSearch(**made).run()


class Failing(RestoreSearch):
    """This rank's shard is damaged."""

    def _fetch_checked(self, choice: Choice) -> tuple[Fetched | None, EverstepError | None]:
        return None, CorruptDataError(f"block 3 of {choice.checkpoint}")


def failing(**other: str) -> RestoreSearch:
    """Return the search of a rank beside one that says this of the same checkpoint, and has no older one."""
    whole = Offer(attempt=1, step=2, world_size=2, shards=[0, 1], in_memory=False, problem="")
    link = Link(Offers(re=1, items=[whole], had_complete=True))
    ranks = Ranks(offer=["1.2"], fit={"hint": "", **other}, lost=True)
    made: dict[str, Any] = {"link": link, "ranks": ranks, "components": [], "attempt": 2, "events": None}
    return Failing(**made)


def test_all_ranks_raise_what_does_not_fit_on_one_also_who_has_a_damaged_shard() -> None:
    """Else it would go on to an older checkpoint, and wait there for who has raised."""
    with pytest.raises(StateMismatchError, match=r"rank 1: w is \[8\] in the checkpoint"):
        failing(code="StateMismatchError", message="w is [8] in the checkpoint, [9] here").run()


def test_where_all_are_damaged_the_first_rank_is_quoted() -> None:
    found = failing(code="CorruptDataError", message="block 5")
    with pytest.raises(CorruptDataError, match=r"1\.2: block 3 of 1\.2"):
        found.run()
