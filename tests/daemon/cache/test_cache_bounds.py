"""Bounds that an operator sets on caches, and what no client can take from the others: memory, descriptors, time."""

import contextlib
import ctypes
import dataclasses
import faulthandler
import mmap
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import xxhash
from cached import HostileReader
from pausing import wait_until
from rich.console import Console

from everstep.core.errors import ConfigError
from everstep.daemon.cache.arena import Item, make_cache_arena
from everstep.daemon.cache.book import CACHE_DESCRIPTORS
from everstep.daemon.cache.space_plan import Refusal, bounded_room
from everstep.daemon.cache.staging import Staging
from everstep.daemon.cli.cache_commands import draw_caches
from everstep.daemon.cli.main import main
from everstep.daemon.config import load_config
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import CacheView
from everstep.daemon.testing import daemon_process, node_daemon
from everstep.dataloader.cache.arena_format import base_bytes, budget_for, record_bytes
from everstep.proto import frames

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], AbstractContextManager[Path]]:
    """Run a node daemon with these lines in its configuration; gives its socket."""

    @contextmanager
    def run(lines: str) -> Generator[Path]:
        socket_path = Path(os.environ["EVERSTEP_SOCKET"])
        (tmp_path / "d0").mkdir()
        config = tmp_path / "node.toml"
        config.write_text(
            f'[devices]\nnvme0 = "{tmp_path / "d0"}"\n[daemon]\nsocket = "{socket_path}"\n'
            f"[memory]\nreserve_bytes = 0\n{lines}\n"
        )
        with node_daemon(config, socket_path):
            yield socket_path

    return run


@pytest.fixture(scope="module")
def running() -> Iterator[Path]:
    """One daemon for the tests that do nothing to it."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    with daemon_process(folder / "s" / "data.sock"):
        yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def daemon(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(running))


def states(socket_path: Path) -> dict[str, CacheView]:
    with connected(socket_path) as client:
        return {each.fingerprint: each for each in client.status().caches}


def opened(reader: HostileReader, name: str, count: int = 16, budget_bytes: int = MIB) -> frames.CacheOpened:
    reply = reader.open_cache(count, fingerprint=name, budget_bytes=budget_bytes)
    assert isinstance(reply, frames.CacheOpened), reply
    reader.stage(4 * MIB)
    return reply


def published(reader: HostileReader, count: int, length: int = 100_000, begin: int = 0) -> frames.CacheFilled:
    reply = reader.fill({index: bytes([index]) * length for index in range(begin, begin + count)})
    assert isinstance(reply, frames.CacheFilled), reply
    return reply


def test_one_user_gets_no_more_than_the_operator_allows(
    node: Callable[[str], AbstractContextManager[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own caches without a reader go first; then it is told the bound, the configuration's key and what to do."""
    bound = 2 * MIB
    with node(f"cache_user_max_bytes = {bound}") as socket_path:
        with HostileReader(socket_path) as left:
            opened(left, "left")
            assert published(left, 10).published_count == 10
        wait_until(lambda: states(socket_path)["left"].client_count == 0)
        with HostileReader(socket_path) as first, HostileReader(socket_path) as second:
            assert opened(first, "first").reason == ""
            assert published(first, 10).published_count == 10
            wait_until(lambda: "first" in states(socket_path))
            reply = opened(second, "second", budget_bytes=4 * MIB)
            assert "memory.cache_user_max_bytes" in reply.reason
            assert f"the caches of user {os.getuid()} have" in reply.reason
            assert published(second, 16).reason == "memory"
            found = states(socket_path)
            assert sorted(found) == ["first", "second"], "its own, which nobody read, made room"
            assert bound - PAGE < sum(each.allocated_bytes for each in found.values()) <= bound
            assert found["second"].published_count == (MIB - base_bytes(16)) // record_bytes(100_000)
            with HostileReader(socket_path) as third:
                refused = third.open_cache(1000, fingerprint="third")
                assert isinstance(refused, frames.Failure)
                assert refused.code == "MemoryRefusedError"
                assert "memory.cache_user_max_bytes" in refused.message
            assert main(["cache", "list"]) == 0
            assert "have memory.cache_user_max_bytes raised" in " ".join(capsys.readouterr().out.split())
        wait_until(lambda: all(not each.client_count for each in states(socket_path).values()))
        assert main(["cache", "drop", str(states(socket_path)["first"].number)]) == 0
        with HostileReader(socket_path) as again:
            opened(again, "third")
            assert published(again, 10).published_count == 10, "what was dropped counts no more"


def test_caches_leave_the_rest_to_checkpoints(node: Callable[[str], AbstractContextManager[Path]]) -> None:
    with node(f"cache_max_bytes = {MIB}") as socket_path, HostileReader(socket_path) as reader:
        assert "memory.cache_max_bytes" in opened(reader, "all", budget_bytes=64 * MIB).reason
        assert published(reader, 16).reason == "memory"
        assert MIB - PAGE < states(socket_path)["all"].allocated_bytes <= MIB


def test_the_bound_that_leaves_least_is_named() -> None:
    bounds = {"user_bytes": 30, "user_max_bytes": 50, "all_bytes": 90, "all_max_bytes": 100}
    assert bounded_room(7, **bounds).size_bytes == 10
    assert "memory.cache_max_bytes" in bounded_room(7, **bounds).hint
    less = bounded_room(7, **(bounds | {"user_bytes": 60}))
    assert (less.size_bytes, "memory.cache_user_max_bytes" in less.hint) == (0, True)
    assert "user 7 have 60 B of 50 B" in less.why


@pytest.mark.parametrize("line", ["cache_user_max_bytes = -1", "cache_max_bytes = -1", "cache_byte = 1"])
def test_a_wrong_bound_is_named(tmp_path: Path, line: str) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'[devices]\nd = "/d"\n[memory]\n{line}\n')
    with pytest.raises(
        ConfigError, match=r"memory\.cache_(user_)?max_bytes is -1|no key memory\.cache_byte "
    ):
        load_config(config)


# -- memory that no client can have made


def pages_bytes(fd: int) -> int:
    """Return what the kernel says that a memfd takes."""
    return os.fstat(fd).st_blocks * 512


@pytest.mark.usefixtures("daemon")
def test_the_kernel_has_no_page_beyond_the_budget() -> None:
    """Of a full cache with everything that it says of itself, page by page."""
    lengths = [5000, 0, 1, 70_000, 4096]
    with HostileReader(_socket()) as reader:
        budget = budget_for(lengths)
        opened(reader, "exact", 5, budget)
        filled = reader.fill({index: bytes([index]) * length for index, length in enumerate(lengths)})
        assert isinstance(filled, frames.CacheFilled)
        assert filled.published_count == 5
        assert reader.view.header().used_bytes == budget == os.fstat(reader.arena_fd).st_size
        assert pages_bytes(reader.arena_fd) == -(-budget // PAGE) * PAGE
        assert states(_socket())["exact"].allocated_bytes == budget


def _socket() -> Path:
    return Path(os.environ["EVERSTEP_SOCKET"])


@pytest.mark.usefixtures("daemon")
def test_a_reader_cannot_make_pages_that_nobody_admitted() -> None:
    """Reading a hole of a memfd through a mapping makes pages, which would stay after its death: there is no hole."""
    with HostileReader(_socket()) as reader:
        opened(reader, "hole", 4, budget_bytes=MIB)
        assert published(reader, 1, 1000).published_count == 1
        assert os.fstat(reader.arena_fd).st_size == MIB
        pid = os.fork()
        if pid == 0:  # SIGBUS is what it gets
            faulthandler.disable()
            for begin in range(0, 64 * MIB, PAGE):
                reader.view.octets[begin]
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == 7
        assert pages_bytes(reader.arena_fd) == MIB
        populate_arena()
        assert pages_bytes(reader.arena_fd) == MIB
        assert published(reader, 3, 1000, begin=1).published_count == 3


def populate_arena() -> None:
    """Ask the kernel for all pages of the arena's mapping, as mlockall does."""
    line = next(each for each in Path("/proc/self/maps").read_text().splitlines() if "everstep-cache" in each)
    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 22)  # MADV_POPULATE_READ


@pytest.mark.usefixtures("daemon")
def test_two_requests_at_once_leave_no_reader_behind() -> None:
    """A second OpenCache sent before the first was answered is refused, and its cache has no reader for ever."""
    with HostileReader(_socket()) as reader:
        for number, name in ((101, "one"), (102, "two")):
            reader.send(
                frames.OpenCache(
                    request_id=number,
                    fingerprint=name,
                    content=frames.CacheContent.RAW,
                    sample_count=4,
                    budget_bytes=MIB,
                )
            )
        replies = [reader.receive(), reader.receive()]
        assert {type(each).__name__ for each in replies} == {"CacheOpened", "Failure"}
    wait_until(lambda: all(not each.client_count for each in states(_socket()).values()))


@pytest.mark.usefixtures("daemon")
def test_who_still_maps_a_dropped_cache_reads_it_whole() -> None:
    """Its memory is neither taken away nor used for the next cache of the same dataset."""
    with HostileReader(_socket()) as slow:
        opened(slow, "dropped", 4)
        assert published(slow, 4, 50_000).published_count == 4
        slow.sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not states(_socket())["dropped"].client_count)
        assert main(["cache", "drop", str(states(_socket())["dropped"].number)]) == 0
        with HostileReader(_socket()) as next_one:
            opened(next_one, "dropped", 4)
            assert next_one.found(0) is None
            next_one.fill(dict.fromkeys(range(4), b"other" * 10000))
            assert next_one.found(0) == b"other" * 10_000
            assert [slow.found(index) for index in range(4)] == [
                bytes([index]) * 50_000 for index in range(4)
            ]


def test_where_addresses_are_short_a_cache_is_mapped_as_far_as_its_budget() -> None:
    """A node with terabytes of memory could otherwise have some dozen caches."""
    with daemon_process(_socket()) as process, HostileReader(_socket()) as reader:
        mapped_bytes = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * PAGE
        resource.prlimit(
            process.pid, resource.RLIMIT_AS, (mapped_bytes + (1 << 30), mapped_bytes + (1 << 30))
        )
        assert opened(reader, "narrow").size_bytes == MIB
        reader.stage(MIB)
        assert published(reader, 10).published_count == 10


# -- time and descriptors


@pytest.mark.usefixtures("daemon")
def test_more_than_a_staging_holds_cannot_wait() -> None:
    """Else a small message would have the daemon copy and hash a staging over and over."""
    with HostileReader(_socket()) as reader:
        opened(reader, "twice", 4096, budget_bytes=64 * MIB)
        digest = xxhash.xxh3_64_intdigest(bytes(MIB))
        refused = reader.send_items([(index, 0, MIB, digest ^ 1) for index in range(5)])
        assert isinstance(refused, frames.Failure)
        assert "wait in a staging of 4194304" in refused.message
        honest = reader.send_items([(index, index * MIB, MIB, digest) for index in range(4)])
        assert isinstance(honest, frames.CacheFilled)
        assert honest.published_count == 4


def test_no_batch_keeps_a_thread_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied a few megabytes at a time, bad samples like good ones."""
    monkeypatch.setattr("everstep.daemon.cache.arena.COPY_BYTES", 2000)
    staging, arena = Staging(MIB), make_cache_arena(8, MIB, MIB)
    try:
        arena.allocate(MIB)
        arena.space.allocated_bytes = MIB
        good = xxhash.xxh3_64_intdigest(bytes(1000))
        items = [
            Item(sample=index, offset_bytes=0, length=1000, digest=good ^ index % 2) for index in range(8)
        ]
        copied, refused = arena.copy(staging, items)
        assert [item.sample for item, _ in copied] == [0]
        assert [(item.sample, why) for item, why in refused] == [(1, Refusal.CORRUPT)]
        assert [len(each) for each in arena.copy(staging, items[2:])] == [1, 1]
    finally:
        arena.close()


@pytest.mark.usefixtures("daemon")
def test_a_fingerprint_is_plain_text() -> None:
    """It is shown in operators' terminals."""
    with HostileReader(_socket()) as reader:
        refused = reader.open_cache(4, fingerprint="\x1b[2Jall is well")
        assert isinstance(refused, frames.Failure)
        assert "printable" in refused.message


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_unread_answers_take_few_descriptors() -> None:
    """Whoever asks for staging upon staging and reads no answer is cut off; the others are served."""
    with daemon_process(_socket()) as process, HostileReader(_socket()) as other:
        opened(other, "other")
        before = descriptors(process.pid)
        with HostileReader(_socket()) as reader:
            opened(reader, "greedy")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for number in range(2000):
                    reader.send(frames.StageCache(request_id=number, size_bytes=PAGE))
            wait_until(lambda: not states(_socket())["greedy"].client_count)
            assert published(other, 2).published_count == 2
        wait_until(lambda: descriptors(process.pid) <= before + CACHE_DESCRIPTORS)  # its cache stays


def test_readers_of_caches_leave_descriptors_to_others() -> None:
    """Caches that nobody reads go first; then a reader is refused, and can read without the cache."""
    with daemon_process(_socket()) as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (120, 120))
        for number in range(40):
            with HostileReader(_socket()) as passing:
                opened(passing, f"tiny {number}", 1, PAGE)
                assert published(passing, 1, 10).published_count == 1
            wait_until(lambda: all(not each.client_count for each in states(_socket()).values()))
        kept = states(_socket())
        assert len(kept) <= 30
        assert "tiny 39" in kept, "the newest stays"
        with ExitStack() as stack:
            replies = list[frames.Reply]()
            for _ in range(25):
                reader = stack.enter_context(HostileReader(_socket()))
                replies.append(reader.open_cache(1, fingerprint="shared", budget_bytes=PAGE))
            assert isinstance(replies[0], frames.CacheOpened)
            assert isinstance(replies[-1], frames.Failure)
            assert "descriptors allow" in replies[-1].message
            with connected(_socket()) as client:
                assert client.status().daemon.pid == process.pid, "others are served"


def test_what_a_person_sees_of_caches(capsys: pytest.CaptureFixture[str]) -> None:
    view = CacheView(
        number=1,
        uid=1000,
        fingerprint="f",
        content="raw",
        sample_count=4,
        published_count=2,
        used_bytes=100,
        allocated_bytes=4096,
        budget_bytes=5000,
        client_count=1,
        idle_s=0.0,
        reason="",
    )
    long = dataclasses.replace(
        view, fingerprint="imagenet-train-with-a-long-name-v3", hit_count=3, miss_count=1
    )
    draw_caches(Console(width=100), [long])
    shown = capsys.readouterr().out
    assert "imagenet-train…g-name-v3" in shown
    assert "75.0 %" in shown
    draw_caches(Console(width=100), [view])
    assert "uid" not in capsys.readouterr().out
    draw_caches(Console(width=100), [view, dataclasses.replace(view, number=2, uid=1001)])
    assert "uid 1001" in capsys.readouterr().out
