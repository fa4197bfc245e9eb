"""The loader in one process: alone in its group, and what it refuses."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from map_items import Items
from torch.utils.data import IterableDataset

from everstep.core.errors import LoaderStateError, StateTypeError, UsageError, WorkerTimeoutError
from everstep.daemon.testing import daemon_process
from everstep.dataloader import BlockShuffle, DataLoader, Ledger, Mixture, SharedLoader
from everstep.dataloader.shared.supply import MAPPED_MAX


class Pair(NamedTuple):
    """A sample."""

    number: int
    image: torch.Tensor


class Numbers:
    """Samples of named tuples; one may be broken."""

    broken: object = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> object:
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        return Pair(index, torch.full((2,), index))


class Images:
    """Samples of some pages each."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5000,), index)


@pytest.fixture
def _daemon() -> Iterator[None]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        yield


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:  # pyright: ignore[reportUnusedFunction]
    """Python's spawn starts one tracker process for good; have it before the first look at what is left behind."""
    resource_tracker.ensure_running()


@pytest.fixture
def loaders() -> Iterator[list[SharedLoader[Any]]]:
    """Closed at the end."""
    made: list[SharedLoader[Any]] = []
    yield made
    for loader in made:
        loader.close()


def make(loaders: list[SharedLoader[Any]], **arguments: Any) -> SharedLoader[Any]:
    defaults: dict[str, Any] = {
        "dataset": Numbers(),
        "batch_size": 3,
        "shuffle": True,
        "seed": 2,
        "group": "g",
    }
    loaders.append(SharedLoader(**(defaults | arguments)))
    return loaders[-1]


def numbers(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch.number.tolist()]


def plain(drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(cast(Any, Numbers()), batch_size=3, shuffle=True, seed=2, drop_last=drop_last)


@pytest.mark.usefixtures("_daemon")
@pytest.mark.parametrize("workers", [0, 1])
def test_one_job_gets_what_a_loader_gives(loaders: list[SharedLoader[Any]], workers: int) -> None:
    loader = make(loaders, num_workers=workers)
    expected = plain()
    for _ in range(3):
        assert numbers(loader) == numbers(expected)
    assert isinstance(next(iter(loader)), Pair)
    assert loader.is_shared
    assert loader.received_count > 0
    assert len(loader) == len(expected) == 4
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


@pytest.mark.usefixtures("_daemon")
def test_closed_in_mid_epoch_the_next_loop_goes_on_there(loaders: list[SharedLoader[Any]]) -> None:
    loader = make(loaders)
    iterator = iter(loader)
    got = next(iterator).number.tolist()
    loader.close()
    with pytest.raises(UsageError, match="closed in epoch 0, at batch 1"):
        next(iterator)
    with pytest.warns(UserWarning, match="goes on with epoch 0 at batch 1"):
        assert got + numbers(loader) == numbers(plain())


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("_daemon")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("names_epochs", [False, True])
def test_beside_another_that_ends_with_it_each_epoch_is_whole(
    loaders: list[SharedLoader[Any]], drop_last: bool, names_epochs: bool
) -> None:
    """A zip asks the second one for no batch beyond the first one's last, so that it never hears of its end."""
    loader, expected = make(loaders, drop_last=drop_last), plain(drop_last)
    for epoch in range(3):
        if names_epochs:
            loader.set_epoch(epoch)
        pairs = list(zip(range(len(loader)), loader, strict=False))
        assert loader.epoch == epoch
        assert numbers(batch for _, batch in pairs) == numbers(expected)
    assert numbers(loader) == numbers(expected)
    assert loader.ledger.state() == expected.ledger.state()


@pytest.mark.usefixtures("_daemon")
@pytest.mark.parametrize("unused", [False, True])
def test_a_state_of_an_end_has_an_empty_rest_once(loaders: list[SharedLoader[Any]], unused: bool) -> None:
    first, second, expected = make(loaders), make(loaders), plain()
    list(zip(range(len(first)), first, strict=False))
    second.load_state_dict(first.state_dict())
    rest = iter(second)
    if not unused:
        assert list(rest) == []
    expected.set_epoch(1)
    assert numbers(second) == numbers(expected)


@pytest.mark.usefixtures("_daemon")
def test_state_and_position_are_those_of_a_loader(loaders: list[SharedLoader[Any]]) -> None:
    loader, expected = make(loaders), plain()
    assert loader.state_dict() | {"shared": None} == expected.state_dict() | {"shared": None}
    for ours, theirs in zip(loader, expected, strict=True):
        assert ours.number.tolist() == theirs.number.tolist()
        assert loader.state_dict() | {"shared": None} == expected.state_dict() | {"shared": None}
    assert loader.epoch == 1
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(UsageError, match="set_epoch"):
        loader.set_epoch(5)
    with pytest.warns(UserWarning, match="goes on with epoch 1 at batch 1"):
        assert len(numbers(loader)) == 7
    with pytest.raises(UsageError, match="newer iter"):
        next(iterator)
    loader.set_epoch(0)
    assert numbers(loader) == numbers(plain())
    loader.reset()
    assert loader.epoch == 1
    with pytest.raises(LoaderStateError, match="iteration has begun"):
        loader.load_state_dict(expected.state_dict())


@pytest.mark.usefixtures("_daemon")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_comes_where_its_batch_is_and_the_next_loop_begins_there(
    loaders: list[SharedLoader[Any]], workers: int
) -> None:
    order = numbers(plain())
    dataset = Numbers()
    dataset.broken = order[7]
    loader = make(loaders, dataset=dataset, num_workers=workers)
    got: list[int] = []
    iterator = iter(loader)
    with pytest.raises(ValueError, match=f"sample {order[7]} is broken"):  # noqa: PT012  what came before it counts
        for batch in iterator:
            got += batch.number.tolist()
    with pytest.raises(UsageError, match="ended with an error"):
        next(iterator)
    assert got == order[:6]
    assert loader.state_dict()["cursor"] == 6
    if not workers:
        dataset.broken = None
        with pytest.warns(UserWarning, match="goes on"):
            assert numbers(loader) == order[6:]


class Bad(Numbers):
    """One sample kills, one hangs."""

    killer: object = None
    endless: object = None

    def __getitem__(self, index: int) -> object:
        if index == self.killer:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.endless:
            signal.pause()
        return super().__getitem__(index)


@pytest.mark.usefixtures("_daemon")
def test_a_batch_of_which_nothing_is_left_is_a_stand_in_of_no_weight(
    loaders: list[SharedLoader[Any]],
) -> None:
    dataset = Bad()
    dataset.killer = 4
    loader = make(loaders, dataset=dataset, num_workers=1, batch_size=1, shuffle=False)
    with pytest.warns(RuntimeWarning, match="sample 4 is quarantined: 2 workers died"):
        got = [(batch.number.tolist(), loader.weight) for batch in loader]
    assert [weight for _, weight in got] == [float(place != 4) for place in range(10)]
    assert [numbers for numbers, weight in got if weight] == [[place] for place in range(10) if place != 4]
    assert [each.sample for each in loader.quarantined] == [4]
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []
    assert loader.ledger.tally(0).quarantined == (4,)
    assert loader.ledger.tally(0).padding_count == 1


@pytest.mark.usefixtures("_daemon")
def test_who_hangs_is_named_after_the_deadline_and_the_next_loop_begins_there(
    loaders: list[SharedLoader[Any]],
) -> None:
    dataset = Bad()
    dataset.endless = 7
    loader = make(loaders, dataset=dataset, num_workers=1, shuffle=False, timeout=4.0)
    got: list[int] = []
    with pytest.raises(WorkerTimeoutError, match=r"worker 0 .* is still reading sample 7"):  # noqa: PT012  what came before it counts
        for batch in loader:
            got += batch.number.tolist()
    assert got == [0, 1, 2, 3, 4, 5]
    dataset.endless = None
    with pytest.warns(UserWarning, match="goes on"):
        assert numbers(loader) == [6, 7, 8, 9]


@pytest.mark.usefixtures("_daemon")
def test_batches_lie_in_the_groups_memory_and_yet_are_each_jobs_own(loaders: list[SharedLoader[Any]]) -> None:
    images = Images()
    jobs = [make(loaders, dataset=images, num_workers=1, jobs=2) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:  # each waits until the other has joined
        walks = list(threads.map(iter, jobs))
    plain_batches = list(DataLoader(cast(Any, images), batch_size=3, shuffle=True, seed=2))
    kept: list[torch.Tensor] = []
    mapped = 0
    for ours, theirs, expected in zip(*walks, plain_batches, strict=True):
        mapped = max(mapped, mapped_batches())
        ours.add_(1)
        assert torch.equal(theirs, expected)
        assert torch.equal(ours, expected + 1)
        kept.append(ours)
    assert all(torch.equal(one, other + 1) for one, other in zip(kept, plain_batches, strict=True))
    assert sum(job.received_count for job in jobs) >= len(plain_batches)
    assert 1 <= mapped <= 2 * MAPPED_MAX


def mapped_batches() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("everstep-share-batch" in line and " rw-p " in line for line in lines)


@pytest.mark.usefixtures("_daemon")
def test_workers_may_be_spawned(loaders: list[SharedLoader[Any]]) -> None:
    terms: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "shuffle": False}
    assert list(make(loaders, dataset=Items("abcde"), **terms)) == [["a", "b", "c"], ["d", "e"]]
    unpicklable = make(loaders, dataset=Items([lambda: 1]), group="other", **terms)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(UsageError, match=r"dataset.items\[0\] cannot be pickled"):
        iter(unpicklable)


@pytest.mark.usefixtures("_daemon")
def test_an_interrupt_ends_the_loop_and_the_next_one_begins_there(
    loaders: list[SharedLoader[Any]],
) -> None:
    class Interrupted(Numbers):
        def __getitem__(self, index: int) -> object:
            if index == self.broken:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    dataset = Interrupted()
    dataset.broken = 7
    loader = make(loaders, dataset=dataset, shuffle=False)
    got: list[int] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  what came before it counts
        for batch in loader:
            got += batch.number.tolist()
    dataset.broken = None
    with pytest.warns(UserWarning, match="goes on"):
        assert got + numbers(loader) == list(range(10))


@pytest.mark.usefixtures("_daemon")
def test_what_cannot_be_shared_is_refused_with_its_path(loaders: list[SharedLoader[Any]]) -> None:
    loader = make(loaders, collate_fn=lambda samples: {"meta": [1, 2, samples[0].__class__]})  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    with pytest.raises(UsageError, match=r"batch\['meta'\]\[2\] is a builtins.type"):
        iter(loader)


def test_another_order_than_a_uniform_one_is_refused(loaders: list[SharedLoader[Any]]) -> None:
    for shuffle in ("blocks", BlockShuffle(block=2)):
        with pytest.raises(UsageError, match="shuffles all samples or none"):
            make(loaders, shuffle=shuffle)
    with pytest.raises(UsageError, match="a Mixture goes on from epoch to epoch"):
        make(loaders, dataset=Mixture({"a": Numbers()}), shuffle=None)


@pytest.mark.usefixtures("_daemon")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_shared_later_is_refused_where_the_loop_reaches_it(
    loaders: list[SharedLoader[Any]], workers: int
) -> None:
    def collate(samples: list[Pair]) -> object:
        numbers = [sample.number for sample in samples]
        return {"ids": torch.tensor(numbers), "meta": [1, object() if 7 in numbers else 2]}

    loader = make(loaders, collate_fn=collate, shuffle=False, num_workers=workers)
    got: list[int] = []
    with pytest.raises(StateTypeError, match=r"batch\['meta'\]\[1\] is a builtins.object"):  # noqa: PT012  what came before it counts
        for batch in loader:
            got += batch["ids"].tolist()
    assert got == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("_daemon")
def test_drop_last_and_no_batches(loaders: list[SharedLoader[Any]]) -> None:
    loader = make(loaders, drop_last=True, group="dropping")
    assert len(numbers(loader)) == 9
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []
    single = make(loaders, batch_size=None, group="single")
    assert [each.number for each in single] == numbers(plain())
    assert list(make(loaders, dataset=[], shuffle=False, group="empty")) == []


@pytest.mark.usefixtures("_daemon")
def test_a_budget_too_small_for_a_batch_means_alone(loaders: list[SharedLoader[Any]]) -> None:
    loader = make(loaders, budget="1kB", collate_fn=lambda samples: torch.zeros(1000))  # pyright: ignore[reportUnknownLambdaType]
    assert len(list(loader)) == 4
    assert loader.received_count == 0


def test_a_state_of_another_loader_is_refused(loaders: list[SharedLoader[Any]]) -> None:
    state = plain().state_dict()
    make(loaders).load_state_dict({})
    with pytest.raises(LoaderStateError, match="state has order 'permuted-1', this loader 'sequential-1'"):
        make(loaders, shuffle=False).load_state_dict(state)
    with pytest.raises(LoaderStateError, match="dataset 'Numbers' with 9 samples"):
        make(loaders).load_state_dict(state | {"dataset": {"fingerprint": "Numbers", "n": 9}})


class Stream(IterableDataset[int]):
    """Has no numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": Stream()},
        {"batch_size": 0},
        {"batch_size": None, "drop_last": True},
        {"num_workers": -1},
        {"seed": -1},
        {"group": ""},
        {"join": "late"},
        {"jobs": 0},
        {"gather_s": -1.0},
        {"lease_s": 0.0},
        {"timeout": 1.0},
        {"timeout": -1.0, "num_workers": 1},
        {"prefetch_factor": 0},
        {"multiprocessing_context": "thread"},
        {"budget": "much"},
    ],
)
def test_bad_arguments_are_refused(loaders: list[SharedLoader[Any]], arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(loaders, **arguments)


# -- ranks

RANK_SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import TensorDataset
from everstep.core.errors import UsageError
from everstep.dataloader import SharedLoader

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=int(sys.argv[3]))
loader = SharedLoader(TensorDataset(torch.arange(12)), batch_size=4, group="ddp")
try:
    for (batch,) in loader:
        print(batch.tolist())
except UsageError as error:
    print(error)
loader.close()
dist.barrier()  # who leaves while the other is still connecting breaks its connection
dist.destroy_process_group()
"""


def run_ranks(folder: Path, count: int) -> list[str]:
    """Return what each rank of a job prints."""
    commands = [
        [sys.executable, "-c", RANK_SCRIPT, str(rank), str(folder / f"store-{count}"), str(count)]
        for rank in range(count)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count
    return outputs


@pytest.mark.usefixtures("_daemon")
def test_a_job_of_several_ranks_is_refused(tmp_path: Path) -> None:
    """It would get the whole epoch on each of them, and nobody would notice."""
    assert run_ranks(tmp_path, 1)[0].count("[") == 3
    for said in run_ranks(tmp_path, 2):
        assert "a SharedLoader in a job of 2 ranks" in said
        assert "everstep.DataLoader splits an epoch over ranks" in said
        assert "[" not in said, "no batch was handed out"


@pytest.mark.usefixtures("_daemon")
def test_processes_that_may_be_ranks_are_warned_once(
    loaders: list[SharedLoader[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make(loaders)
    with pytest.warns(
        UserWarning, match=r"WORLD_SIZE=2: a SharedLoader gives each of these processes"
    ) as caught:
        assert len(list(loader)) == 4
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name], "where the loop is"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader)) == 4
