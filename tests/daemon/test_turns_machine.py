"""Whose piece is next: nobody waits for long, nobody gets more than a share, nothing is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.devices.turns_machine import PIECE_BYTES, RESTORE_WEIGHT, Turns, Urgency, cut

OWNERS = range(4)
sizes = st.integers(0, PIECE_BYTES)
pieces = st.tuples(st.sampled_from(OWNERS), st.sampled_from(Urgency), sizes)
Item = tuple[int, Urgency, int, int]


@given(st.lists(st.one_of(pieces, st.none()), max_size=60))
def test_every_piece_is_taken_once_and_those_of_an_owner_in_order(
    events: list[tuple[int, Urgency, int] | None],
) -> None:
    """None takes one, if any waits."""
    turns, added, taken = Turns[Item](), list[Item](), list[Item]()
    for number, event in enumerate(events):
        if event is not None:
            owner, urgency, size = event
            added.append((owner, urgency, size, number))
            turns.add(owner, urgency, size, added[-1])
        elif turns:
            taken.append(turns.take())
    while turns:
        taken.append(turns.take())
    assert sorted(added, key=lambda item: item[3]) == sorted(taken, key=lambda item: item[3])
    for owner in OWNERS:
        for urgency in Urgency:
            numbers = [item[3] for item in taken if item[:2] == (owner, urgency)]
            assert numbers == sorted(numbers)


@given(st.lists(st.lists(sizes, min_size=60, max_size=60), min_size=2, max_size=4), st.sampled_from(Urgency))
def test_owners_that_wait_for_long_get_the_same_bytes(waiting: list[list[int]], urgency: Urgency) -> None:
    turns = Turns[tuple[int, int]]()
    for owner, found in enumerate(waiting):
        for size in found:
            turns.add(owner, urgency, size, (owner, size))
    moved, left = Counter[int](), {owner: len(found) for owner, found in enumerate(waiting)}
    while all(left.values()):
        owner, size = turns.take()
        moved[owner] += size
        left[owner] -= 1
        assert max(moved[each] for each in left) - min(moved[each] for each in left) <= 2 * PIECE_BYTES


@given(st.lists(sizes, min_size=40, max_size=40), st.lists(sizes, min_size=40, max_size=40))
def test_restores_go_ahead_and_the_rest_keeps_its_share(restores: list[int], others: list[int]) -> None:
    turns = Turns[tuple[Urgency, int]]()
    for size in others:
        turns.add(1, Urgency.OTHER, size, (Urgency.OTHER, size))
    for size in restores:
        turns.add(2, Urgency.RESTORE, size, (Urgency.RESTORE, size))
    moved, left = Counter[Urgency](), {Urgency.OTHER: len(others), Urgency.RESTORE: len(restores)}
    while all(left.values()):
        urgency, size = turns.take()
        assert moved or urgency is Urgency.RESTORE
        moved[urgency] += size
        left[urgency] -= 1
        ahead = moved[Urgency.RESTORE] - RESTORE_WEIGHT * moved[Urgency.OTHER]
        assert 0 <= ahead < (RESTORE_WEIGHT + 1) * PIECE_BYTES


@given(st.integers(0, 40 * PIECE_BYTES))
def test_pieces_are_the_whole(length: int) -> None:
    found = cut(length)
    assert sum(size for _, size in found) == length
    assert [offset for offset, _ in found] == [PIECE_BYTES * index for index in range(len(found))]
    assert all(size == PIECE_BYTES for _, size in found[:-1])
    assert found[-1][1] <= PIECE_BYTES
