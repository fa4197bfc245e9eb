"""Streams read by the pool's workers, which are killed by real signals: nothing is lost, repeated or moved."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data.dataloader as torch_dataloader
from fragile_streams import Fragile, Silent, loader_of, numbers

from everstep.core.errors import UsageError, WorkerError, WorkerTimeoutError
from everstep.dataloader import DataLoader, batch_supply
from everstep.dataloader.batch_maker import MadeBatch
from everstep.dataloader.workers.batches import Pinner

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]


def batches_of(loader: DataLoader[Any]) -> list[list[float]]:
    return [numbers(batch) for batch in loader]


def undisturbed(folder: Path, epochs: int = 1, workers: int = 2, **more: Any) -> list[list[list[float]]]:
    loader = loader_of(Fragile(folder, **more), num_workers=workers)
    return [batches_of(loader) for _ in range(epochs)]


def pool_pids(iterator: Any) -> list[int]:
    return iterator._made.pool.pids


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_is_replaced_in_the_middle_of_its_share(
    tmp_path: Path, persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first batch, in a later one, and in one that was being made in advance; noise included."""
    dataset = Fragile(tmp_path, deadly={0: 1, 11: 1, 22: 1})
    loader = loader_of(dataset, persistent_workers=persistent)
    with caplog.at_level(logging.WARNING, "everstep"):
        assert [batches_of(loader) for _ in range(2)] == undisturbed(tmp_path, 2)
    assert caplog.text.count("loader_worker_died") == len(list(tmp_path.glob("died-*"))) == 3
    assert "reading sample 5 of share 1 of the stream" in caplog.text
    assert loader.epoch == 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(tmp_path: Path, method: str) -> None:
    loader = loader_of(Fragile(tmp_path, deadly={5: 1}), num_workers=1, multiprocessing_context=method)
    assert batches_of(loader) == undisturbed(tmp_path, workers=1)[0]
    assert len(list(tmp_path.glob("died-*"))) == 1


def test_all_workers_are_killed_while_the_trainer_trains(tmp_path: Path) -> None:
    """With batches on their way: what came is handed out, what did not is made again."""
    loader = loader_of(Fragile(tmp_path, count=120), num_workers=3, prefetch_factor=3)
    iterator = iter(loader)
    seen: list[list[float]] = []
    for batch in iterator:
        seen.append(numbers(batch))
        if len(seen) in {1, 7, 20}:
            for pid in pool_pids(iterator):
                os.kill(pid, signal.SIGKILL)
    assert seen == undisturbed(tmp_path, workers=3, count=120)[0]


def test_a_state_taken_beside_a_death_goes_on(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path)[0]
    first = loader_of(Fragile(tmp_path, deadly={14: 1}))
    iterator = iter(first)
    before = [numbers(next(iterator)) for _ in range(3)]
    second = loader_of(Fragile(tmp_path, deadly={25: 1}))
    second.load_state_dict(first.state_dict())
    assert before + batches_of(second) == whole


def test_a_stream_that_says_nothing_cannot_be_read_on_by_another_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker 1 died, and Silent does not say where it stands"):
        batches_of(loader_of(Silent(tmp_path, deadly={11: 1})))
    at_the_begin = loader_of(Silent(tmp_path, deadly={1: 1}))  # nothing was read: it is begun once more
    assert batches_of(at_the_begin) == undisturbed(tmp_path)[0]


def test_what_kills_each_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError,
        match=r"3 DataLoader workers died over the same batch.*SIGKILL reading sample 5 of share 1",
    ):
        batches_of(loader_of(Fragile(tmp_path, deadly={11: 10**6})))


def test_a_hanging_stream_is_named_at_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerTimeoutError, match=r"timed out after 4 seconds: worker 1 .*still reading sample 5 of share 1"
    ):
        batches_of(loader_of(Fragile(tmp_path, halts_at=11), timeout=4))


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_ends_with_the_workers_that_began_it_and_the_next_has_its_own(
    tmp_path: Path, steps: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = undisturbed(tmp_path)[0]
    first = loader_of(Fragile(tmp_path))
    iterator = iter(first)
    before = [numbers(next(iterator)) for _ in range(steps)]
    second = loader_of(Fragile(tmp_path), num_workers=workers, persistent_workers=workers > 0)
    with caplog.at_level(logging.WARNING, "everstep"):
        second.load_state_dict(first.state_dict())
    assert f"loader_workers_of_state epoch=0 workers=2 num_workers={workers}" in caplog.text
    again = loader_of(Fragile(tmp_path), num_workers=3)
    again.load_state_dict(second.state_dict())  # on the way from one job to the next
    assert before + batches_of(second) == whole
    assert before + batches_of(again) == whole
    assert batches_of(second) == undisturbed(tmp_path, 2, workers=workers)[1]


def test_persistent_workers_read_all_epochs_and_begin_anew_where_they_are_told(tmp_path: Path) -> None:
    """A worker keeps its copy of the dataset: it has to hear of the epoch, and of a reset in the middle."""
    whole = undisturbed(tmp_path, 3)
    loader = loader_of(Fragile(tmp_path), persistent_workers=True)
    iterator = iter(loader)
    pids = pool_pids(iterator)
    assert [numbers(batch) for batch in iterator] == whole[0]
    iterator = iter(loader)
    assert [numbers(next(iterator)) for _ in range(3)] == whole[1][:3]
    loader.reset()
    assert batches_of(loader) == whole[1]
    iterator = iter(loader)
    assert [numbers(batch) for batch in iterator] == whole[2]
    assert loader._supply.pool is not None
    assert loader._supply.pool.pids == pids


def test_a_reset_in_the_middle_begins_anew_in_the_trainer(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, workers=0)[0]
    loader = loader_of(Fragile(tmp_path), num_workers=0)
    assert numbers(next(iter(loader))) == whole[0]
    loader.reset()
    assert batches_of(loader) == whole


class Marking(Pinner):
    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None: ...

    def pin(self, made: MadeBatch) -> MadeBatch:
        self.count += 1
        return made


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_pinned(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pinner = Marking()
    monkeypatch.setattr(batch_supply, "pinner_for", lambda *_: pinner)
    deadly = {11: 1} if workers else {}
    loader = loader_of(Fragile(tmp_path, deadly=deadly), num_workers=workers)
    batches = batches_of(loader)
    monkeypatch.undo()
    assert batches == undisturbed(tmp_path, workers=workers)[0]
    assert pinner.count >= len(batches)


def test_no_more_is_made_in_advance_than_asked_for(tmp_path: Path) -> None:
    iterator = iter(loader_of(Counting(tmp_path, count=400), num_workers=1, prefetch_factor=2))
    next(iterator)
    next(iterator)
    assert 8 <= len((tmp_path / "reads").read_text()) <= 4 * (2 + 2)


class Counting(Fragile):
    def _maybe_die(self, number: int) -> None:
        with (self.folder / "reads").open("a") as file:
            file.write("x")


def test_collate_that_raises_stop_iteration_does_not_end_the_epoch(tmp_path: Path) -> None:
    for workers in (0, 1):
        loader = loader_of(Fragile(tmp_path), num_workers=workers, collate_fn=stops)
        with pytest.raises(UsageError, match="collate_fn raised StopIteration at sample 0"):
            next(iter(loader))


def stops(batch: object) -> object:
    raise StopIteration(batch)


def test_no_loader_starts_a_worker_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an iterator of torch's")

    monkeypatch.setattr(torch_dataloader._BaseDataLoaderIter, "__init__", refuse)
    monkeypatch.setattr(torch_dataloader._MultiProcessingDataLoaderIter, "__init__", refuse)
    assert len(batches_of(loader_of(Fragile(tmp_path)))) == 8
    assert len(batches_of(loader_of(list(range(8))))) == 2
    assert len(batches_of(loader_of(list(range(8)), sampler=[3, 1]))) == 1
