"""The cache in hard use: readers killed while they fill, threads, forks, hundreds of readers, budgets out of range."""

import ctypes
import gc
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch.utils.data
from cached import Blocks
from pausing import wait_until

from everstep.core.errors import UsageError
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import CacheView
from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset
from everstep.dataloader.cache.arena_format import base_bytes, record_bytes

LENGTHS = [0, 1, 7, 8, 9, 4096, 100_000, *(300 + 13 * index for index in range(57))]
KILLS = int(os.environ.get("EVERSTEP_CACHE_KILLS", "25"))
DATASETS = int(os.environ.get("EVERSTEP_CACHE_DATASETS", "60"))
READERS = int(os.environ.get("EVERSTEP_CACHE_READERS", "24"))


@pytest.fixture(scope="module", autouse=True)
def _background() -> None:  # pyright: ignore[reportUnusedFunction]
    """Forkserver starts processes for good: have them before the first look at what is left behind."""
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


def state_of(name: str) -> CacheView:
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        return next(each for each in client.status().caches if each.fingerprint == name)


def contents(source: Blocks) -> list[bytes]:
    return [source.content(index) for index in range(len(source))]


def read_for_ever(source: Blocks, seed: int) -> None:
    """Read in a random order, over and over, until killed."""
    logging.disable()
    dataset, order = CachedDataset[bytes](source, budget="8MB"), random.Random(seed)
    while True:
        index = order.randrange(len(source))
        assert dataset[index] == source.content(index)


def test_readers_killed_at_any_moment_leave_whole_samples_and_nothing_else(source: Blocks) -> None:
    """Two racing readers, killed after a random time from the attach on, again and again.

    EVERSTEP_CACHE_KILLS repeats it, EVERSTEP_CACHE_SEED draws other times.
    """
    seed = os.environ.get("EVERSTEP_CACHE_SEED", "1")
    moments, context = random.Random(seed), multiprocessing.get_context("fork")
    for number in range(KILLS):
        children = [context.Process(target=read_for_ever, args=(source, 2 * number + i)) for i in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(moments.uniform(0, 0.08))
            assert child.exitcode is None, f"a reader found a wrong sample, seed {seed}"
            child.kill()
            child.join()
            child.close()
    dataset = CachedDataset[bytes](source, budget="8MB")
    assert [dataset[index] for index in range(len(source))] == contents(source)
    assert dataset.flush()
    wait_until(lambda: state_of(source.name).client_count == 1)
    state = state_of(source.name)
    assert state.published_count == len(source)
    assert state.used_bytes == base_bytes(len(LENGTHS)) + sum(map(record_bytes, LENGTHS)), (
        "no gap, none twice"
    )
    source.reads()
    assert [dataset[index] for index in range(len(source))] == contents(source)
    assert source.reads() == []
    dataset.close()


def test_a_hit_makes_no_system_call(source: Blocks) -> None:
    """The kernel kills whoever makes one but read and write: nothing is sent, waited for or even asked."""
    dataset = CachedDataset[bytes](source, budget="8MB")
    for index in range(len(source)):
        dataset[index]
    assert dataset.flush()
    ours, theirs = os.pipe()
    wanted = [index for index, length in enumerate(LENGTHS) if length < 500]
    pid = os.fork()
    if pid == 0:
        assert len([dataset[index] for index in wanted]) == len(wanted)
        gc.disable()  # what other tests left to be collected may be files
        done = ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_STRICT
        for _ in range(40):
            assert len([dataset[index] for index in wanted]) == len(wanted)
        os.write(theirs, b"%d %d\n" % (done, dataset.cache_info().hit_count))
        dataset[0]
        os.getppid()  # and this is its end
        os.write(theirs, b"not killed\n")
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert said == b"0 %d\n" % (41 * len(wanted))
    assert os.WTERMSIG(status) == signal.SIGKILL
    dataset.close()


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 1)])
def test_torchs_own_loader_reads_each_sample_once(source: Blocks, method: str, workers: int) -> None:
    dataset = CachedDataset[bytes](source, budget="8MB")
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, num_workers=workers, multiprocessing_context=method, collate_fn=list
    )
    assert [sample for batch in loader for sample in batch] == contents(source)
    wait_until(lambda: dataset.cache_info().cached_count == len(source))  # workers wait a second at most
    assert [dataset[index] for index in range(len(source))] == contents(source)
    assert sorted(source.reads()) == list(range(len(source)))
    dataset.close()


def test_threads_and_forks_share_one_dataset(source: Blocks) -> None:
    """Children are forked while threads of the parent fill; parent and children read on, each for itself."""
    dataset, wrong, context = (
        CachedDataset[bytes](source, budget="8MB"),
        list[int](),
        multiprocessing.get_context("fork"),
    )
    stop = threading.Event()

    def read(seed: int) -> None:
        order = random.Random(seed)
        while not stop.is_set():
            index = order.randrange(len(source))
            if dataset[index] != source.content(index):
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            child = context.Process(target=read_some, args=(dataset, source))
            child.start()
            child.join()
            assert child.exitcode == 0
            child.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert dataset.flush()
    assert dataset.cache_info().is_attached
    wait_until(lambda: state_of(source.name).client_count == 1)
    dataset.close()


def read_some(dataset: CachedDataset[bytes], source: Blocks) -> None:
    assert [dataset[index] for index in range(len(source))] == contents(source)
    assert dataset.flush()
    assert dataset.cache_info().is_attached


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_tiny_datasets_in_one_process(source: Blocks) -> None:
    """Each takes one descriptor of this process. EVERSTEP_CACHE_DATASETS says how many there are."""
    held = descriptors()
    tiny = [Blocks([5], source.log, name=f"{source.name[-80:]} {number}") for number in range(DATASETS)]
    datasets = [CachedDataset[bytes](each, budget=4096) for each in tiny]
    assert descriptors() <= held + DATASETS
    for _ in range(2):
        assert [dataset[0] for dataset in datasets] == [each.content(0) for each in tiny]
        assert all(dataset.flush() for dataset in datasets)
    assert len(source.reads()) == DATASETS
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        found = [each for each in client.status().caches if each.fingerprint.startswith(source.name[-80:])]
    assert sum(each.allocated_bytes for each in found) == 4096 * DATASETS
    for dataset in datasets:
        dataset.close()
    wait_until(lambda: descriptors() <= held)


def read_once(source: Blocks, seed: int) -> None:
    dataset, order = CachedDataset[bytes](source, budget="8MB"), list(range(len(source)))
    random.Random(seed).shuffle(order)
    assert [dataset[index] for index in order] == [source.content(index) for index in order]


def test_many_readers_race_for_every_sample(source: Blocks) -> None:
    """EVERSTEP_CACHE_READERS says how many."""
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=read_once, args=(source, seed)) for seed in range(READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0] * READERS
    # What each has staged last comes before its end.
    wait_until(lambda: state_of(source.name).client_count == 0)
    state = state_of(source.name)
    assert state.published_count == len(source)
    assert state.used_bytes == base_bytes(len(LENGTHS)) + sum(map(record_bytes, LENGTHS))
    assert len(set(source.reads())) == len(source)


class Endless(Sequence[bytes]):
    """10^9 samples that cost nothing."""

    def __len__(self) -> int:
        return 1_000_000_000

    def get_bytes(self, index: int) -> bytes:
        return b"%d" % index

    __getitem__ = get_bytes  # pyright: ignore[reportAssignmentType]

    def fingerprint(self) -> str:
        return "endless"


def test_a_billion_samples_and_a_small_budget_mean_direct_reads(
    source: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    """The index alone is above the budget: it is said with both sizes, and takes no memory on either side."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = CachedDataset[bytes](Endless(), budget="1GB")
    assert [dataset[index] for index in (0, 999_999_999, -1)] == [b"0", b"999999999", b"999999999"]
    assert "the index of 1000000000 samples alone takes 7.5 GiB of a budget of 953.7 MiB" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000
    assert source.name
    dataset.close()


def test_a_budget_above_the_nodes_memory_is_cut_and_said(
    source: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = CachedDataset[bytes](source, budget="900TB")
    assert [dataset[index] for index in range(len(source))] == contents(source)
    assert dataset.flush()
    info = dataset.cache_info()
    assert info.cached_count == len(source)
    assert info.budget_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "of memory" in caplog.text
    dataset.close()


def test_many_datasets_of_a_hanging_daemon_end_in_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process staged last is waited for at its end, in all datasets together."""
    from everstep.dataloader.cache import reader as reader_module

    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        sources = [Blocks([100], tmp_path / "reads", name=f"hang {number}") for number in range(8)]
        datasets = [CachedDataset[bytes](each, budget=8192) for each in sources]
        process.send_signal(signal.SIGSTOP)
        try:
            for dataset in datasets:
                dataset[0]
            waited: list[float] = []
            clock = [0.0]
            monkeypatch.setattr(reader_module.time, "monotonic", lambda: clock[0])
            monkeypatch.setattr(
                "everstep.dataloader.cache.link.time.sleep",
                lambda seconds: (waited.append(seconds), clock.__setitem__(0, clock[0] + seconds))[0],
            )
            reader_module._flush_all()
            assert sum(waited) < 1.5 * reader_module.EXIT_DEADLINE_S
        finally:
            process.send_signal(signal.SIGCONT)


def test_what_was_staged_while_the_daemon_hung_is_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many small samples come meanwhile, no message is one too many for the daemon."""
    monkeypatch.setattr("everstep.dataloader.cache.link.BATCH_AGE_S", 0.0)
    slow = Blocks([10] * 5000, tmp_path / "reads")
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        dataset = CachedDataset[bytes](slow, budget="1MB")
        process.send_signal(signal.SIGSTOP)
        try:
            for index in range(len(slow)):
                dataset[index]
        finally:
            process.send_signal(signal.SIGCONT)
        assert dataset.flush()
        info = dataset.cache_info()
        assert (info.is_attached, info.cached_count, info.deferred_count) == (True, len(slow), 0)
        dataset.close()


def test_a_changed_length_is_an_error_at_once(source: Blocks) -> None:
    dataset = CachedDataset[bytes](source, budget="8MB")
    with pytest.raises(UsageError, match="a fingerprint must change when the dataset does"):
        CachedDataset(Blocks([1], source.log, name=source.name), budget="8MB")
    dataset.close()
