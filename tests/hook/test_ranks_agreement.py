"""What all ranks must agree on before they train, over a real Store: two of them in one process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_pairs import NEVER, own_server, ranks_of_two
from torch._C._distributed_c10d import TCPStore

from everstep.core.errors import DeadlineError, UsageError
from everstep.hook import rank_store
from everstep.hook import ranks as ranks_module
from everstep.hook.rank_store import STORE_GONE_HINT
from everstep.hook.ranks import StoreRanks

DEADLINE_S = 20.0
Make = Callable[[int], StoreRanks]


@pytest.fixture
def server() -> Iterator[list[TCPStore]]:
    """The Store that torchrun's agent would serve; who empties the list ends it."""
    made = [own_server()]
    yield made
    made.clear()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, server: list[TCPStore]) -> Iterator[Make]:
    """Make one rank of two."""
    with ranks_of_two(monkeypatch, server[0].port) as make:
        yield lambda number: make(number, NEVER)


def on_both(act: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=act, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)


def test_ranks_that_were_not_given_the_same_are_refused(rank: Make) -> None:
    pair, refused = [rank(0), rank(1)], list[str]()

    def agree(number: int) -> None:
        with pytest.raises(UsageError) as raised:
            pair[number].agree_settings({"every": "3", "fresh": str(number == 1)}, None)
        refused.append(str(raised.value))

    on_both(agree)
    assert len(refused) == 2
    assert all("fresh=False on rank 0; fresh=True on rank 1 (attach(" in text for text in refused)


def test_what_one_rank_was_given_and_cannot_save_is_raised_by_all(rank: Make) -> None:
    pair, raised = [rank(0), rank(1)], dict[int, str]()
    mine = UsageError("an object cannot be attached as 'every'", hint="take another keyword")

    def agree(number: int) -> None:
        with pytest.raises(UsageError) as caught:
            pair[number].agree_settings({"every": "3"}, mine if number == 1 else None)
        raised[number] = caught.value.message

    on_both(agree)
    assert raised == {0: f"rank 1: {mine.message}", 1: mine.message}


def test_who_did_not_come_to_an_agreement_is_named(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "AGREE_DEADLINE_S", 0.2)
    with pytest.raises(DeadlineError, match=r"offers \(missing: rank 1\)"):
        rank(0).gather("offers", [])


def test_a_store_that_goes_while_ranks_agree_is_named_with_the_time_that_it_took(
    rank: Make, server: list[TCPStore]
) -> None:
    first, second = rank(0), rank(1)
    said = rf"after \d+\.\d s the TCPStore of torch\.distributed at 127\.0\.0\.1:{server[0].port} failed: "
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.gather, "offers", [])
        second._store.wait(["1/offers/0"])
        server.clear()
        with pytest.raises(DeadlineError, match=f"^the ranks could not agree on offers: {said}") as caught:
            waiting.result(DEADLINE_S)
    assert caught.value.hint == STORE_GONE_HINT
    with pytest.raises(DeadlineError, match=f"^rank 0 did not attach this run: {said}"):
        second.agree_settings({}, None)


def test_a_rank_that_has_ended_is_waited_for_no_longer(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemon says so: one that dies while it restores would be waited for as long as devices may take."""
    monkeypatch.setattr(rank_store, "SAID_AFTER_S", 0.1)
    first = rank(0)
    first.gone(1)
    with pytest.raises(DeadlineError, match="rank 1 has ended before the ranks could agree on restore"):
        first.gather("restore", {}, deadline_s=3600.0)
