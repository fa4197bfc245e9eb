"""What clients that mean harm send: names, and bytes where HTTP is spoken."""

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

LONG = "x" * 10_000
NAMES = {
    "dots": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "nul": "run\0",
    "long": LONG,
    "empty": "",
    "newline": "a\nrequest_refused source=uid:0",
    "right-to-left": "\u202etxt.exe",
    "escape": "\x1b[2J",
    "lone-dot": ".",
    "invisible": "a\u200bb",
}

HTTP2: dict[str, bytes] = {
    "noise": bytes(range(256)) * 40,
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "preface, then noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 900,
    "a frame of 16 MiB": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\x00\x00\x00\x00\x00" + bytes(100),
    "headers before settings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x01\x01\x05\x00\x00\x00\x01\xff",
    "data of no stream": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(6)[:3] + b"\x04\x00" + bytes(4)
    + b"\x00\x00\x01\x00\x00\x00\x00\x00\x63x",
    "a flood of pings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)
    + (b"\x00\x00\x08\x06\x00" + bytes(12)) * 5000,
    "a flood of resets": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)
    + b"".join(b"\x00\x00\x04\x03\x00" + struct.pack(">II", 2 * n + 1, 8) for n in range(2000)),
    "a flood of settings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + (bytes(3) + b"\x04\x00" + bytes(4)) * 5000,
}  # fmt: skip

METRICS: dict[str, bytes] = {
    "noise": bytes(range(128, 256)) * 30 + b"\r\n\r\n",
    "a path out": b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n",
    "an encoded path out": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.0\r\n\r\n",
    "a line of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n",
    "5,000 headers": b"GET / HTTP/1.0\r\n" + b"X-H: y\r\n" * 5000 + b"\r\n",
    "a body of -1": b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\n",
    "a body that is not sent": b"POST / HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
    "a request split in two": b"GET / HTTP/1.0\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "http2": HTTP2["preface, then noise"],
}


def frame_of(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def text_of(content: bytes) -> bytes:
    return bytes([len(content)]) + content


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK, END_STREAM, END_HEADERS = 1, 1, 4
CANCEL = 8
CALL = (
    b"\x83\x86\x04" + text_of(b"/everstep.node.v1.Node/GetStatus")  # POST, http
    + b"\x01" + text_of(b"localhost")
    + b"\x0f\x10" + text_of(b"application/grpc")
    + b"\x00" + text_of(b"te") + text_of(b"trailers")  # codespell:ignore te
    + b"\x00" + text_of(b"grpc-timeout") + text_of(b"60S")
)  # fmt: skip
"""Headers of a call, by the static table of HPACK and without Huffman's code."""
RESETS = 2000


def flood_of_resets(sock: socket.socket) -> list[tuple[int, int]]:
    """Call and take back again and again; return kind and flags of each frame that came, up to the end."""
    with contextlib.suppress(OSError):  # it was cut off
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame_of(SETTINGS, 0, 0))
        for stream in range(1, 2 * RESETS, 2):
            sock.sendall(
                frame_of(HEADERS, END_HEADERS, stream, CALL)
                + frame_of(DATA, END_STREAM, stream, bytes(5))  # the empty request
                + frame_of(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
            )
        sock.sendall(frame_of(PING, 0, 0, b"are you?"))
    return frames_until(sock, lambda kind, flags: kind == GOAWAY or (kind, flags) == (PING, ACK))


def frames_until(sock: socket.socket, is_last: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Return kind and flags of each frame that comes, until there is such a one or the connection ends."""
    found, buffer = list[tuple[int, int]](), bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while not any(is_last(*each) for each in found) and (data := sock.recv(1 << 16)):
            buffer += data
            while len(buffer) >= 9 and len(buffer) >= (end := 9 + int.from_bytes(buffer[:3], "big")):
                found.append((buffer[3], buffer[4]))
                del buffer[:end]
    return found
