"""How long ranks wait for one of them whose daemon or devices are slow, over a real Store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rank_pairs import NEVER, own_server, ranks_of_two

from everstep.hook import rank_store
from everstep.hook import ranks as ranks_module
from everstep.hook.ranks import StoreRanks
from everstep.hook.restore import RestoreSearch
from everstep.proto.frames import Offers

DEADLINE_S = 60.0


class Link:
    """A daemon that has nothing, and says so only once it may."""

    def __init__(self, may_answer: threading.Event) -> None:
        self.client = self
        self.asked, self._may_answer = threading.Event(), may_answer

    def request(self, make: object, deadline_s: float) -> tuple[Offers, None]:
        del make, deadline_s
        self.asked.set()
        assert self._may_answer.wait(DEADLINE_S)
        return Offers(re=1, items=[], had_complete=False), None


def search(ranks: StoreRanks, link: Link) -> object:
    made: dict[str, Any] = {"link": link, "ranks": ranks, "components": [], "attempt": 2, "events": None}
    return RestoreSearch(**made).run()


def test_a_rank_that_looks_for_longer_than_ranks_are_waited_for_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shard comes from the devices, or its daemon still writes what died; the others have theirs in memory."""
    agree_deadline_s = ranks_module.AGREE_DEADLINE_S
    fast, slow = Link(threading.Event()), Link(threading.Event())

    def say_awaited(who: str, deadline_s: float) -> None:
        del deadline_s
        if who.startswith("offer "):
            monkeypatch.setattr(ranks_module, "AGREE_DEADLINE_S", agree_deadline_s)
            slow._may_answer.set()

    monkeypatch.setattr(rank_store, "say_awaited", say_awaited)
    monkeypatch.setattr(rank_store, "SAID_AFTER_S", 0.5)
    server = own_server()
    with ranks_of_two(monkeypatch, server.port) as make, ThreadPoolExecutor() as threads:
        searches = [
            threads.submit(search, make(0, NEVER), fast),
            threads.submit(search, make(1, NEVER), slow),
        ]
        assert all(link.asked.wait(DEADLINE_S) for link in (fast, slow))
        monkeypatch.setattr(ranks_module, "AGREE_DEADLINE_S", 0.1)
        fast._may_answer.set()
        try:
            assert [each.result(DEADLINE_S) for each in searches] == [None, None]
        finally:
            slow._may_answer.set()
