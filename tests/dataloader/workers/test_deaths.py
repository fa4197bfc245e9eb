"""Workers that are killed, by real signals: nothing is lost or repeated, and what kills them again is named."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fragile import Counted, Fragile, FragileInBulk, ImportFails, ids, loader_of

from everstep.core.errors import UsageError, WorkerError
from everstep.dataloader import DataLoader, Ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]


def undisturbed(count: int = 24, epoch: int = 0, **more: object) -> list[list[int]]:
    loader = loader_of(list(range(count)), num_workers=0, multiprocessing_context=None, **more)
    loader.set_epoch(epoch)
    return [ids(batch) for batch in loader]


def pids(loader: DataLoader[object]) -> list[int]:
    assert loader._supply.pool is not None
    return loader._supply.pool.pids


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_repeated(
    tmp_path: Path, persistent: bool, in_bulk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = (FragileInBulk if in_bulk else Fragile)(tmp_path, deadly={3: 1, 11: 1, 20: 1})
    loader = loader_of(dataset, persistent_workers=persistent, augment_seed="batch")
    with caplog.at_level(logging.WARNING, "everstep"):
        for epoch in range(2):
            assert [ids(batch) for batch in loader] == undisturbed(epoch=epoch)
    assert caplog.text.count("loader_worker_died") == 3
    assert "was killed by SIGKILL" in caplog.text
    assert in_bulk or "reading sample 11" in caplog.text
    assert loader.quarantined == ()
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_killed_worker_is_replaced_with_other_start_methods(tmp_path: Path, method: str) -> None:
    """The dataset holds a semaphore of multiprocessing, too, which travels only while a process is being started."""
    context = multiprocessing.get_context(method)
    dataset = Counted(tmp_path, deadly={5: 1})
    dataset.reads_done = context.Semaphore(0)
    loader = loader_of(dataset, num_workers=1, multiprocessing_context=context)
    assert [ids(batch) for batch in loader] == undisturbed()
    assert len(list(tmp_path.glob("died-*"))) == 1
    assert dataset.reads_done.get_value() >= 24


def test_all_workers_are_killed_while_the_trainer_trains(tmp_path: Path) -> None:
    """Twice; the second time they are asked to end: a sample that is read at both deaths would be left out else."""
    loader = loader_of(Fragile(tmp_path), persistent_workers=True, num_workers=3)
    seen: list[list[int]] = []
    for batch in loader:
        seen.append(ids(batch))
        for pid in pids(loader) if len(seen) in {1, 3} else ():
            os.kill(pid, signal.SIGKILL if len(seen) == 1 else signal.SIGTERM)
    assert seen == undisturbed()


def test_a_worker_is_killed_while_the_trainer_waits_for_it(tmp_path: Path) -> None:
    """The killer waits until the worker has begun to read; then nothing but its death can wake the trainer."""
    loader = loader_of(
        Hanging(tmp_path, hangs_at=undisturbed()[0][1]), num_workers=1, persistent_workers=True
    )
    waiter = threading.Thread(target=kill_reader, args=(tmp_path / "reading",))
    waiter.start()
    assert [ids(batch) for batch in loader] == undisturbed()
    waiter.join()


def kill_reader(path: Path) -> None:
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.005)
    os.kill(int(path.read_text()), signal.SIGKILL)


class Hanging(Fragile):
    """One sample is never read by the first worker that tries."""

    def __init__(self, folder: Path, hangs_at: int) -> None:
        super().__init__(folder)
        self.hangs_at = hangs_at

    def __getitem__(self, index: int) -> int:
        path = self.folder / "reading"
        if index == self.hangs_at and not path.exists():
            path.write_text(f"{os.getpid()}\n")
            signal.pause()
        return index


def test_a_worker_killed_at_any_moment(tmp_path: Path) -> None:
    """A killer beside the loop, at moments that nobody chooses: between batches, in a sample, while sending."""
    loader = loader_of(Fragile(tmp_path, count=400), batch_size=4, persistent_workers=True)
    ended = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while not ended.wait(0.02) and len(killed) < 12:
            alive = loader._supply.pool.pids if loader._supply.pool is not None else []
            if len(alive) == 2:
                with contextlib.suppress(ProcessLookupError):  # buried since
                    os.kill(alive[len(killed) % 2], signal.SIGTERM)  # asked to end: no sample is blamed
                    killed.append(alive[len(killed) % 2])

    killer = threading.Thread(target=kill)
    killer.start()
    seen: list[list[int]] = []
    try:
        for batch in loader:
            seen.append(ids(batch))
            time.sleep(0.004)
            while len(seen) == 50 and not killed:
                time.sleep(0.004)
    finally:
        ended.set()
        killer.join()
    assert killed
    assert seen == undisturbed(count=400)
    assert loader.quarantined == ()
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_sample_that_kills_again_is_quarantined_and_named(tmp_path: Path, in_bulk: bool) -> None:
    dataset = (FragileInBulk if in_bulk else Fragile)(tmp_path, deadly={7: 10**6}, signal=signal.SIGSYS)
    loader = loader_of(dataset, augment_seed="batch")
    deaths = 3 if in_bulk else 2
    with pytest.warns(RuntimeWarning, match=f"sample 7 is quarantined: {deaths} workers died .* by SIGSYS"):
        seen = [ids(batch) for batch in loader]
    assert seen == [[each for each in batch if each != 7] for batch in undisturbed()]
    assert [tuple(each) for each in loader.quarantined] == [(7, deaths, "was killed by SIGSYS")]
    assert loader.ledger.tally(0).quarantined == (7,)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []
    reads = dataset.reads(7)
    assert [ids(batch) for batch in loader] == [
        [each for each in batch if each != 7] for batch in undisturbed(epoch=1)
    ]
    assert dataset.reads(7) == reads == deaths, "left out at once in the next epoch"
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_the_weight_of_a_batch_follows_what_was_left_out(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path, deadly={7: 2}), rank=0, world_size=1)
    with pytest.warns(RuntimeWarning, match="sample 7"):
        weights = {len(ids(batch)): loader.weight for batch in loader}
    assert weights == {4: 1.0, 3: 0.75}


def test_a_batch_of_which_nothing_is_left_is_padding(tmp_path: Path) -> None:
    expected = undisturbed(batch_size=1)
    victim = expected[5][0]
    loader = loader_of(Fragile(tmp_path, deadly={victim: 2}), batch_size=1)
    with pytest.warns(RuntimeWarning, match=f"sample {victim} "):
        handed = [(ids(batch), loader.weight) for batch in loader]
    seen = [batch for batch, _ in handed]
    assert [weight for _, weight in handed] == [0.0 if i == 5 else 1.0 for i in range(24)]
    assert seen[5] != [victim]
    assert seen[:5] + seen[6:] == expected[:5] + expected[6:]
    tally = loader.ledger.tally(0)
    assert (tally.count, tally.padding_count, tally.quarantined) == (23, 1, (victim,))
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_a_ledger_does_not_hide_what_is_lost_behind_a_quarantine(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path, deadly={7: 2}))
    with pytest.warns(RuntimeWarning, match="sample 7"):
        for _ in loader:
            pass
    state = loader.ledger.state()
    wrong = {**state, "epochs": [{**state["epochs"][0], "quarantined": [8]}]}  # type: ignore[index]
    assert "some were lost" in Ledger.verify([Ledger.from_state(wrong)], loader.state_dict())[0]
    forgotten = {**state, "epochs": [{**state["epochs"][0], "quarantined": []}]}  # type: ignore[index]
    assert "24 samples should" in Ledger.verify([Ledger.from_state(forgotten)], loader.state_dict())[0]


def die(batch: list[int]) -> list[int]:
    if 7 in batch:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def test_a_batch_that_kills_when_it_is_collated_is_an_error_with_its_samples(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path), collate_fn=die)
    with pytest.raises(
        WorkerError, match=r"2 DataLoader workers died over the batch of samples \[.*collate_fn"
    ) as info:
        for _ in loader:
            pass
    assert isinstance(info.value, RuntimeError), "as torch's error is"
    assert "7" in str(info.value)


def test_a_dataset_that_kills_at_every_sample_ends(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path, deadly=dict.fromkeys(range(24), 9)), num_workers=1)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(WorkerError, match="every sample of the batch at 0 kills"),
    ):
        list(loader)


def test_workers_that_cannot_start_raise_at_once_with_their_traceback() -> None:
    loader = loader_of(ImportFails(), multiprocessing_context="spawn", num_workers=1)
    with pytest.raises(
        ImportError, match=r"(?s)Caught ImportError while a DataLoader worker started.*__setstate__"
    ):
        list(loader)


def kill_myself(_worker: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_worker: int) -> None:
    os._exit(3)


def test_workers_killed_while_they_start_are_given_up_after_three() -> None:
    loader = loader_of(list(range(8)), worker_init_fn=kill_myself, num_workers=1)
    with pytest.raises(
        WorkerError, match=r"3 DataLoader workers in a row died before they had started.*SIGKILL"
    ):
        list(loader)


def test_a_worker_that_leaves_before_it_has_started_is_told_at_once() -> None:
    loader = loader_of(list(range(8)), worker_init_fn=leave, num_workers=1)
    with pytest.raises(WorkerError, match="exited with code 3 before it had started"):
        list(loader)


def test_an_iterator_does_not_go_on_in_a_forked_child(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path))
    iterator = iter(loader)
    first = ids(next(iterator))
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except UsageError as exc:
            os._exit(7 if "belong to process" in str(exc) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [first, *map(ids, iterator)] == undisturbed()


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 96 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup whose processes get LIMIT_BYTES beside what they have."""
    if os.geteuid() or not (MEMORY_GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of cgroup v1")
    group = MEMORY_GROUPS / f"everstep-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    until_s = time.monotonic() + 10.0
    while True:
        try:
            group.rmdir()
        except OSError:  # its last process is ending
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)
        else:
            return


class Hungry(Fragile):
    """Sample 11 takes twice the memory that its group has, once."""

    def __init__(self, folder: Path, group: Path) -> None:
        super().__init__(folder)
        self.group = group

    def __getitem__(self, index: int) -> int:
        eaten = self.folder / "eaten"
        if index == 11 and not eaten.exists():
            eaten.touch()
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
            assert len(b"x" * (2 * LIMIT_BYTES)) < 0, "the kernel lets it have more than the limit"
        return super().__getitem__(index)


def test_a_worker_that_the_kernel_kills_for_memory_is_replaced(
    tmp_path: Path, small_group: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(Hungry(tmp_path, small_group))
    with caplog.at_level(logging.WARNING, "everstep"):
        assert [ids(batch) for batch in loader] == undisturbed()
    killed = dict(line.split() for line in (small_group / "memory.oom_control").read_text().splitlines())
    assert killed["oom_kill"] == "1"
    assert "was killed by SIGKILL" in caplog.text
    assert "reading sample 11" in caplog.text
    assert loader.quarantined == ()
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []
