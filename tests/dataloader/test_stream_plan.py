"""Shares of a stream in turn: whatever comes when, the batches are those of the shares in turn."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.stream_plan import Shard, Standing, StreamShares, begin_of_share


def in_turn(lengths: list[int], first: int) -> list[tuple[int, int]]:
    """What is handed out: (share, number of its batch), less the shares that are at their end."""
    count = len(lengths)
    return [
        ((first + step) % count, step // count)
        for step in range(count * (max(lengths) + 1))
        if step // count < lengths[(first + step) % count]
    ]


def standing(share: int, number: int, length: int) -> Standing:
    """Batch `number` of a share with `length` batches; one more says that the share is at its end."""
    is_over = number >= length
    shard: Shard = {"own": {"at": number}, "seen": min(number + 1, length), "is_over": is_over}
    return Standing(share, 0 if is_over else 1, shard)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    first=st.integers(0, 4),
    window=st.integers(1, 9),
    order=st.lists(st.integers(0, 8), max_size=120),
)
def test_batches_are_those_of_the_shares_in_turn(
    lengths: list[int], first: int, window: int, order: list[int]
) -> None:
    first %= len(lengths)
    shares = StreamShares(seed=1, epoch=2, ranks=(3, 4), begins=[None] * len(lengths), first_share=first)
    tickets, out, made = shares.tickets(), deque[int](), [0] * len(lengths)
    waiting: dict[int, deque[int]] = {share: deque() for share in range(len(lengths))}
    came: dict[int, Standing] = {}
    handed: list[tuple[int, int]] = []
    number = 0
    choices, has_more = iter(order), True
    while has_more or out:
        while has_more and len(out) < window:
            ticket = next(tickets, None)
            if ticket is None:
                has_more = False
                break
            assert (ticket.begin is not None) == (made[ticket.share] == 0 and not waiting[ticket.share])
            waiting[ticket.share].append(number)
            out.append(number)
            number += 1
        busy = [share for share, queue in waiting.items() if queue]
        if busy:  # any worker may be the next to send something
            share = busy[next(choices, 0) % len(busy)]
            came[waiting[share].popleft()] = standing(share, made[share], lengths[share])
            made[share] += 1
            shares.came(standing(share, made[share] - 1, lengths[share]))
        while out and out[0] in came:
            what = came.pop(out.popleft())
            if what.sample_count:
                handed.append((what.share, what.shard["own"]["at"]))  # type: ignore[index]
    assert handed == in_turn(lengths, first)


def test_shares_that_are_over_are_not_asked() -> None:
    over: Shard = {"own": None, "seen": 3, "is_over": True}
    shares = StreamShares(seed=1, epoch=0, ranks=(0, 1), begins=[over, None], first_share=0)
    assert next(shares.tickets()).share == 1
    assert list(StreamShares(seed=1, epoch=0, ranks=(0, 1), begins=[over], first_share=0).tickets()) == []


def test_a_share_is_opened_behind_what_came_last() -> None:
    shares = StreamShares(seed=1, epoch=0, ranks=(0, 1), begins=[None, None], first_share=0)
    assert shares.opening(0).begin == begin_of_share()
    shares.came(Standing(0, 4, {"own": {"at": 4}, "seen": 4, "is_over": False}))
    shares.came(Standing(1, 4, {"own": None, "seen": 4, "is_over": False}))
    assert shares.opening(0).begin == {"own": {"at": 4}, "seen": 4, "is_over": False}
    assert (shares.can_be_opened(0), shares.can_be_opened(1)) == (True, False)


def test_the_plan_knows_its_shares() -> None:
    with pytest.raises(AssertionError):
        StreamShares(seed=1, epoch=0, ranks=(0, 1), begins=[None], first_share=1)
