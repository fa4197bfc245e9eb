"""The data socket's framing, over real sockets."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import DaemonUnavailableError
from everstep.proto import frames
from everstep.proto.wire import FrameError, FrameReader, decode_reply, decode_request, pack


def test_frames_arrive_whole_however_they_are_cut() -> None:
    left, right = socket.socketpair()
    with left, right:
        sent = [
            frames.Hello(protocol=1, version="0.1.0", role=frames.Role.TRAINER),
            frames.SealedEverywhere(attempt=1, step=2**40),
        ]
        reader = FrameReader(size_bytes_max=1000)
        got: list[frames.Request] = []
        for byte in b"".join(pack(frame) for frame in sent):
            left.sendall(bytes([byte]))
            assert reader.receive(right)
            while (body := reader.next_body()) is not None:
                got.append(decode_request(body))
        assert got == sent


def test_a_descriptor_comes_with_its_frame() -> None:
    left, right = socket.socketpair()
    with left, right:
        fd = os.memfd_create("test")
        os.write(fd, b"arena")
        ready = frames.ArenaReady(re=1, arena=1, slot_size_bytes=4096, slot_count=1, allocation_s=0.0)
        socket.send_fds(left, [pack(ready)], [fd])
        os.close(fd)
        reader = FrameReader(size_bytes_max=1000)
        assert reader.receive(right)
        body = reader.next_body()
        assert body is not None
        assert decode_reply(body) == ready
        taken = reader.take_fd()
        assert os.pread(taken, 5, 0) == b"arena"
        assert not os.get_inheritable(taken)
        os.close(taken)
        with pytest.raises(FrameError, match="did not come"):
            reader.take_fd()


def test_descriptors_that_nobody_takes_are_closed() -> None:
    left, right = socket.socketpair()
    with left, right:
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        socket.send_fds(left, [b"x"], [0, 1])
        reader = FrameReader(size_bytes_max=1000)
        reader.receive(right)
        assert reader.fd_count == 2
        reader.close()
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_an_oversize_frame_is_refused_before_it_is_buffered() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall((2**31).to_bytes(4, "little") + b"xx")
        reader = FrameReader(size_bytes_max=1000)
        reader.receive(right)
        with pytest.raises(FrameError, match="2147483648 bytes"):
            reader.next_body()


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_frame_or_a_declared_error(body: bytes) -> None:
    for decode, error in ((decode_request, FrameError), (decode_reply, DaemonUnavailableError)):
        try:
            frame = decode(body)
        except error:
            continue
        assert decode(pack(frame)[4:]) == frame
