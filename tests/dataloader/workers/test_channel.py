"""Messages between a trainer and a worker: whole, in order, with their descriptors, until the end."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from everstep.core.errors import NodeError
from everstep.dataloader.workers import channel
from everstep.dataloader.workers.channel import BODY_INLINE_MAX, FDS_MAX, Ended, Kind, pair, receive, send


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = pair()
    ours.settimeout(10)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, BODY_INLINE_MAX, BODY_INLINE_MAX + 1, 3 << 20])
def test_a_body_of_any_size_arrives(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    send(ends[1], Kind.MADE, 1 << 40, body[:size])
    message = receive(ends[0])
    assert (message.kind, message.number, message.body, message.fds) == (Kind.MADE, 1 << 40, body[:size], [])


def test_descriptors_arrive_in_their_order(ends: tuple[socket.socket, socket.socket]) -> None:
    fds = [channel.memfd(i) for i in range(1, FDS_MAX + 1)]
    send(ends[1], Kind.MADE, 0, b"x" * (BODY_INLINE_MAX + 1), fds)
    channel.close_all(fds)
    message = receive(ends[0])
    assert [os.fstat(fd).st_size for fd in message.fds] == list(range(1, FDS_MAX + 1))
    assert len(message.body) == BODY_INLINE_MAX + 1
    message.close()


def test_what_was_sent_before_the_end_is_read_and_then_comes_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    send(ends[1], Kind.READY, 1, b"")
    ends[1].close()
    assert receive(ends[0]).kind is Kind.READY
    for _ in range(2):
        with pytest.raises(Ended):
            receive(ends[0])
    with pytest.raises(Ended):
        send(ends[0], Kind.TICKET, 1, b"")


def test_a_sender_killed_at_any_moment_leaves_whole_messages_only() -> None:
    """A child sends without pause until it is killed; what is then in the socket are whole messages, in order."""
    for _ in range(20):
        ours, theirs = pair()
        pid = os.fork()
        if pid == 0:
            number = 0
            while True:
                send(theirs, Kind.MADE, number, bytes([number % 256]) * (number % BODY_INLINE_MAX))
                number += 1
        theirs.close()
        expected = 0
        try:
            while message := receive(ours):
                assert message.number == expected
                assert message.body == bytes([expected % 256]) * (expected % BODY_INLINE_MAX)
                expected += 1
                if expected == 50:
                    os.kill(pid, signal.SIGKILL)
        except Ended:
            assert expected >= 50
        ours.close()
        os.waitpid(pid, 0)


def test_a_full_or_an_empty_socket_does_not_block_who_does_not_want_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(ends[0])
    sent = 0
    with contextlib.suppress(BlockingIOError):
        for sent in range(10_000):
            send(ends[0], Kind.TICKET, sent, b"x" * 4096)
    assert 10 < sent < 9_999
    assert [receive(ends[1]).number for _ in range(sent)] == list(range(sent))


def test_too_many_open_files_are_named(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = [channel.memfd(1) for _ in range(5)]
    send(ends[1], Kind.MADE, 0, b"", fds)
    channel.close_all(fds)
    monkeypatch.setattr(
        channel, "_CONTROL_SIZE", socket.CMSG_SPACE(4)
    )  # room for two, as at the limit of files
    with pytest.raises(NodeError, match=r"too many open files.*ulimit"):
        receive(ends[0])
