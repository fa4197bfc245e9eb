import threading

import pytest

from everstep.checkpoint.chunk_ring import ChunkRing, RingClosedError
from everstep.core.errors import UsageError


def test_a_slot_is_lent_once_until_it_is_given_back() -> None:
    ring = ChunkRing(2, 4096)
    offsets = {ring.take(), ring.take()}
    assert offsets == {0, 4096}
    slot = ring.deliver(4096)
    assert slot == 1
    ring.give(slot)
    assert ring.take() == 4096


def test_a_reader_waits_for_a_slot() -> None:
    ring = ChunkRing(1, 4096)
    ring.deliver(ring.take())
    taken: list[int] = []
    reader = threading.Thread(target=lambda: taken.append(ring.take()))
    reader.start()
    ring.give(0)
    reader.join(10)
    assert taken == [0]


def test_only_what_was_delivered_is_given_back() -> None:
    ring = ChunkRing(2, 4096)
    ring.take()
    for slot in (0, 1, 2, -1):
        with pytest.raises(UsageError, match=f"slot {slot} "):
            ring.give(slot)
    ring.deliver(0)
    ring.give(0)
    with pytest.raises(UsageError, match="slot 0 "):
        ring.give(0)


def test_closing_ends_who_waits_and_who_comes() -> None:
    ring = ChunkRing(1, 4096)
    ring.take()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RingClosedError):
            ring.take()
        ended.set()

    reader = threading.Thread(target=wait)
    reader.start()
    ring.close()
    ring.close()
    reader.join(10)
    assert ended.is_set()
    with pytest.raises(RingClosedError):
        ring.take()
