"""The cache and real processes: workers of every kind, kill -9 of each, a small /dev/shm, a daemon that hangs."""

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from cached import Blocks, HostileReader
from pausing import wait_until

from everstep.daemon.control.client import connected
from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset, DataLoader
from everstep.dataloader.cache import reader as reader_module
from everstep.proto import frames

SUPPORT = Path(__file__).resolve().parents[2] / "support"
LENGTHS = [3000 + 7 * index for index in range(48)]


@pytest.fixture(scope="module", autouse=True)
def _background() -> None:  # pyright: ignore[reportUnusedFunction]
    """Spawn and forkserver start processes for good: have them before the first look at what is left behind."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    with daemon_process(folder / "s" / "data.sock"):
        yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def source(daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blocks:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(daemon))
    return Blocks(LENGTHS, tmp_path / "reads", name=os.environ["PYTEST_CURRENT_TEST"].split()[0][-100:])


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1), ("forkserver", 1)])
def test_workers_attach_by_themselves(source: Blocks, method: str, workers: int) -> None:
    """The first epoch reads each sample once, the second none; order and content are those of a plain loop."""
    dataset = CachedDataset[bytes](source, budget="4MB")
    assert dataset.cache_info().is_attached, "the parent's connection is nothing for its children"
    loader = DataLoader[bytes](
        dataset,
        batch_size=5,
        num_workers=workers,
        multiprocessing_context=method,
        shuffle=True,
        seed=3,
        collate_fn=list,
        persistent_workers=method != "fork",
    )
    plain = DataLoader[bytes](dataset, batch_size=5, shuffle=True, seed=3, collate_fn=list)
    try:
        first = [sample for batch in loader for sample in batch]
        assert sorted(first) == sorted(source.content(index) for index in range(48))
        assert sorted(source.reads()) == list(range(48))
        assert first == [sample for batch in plain for sample in batch]
        second = [sample for batch in loader for sample in batch]
        assert second == [sample for batch in plain for sample in batch]
        assert second != first
        # A worker that lives on may be asked for a sample that it has only just staged: at most for its last message.
        wait_until(lambda: dataset.cache_info().cached_count == 48)
        source.reads()
        assert len([sample for batch in loader for sample in batch]) == 48
        assert source.reads() == []
    finally:
        loader._persistent = None
    dataset.close()


def read_in_child(dataset: CachedDataset[bytes], parents: list[str], result: Connection) -> None:
    """What a forked child has of its parent's cache, and what it has after its first sample."""
    held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    before = (dataset.cache_info().is_attached, dataset.peek(0), sorted(set(held) & set(parents)))
    content = [dataset[index] for index in range(48)]
    result.send((before, dataset.cache_info().is_attached, content))


def sockets_and_memfds() -> list[str]:
    found = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    return [each for each in found if each.startswith("socket:") or "everstep-" in each]


def test_a_forked_child_lets_go_and_attaches_itself(source: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent's connection goes on. What the child staged last is sent when it ends."""
    before = set(sockets_and_memfds())
    dataset = CachedDataset[bytes](source, budget="4MB")
    parents = sorted(set(sockets_and_memfds()) - before)
    assert len(parents) == 1, "a connection; what is mapped needs no descriptor"
    monkeypatch.setattr("everstep.dataloader.cache.link.OUTSTANDING_MAX", 0)
    monkeypatch.setattr("everstep.dataloader.cache.link.BATCH_AGE_S", 1e9)
    monkeypatch.setattr(reader_module, "EXIT_DEADLINE_S", 30.0)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_child, args=(dataset, parents, theirs))
    child.start()
    theirs.close()
    untouched, is_attached, content = ours.recv()
    child.join()
    ours.close()
    assert untouched == (False, None, [])
    assert is_attached
    assert content == [source.content(index) for index in range(48)]
    source.reads()
    assert dataset.cache_info().cached_count == 48, "sent at its end: no message was due before"
    assert [dataset[index] for index in range(48)] == content
    assert source.reads() == []
    assert dataset.flush(), "the parent's connection is alive"
    dataset.close()


def memfds(pid: int) -> set[int]:
    """Return the inodes of the cache's memfds that a process has open."""
    found: set[int] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:everstep-" in str(fd.readlink()):
                found.add(fd.stat().st_ino)
    return found


def holders(inodes: set[int]) -> list[str]:
    """Return the processes that have any of these memfds open or mapped."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            lines = (entry / "maps").read_text().splitlines()
            mapped = {int(line.split()[4]) for line in lines if "/memfd:everstep-" in line}
            found += [entry.name] * bool((mapped | memfds(int(entry.name))) & inodes)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def children(process: BaseProcess) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(each) for each in listed]


def train(source: Blocks, ends: "tuple[Connection, Connection]") -> None:
    """Two epochs; in the second, when both workers have made a batch, say so and wait for a word."""
    ours, theirs = ends
    theirs.close()
    logging.disable()
    dataset = CachedDataset[bytes](source, budget="4MB")
    for epoch in range(2):
        loader = DataLoader[bytes](dataset, batch_size=4, num_workers=2, shuffle=True, collate_fn=list)
        for index, _ in enumerate(loader):
            if epoch and index == 1:
                ours.send("both workers work")
                ours.recv()
        wait_until(lambda: dataset.cache_info().cached_count == len(source))  # what workers staged last, too


@contextmanager
def trainer_in_second_epoch(source: Blocks) -> "Generator[tuple[BaseProcess, Connection]]":
    """A process that trains, and this end of the pipe to it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=train, args=(source, (theirs, ours)))
    trainer.start()
    theirs.close()
    try:
        assert ours.recv() == "both workers work"
        yield trainer, ours
        trainer.join()
    finally:
        trainer.kill()
        trainer.join()
        trainer.close()
        ours.close()


def test_nothing_is_left_of_whoever_is_killed_and_a_restart_is_warm(tmp_path: Path) -> None:
    """A worker, then a trainer whose workers live on for a while, then the daemon, each by SIGKILL."""
    source = Blocks(LENGTHS, tmp_path / "reads")
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        with trainer_in_second_epoch(source) as (trainer, pipe):
            assert sorted(source.reads()) == list(range(48))
            os.kill(children(trainer)[0], signal.SIGKILL)
            pipe.send("go on")
            trainer.join()
            assert trainer.exitcode == 0, "another worker took its place"
            assert source.reads() == []
        wait_until(lambda: len(memfds(process.pid)) == 1)
        with trainer_in_second_epoch(source) as (trainer, _):
            assert source.reads() == [], "it starts warm"
            orphans = children(trainer)
            assert len(orphans) == 2
            trainer.kill()
        wait_until(lambda: not any(alive(pid) for pid in orphans))
        wait_until(lambda: len(memfds(process.pid)) == 1)
        kept = memfds(process.pid)
        wait_until(lambda: holders(kept) == [str(process.pid)])  # one arena; no staging of the dead
        with trainer_in_second_epoch(source) as (trainer, pipe):
            assert source.reads() == []
            process.kill()
            process.wait()
            assert set(holders(kept)) == {str(pid) for pid in (trainer.pid, *children(trainer))}
            pipe.send("go on")
            trainer.join()
            assert trainer.exitcode == 0, "a trainer outlives the daemon"
        wait_until(lambda: holders(kept) == [])
        assert source.reads() == [], "what it had mapped it had until its end"
    names = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in names if "everstep-cache" in name or "everstep-staging" in name]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_daemon_killed_in_mid_epoch_changes_no_batch(tmp_path: Path, workers: int) -> None:
    """Half of the samples had been cached: these are read on from memory, the others from the source."""
    source = Blocks(LENGTHS, tmp_path / "reads")
    order: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "collate_fn": list}
    plain = DataLoader[bytes]([source.content(index) for index in range(48)], **order)  # pyright: ignore[reportArgumentType]
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        dataset = CachedDataset[bytes](source, budget="4MB")
        for index in range(24):
            assert dataset[index]
        assert dataset.flush()
        source.reads()
        batches = list[object]()
        for batch in DataLoader[bytes](dataset, num_workers=workers, **order):
            batches.append(batch)
            if len(batches) == 3:  # both workers are attached; of 12 they have begun 7 at most
                process.kill()
                process.wait()
        assert batches == list(plain)
        assert sorted(source.reads()) == list(range(24, 48))
        dataset.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


SMALL = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from cached import Blocks
from everstep.dataloader import CachedDataset

assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
source = Blocks([1 << 20] * 96, Path(sys.argv[2]))
dataset = CachedDataset(source, budget="128MiB")
for index in range(96):
    dataset[index]
    assert index % 16 != 15 or dataset.flush()
source.reads()
for index in range(96):
    assert dataset[index] == source.content(index)
print(len(source.reads()), dataset.cache_info().used_bytes)
dataset.close()
"""


@pytest.mark.root
def test_a_container_with_little_shared_memory(tmp_path: Path) -> None:
    """96 MiB in the cache beside a /dev/shm of 64 MiB, in a mount namespace of its own."""
    mounted = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    alone = ["unshare", "-m", "--propagation", "private", "sh", "-c"]
    done = subprocess.run(
        [*alone, mounted, "sh", sys.executable, "-P", "-c", SMALL, str(SUPPORT), str(tmp_path / "reads")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "EVERSTEP_LINGER_S": "0"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    reads, used_bytes = done.stdout.split()
    assert int(reads) == 0
    assert int(used_bytes) > 96 << 20


ENDS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from cached import Blocks
from everstep.dataloader import CachedDataset

def main():
    dataset = CachedDataset(Blocks([20_000] * 200, Path(sys.argv[2]), name=sys.argv[3]), budget="8MiB")
    for index in [*range(200), 0]:
        dataset[index]
    return dataset

dataset = main()
if sys.argv[3] == "collected":
    del dataset
"""


@pytest.mark.parametrize("way", ["kept", "collected"])
def test_a_process_that_ends_without_close_has_said_all_it_read(
    daemon: Path, tmp_path: Path, way: str
) -> None:
    """What it staged last is taken in and counted, and nothing is warned of."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENDS, str(SUPPORT), str(tmp_path / "reads"), way],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "EVERSTEP_SOCKET": str(daemon)},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")

    def counts() -> list[tuple[int, int]]:
        with connected(daemon) as client:
            found = [each for each in client.status().caches if each.fingerprint == way]
        return [
            (each.published_count, each.hit_count + each.miss_count)
            for each in found
            if not each.client_count
        ]

    wait_until(lambda: counts() == [(200, 201)])


def test_a_daemon_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is attached goes on at once; whoever comes new does after one deadline, and starts no second daemon."""
    source = Blocks([100_000] * 600, tmp_path / "reads")
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        dataset = CachedDataset[bytes](source, budget="100MB")
        process.send_signal(signal.SIGSTOP)
        try:
            for index in range(600):
                assert len(dataset[index]) == 100_000
            info = dataset.cache_info()
            assert info.miss_count == 600
            assert info.deferred_count > 200, "the staging holds 32 MiB"
            monkeypatch.setattr(reader_module, "ATTACH_DEADLINE_S", 0.3)
            began_s = time.monotonic()
            late = CachedDataset[bytes](source, budget="100MB")
            assert late[0] == source.content(0)
            assert not late.cache_info().is_attached
            assert time.monotonic() - began_s < 20, "a deadline, not for ever"
        finally:
            process.send_signal(signal.SIGCONT)
        assert dataset.flush()
        assert dataset.cache_info().cached_count == 600 - info.deferred_count
        staging = [
            line for line in Path("/proc/self/smaps").read_text().split("VmFlags") if "everstep-stag" in line
        ]
        assert len(staging) == 1
        assert resident_bytes(staging[0]) <= 4 << 20, "an empty staging gives its pages back"
        dataset.close()


def resident_bytes(mapping: str) -> int:
    """Return what /proc/self/smaps says of one mapping."""
    return 1024 * next(int(line.split()[1]) for line in mapping.splitlines() if line.startswith("Rss:"))


READERS, SAMPLES, ROUND = 2, 4000, 50


def watch_for_torn_samples(socket_path: Path, lengths: list[int], stop: str) -> None:
    """Read everything that is visible, over and over: bytes, length and digest must be those of the sample."""
    import xxhash

    with HostileReader(socket_path) as reader:
        reply = reader.open_cache(SAMPLES, budget_bytes=1 << 26, fingerprint="torn")
        assert isinstance(reply, frames.CacheOpened)
        view, seen = reader.view, set[int]()
        while not (is_last := Path(stop).exists()) or len(seen) < SAMPLES:
            for index in range(SAMPLES):
                if index in seen or not (place := view.places[index]):
                    continue
                length, digest = view.words[place // 8], view.words[place // 8 + 1]
                body = bytes(view.octets[place + 16 : place + 16 + length])
                assert length == lengths[index], (index, length)
                assert xxhash.xxh3_64_intdigest(body) == digest, index
                assert body[:4] == index.to_bytes(4, "little"), index
                seen.add(index)
            assert not is_last or len(seen) == SAMPLES
        del view


def test_no_reader_ever_sees_a_torn_sample(tmp_path: Path) -> None:
    """Readers hammer the index while the daemon fills it. EVERSTEP_TORN_ROUNDS repeats it."""
    socket_path, stop = Path(os.environ["EVERSTEP_SOCKET"]), tmp_path / "stop"
    samples = {
        index: index.to_bytes(4, "little") + os.urandom(16 + 97 * index % 2000) for index in range(SAMPLES)
    }
    lengths = [len(data) for data in samples.values()]
    for _ in range(int(os.environ.get("EVERSTEP_TORN_ROUNDS", "1"))):
        stop.unlink(missing_ok=True)
        with daemon_process(socket_path), HostileReader(socket_path) as writer:
            context = multiprocessing.get_context("fork")
            watchers = [
                context.Process(target=watch_for_torn_samples, args=(socket_path, lengths, str(stop)))
                for _ in range(READERS)
            ]
            for watcher in watchers:
                watcher.start()
            writer.open_cache(SAMPLES, budget_bytes=1 << 26, fingerprint="torn")
            writer.stage(1 << 20)
            for begin in range(0, SAMPLES, ROUND):
                part = {index: samples[index] for index in range(begin, begin + ROUND)}
                filled = writer.fill(part)
                assert isinstance(filled, frames.CacheFilled)
                assert filled.published_count == ROUND
            stop.touch()
            for watcher in watchers:
                watcher.join()
            assert [watcher.exitcode for watcher in watchers] == [0] * READERS
