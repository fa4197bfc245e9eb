"""CachedDataset with a real daemon: what it returns, what it reads, and what happens without one."""

import logging
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cached import Blocks, HostileReader
from pausing import wait_until

from everstep.core.errors import StateTypeError, UsageError
from everstep.daemon.control.client import connected
from everstep.daemon.testing import daemon_process
from everstep.dataloader import BlockShuffle, CachedDataset, DataLoader
from everstep.dataloader.cache import reader as reader_module
from everstep.dataloader.cache.arena_format import base_bytes, budget_for, record_bytes
from everstep.dataloader.sources import SourceDataset
from everstep.hook.trainer_testing import daemon_pid

LENGTHS = [1000, 0, 17, 40_000, 8]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    with daemon_process(folder / "s" / "data.sock"):
        yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def source(daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """A source that the daemon knows nothing of yet."""
    monkeypatch.setenv("EVERSTEP_SOCKET", str(daemon))
    return Blocks(LENGTHS, tmp_path / "reads", name=os.environ["PYTEST_CURRENT_TEST"].split()[0][-100:])


def read_all(dataset: CachedDataset[bytes], source: Blocks) -> None:
    """Read every sample and check it."""
    for index in range(len(source)):
        assert dataset[index] == source.content(index)
    assert dataset.flush()


def test_a_block_shuffle_finds_the_blocks_of_the_source(source: Blocks) -> None:
    assert CachedDataset[bytes](source, budget="1MB").block_sizes is None
    with pytest.raises(UsageError, match=r"has no block_sizes\(\)"):
        DataLoader(CachedDataset[bytes](source, budget="1MB"), shuffle="blocks")
    source.block_sizes = lambda: [2, 3]  # type: ignore[attr-defined]
    cached = CachedDataset[bytes](source, budget="1MB")
    for dataset in (cached, SourceDataset[bytes](cached)):
        loader = DataLoader(dataset, batch_size=None, shuffle=BlockShuffle(window=1))
        lengths = [len(sample) for sample in loader]
        assert sorted(lengths) == sorted(LENGTHS)
        assert {frozenset(lengths[:2]), frozenset(lengths[:3])} & {
            frozenset(LENGTHS[:2]),
            frozenset(LENGTHS[2:]),
        }


def test_each_sample_is_read_once_by_whoever_is_first(source: Blocks) -> None:
    dataset = CachedDataset[bytes](source, budget="1MB")
    assert len(dataset) == 5
    read_all(dataset, source)
    assert sorted(source.reads()) == [0, 1, 2, 3, 4]
    second = CachedDataset[bytes](source, budget="1MB")
    for each in (dataset, second):
        read_all(each, source)
    assert source.reads() == []
    info = second.cache_info()
    assert (info.hit_count, info.hit_bytes, info.miss_count) == (5, sum(LENGTHS), 0)
    assert (info.cached_count, info.used_bytes, info.budget_bytes) == (5, budget_for(LENGTHS), 1_000_000)
    assert dataset[-1] == source.content(4)
    for bad in (5, -6):
        with pytest.raises(IndexError):
            dataset[bad]
    found = second.peek(0)
    assert found is not None
    assert bytes(found) == source.content(0)
    assert found.readonly
    del found
    dataset.close()
    second.close()


def test_what_was_read_is_counted_by_the_daemon_when_it_is_closed(source: Blocks, daemon: Path) -> None:
    """Reports come every few seconds: the last ones with the end."""
    dataset = CachedDataset[bytes](source, budget="1MB")
    read_all(dataset, source)
    for index in range(3):
        assert dataset[index] == source.content(index)
    dataset.close()
    with connected(daemon) as client:

        def counted() -> list[int]:
            caches = [each for each in client.status().caches if each.fingerprint.startswith(source.name)]
            return [each.hit_count + each.miss_count for each in caches]

        wait_until(lambda: counted() == [len(source) + 3])


def test_a_restart_finds_it_filled(source: Blocks) -> None:
    """Whoever used it before is gone: closed, and as after a crash."""
    dataset = CachedDataset[bytes](source, budget="1MB")
    read_all(dataset, source)
    dataset.close()
    source.reads()
    again = CachedDataset[bytes](source, budget="1MB")
    read_all(again, source)
    assert source.reads() == []
    again.close()


def test_only_what_fits_is_kept_and_it_stays(source: Blocks) -> None:
    budget = base_bytes(5) + record_bytes(1000) + record_bytes(0) + record_bytes(17)
    dataset = CachedDataset[bytes](source, budget=budget)
    read_all(dataset, source)
    source.reads()
    for _ in range(3):
        read_all(dataset, source)
        assert sorted(source.reads()) == [3, 4]
    info = dataset.cache_info()
    assert info.used_bytes == info.budget_bytes == budget
    assert info.oversized_count == 4, "40,000 bytes never fit"
    dataset.close()


@pytest.mark.parametrize("wrong", [5, "text", None, [1, 2]], ids=["number", "text", "none", "list"])
def test_a_source_that_returns_no_bytes_is_told_and_nothing_is_cached(
    source: Blocks, monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    """bytes(5) are five zeros: nobody would notice before the model is trained on them."""
    dataset = CachedDataset[bytes](source, budget="1MB")
    with monkeypatch.context() as patched:
        patched.setattr(source, "get_bytes", lambda index: wrong)
        with pytest.raises(UsageError, match=f"sample 2 of Blocks is {type(wrong).__name__}, not bytes"):
            dataset[2]
    assert dataset.flush()
    assert dataset.cache_info().cached_count == 0
    read_all(dataset, source)
    dataset.close()


def test_views_and_arrays_of_bytes_are_bytes(source: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset[bytes](source, budget="1MB")
    made: list[object] = [bytearray(b"ab"), memoryview(b"abcd")[::2], np.frombuffer(b"ac", np.uint8)]
    monkeypatch.setattr(source, "get_bytes", lambda index: made[index])
    assert [dataset[index] for index in range(3)] == [b"ab", b"ac", b"ac"]
    dataset.close()


def test_an_error_of_the_source_passes_untouched(source: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset[bytes](source, budget="1MB")
    error = ConnectionResetError("planted by a test")

    def fail(index: int) -> bytes:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(source, "get_bytes", fail)
        with pytest.raises(ConnectionResetError) as raised:
            dataset[2]
    assert raised.value is error
    assert dataset.flush()
    assert dataset.cache_info().cached_count == 0
    read_all(dataset, source)
    dataset.close()


def test_decode_sees_the_bytes_at_each_read(source: Blocks) -> None:
    dataset = CachedDataset[int](source, budget="1MB", decode=len)
    assert [dataset[index] for index in range(5)] == LENGTHS
    assert dataset.flush()
    assert [dataset[index] for index in range(5)] == LENGTHS
    assert dataset.get_bytes(2) == source.content(2)
    dataset.close()


def test_another_fingerprint_is_another_cache_and_another_length_an_error(source: Blocks) -> None:
    dataset = CachedDataset[bytes](source, budget="1MB")
    read_all(dataset, source)
    changed = CachedDataset[bytes](source, budget="1MB", fingerprint="changed")
    assert changed.cache_info().cached_count == 0
    longer = Blocks([*LENGTHS, 1], source.log, name=source.name)
    with pytest.raises(UsageError, match="had 5 samples when its cache was made, and has 6 now"):
        CachedDataset(longer, budget="1MB")
    changed.close()
    dataset.close()


@pytest.mark.parametrize("is_as_long", [True, False])
def test_content_that_changed_under_its_fingerprint_is_told(
    source: Blocks, caplog: pytest.LogCaptureFixture, is_as_long: bool
) -> None:
    """Two processes that see the same sample missing, with different bytes."""
    dataset = CachedDataset[bytes](source, budget="1MB")
    with HostileReader(Path(os.environ["EVERSTEP_SOCKET"])) as other:
        other.open_cache(5, fingerprint=source.name)
        other.stage()
        dataset._reader.offer(0, b"first")
        assert dataset.flush()
        dataset._reader.offer(0, b"other" if is_as_long else b"longer other")
        assert dataset.flush()
        assert other.found(0) == b"first"
    assert "sample 0 is in the cache with other bytes" in caplog.text
    dataset.close()


def test_a_sample_larger_than_the_staging_gets_a_larger_one(
    source: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.dataloader.cache.link.STAGING_BYTES", 4096)
    monkeypatch.setattr("everstep.dataloader.cache.link.LARGER_DEADLINE_S", 30.0)
    dataset = CachedDataset[bytes](source, budget="1MB")
    for index in (3, 0, 2):
        assert dataset[index] == source.content(index)
        assert dataset.flush()
    assert dataset.cache_info().cached_count == 3
    dataset.close()


class Prepared:
    """A map-style dataset; `bad` holds what cannot be cached."""

    def __init__(self, name: str, *, bad: bool = False) -> None:
        self.name, self.bad, self.reads = name, bad, 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        self.reads += 1
        label = {"class": index, "odd": object()} if self.bad else {"class": index}
        return torch.full((2, 3), index), np.arange(index), label, "text", b"raw"

    def fingerprint(self) -> str:
        return self.name


def test_prepared_samples_come_back_as_they_were(source: Blocks) -> None:
    prepared = Prepared(source.name)
    dataset = CachedDataset[tuple[torch.Tensor, np.ndarray, dict[str, int], str, bytes]](
        prepared, budget="1MB", prepared=True
    )
    for index in range(3):
        dataset[index]
    assert dataset.flush()
    assert prepared.reads == 3
    for _ in range(2):
        image, array, label, text, raw = dataset[2]
        assert torch.equal(image, torch.full((2, 3), 2))
        assert array.tolist() == [0, 1]
        assert (label, text, raw) == ({"class": 2}, "text", b"raw")
        image += 1  # this reader's own
    assert prepared.reads == 3
    raw_bytes = CachedDataset[bytes](source, budget="1MB")
    assert raw_bytes.cache_info().cached_count == 0, "other content under the same fingerprint"
    raw_bytes.close()
    dataset.close()


def test_what_cannot_be_prepared_is_named(source: Blocks) -> None:
    dataset = CachedDataset[object](Prepared(source.name, bad=True), budget="1MB", prepared=True)
    with pytest.raises(StateTypeError, match=r"sample\[2\]\['odd'\] is a builtins.object"):
        dataset[1]
    dataset.close()


def test_arguments_are_checked(source: Blocks) -> None:
    with pytest.raises(UsageError, match="Prepared is no source"):
        CachedDataset(Prepared("p"), budget=1000)
    with pytest.raises(UsageError, match="decode= goes with a source"):
        CachedDataset(source, budget=1000, prepared=True, decode=len)
    with pytest.raises(UsageError, match="list has no fingerprint"):
        CachedDataset([1, 2], budget=1000, prepared=True)
    decoded = SourceDataset(source, decode=len)
    for dataset in (decoded, SourceDataset(source, label=str)):
        with pytest.raises(UsageError, match="the fingerprint of a SourceDataset is its source's"):
            CachedDataset(dataset, budget=1000, prepared=True)
    for given, dataset in (("lengths", decoded), (None, SourceDataset(source))):
        CachedDataset[object](dataset, budget="1MB", prepared=True, fingerprint=given).close()
    for budget in (0, -1, "many", 1.5, "0GB", 1 << 60):
        with pytest.raises(UsageError, match="budget="):
            CachedDataset(source, budget=budget)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="no __len__ or no __getitem__"):
        CachedDataset(iter([]), budget=1000, prepared=True, fingerprint="x")  # pyright: ignore[reportArgumentType]


def test_too_small_a_budget_means_direct_reads(source: Blocks, caplog: pytest.LogCaptureFixture) -> None:
    dataset = CachedDataset[bytes](source, budget=63)
    for _ in range(2):
        assert [dataset[index] for index in range(5)] == [source.content(index) for index in range(5)]
    assert len(source.reads()) == 10
    assert not dataset.cache_info().is_attached
    assert len(caplog.records) == 1
    assert "index of 5 samples alone takes 104 B of a budget of 63 B" in caplog.text


def test_a_pickle_holds_settings_only(source: Blocks) -> None:
    dataset = CachedDataset[bytes](source, budget="1MB")
    read_all(dataset, source)
    source.reads()
    copy = pickle.loads(pickle.dumps(dataset))
    assert not copy.cache_info().is_attached
    read_all(copy, source)
    assert source.reads() == []
    copy.close()
    dataset.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Blocks:
    """A source whose test runs daemons itself."""
    return Blocks(LENGTHS, tmp_path / "reads")


def test_without_its_daemon_it_goes_on_and_finds_the_next_one(
    mortal: Blocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order is the caller's; what is mapped is read further; one warning; attempts come at a bounded rate."""
    caplog.set_level(logging.WARNING, logger="everstep")
    clock = [1000.0]
    monkeypatch.setattr(reader_module.time, "monotonic", lambda: clock[0])
    socket_path = Path(os.environ["EVERSTEP_SOCKET"])
    with daemon_process(socket_path) as process:
        dataset = CachedDataset[bytes](mortal, budget="1MB")
        for index in (0, 1, 2):
            dataset[index]
        assert dataset.flush()
        process.send_signal(signal.SIGKILL)
        process.wait()
    mortal.reads()
    attempts: list[float] = []
    connect = dataset._reader._connect
    monkeypatch.setattr(dataset._reader, "_connect", lambda: (attempts.append(clock[0]), connect())[1])
    for _ in range(100):
        clock[0] += 1
        assert [dataset[index] for index in range(5)] == [mortal.content(index) for index in range(5)]
    assert mortal.reads() == [3, 4] * 100
    assert len(caplog.records) == 1
    assert "are read from the source" in caplog.text
    assert 3 <= len(attempts) <= 7
    with daemon_process(socket_path):
        clock[0] += 120
        monkeypatch.setattr(reader_module, "REATTACH_DEADLINE_S", 30.0)
        for _ in range(2):
            assert [dataset[index] for index in range(5)] == [mortal.content(index) for index in range(5)]
            wait_until(dataset.flush)
        mortal.reads()
        assert [dataset[index] for index in range(5)] == [mortal.content(index) for index in range(5)]
        assert mortal.reads() == []
        info = dataset.cache_info()
        assert (info.is_attached, info.cached_count) == (True, 5)
        dataset.close()


def test_a_private_daemon_is_started_and_ends_when_nobody_needs_it(
    mortal: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_LINGER_S", "5")
    dataset = CachedDataset[bytes](mortal, budget="1MB")
    read_all(dataset, mortal)
    dataset.close()
    again = CachedDataset[bytes](mortal, budget="1MB")
    mortal.reads()
    read_all(again, mortal)
    assert mortal.reads() == []
    pid = daemon_pid()
    began_s = time.monotonic()
    again.close()
    assert os.waitpid(pid, 0)[0] == pid
    assert time.monotonic() - began_s > 0.5, "it stays for a next job"
