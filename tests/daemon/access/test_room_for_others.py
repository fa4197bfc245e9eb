"""What one user, or nobody, can hold of what gRPC serves: there is room for others, whoever holds what."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from pausing import wait_until

from everstep.core.errors import DaemonUnavailableError
from everstep.core.paths import control_socket_path
from everstep.daemon.access.connection_bound import ConnectionBound
from everstep.daemon.access.connection_plan import CONNECTIONS_PER_USER_MAX, too_many
from everstep.daemon.access.open_calls import STREAMS_MAX, WAITING_MAX
from everstep.daemon.control.client import connected
from everstep.daemon.control.service import CALLS_MAX, CONNECTIONS_MAX
from everstep.daemon.node import Node
from everstep.daemon.testing import node_daemon

OTHER_UID = 65534
SERVING = b"\x08\x01"
"""A HealthCheckResponse on the wire."""
DEADLINE_S = 60
PATIENCE_S = 100
"""Of who repeats a command beside somebody who connects without end: the machine decides who is faster."""
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
ASK = "/nvhcd.HealthCheckService/RunHealthCheck"

FLOOD = f"""
import os, select, socket, sys
os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
held, poll = {{}}, select.epoll()
def fill():
    while len(held) < {CONNECTIONS_MAX} + 200:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sys.argv[1])
        held[sock.fileno()] = sock
        poll.register(sock, select.EPOLLRDHUP)
fill()
print("there", flush=True)
while True:
    for fd, _ in poll.poll():
        held.pop(fd).close()
    if sys.argv[2] == "again":
        fill()
"""
"""Opens more connections than gRPC takes of all together; opens others for those that are ended, or not."""


def calls_of(path: str, method: str, count: int) -> Callable[[contextlib.ExitStack], list[Any]]:
    """Return what begins calls without a token, whose requests do not come before the stack is closed."""

    def begin(stack: contextlib.ExitStack) -> list[Any]:
        gone = threading.Event()

        def never() -> Iterator[bytes]:
            gone.wait(DEADLINE_S)
            yield from ()

        found = list[Any]()
        for _ in range(-(-count // 64)):
            channel = stack.enter_context(
                grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])
            )
            begun = channel.stream_unary(method)
            found += [begun.future(never(), timeout=DEADLINE_S) for _ in range(64)]
        stack.callback(gone.set)
        return found

    return begin


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-room-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def endpoint(node_config: Path, tmp_path: Path) -> Path:
    """Where job launchers ask; the configuration says so."""
    path = tmp_path / "nvhcd" / "nvhcd.sock"
    path.parent.mkdir(mode=0o700)
    with node_config.open("a") as file:
        file.write(f'[health_check]\nsocket = "{path}"\n')
    return path


def test_calls_without_a_caller_leave_room_for_those_who_have_one(
    node_config: Path, socket_path: Path
) -> None:
    """More than the server answers at once, none of which sends its request; and streams that would never end."""
    control = str(control_socket_path(socket_path))
    with node_daemon(node_config, socket_path), contextlib.ExitStack() as held:
        silent = calls_of(control, CHECK, CALLS_MAX)(held)
        channels = [
            held.enter_context(
                grpc.insecure_channel(f"unix:{control}", options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(3)
        ]
        followers: list[Any] = [
            channel.unary_stream(WATCH)(b"", timeout=DEADLINE_S) for channel in channels for _ in range(60)
        ]
        wait_until(lambda: sum(each.done() for each in silent) >= len(silent) - WAITING_MAX)
        for each in followers:
            with contextlib.suppress(grpc.RpcError):  # it had to make room before it was read
                assert next(each) == SERVING
        wait_until(lambda: sum(each.done() for each in followers) >= len(followers) - STREAMS_MAX)
        with connected(socket_path) as client:
            assert client.status().daemon.pid
        assert channels[0].unary_unary(CHECK)(b"", timeout=DEADLINE_S) == SERVING, "probes are answered, too"
        wait_until(lambda: all(each.done() for each in silent))
        assert sum(not each.done() for each in followers) <= STREAMS_MAX


def test_launchers_are_answered_whoever_asks_without_a_question(
    node_config: Path, endpoint: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), contextlib.ExitStack() as held:
        silent = calls_of(str(endpoint), ASK, 300)(held)
        wait_until(lambda: any(each.done() for each in silent))
        with grpc.insecure_channel(
            f"unix:{endpoint}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            assert channel.unary_unary(ASK)(b"", timeout=DEADLINE_S).startswith(b"\x08\x01"), "success"
        wait_until(lambda: all(each.done() for each in silent))


@contextlib.contextmanager
def flooded(node_config: Path, socket_path: Path, how: str) -> Generator[Path]:
    """Run a daemon that another user floods, and has told so in its log, which is the value."""
    control = control_socket_path(socket_path)
    with node_daemon(node_config, socket_path):
        with connected(socket_path) as client:
            assert client.status().daemon.pid
        for path, mode in ((socket_path.parents[1], 0o711), (socket_path.parent, 0o711), (control, 0o666)):
            path.chmod(mode)
        command = [sys.executable, "-c", FLOOD, str(control), how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == "there\n"
                log = socket_path.with_name("daemon.log")
                wait_until(lambda: "code=connections" in log.read_text())
                yield log
            finally:
                flood.kill()


def answers(socket_path: Path) -> bool:
    try:
        with connected(socket_path) as client:
            return client.status().daemon.pid > 0
    except DaemonUnavailableError:
        return False


@pytest.mark.root
def test_one_user_cannot_hold_all_connections(node_config: Path, socket_path: Path) -> None:
    with flooded(node_config, socket_path, "once") as log:
        wait_until(partial(answers, socket_path))  # gRPC ends a little later what was shut down
        for _ in range(5):
            with connected(socket_path) as client:
                assert client.status().daemon.pid
        (said,) = [line for line in log.read_text().splitlines() if "code=connections" in line]
        assert re.search(rf"source=uid {OTHER_UID} .* more than {CONNECTIONS_PER_USER_MAX} connections", said)


@pytest.mark.root
def test_while_one_user_floods_a_command_that_is_repeated_comes_through(
    node_config: Path, socket_path: Path
) -> None:
    with flooded(node_config, socket_path, "again"):
        until_s, answered = time.monotonic() + PATIENCE_S, 0
        while answered < 3:
            assert time.monotonic() < until_s, f"{answered} answers in {PATIENCE_S} s"
            answered += answers(socket_path)


def test_the_newest_of_a_user_are_too_many_and_nobody_elses() -> None:
    connections = {10: 1, 11: 2, 12: 1, 13: 1, 14: 0, 15: 0, 16: 0, 17: 2}
    assert too_many(connections, unbounded={0}, count_max=2) == {13: 1}
    assert too_many(connections, unbounded={0}, count_max=1) == {12: 1, 13: 1, 17: 2}
    assert too_many({}, unbounded=()) == {}


def test_a_descriptor_whose_number_another_has_taken_is_left_to_the_next_look() -> None:
    """gRPC closes and opens meanwhile. What was recorded unlisted could not be ended, and that ended the looking."""
    path = Path(tempfile.mkdtemp(prefix="es-bound-", dir="/tmp")) / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))
        with listener.accept()[0] as accepted:
            bound = ConnectionBound(cast(Node, None), [str(path)])
            inode = os.fstat(accepted.fileno()).st_ino
            known = bound._connections  # pyright: ignore[reportPrivateUsage]
            bound._end_too_many({inode + 1: accepted.fileno()})  # pyright: ignore[reportPrivateUsage]
            assert known == {}
            bound._end_too_many({inode: accepted.fileno()})  # pyright: ignore[reportPrivateUsage]
            assert known == {inode: os.getuid()}
    shutil.rmtree(path.parent)
