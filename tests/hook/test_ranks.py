"""How the ranks of one run agree over a real Store: two of them in one process."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from everstep.checkpoint.frequency_types import Limits
from everstep.core.ids import CheckpointId
from everstep.hook import ranks as ranks_module
from everstep.hook.pace import Pace
from everstep.hook.ranks import CONFIRM_S, StoreRanks

DEADLINE_S = 20.0
Make = Callable[[int], StoreRanks]


class Listener:
    """Has time for a last checkpoint, or not; nothing of these tests is ever sealed."""

    def __init__(self, *, has_time: bool = True) -> None:
        self._has_time = has_time

    def saves_last_boundary(self) -> bool:
        return self._has_time

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        raise AssertionError(checkpoint)

    def complete(self, checkpoint: CheckpointId) -> None:
        raise AssertionError(checkpoint)

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        raise AssertionError(checkpoint)


@pytest.fixture
def server() -> Iterator[list[TCPStore]]:
    """The Store that torchrun's agent would serve; who empties the list ends it."""
    made = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)]
    yield made
    made.clear()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, server: list[TCPStore]) -> Iterator[Make]:
    """Make one rank of two."""
    made: list[StoreRanks] = []
    port = server[0].port

    def make(number: int) -> StoreRanks:
        monkeypatch.setattr(dist, "get_rank", lambda: number)
        made.append(StoreRanks("small", Pace(every=10**6, limits=Limits())))
        return made[-1]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        ranks_module,
        "_own_client",
        lambda: TCPStore("127.0.0.1", port, is_master=False, use_libuv=False),
    )
    yield make
    while made:
        made.pop().close()


def last_boundary(pair: list[StoreRanks]) -> tuple[str, bool]:
    """Pass boundaries until one is the last: return why, and whether it is saved, the same for both ranks."""
    until_s, step = time.monotonic() + DEADLINE_S, 0
    while time.monotonic() < until_s:
        step += 1
        saved = {each.is_due(step) for each in pair}
        ends = {each.end_after(step) for each in pair}
        if ends != {""}:
            assert len(ends) == len(saved) == 1
            return ends.pop(), saved.pop()
    raise AssertionError("no boundary is the last one")


def never() -> None:
    raise AssertionError("all ranks were told")


def test_ranks_that_are_all_told_end_with_the_same_boundary(rank: Make) -> None:
    pair = [rank(0), rank(1)]
    for each in pair:
        each.start(0, Listener())
        each.confirm_end("SIGTERM", never)
    assert last_boundary(pair) == ("SIGTERM", True)


@pytest.mark.parametrize("has_time", [True, False])
def test_rank_0_says_for_all_whether_the_last_boundary_is_saved(rank: Make, has_time: bool) -> None:
    pair = [rank(0), rank(1)]
    for each, believes in zip(pair, (has_time, not has_time), strict=True):
        each.start(0, Listener(has_time=believes))
    pair[1].ask_for_checkpoint("the notice")
    assert last_boundary(pair) == ("the notice", has_time)


def test_a_request_after_a_notice_leaves_the_notice(rank: Make) -> None:
    """Of any rank, in the same moment."""
    pair = [rank(0), rank(1)]
    pair[1].ask_for_checkpoint("the notice")
    pair[0].ask_for_checkpoint()
    pair[1].ask_for_checkpoint()
    for each in pair:
        each.start(0, Listener())
    assert last_boundary(pair) == ("the notice", True)


class AsksMeanwhile:
    """The Store as rank 0 sees it: another rank asks between any two of its calls."""

    def __init__(self, store: Store, ask: Callable[[], None]) -> None:
        self._store, self._ask = store, ask

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self._store, name)

        def and_ask(*arguments: object) -> object:
            found = call(*arguments)
            self._ask()
            return found

        return and_ask


def test_no_request_is_lost_that_comes_while_rank_0_reads_another(rank: Make) -> None:
    first, second = rank(0), rank(1)
    asked = ["", "the notice"]

    def ask() -> None:
        if asked:
            second.ask_for_checkpoint(asked.pop(0))
            second._send(second._outbox)
            second._outbox.clear()

    ask()
    real = first._store
    first._store = cast("Store", AsksMeanwhile(real, ask))
    first._receive_requests()
    first._store = real
    first._receive_requests()
    assert (first._requested, first._end) == (True, "the notice")


def test_who_is_told_before_its_first_boundary_ends_alone_unless_all_are(rank: Make) -> None:
    """Its peer has died; the thread that reads the others' confirmations does not run yet."""
    alone = threading.Event()
    rank(1).confirm_end("SIGTERM", alone.set)
    assert alone.wait(CONFIRM_S + DEADLINE_S)


def test_who_is_told_after_the_store_was_lost_ends_alone(rank: Make, server: list[TCPStore]) -> None:
    alone, survivor = threading.Event(), rank(1)
    survivor.start(0, Listener())
    server.clear()
    while not survivor._lost:
        time.sleep(0.01)
    survivor.confirm_end("SIGTERM", alone.set)
    assert alone.wait(CONFIRM_S + DEADLINE_S)


def test_who_closes_meanwhile_is_not_ended(rank: Make) -> None:
    leaving = rank(1)
    leaving.start(0, Listener())
    leaving.confirm_end("SIGTERM", never)
    assert leaving._confirming is not None
    timer = leaving._confirming[1]
    leaving.close()
    timer.join(DEADLINE_S)
    assert timer.finished.is_set()
