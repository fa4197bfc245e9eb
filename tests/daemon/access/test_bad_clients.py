"""Clients that mean harm, at every port of a node daemon: each is refused, nothing of it stays, the neighbour saves on.

One daemon takes them all, one after the other; after each its descriptors, mappings and threads are as before.
"""

import array
import contextlib
import os
import select
import shutil
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from hostile import HELLO, HOST, SETTLE_S, Attacked, Case, Evil, attacked, ended, paths_on
from hostile_bytes import HTTP2, LONG, METRICS, NAMES, RESETS, RST_STREAM, SETTINGS, flood_of_resets
from other_user import OTHER_USER
from pausing import wait_until

from everstep.core.ids import CheckpointId
from everstep.proto import frames, share_frames
from everstep.proto import node_pb2 as pb
from everstep.proto.wire import pack

CASES: dict[str, Case] = {}
SERVICE = "/everstep.node.v1.Node/"


@pytest.fixture(scope="module")
def target() -> Iterator[Attacked]:
    folder = Path(tempfile.mkdtemp(prefix="es-bad-", dir="/tmp"))
    try:
        with attacked(folder, quota="connections = 600\ncalls = 16") as found:
            yield found
    finally:
        shutil.rmtree(folder)


def case(name: str) -> Callable[[Case], Case]:
    def add(body: Case) -> Case:
        assert name not in CASES
        CASES[name] = body
        return body

    return add


# -- bytes that are no frames, before and after Hello


def body(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def encoded(value: object) -> bytes:
    return body(msgspec.msgpack.encode(value))


RAW: dict[str, bytes] = {
    "empty frame": body(b""),
    "length of 4 GiB": b"\xff\xff\xff\xff",
    "negative length": struct.pack("<i", -1),
    "noise": bytes(range(256)) * 8,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "client hello of tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "no map": encoded([1, 2, 3]),
    "no tag": encoded({"protocol": frames.PROTOCOL}),
    "unknown tag": encoded({"type": "become_root"}),
    "tag of a reply": encoded({"type": "welcome"}),
    "wrong types": encoded({"type": "hello", "protocol": "9", "version": 9, "role": 9}),
    "unknown role": encoded({"type": "hello", "protocol": frames.PROTOCOL, "version": "", "role": "root"}),
    "integer beyond 64 bits": body(b"\x81\xa8protocol\xcf" + b"\xff" * 9),
    "deep nesting": body(b"\x91" * 4000),
    "array of 4 billion": body(b"\xdd\xff\xff\xff\xff"),
    "map of 4 billion": body(b"\xdf\xff\xff\xff\xff"),
    "string of 4 GiB": body(b"\xdb\xff\xff\xff\xff"),
    "extension type": body(b"\xc7\x04\x7fevil"),
    "not utf-8": body(b"\x81\xa4type\xa2\xff\xfe"),
    "bytes after the map": body(msgspec.msgpack.encode(HELLO) + b"more"),
    "a pickle": body(b"cos\nsystem\n(S'touch /tmp/everstep-was-here'\ntR."),
}


def raw_case(content: bytes, *, greeted: bool) -> Case:
    def send(target: Attacked) -> None:
        with target.connect() as sock:
            sock.sendall((pack(HELLO) if greeted else b"") + content)
            said = ended(sock)
        assert (b"welcome" in said) == greeted
        assert not Path("/tmp/everstep-was-here").exists()

    return send


for name, content in RAW.items():
    case(f"data: {name}, before Hello")(raw_case(content, greeted=False))
    if name != "client hello of tls":  # the length of a frame of 64 KiB, which may still come
        case(f"data: {name}, after Hello")(raw_case(content, greeted=True))
case("data: too large before Hello")(raw_case(struct.pack("<I", 5000), greeted=False))
case("data: too large after Hello")(raw_case(struct.pack("<I", (16 << 20) + 1), greeted=True))
case("data: another protocol")(
    raw_case(pack(frames.Hello(protocol=-1, version="x", role=frames.Role.TRAINER)), greeted=False)
)
case("data: a request before Hello")(raw_case(pack(frames.ListOffers(request_id=1)), greeted=False))


@case("data: half a Hello, then silence")
def half_hello(target: Attacked) -> None:
    """The deadline of Hello ends it, not the client."""
    with target.connect() as sock:
        sock.sendall(pack(HELLO)[:7])
        assert ended(sock) == b""


@case("data: half a frame of 15 MiB, left")
def half_frame(target: Attacked) -> None:
    with target.connect() as sock:
        sock.sendall(pack(HELLO) + struct.pack("<I", 15 << 20) + bytes(1 << 20))


@case("data: half frames of more than a user may hold")
def many_halves(target: Attacked) -> None:
    socks = [target.connect() for _ in range(8)]
    closed = 0
    for sock in socks:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(pack(HELLO) + struct.pack("<I", 15 << 20) + bytes(14 << 20))
    for sock in socks:
        sock.settimeout(0.5)
        try:
            ended(sock)
            closed += 1
        except TimeoutError:
            pass
        sock.close()
    assert closed >= 3, "8 x 14 MiB wait, 64 MiB may"


@case("data: a second Hello")
def second_hello(target: Attacked) -> None:
    with Evil(target) as evil:
        assert evil.refusal(HELLO) == "UsageError"


# -- descriptors: clients send none


def memfd(size: int, *, seals: int = 0) -> int:
    fd = os.memfd_create("evil", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(fd, size)
    if seals:
        import fcntl

        fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
    return fd


def opened(path: str, flags: int = os.O_RDONLY) -> Callable[[], list[int]]:
    return lambda: [os.open(path, flags | os.O_CLOEXEC)]


def epolled() -> list[int]:
    with select.epoll() as made:
        return [os.dup(made.fileno())]


DESCRIPTORS: dict[str, Callable[[], list[int]]] = {
    "a file": opened(__file__),
    "a directory": opened("/etc"),
    "a directory by path only": opened("/", os.O_PATH),
    "/dev/zero": opened("/dev/zero"),
    "/dev/full": opened("/dev/full", os.O_WRONLY),
    "its own memory": opened("/proc/self/mem"),
    "an unsealed memfd": lambda: [memfd(4096)],
    "a sealed memfd": lambda: [memfd(4096, seals=0x1 | 0x2 | 0x4)],
    "an empty memfd": lambda: [memfd(0)],
    "an eventfd": lambda: [os.eventfd(0)],
    "an epoll": epolled,
    "its own pidfd": lambda: [os.pidfd_open(os.getpid())],
    "a pipe": lambda: [*os.pipe()],
}


def sent_with(target: Attacked, fds: list[int], *, greeted: bool) -> bytes:
    with target.connect() as sock:
        try:
            content = pack(HELLO)
            if greeted:
                sock.sendall(content)
                assert sock.recv(4)
                content = pack(frames.ListOffers(request_id=1))
            socket.send_fds(sock, [content], fds)
            return ended(sock)
        finally:
            for fd in set(fds):
                os.close(fd)


def descriptor_case(make: Callable[[], list[int]], *, greeted: bool) -> Case:
    def send(target: Attacked) -> None:
        assert b"offers" not in sent_with(target, make(), greeted=greeted)

    return send


for name, make in DESCRIPTORS.items():
    for greeted in (False, True):
        case(f"fd: {name}, {'after' if greeted else 'with'} Hello")(descriptor_case(make, greeted=greeted))


@case("fd: more than a message may carry")
def many_descriptors(target: Attacked) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    with target.connect() as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(20):
                fds = array.array("i", [fd] * 200)
                sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        ended(sock)
    os.close(fd)


@case("fd: a memfd that is cut off while it is on its way")
def truncated(target: Attacked) -> None:
    fd = memfd(1 << 20)
    with target.connect() as sock:
        socket.send_fds(sock, [pack(HELLO)], [fd])
        os.truncate(fd, 0)
        os.close(fd)
        ended(sock)


@case("fd: the connection itself")
def itself(target: Attacked) -> None:
    with target.connect() as sock:
        socket.send_fds(sock, [pack(HELLO)], [sock.fileno()])
        sock.settimeout(15)
        assert b"welcome" not in ended(sock)


# -- frames that are well-formed, and say what cannot be


def open_run(**changes: object) -> frames.OpenRun:
    given: dict[str, object] = {
        "request_id": 1, "name": "evil", "rank": 0, "world_size": 1, "storage": ["nvme0"], "takeover": False,
    }  # fmt: skip
    return frames.OpenRun(**(given | changes))  # type: ignore[arg-type]


BIG = 2**63 - 1
WITHOUT_RUN: dict[str, frames.Request] = {
    "rank -1": open_run(rank=-1),
    "rank beyond the world": open_run(rank=1),
    "largest rank": open_run(rank=BIG),
    "world of 0": open_run(world_size=0),
    "world of -1": open_run(world_size=-1),
    "no such device": open_run(storage=["nvme9"]),
    "a directory of the system": open_run(storage=["/etc"]),
    "a way out of a device": open_run(storage=["nvme0/../../etc"]),
    "a device with NUL": open_run(storage=["nvme0\0"]),
    "10,000 devices": open_run(storage=["x"] * 10_000),
    "a name with NUL": open_run(name=NAMES["nul"]),
    "a name of 10,000": open_run(name=LONG),
    "no name": open_run(name=""),
    "a name of two lines": open_run(name=NAMES["newline"]),
    "a name that turns round": open_run(name=NAMES["right-to-left"]),
    "keep -1": open_run(keep=frames.KeepRules(last=-1)),
    "the neighbour's run": open_run(name="neighbour", storage=["nvme0", "nvme1"]),
    "attempt without run": frames.BeginAttempt(request_id=1, attempt=1, fresh=False),
    "fetch without run": frames.Fetch(request_id=1, attempt=1, step=1, rank=0),
    "manifest without run": frames.GetManifest(request_id=1, attempt=1, step=1, rank=0),
    "arena without run": frames.MakeArena(request_id=1, layout_digest="", slot_size_bytes=4096, slot_count=1),
    "seal without run": frames.Seal(
        arena=1, slot=0, attempt=1, step=1, draft_offset_bytes=0, draft_size_bytes=1, draft_sha256=""
    ),
    "complete without run": frames.Complete(attempt=1, step=1),
    "detach without run": frames.Detach(request_id=1),
    "hand the node's daemon over": frames.HandOver(request_id=1),
    "a cache of control characters": frames.OpenCache(
        request_id=1,
        fingerprint="\x1b[2J",
        content=frames.CacheContent.RAW,
        sample_count=1,
        budget_bytes=1 << 20,
    ),
    "a cache of 2^48 samples": frames.OpenCache(
        request_id=1, fingerprint="f", content=frames.CacheContent.RAW, sample_count=1 << 48, budget_bytes=1
    ),
    "a cache of -1 samples": frames.OpenCache(
        request_id=1, fingerprint="f", content=frames.CacheContent.RAW, sample_count=-1, budget_bytes=1
    ),
    "a cache that no memory holds": frames.OpenCache(
        request_id=1,
        fingerprint="f",
        content=frames.CacheContent.RAW,
        sample_count=(1 << 48) - 1,
        budget_bytes=1,
    ),
    "staging without cache": frames.StageCache(request_id=1, size_bytes=4096),
    "filling without cache": frames.FillCache(request_id=1, items=[(0, 0, 1, 0)]),
    "leave no group": share_frames.StageShare(request_id=1, size_bytes=4096),
}


def frame_case(frame: frames.Request) -> Case:
    def send(target: Attacked) -> None:
        with Evil(target) as evil:
            assert evil.refusal(frame)

    return send


for name, frame in WITHOUT_RUN.items():
    case(f"frame: {name}")(frame_case(frame))


def make_arena(**changes: int) -> frames.MakeArena:
    given = {"slot_size_bytes": 4096, "slot_count": 1, "ring_size_bytes": 0, "files_size_bytes": 0}
    return frames.MakeArena(request_id=1, layout_digest="", **(given | changes))


Leased = Callable[[Evil, int], frames.Request]


def seal(kind: type[frames.Seal] | type[frames.Announce] = frames.Seal, **changes: int) -> Leased:
    def make(evil: Evil, arena: int) -> frames.Request:
        given = {
            "arena": arena, "slot": 0, "attempt": evil.attempt, "step": 7, "draft_offset_bytes": 0,
            "draft_size_bytes": 100,
        }  # fmt: skip
        return kind(draft_sha256="0" * 64, **(given | changes))

    return make


def begin(**changes: int) -> Leased:
    def make(evil: Evil, arena: int) -> frames.Request:
        given = {"arena": arena, "slot": 0, "attempt": evil.attempt, "step": 7}
        return frames.BeginSnapshot(**(given | changes))

    return make


WITH_RUN: dict[str, Leased] = {
    "slots of 0 bytes": lambda *_: make_arena(slot_size_bytes=0),
    "slots of -4096 bytes": lambda *_: make_arena(slot_size_bytes=-4096),
    "slots of 4097 bytes": lambda *_: make_arena(slot_size_bytes=4097),
    "slots of 2^62 bytes": lambda *_: make_arena(slot_size_bytes=1 << 62),
    "no slots": lambda *_: make_arena(slot_count=0),
    "-1 slots": lambda *_: make_arena(slot_count=-1),
    "65 slots": lambda *_: make_arena(slot_count=65),
    "a ring of -1": lambda *_: make_arena(ring_size_bytes=-1),
    "files of -1": lambda *_: make_arena(files_size_bytes=-1),
    "begin in no arena": begin(arena=99),
    "begin in arena -1": begin(arena=-1),
    "begin in slot -1": begin(slot=-1),
    "begin in slot 99": begin(slot=99),
    "begin of attempt 0": begin(attempt=0),
    "begin of an attempt to come": begin(attempt=BIG),
    "begin of step -1": begin(step=-1),
    "seal what was not begun": seal(),
    "seal in slot -1": seal(slot=-1),
    "seal in no arena": seal(arena=99),
    "announce what was not begun": seal(frames.Announce),
    "announce in slot 99": seal(frames.Announce, slot=99),
    "give up slot -1": lambda _, arena: frames.Abandon(arena=arena, slot=-1, reason="x"),
    "stream from no ring": lambda _, arena: frames.Stream(arena=arena, ranges=[(0, -1, BIG)]),
    "a chunk of no ring": lambda _, arena: frames.ChunkTaken(arena=arena, slot=-1),
    "release no ring": lambda _, arena: frames.Release(arena=arena),
    "fetch attempt -1": lambda *_: frames.Fetch(request_id=1, attempt=-1, step=1, rank=0),
    "fetch rank -1": lambda *_: frames.Fetch(request_id=1, attempt=1, step=1, rank=-1),
    "fetch what is not there": lambda *_: frames.Fetch(request_id=1, attempt=BIG, step=BIG, rank=0),
    "manifest of rank 99": lambda *_: frames.GetManifest(request_id=1, attempt=1, step=1, rank=99),
    "attempt -1": lambda *_: frames.BeginAttempt(request_id=1, attempt=-1, fresh=False),
    "attempt 0": lambda *_: frames.BeginAttempt(request_id=1, attempt=0, fresh=False),
    "complete step -1": lambda *_: frames.Complete(attempt=1, step=-1),
    "sealed everywhere at attempt 0": lambda *_: frames.SealedEverywhere(attempt=0, step=1),
    "give up an attempt to come": lambda *_: frames.GiveUp(attempt=BIG, step=1),
    "attach twice": lambda *_: open_run(),
    "attach the neighbour, too": lambda *_: open_run(name="neighbour", storage=["nvme0", "nvme1"]),
}


def leased_case(make: Leased) -> Case:
    def send(target: Attacked) -> None:
        with Evil(target) as evil:
            arena = evil.attach()
            assert evil.refusal(make(evil, arena.ready.arena))
            assert isinstance(evil.ask(frames.Detach(request_id=evil.number())), frames.Done)

    return send


for name, leased in WITH_RUN.items():
    case(f"run: {name}")(leased_case(leased))


def draft_case(**changes: int) -> Case:
    """Begun properly, then sealed with a draft that lies elsewhere."""

    def send(target: Attacked) -> None:
        with Evil(target) as evil:
            arena = evil.attach()
            evil.send(begin()(evil, arena.ready.arena))
            assert evil.refusal(seal(frames.Seal, **changes)(evil, arena.ready.arena)) or evil.failed()
            evil.ask(frames.Detach(request_id=evil.number()))

    return send


for name, changes in {
    "at -1": {"draft_offset_bytes": -1},
    "beyond the slot": {"draft_offset_bytes": 1 << 40},
    "of -1 bytes": {"draft_size_bytes": -1},
    "of 2^62 bytes": {"draft_size_bytes": 1 << 62},
    "over the slot's end": {"draft_offset_bytes": 4096, "draft_size_bytes": 1 << 30},
    "of another digest": {},
    "of another step": {"step": 8},
}.items():
    case(f"draft: {name}")(draft_case(**changes))


# -- the control socket


def call(
    target: Attacked,
    method: str,
    request: bytes = b"",
    *,
    token: str | None = None,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
    timeout_s: float | None = 10,
) -> grpc.StatusCode:
    if token is not None:
        metadata = (*metadata, ("authorization", f"Bearer {token}"))
    with target.channel() as channel:
        try:
            channel.unary_unary(SERVICE + method)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


def token_of(evil: Evil) -> str:
    assert isinstance(evil.hello, frames.Welcome)
    return evil.hello.token


def unknown_case(*metadata: tuple[str, str | bytes]) -> Case:
    def send(target: Attacked) -> None:
        code = call(target, "GetStatus", metadata=metadata)
        assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED), code

    return send


for name, metadata in {
    "no token": (),
    "a wrong token": (("authorization", f"Bearer {'0' * 64}"),),
    "an empty token": (("authorization", "Bearer "),),
    "another scheme": (("authorization", "Basic cm9vdDpyb290"),),
    "two tokens": (("authorization", "Bearer a"), ("authorization", "Bearer b")),
    "a token of 10,000": (("authorization", f"Bearer {LONG}"),),
    "a token elsewhere": (("authorization-bin", b"Bearer a"),),
    "headers of 200 KB": tuple((f"h{number}", "x" * 200) for number in range(1000)),
}.items():
    case(f"control: {name}")(unknown_case(*metadata))


@case("control: a revoked token")
def replay(target: Attacked) -> None:
    with Evil(target) as evil:
        token = token_of(evil)
        assert call(target, "GetStatus", token=token) is grpc.StatusCode.OK
    with Evil(target):  # by its Welcome the end of the first was seen
        assert call(target, "GetStatus", token=token) is grpc.StatusCode.UNAUTHENTICATED


def known_case(method: str, request: bytes, *codes: grpc.StatusCode, timeout_s: float | None = 10) -> Case:
    def send(target: Attacked) -> None:
        with Evil(target) as evil:
            assert call(target, method, request, token=token_of(evil), timeout_s=timeout_s) in codes

    return send


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
case("control: no deadline")(known_case("GetStatus", b"", INVALID, timeout_s=None))
case("control: a deadline of a day")(known_case("GetStatus", b"", INVALID, timeout_s=86400))
case("control: no such method")(known_case("BecomeRoot", b"", grpc.StatusCode.UNIMPLEMENTED))
case("control: a request of 2 MiB")(
    known_case("GetStatus", bytes(2 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED)
)
case("control: a request that is none")(
    known_case("GetCheckpoint", b"\xff" * 50, grpc.StatusCode.INTERNAL, INVALID, grpc.StatusCode.UNKNOWN)
)
for name, text in NAMES.items():
    if "\0" not in text:
        case(f"control: run {name}")(
            known_case(
                "GetCheckpoint",
                pb.GetCheckpointRequest(selector=pb.Selector(run=text)).SerializeToString(),
                NOT_FOUND,
                INVALID,
            )
        )
    case(f"control: tag {name}")(
        known_case(
            "TagCheckpoint",
            pb.TagCheckpointRequest(selector=pb.Selector(run="nobody's"), name=text).SerializeToString(),
            NOT_FOUND,
            INVALID,
        )
    )
    case(f"control: token {name}")(
        known_case("RevokeToken", pb.RevokeTokenRequest(token_id=text).SerializeToString(), NOT_FOUND)
    )
for text in ("-1.-1", "1.2.3", "٣.٤", "9" * 5000 + ".1", "1.", "../1.1"):
    selector = pb.Selector(run="neighbour", checkpoint=text)
    case(f"control: checkpoint {text[:10]}")(
        known_case(
            "VerifyCheckpoint",
            pb.VerifyCheckpointRequest(selector=selector).SerializeToString(),
            NOT_FOUND,
            INVALID,
        )
    )


@case("control: a call whose request never comes")
def slow_request(target: Attacked) -> None:
    with Evil(target) as evil, target.channel() as channel:
        go = threading.Event()

        def nothing() -> Iterator[bytes]:
            go.wait(20)
            yield from ()

        metadata = (("authorization", f"Bearer {token_of(evil)}"),)
        answer = channel.stream_unary(SERVICE + "GetStatus").future(nothing(), timeout=0.5, metadata=metadata)
        assert _code(answer) is grpc.StatusCode.DEADLINE_EXCEEDED
        go.set()


@case("control: a call without a request")
def no_request(target: Attacked) -> None:
    with Evil(target) as evil, target.channel() as channel:
        metadata = (("authorization", f"Bearer {token_of(evil)}"),)
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(SERVICE + "GetStatus")(iter(()), timeout=10, metadata=metadata)
        assert caught.value.code() is INVALID  # type: ignore[attr-defined]


@case("control: more calls at once than a user may")
def many_calls(target: Attacked) -> None:
    with Evil(target) as evil, target.channel() as channel:
        go = threading.Event()

        def held() -> Iterator[bytes]:
            go.wait(SETTLE_S)
            yield b""

        metadata = (("authorization", f"Bearer {token_of(evil)}"),)
        method = channel.stream_unary(SERVICE + "GetStatus")
        calls = [method.future(held(), timeout=SETTLE_S, metadata=metadata) for _ in range(30)]
        wait_until(lambda: sum(each.done() for each in calls) == 14)  # whichever came last
        refused = [_code(each) for each in calls if each.done()]
        go.set()
        codes = [_code(each) for each in calls]
        assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 14
        assert codes.count(grpc.StatusCode.OK) == 16


def _code(answer: Any) -> grpc.StatusCode:
    error = answer.exception()
    return grpc.StatusCode.OK if error is None else error.code()


@contextlib.contextmanager
def http2_connection(target: Attacked, where: str) -> Generator[socket.socket]:
    if where == "tls":
        with target.spoken() as sock:
            assert sock.version() == "TLSv1.3"
            yield sock
    elif where == "control":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(target.control))
            yield sock
    else:
        with target.tcp(target.peer_port if where == "peer" else target.tls_port) as sock:
            yield sock


def bytes_case(where: str, content: bytes) -> Case:
    def send(target: Attacked) -> None:
        with (
            http2_connection(target, where) as sock,
            contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError),
        ):
            sock.settimeout(0.2)  # some of it gRPC answers by waiting for more
            sock.sendall(content)
            assert b"everstep" not in ended(sock)

    return send


for where in ("control", "tls", "tls's port without tls", "peer"):
    for name, content in HTTP2.items():
        case(f"{where}: {name}")(bytes_case(where, content))


def rapid_reset(target: Attacked, where: str) -> None:
    """CVE-2023-44487: whole calls, each of them taken back before it can be answered."""

    said = list[tuple[int, int]]()

    with http2_connection(target, where) as sock, Evil(target) as other, target.channel() as channel:
        sock.settimeout(SETTLE_S)
        metadata = (("authorization", f"Bearer {token_of(other)}"),)
        thread = threading.Thread(target=lambda: said.extend(flood_of_resets(sock)))
        thread.start()
        for _ in range(5):
            target.neighbour.save()
            channel.unary_unary(SERVICE + "GetStatus")(b"", timeout=SETTLE_S, metadata=metadata)
        thread.join(2 * SETTLE_S)
        assert not thread.is_alive()
    assert said[0][0] == SETTINGS, "it was spoken to"
    assert any(kind == RST_STREAM for kind, _ in said), "more streams at once than there may be were refused"


for where in ("control", "tls", "peer"):
    case(f"{where}: {RESETS:,} calls, each taken back at once")(partial(rapid_reset, where=where))


# -- the ports of the network


@case("tls: a hello of TLS without a certificate")
def no_certificate(target: Attacked) -> None:
    context = ssl.create_default_context(cafile=str(target.authority.certificate))
    context.set_alpn_protocols(["h2"])
    with (
        target.tcp(target.tls_port) as plain,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain, server_hostname=HOST) as spoken,
    ):
        spoken.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4))
        assert spoken.recv(100) == b""


def silent(target: Attacked, port: str) -> None:
    target.held += [target.tcp(getattr(target, port)) for _ in range(200)]
    target.neighbour.save()
    assert all(b"everstep" not in ended(sock) for sock in target.held[-200:])  # each is ended


for where in ("tls", "peer"):
    case(f"{where}: 200 connections that say nothing")(partial(silent, port=f"{where}_port"))


def peer_code(
    target: Attacked, method: str, request: bytes, token: str, timeout_s: float | None = 10
) -> grpc.StatusCode:
    with grpc.insecure_channel(f"{HOST}:{target.peer_port}") as channel:
        try:
            channel.unary_unary(f"/everstep.peer.v1.Peer/{method}")(
                request, timeout=timeout_s, metadata=(("authorization", f"Bearer {token}"),)
            )
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


for name, token in (("no token", ""), ("a wrong token", "0" * 64), ("a long token", "0" * 5000)):

    def peer_unknown(target: Attacked, token: str = token) -> None:
        for method in ("Probe", "Fetch", "Offer"):
            code = peer_code(target, method, b"", token)
            assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED), code

    case(f"peer: {name}")(peer_unknown)


def metrics_case(content: bytes) -> Case:
    def send(target: Attacked) -> None:
        with target.tcp(target.metrics_port) as sock, contextlib.suppress(ConnectionError, TimeoutError):
            sock.settimeout(0.5)
            sock.sendall(content)
            said = ended(sock)
            assert b"root:" not in said
            assert b"neighbour" not in said

    return send


for name, content in METRICS.items():
    case(f"metrics: {name}")(metrics_case(content))


@case("metrics: half requests on 5 connections")
def slow_metrics(target: Attacked) -> None:
    for _ in range(5):
        sock = target.tcp(target.metrics_port)
        target.held.append(sock)
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHos")
    target.neighbour.save()


# -- floods


@case("flood: 3,000 connections that go again, half of them after Hello")
def connects(target: Attacked) -> None:
    for number in range(3000):
        with target.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(pack(HELLO) * (number % 2))


@case("flood: more connections than a user may have")
def too_many(target: Attacked) -> None:
    for _ in range(620):
        sock = target.connect()
        target.held.append(sock)
    said = [ended(sock) for sock in target.held[-10:]]
    assert all(b"QuotaError" in each and b"600 connections" in each for each in said)
    # The neighbour is of this very user here, and has its connection already.
    target.neighbour.save()


@case("flood: 20,000 requests that nobody reads the answers of")
def unread(target: Attacked) -> None:
    with target.connect() as sock, contextlib.suppress(ConnectionError, TimeoutError):
        sock.settimeout(5)
        sock.sendall(pack(HELLO) + pack(frames.ListOffers(request_id=1)) * 20_000)
        target.neighbour.save()


@case("flood: a thousand refusals")
def refusals(target: Attacked) -> None:
    with Evil(target) as evil:
        for _ in range(1000):
            evil.send(frames.ListOffers(request_id=evil.number()))
        for _ in range(1000):
            assert isinstance(evil.receive(), frames.Failure)


CASES.update(OTHER_USER)  # they need root


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.root] * (name in OTHER_USER)) for name in CASES]
)
def test_it_is_refused_and_nothing_of_it_stays(target: Attacked, name: str) -> None:
    CASES[name](target)
    target.check()


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 100


def test_what_is_logged_of_them_is_bounded_and_the_daemon_met_no_bug(target: Attacked) -> None:
    lines = target.log.splitlines()
    assert [line for line in lines if "internal_error" in line or "Error: " in line] == [], target.log[-3000:]
    refused = [line for line in lines if "request_refused" in line or "bad_frame" in line]
    assert 0 < len(refused) < 60, "one line for each source, kind and minute"
    assert [line for line in lines if line.startswith("request_refused")] == [], (
        "a client wrote a line of its own"
    )
    saved = CheckpointId(1, target.neighbour.step)
    assert saved.step > 100


def test_names_of_clients_become_no_paths(target: Attacked) -> None:
    """A name is hashed; what it says stands in files only."""
    before = paths_on(target.devices)
    for name in ("../../outside", "/tmp/everstep-outside", "..", "a/b", "con\\..\\x"):
        with Evil(target) as evil:
            evil.attach(name)
            evil.ask(frames.Detach(request_id=evil.number()))
    made = paths_on(target.devices) - before
    assert made
    for path in made:
        assert path.resolve().is_relative_to(target.devices[0].parent), path
        assert "outside" not in str(path)
    assert not Path("/tmp/everstep-outside").exists()
    assert not list(target.devices[0].parent.glob("outside*"))
