"""The thread that pins: in order, one batch ahead, and gone when the loop ends; with a pinner that needs no device."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fragile import Fragile, ids, loader_of
from torch.utils.data import Sampler

from everstep.dataloader import batch_supply
from everstep.dataloader.batch_maker import MadeBatch
from everstep.dataloader.workers.batches import Pinner

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")


class Marking(Pinner):
    """Adds 1000 to each batch, in the thread that it says."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def begin(self) -> None:
        self.threads.add(threading.current_thread().name)

    def pin(self, made: MadeBatch) -> MadeBatch:
        self.threads.add(threading.current_thread().name)
        if 13 in made.ids and self.fails:
            raise ValueError("cannot pin 13")
        assert isinstance(made.data, torch.Tensor)
        return made._replace(data=made.data + 1000)

    fails = False


@pytest.fixture
def pinner(monkeypatch: pytest.MonkeyPatch) -> Marking:
    pinner = Marking()
    monkeypatch.setattr(batch_supply, "pinner_for", lambda *_: pinner)
    return pinner


def pin_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "everstep-pin"]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_come_pinned_in_order_and_the_thread_ends(
    tmp_path: Path, pinner: Marking, persistent: bool
) -> None:
    loader = loader_of(Fragile(tmp_path, deadly={5: 1}), persistent_workers=persistent)
    for _ in range(2):
        batches = [ids(batch) for batch in loader]
        assert sorted(each for batch in batches for each in batch) == list(range(1000, 1024))
        assert pin_threads() == []
    assert pinner.threads == {"everstep-pin"}


def test_without_workers_the_trainer_pins(pinner: Marking) -> None:
    loader = loader_of(list(range(8)), num_workers=0, multiprocessing_context=None)
    assert min(each for batch in loader for each in ids(batch)) == 1000
    assert pinner.threads == {"MainThread"}


@pytest.mark.filterwarnings("ignore:iter.. goes on:UserWarning")
def test_a_break_wakes_the_thread_and_persistent_workers_go_on(tmp_path: Path, pinner: Marking) -> None:
    loader = loader_of(Fragile(tmp_path), persistent_workers=True)
    seen: list[int] = []
    pids = []
    for _ in range(3):
        for batch in loader:
            seen += ids(batch)
            assert loader._supply.pool is not None
            pids.append(loader._supply.pool.pids)
            break
        assert pin_threads() == []
    assert pids[0] == pids[1] == pids[2]
    seen += [each for batch in loader for each in ids(batch)]
    assert sorted(seen) == list(range(1000, 1024))


def test_a_break_while_the_thread_waits_for_a_batch_that_never_comes(tmp_path: Path, pinner: Marking) -> None:
    loader = loader_of(Waiting(tmp_path), num_workers=1, shuffle=False, prefetch_factor=1)
    iterator = iter(loader)
    assert ids(next(iterator)) == [1000, 1001, 1002, 1003]
    del iterator
    assert pin_threads() == []


class Waiting(Fragile):
    """Samples from the fifth on are never read; the worker must be killed."""

    def __getitem__(self, index: int) -> int:
        if index > 3:
            signal.sigwait({signal.SIGCONT})
        return index


def test_errors_of_the_dataset_and_of_pinning_come_through(tmp_path: Path, pinner: Marking) -> None:
    pinner.fails = True
    loader = loader_of(Fragile(tmp_path))
    with pytest.raises(ValueError, match="cannot pin 13"):
        list(loader)
    assert pin_threads() == []


class Naming(Sampler[int]):
    """Notes who draws from it, and what the generator of torch gives there."""

    def __init__(self, ends_at: int = 24) -> None:
        self.ends_at = ends_at
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        for count, index in enumerate(torch.randperm(24).tolist()):
            self.threads.add(threading.current_thread().name)
            if count == self.ends_at:
                raise LookupError("no more of these")
            yield index


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_a_sampler_of_ones_own_is_drawn_from_where_the_loop_runs(
    tmp_path: Path, pinner: Marking, prefetch: int
) -> None:
    """It may draw from the global generators, which are put back behind it: no other thread may do that meanwhile."""
    sampler = Naming()
    loader = loader_of(
        Fragile(tmp_path),
        shuffle=None,
        seed=None,
        sampler=sampler,
        batch_size=2,
        prefetch_factor=prefetch,
        persistent_workers=True,
    )
    for _ in range(2):
        assert sorted(each for batch in loader for each in ids(batch)) == list(range(1000, 1024))
    assert sampler.threads == {"MainThread"}


def test_an_error_of_a_sampler_of_ones_own_comes_through(tmp_path: Path, pinner: Marking) -> None:
    loader = loader_of(Fragile(tmp_path), shuffle=None, seed=None, sampler=Naming(ends_at=17))
    with pytest.raises(LookupError, match="no more of these"):
        list(loader)
    assert pin_threads() == []


def test_a_forked_child_leaves_the_thread_of_its_parent_alone(tmp_path: Path, pinner: Marking) -> None:
    iterator = iter(loader_of(Fragile(tmp_path)))
    first = ids(next(iterator))
    pid = os.fork()
    if pid == 0:
        del iterator
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert sorted(first + [each for batch in iterator for each in ids(batch)]) == list(range(1000, 1024))
