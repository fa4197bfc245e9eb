"""The loader in one process: alone in its group, and what it refuses."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.utils.data import IterableDataset

from everstep.core.errors import LoaderStateError, UsageError
from everstep.daemon.testing import daemon_process
from everstep.dataloader import DataLoader, Ledger, SharedLoader


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


@pytest.fixture
def _daemon() -> Iterator[None]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        yield


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


def plain() -> DataLoader[Any]:
    return DataLoader(cast(Any, Numbers()), batch_size=3, shuffle=True, seed=2)


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
    with pytest.raises(ValueError, match=f"sample {order[7]} is broken"):  # noqa: PT012  what came before it counts
        for batch in loader:
            got += batch.number.tolist()
    assert got == order[:6]
    assert loader.state_dict()["cursor"] == 6
    if not workers:
        dataset.broken = None
        with pytest.warns(UserWarning, match="goes on"):
            assert numbers(loader) == order[6:]


@pytest.mark.usefixtures("_daemon")
def test_what_cannot_be_shared_is_refused_with_its_path(loaders: list[SharedLoader[Any]]) -> None:
    loader = make(loaders, collate_fn=lambda samples: {"meta": [1, 2, samples[0].__class__]})  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    with pytest.raises(UsageError, match=r"batch\['meta'\]\[2\] is a type"):
        iter(loader)


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
    with pytest.raises(
        LoaderStateError, match="order of the state is 'permuted-1', of this loader 'sequential-1'"
    ):
        make(loaders, shuffle=False).load_state_dict(state)
    with pytest.raises(LoaderStateError, match="number of samples of the state is 9"):
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
        {"budget": "much"},
    ],
)
def test_bad_arguments_are_refused(loaders: list[SharedLoader[Any]], arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(loaders, **arguments)
