"""Objects by fsspec's own HTTP, from a real server on loopback: links, sizes, what changes, fails or is slow."""

import contextlib
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec import asyn
from source_checks import check_in_workers, check_source, contents

from everstep.core.errors import SourceChangedError, StorageError, UsageError
from everstep.dataloader.sources import ObjectSource, object_source

pytest.importorskip("aiohttp", reason="pip install aiohttp")

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
BREAKS = 0
"""In the place of a status: the connection is reset."""


class Web(ThreadingHTTPServer):
    """Answers with `objects`, or with a page of links where a path ends in "/"; first with `failures` of a path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects = {f"/train/{number}.bin": b"%d" % number * 3 for number in range(3)}
        self.objects["/train/more/3.bin"] = b"333"
        self.failures: dict[str, list[int]] = {}
        self.waits: list[threading.Event] = []
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def urls(self) -> list[str]:
        return [self.url(path) for path in self.objects]

    def page(self, folder: str) -> bytes | None:
        below = [path.removeprefix(folder) for path in self.objects if path.startswith(folder)]
        names = sorted({name[: name.find("/") + 1] or name for name in below})
        return "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode() if below else None


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Web  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self.server.waits:
            self.server.waits.pop(0).wait()
        self._answer()

    def _answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        failures = self.server.failures.get(path)
        status = failures.pop(0) if failures else 200
        is_page = path.endswith("/")
        data = self.server.page(path) if is_page else self.server.objects.get(path)
        if status == BREAKS:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if data is None and self.server.page(path + "/"):
            status = 301
        self.send_response(404 if data is None and status == 200 else status)
        self.send_header("Location", path + "/")
        self.send_header("Content-Type", "text/html" if is_page else "application/octet-stream")
        self.send_header("Content-Length", str(len(data or b"")))
        if data is not None and not is_page:
            self.send_header("ETag", f'"{zlib.crc32(data):08x}"')
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(BrokenPipeError):  # who waited too long has hung up
                self.wfile.write(data or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class has this name
        """Say nothing."""


@pytest.fixture(scope="module", autouse=True)
def _loop() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """fsspec's event loop is a thread that stays: it begins before anything is counted, and ends with this file."""
    loop = asyn.get_loop()
    yield
    thread = asyn.iothread[0]
    assert thread is not None
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    asyn.loop[0] = asyn.iothread[0] = None


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(object_source, "FIRST_DELAY_S", 0.001)
    server = Web()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_all_that_pages_link_to(web: Web) -> None:
    source = ObjectSource(web.url("/train/"))
    check_source(source, [b"000", b"111", b"222", b"333"])
    assert source.url(3) == web.url("/train/more/3.bin")
    assert len(ObjectSource(web.url("/train/"), extensions=("1.bin", "3.bin"))) == 2
    assert source.fingerprint() == ObjectSource(web.urls()).fingerprint(), "sizes and ETags are asked for"
    with pytest.raises(UsageError, match="there is no object"):
        ObjectSource(web.url("/none/"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_them(web: Web, method: str) -> None:
    check_in_workers(ObjectSource(web.urls()), list(web.objects.values()), method)


def test_an_object_is_one_whole_answer(web: Web) -> None:
    source = ObjectSource(web.urls())
    assert sorted(web.asked) == [f"HEAD {path}" for path in web.objects]
    web.asked.clear()
    assert contents(source) == list(web.objects.values())
    assert web.asked == [f"GET {path}" for path in web.objects]


@pytest.mark.parametrize("by", ["prefix", "list"])
def test_objects_that_change(web: Web, by: str) -> None:
    def made() -> ObjectSource:
        return ObjectSource(web.url("/train/") if by == "prefix" else web.urls())

    source = made()
    web.objects["/train/1.bin"] = b"xyz"
    assert made().fingerprint() != source.fingerprint(), "of the same size, with another ETag"
    web.objects["/train/1.bin"] = b"longer"
    with pytest.raises(SourceChangedError, match=r"1\.bin has 6 bytes, 3 when it was listed \(sample 1\)"):
        source.get_bytes(1)
    del web.objects["/train/1.bin"]
    with pytest.raises(SourceChangedError, match=r"1\.bin \(sample 1\) is gone"):
        source.get_bytes(1)


@pytest.mark.parametrize("failure", [BREAKS, 429, 503])
@pytest.mark.parametrize("path", ["/train/", "/train/more/", "/train/1.bin"])
def test_what_fails_for_a_while_is_asked_again(web: Web, path: str, failure: int) -> None:
    """A page, one below it, and an object's size: nothing is left out, and nothing is said to be gone."""
    web.failures = {path: [failure] * 5}
    source = ObjectSource(web.url("/train/"))
    assert not web.failures[path]
    web.failures = {path: [failure] * 5}
    assert contents(source) == [b"000", b"111", b"222", b"333"]


@pytest.mark.parametrize("status", [401, 403])
def test_what_is_refused_is_not_asked_again(web: Web, status: int) -> None:
    source = ObjectSource(web.urls())
    web.asked.clear()
    web.failures = {"/train/1.bin": [status]}
    with pytest.raises(PermissionError, match=rf"train/1\.bin \(sample 1\) is refused: .*{status}"):
        source.get_bytes(1)
    assert web.asked == ["GET /train/1.bin"]
    web.failures = {"/train/1.bin": [status] * 2}
    with pytest.raises(PermissionError, match=r"train/1\.bin is refused"):
        ObjectSource(web.urls())


def test_a_slow_answer_is_given_up_and_the_deadline_ends_it(web: Web) -> None:
    go_on = threading.Event()
    try:
        source = ObjectSource(web.urls(), deadline_s=9.0)
        web.waits = [go_on]
        assert source.get_bytes(1) == b"111", "the second try"
        hurried = ObjectSource(web.urls(), deadline_s=0.6)
        web.waits = [go_on] * 100
        with pytest.raises(StorageError, match=r"2\.bin \(sample 2\) could not be read within 0\.6 s"):
            hurried.get_bytes(2)
    finally:
        web.waits = []
        go_on.set()


def test_what_signs_a_url_is_in_no_message(
    web: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signed = web.url("/train/1.bin?X-Amz-Signature=abcdef123&id=5")
    source = ObjectSource([signed], deadline_s=0.3)
    assert contents(source) == [b"111"]
    assert source.fingerprint() == ObjectSource([signed.replace("abcdef", "uvwxyz")]).fingerprint()
    web.failures = {"/train/1.bin": [503] * 1000}
    with pytest.raises(StorageError, match="503") as failed:
        source.get_bytes(0)
    web.failures = {"/train/1.bin": [403]}
    with pytest.raises(PermissionError, match="403") as refused:
        source.get_bytes(0)
    for text in (str(failed.value), str(refused.value), caplog.text):
        assert "abcdef" not in text
