"""Chunks of a shard taken out of the ring: what goes wrong there is said at once."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import pytest

from everstep.hook import shard_stream
from everstep.hook.link import Link
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.received_leaves import ReceivedLeaves
from everstep.hook.shard_stream import ShardStream, StreamEvents
from everstep.proto import frames


class NoMemory:
    """Leaves for which there is no room."""

    def expect(self, _: object) -> list[tuple[int, int, int]]:
        return [(0, 0, 1)]

    def receive(self, *_: int) -> None:
        raise RuntimeError("can't allocate memory")


def test_a_copy_that_fails_ends_the_restore_though_the_daemon_waits_for_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon announces no end: it waits for a free slot."""
    monkeypatch.setattr(shard_stream, "SILENCE_S", 5.0)
    told: list[frames.Request] = []
    events: StreamEvents = SimpleQueue()
    events.put(frames.Chunk(arena=1, slot=0, segment=0, file_offset_bytes=0, size_bytes=1))
    stream = ShardStream(
        link=cast(Link, SimpleNamespace(tell=told.append, broken=False)),
        arena=cast(MappedArena, SimpleNamespace(number=1, slot_address=lambda _: 0)),
        leaves=cast(ReceivedLeaves, NoMemory()),
        events=events,
    )
    with pytest.raises(RuntimeError, match="allocate memory"):
        stream.receive()
    assert [type(frame) for frame in told] == [frames.Stream]
