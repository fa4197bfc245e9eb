"""The cache at the data socket, by hand: what is published, what is refused, and what no client can do."""

import ctypes
import fcntl
import mmap
import os
import random
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cached import HostileReader
from pausing import wait_until

from everstep.daemon.control.client import connected
from everstep.daemon.testing import daemon_process, node_daemon
from everstep.dataloader.cache.arena_format import base_bytes, budget_for, record_bytes
from everstep.proto import frames
from everstep.proto.frames import CacheContent

MIB = 1 << 20


@pytest.fixture(scope="module")
def socket_path() -> Iterator[Path]:
    """One daemon for most tests; their fingerprints differ."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    with daemon_process(folder / "s" / "data.sock"):
        yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def reader(socket_path: Path) -> Iterator[HostileReader]:
    with HostileReader(socket_path) as made:
        yield made


def opened(reader: HostileReader, count: int = 4, **settings: object) -> frames.CacheOpened:
    reply = reader.open_cache(count, **settings)  # pyright: ignore[reportArgumentType]
    assert isinstance(reply, frames.CacheOpened), reply
    assert isinstance(reader.stage(), frames.StagingReady)
    return reply


def filled(reply: frames.Reply) -> frames.CacheFilled:
    assert isinstance(reply, frames.CacheFilled), reply
    return reply


def test_what_is_filled_is_found_by_all_of_its_user(reader: HostileReader, socket_path: Path) -> None:
    opened(reader)
    samples = {0: b"", 1: b"one", 3: random.Random(1).randbytes(5000)}
    assert filled(reader.fill(samples)).published_count == 3
    assert [reader.found(index) for index in range(4)] == [b"", b"one", None, samples[3]]
    with HostileReader(socket_path) as second:
        opened(second)
        assert [second.found(index) for index in range(4)] == [b"", b"one", None, samples[3]]
        again = filled(second.fill({1: b"one", 2: b"two"}))
        assert (again.published_count, again.known_count) == (1, 1)
        assert reader.found(2) == b"two"
        twice = filled(second.fill({1: b"new"}))
        assert (twice.differing, twice.published_count) == ([1], 0)
        assert reader.found(1) == b"one"
        assert isinstance(second.open_cache(4), frames.Failure), "one cache for a connection"
    with HostileReader(socket_path) as other:
        opened(other, fingerprint="other")
        assert other.found(1) is None
    with HostileReader(socket_path) as prepared:
        opened(prepared, content=CacheContent.PREPARED)
        assert prepared.found(1) is None


def test_what_a_client_says_is_checked(reader: HostileReader) -> None:
    """Lengths, offsets, ids and digests that are not true are refused, and cost the others nothing."""
    opened(reader)
    size = len(reader.staging)
    for items in (
        [(0, size - 3, 4, 0)],
        [(0, 0, size + 1, 0)],
        [(0, -1, 4, 0)],
        [(0, 0, -1, 0)],
        [(4, 0, 1, 0)],
        [(-1, 0, 1, 0)],
        [(0, 1 << 62, 1 << 62, 0)],
        [(0, 0, 4, -1)],
        [(1, 0, 4, 0), (0, size, 1, 0)],
    ):
        refused = reader.send_items(items)
        assert isinstance(refused, frames.Failure), (items, refused)
        assert refused.code == "UsageError"
    corrupt = filled(
        reader.fill({0: b"abcd", 1: b"efgh"}, change=lambda staging: staging.__setitem__(2, ord("X")))
    )
    assert (corrupt.corrupt, corrupt.published_count) == ([0], 1)
    assert [reader.found(0), reader.found(1)] == [None, b"efgh"]
    twice = filled(reader.send_items([(2, 4, 4, digest(b"efgh")), (2, 0, 4, digest(b"abXd"))]))
    assert (twice.published_count, twice.differing) == (1, [2])
    used = reader.view.header().used_bytes
    assert used == base_bytes(4) + 2 * record_bytes(4), "what was refused takes no room"
    assert isinstance(reader.ask(frames.StageCache(request_id=9, size_bytes=1 << 47)), frames.Failure)


def digest(data: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(data)


def test_frames_out_of_turn_are_refused(reader: HostileReader) -> None:
    for frame in (
        frames.StageCache(request_id=1, size_bytes=4096),
        frames.FillCache(request_id=2, items=[]),
    ):
        refused = reader.ask(frame)
        assert isinstance(refused, frames.Failure)
        assert "no cache" in refused.message
    assert isinstance(reader.open_cache(4), frames.CacheOpened)
    refused = reader.send_items([])
    assert isinstance(refused, frames.Failure)
    assert "no staging" in refused.message


def test_another_length_under_the_same_fingerprint_is_an_error(
    reader: HostileReader, socket_path: Path
) -> None:
    opened(reader, 4)
    with HostileReader(socket_path) as other:
        refused = other.open_cache(5)
        assert isinstance(refused, frames.Failure)
        assert refused.code == "UsageError"
        assert "had 4 samples when its cache was made, and has 5 now" in refused.message


def test_no_client_can_write_or_resize_an_arena(reader: HostileReader) -> None:
    """Not through the descriptor that it got, not by opening it again, not by making its mapping writable."""
    opened(reader)
    filled(reader.fill({0: b"data"}))
    again = os.open(
        f"/proc/self/fd/{reader.arena_fd}", os.O_RDWR
    )  # root may; others are stopped here already
    try:
        for fd in (reader.arena_fd, again):
            for attempt in (
                lambda fd=fd: os.pwrite(fd, b"x", 64),
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
                lambda fd=fd: punch_hole(fd),
            ):
                with pytest.raises(OSError, match=r"not permitted|denied|Bad file|Invalid argument"):
                    attempt()
        mapping = mmap.mmap(again, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        try:
            assert make_writable(mapping) != 0
        finally:
            mapping.close()
    finally:
        os.close(again)
    with pytest.raises(OSError, match=r"Bad file|Invalid argument"):
        os.ftruncate(reader.arena_fd, 1 << 30)
    assert reader.found(0) == b"data"
    assert fcntl.fcntl(reader.arena_fd, fcntl.F_GET_SEALS) & 0x1F == 0x13, "it grows with its pages"


def punch_hole(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0x3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make_writable(mapping: mmap.mmap) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = [
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "everstep-cache" in line
    ]
    assert address
    return max(libc.mprotect(each, 4096, 3) for each in address)


def test_a_staging_cannot_be_cut(reader: HostileReader) -> None:
    """So neither side's access to it ever faults; what was never written is zeros, which have another digest."""
    opened(reader)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(reader.staging_fd, size)
    reader.staging[:4] = b"abcd"
    punch_hole(reader.staging_fd)
    assert filled(reader.send_items([(0, 0, 4, digest(b"abcd"))])).corrupt == [0]


def test_the_budget_is_kept_to_the_byte(socket_path: Path) -> None:
    lengths = [1000, 1, 0, 333, 4096, 7, 8, 9]
    samples = {index: bytes([index]) * length for index, length in enumerate(lengths)}
    for less, name in ((0, "exact"), (1, "less")):
        with HostileReader(socket_path) as reader:
            budget = budget_for(lengths) - less
            assert opened(reader, len(lengths), budget_bytes=budget, fingerprint=name).budget_bytes == budget
            done = filled(reader.fill(samples))
            assert (done.published_count, done.reason) == (8 - less, "full" if less else "")
            header = reader.view.header()
            assert header.used_bytes == budget_for(lengths) - less * record_bytes(9)
            assert header.used_bytes <= budget
            assert header.free_bytes == budget - header.used_bytes
            assert header.published_count == 8 - less


def test_a_sample_above_the_budget_is_never_admitted(reader: HostileReader) -> None:
    opened(reader, 2, budget_bytes=base_bytes(2) + record_bytes(100))
    assert filled(reader.fill({0: bytes(105)})).reason == "oversized"
    assert filled(reader.fill({0: bytes(104)})).published_count == 1, "100 bytes are padded to as many"
    assert filled(reader.fill({1: bytes(105), 0: bytes(104)})).known_count == 1


def test_the_largest_budget_of_the_readers_counts(reader: HostileReader, socket_path: Path) -> None:
    first = opened(reader, 2, budget_bytes=base_bytes(2) + record_bytes(100))
    assert filled(reader.fill({0: bytes(2000)})).reason == "oversized"
    with HostileReader(socket_path) as second:
        assert opened(second, 2, budget_bytes=1 << 16).budget_bytes == 1 << 16
        assert filled(reader.fill({0: bytes(2000)})).published_count == 1
        third = reader.view.header()
        assert third.capacity_bytes == (1 << 16) - base_bytes(2)
    with HostileReader(socket_path) as fourth:
        reply = opened(fourth, 2, budget_bytes=200)
        assert reply.budget_bytes >= reader.view.header().used_bytes > first.budget_bytes
        assert "another process" in reply.reason


def test_an_index_without_room_is_refused(reader: HostileReader) -> None:
    refused = reader.open_cache(1000, budget_bytes=8063)
    assert isinstance(refused, frames.Failure)
    assert refused.code == "MemoryRefusedError"
    assert "index of 1000 samples alone takes" in refused.message


@pytest.fixture
def small_node(tmp_path: Path) -> Iterator[Path]:
    """The socket of a daemon with 3 MiB for all arenas."""
    socket_path = Path(os.environ["EVERSTEP_SOCKET"])
    (tmp_path / "d0").mkdir()
    config = tmp_path / "node.toml"
    config.write_text(
        f'[devices]\nnvme0 = "{tmp_path / "d0"}"\n[daemon]\nsocket = "{socket_path}"\n'
        f"[memory]\narena_max_bytes = {3 * MIB}\nreserve_bytes = 0\n"
    )
    with node_daemon(config, socket_path):
        yield socket_path


def samples_of(count: int) -> dict[int, bytes]:
    return {index: random.Random(index).randbytes(1000) for index in range(count)}


def test_where_memory_is_short_it_is_smaller_and_says_so(small_node: Path) -> None:
    with HostileReader(small_node) as reader:
        reply = reader.open_cache(5000, budget_bytes=8 * MIB)
        assert isinstance(reply, frames.CacheOpened)
        assert "the daemon's budget has 3 MiB left" in reply.reason
        assert isinstance(reader.stage(4 * MIB), frames.StagingReady)
        done = filled(reader.fill(samples_of(4000)))
        assert done.reason == "memory"
        pages_bytes = (3 * MIB - base_bytes(5000)) // 4096 * 4096
        assert done.published_count == pages_bytes // record_bytes(1000)


def test_memory_that_becomes_free_is_used(small_node: Path) -> None:
    """A cache that was short grows when another one has lost its last reader, which makes room."""
    with HostileReader(small_node) as short:
        with HostileReader(small_node) as other:
            opened(other, 10, fingerprint="other", budget_bytes=2 * MIB)
            assert filled(other.fill(samples_of(10))).published_count == 10
            wait_until(lambda: caches(small_node)["allocated_bytes"] == 2 * MIB)
            opened(short, 3000, fingerprint="short", budget_bytes=2 * MIB)
            short.stage(2 * MIB)
            few = filled(short.fill(samples_of(1500)))
            assert few.reason == "memory"
            assert few.published_count < 1100
        wait_until(lambda: short.view.header().free_bytes > 1500 * 1024 - MIB)
        assert filled(short.fill(samples_of(1500))).reason == ""
        assert short.view.header().published_count == 1500
        assert caches(small_node)["caches"] == 1


def test_caches_without_readers_make_room_oldest_first(small_node: Path) -> None:
    """The newest one that nobody reads stays, and so does one that is read, however old."""
    with HostileReader(small_node) as old_but_read:
        opened(old_but_read, 10, fingerprint="read", budget_bytes=MIB)
        filled(old_but_read.fill(samples_of(10)))
        for name in ("first", "second"):
            with HostileReader(small_node) as reader:
                opened(reader, 10, fingerprint=name, budget_bytes=MIB)
                filled(reader.fill(samples_of(10)))
            wait_until(lambda: caches(small_node)["clients"] == 1)
        with HostileReader(small_node) as fourth:
            opened(fourth, 10, fingerprint="fourth", budget_bytes=MIB)
            assert filled(fourth.fill(samples_of(10))).published_count == 10
        wait_until(lambda: caches(small_node)["clients"] == 1)
        with HostileReader(small_node) as again:
            opened(again, 10, fingerprint="second", budget_bytes=MIB)
            assert again.found(3) == samples_of(10)[3]
        with HostileReader(small_node) as again:
            opened(again, 10, fingerprint="first", budget_bytes=MIB)
            assert again.found(3) is None
        assert old_but_read.found(3) == samples_of(10)[3]


def caches(socket_path: Path) -> dict[str, float]:
    """Return the cache's metrics by their short names."""
    with connected(socket_path) as client:
        port = client.status().daemon.metrics_port
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(("everstep_cache_", "everstep_caches")):
                name, value = line.rsplit(" ", 1)
                found[name.removeprefix("everstep_").removeprefix("cache_")] = float(value)
    return found


def test_metrics_say_what_the_caches_hold(small_node: Path) -> None:
    with HostileReader(small_node) as reader:
        opened(reader, 10, budget_bytes=MIB)
        filled(reader.fill(samples_of(9)))
        filled(reader.fill({0: samples_of(1)[0], 9: b"x"}, digests={9: 1}))
        reader.send(
            frames.CacheUse(hit_count=5, hit_bytes=50, miss_count=2, miss_bytes=20, oversized_count=1)
        )
        wait_until(lambda: caches(small_node)['reads_total{source="memory"}'] == 5)
        found = caches(small_node)
        assert found["caches"] == found["clients"] == 1
        assert found["budget_bytes"] == found["allocated_bytes"] == MIB
        assert found["bytes"] == base_bytes(10) + 9 * record_bytes(1000)
        assert found["samples"] == found["filled_samples_total"] == 9
        assert found["filled_bytes_total"] == 9000
        assert found["known_samples_total"] == 1
        assert found['refused_samples_total{reason="corrupt"}'] == 1
        assert found['refused_samples_total{reason="oversized"}'] == 1
        assert found['read_bytes_total{source="dataset"}'] == 20


def test_racing_readers_publish_a_sample_once(reader: HostileReader, socket_path: Path) -> None:
    opened(reader, 64)
    samples = {index: random.Random(index).randbytes(500) for index in range(64)}
    published: list[int] = []
    start = threading.Barrier(4)

    def race() -> None:
        with HostileReader(socket_path) as racer:
            opened(racer, 64)
            start.wait()
            published.append(
                sum(filled(racer.fill({i: data})).published_count for i, data in samples.items())
            )

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(published) == 64
    assert reader.view.header().used_bytes == base_bytes(64) + 64 * record_bytes(500)
    assert [reader.found(index) for index in range(64)] == list(samples.values())
