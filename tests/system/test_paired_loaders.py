"""Loaders that run beside the one that leads, in a zip or by next(): a restart goes on with both."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import service
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

import everstep
from everstep.dataloader import DataLoader, Ledger, SharedLoader
from everstep.hook.run import Run

Loader = Any
Loop = Callable[[Run, Loader, Loader, int], Iterator[Any]]
EPOCHS = 3
"""Of three steps."""


class CrashError(Exception):
    pass


class Counting(IterableDataset[tuple[torch.Tensor]]):
    """12 numbers, which differ by epoch."""

    def __init__(self, begin: int) -> None:
        self.begin, self.epoch, self.place = begin, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        while self.place < 12:
            self.place += 1
            yield (torch.tensor(self.begin + 20 * self.epoch + self.place),)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


def ours(begin: int) -> Loader:
    return DataLoader(TensorDataset(torch.arange(12) + begin), batch_size=4, shuffle=True, seed=begin)


def with_a_sampler(begin: int) -> Loader:
    data = TensorDataset(torch.arange(12) + begin)
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data))


def streaming(begin: int) -> Loader:
    return DataLoader(Counting(begin), batch_size=4)


def shared(begin: int) -> Loader:
    data = TensorDataset(torch.arange(12) + begin)
    return SharedLoader(data, batch_size=4, shuffle=True, seed=begin, group=f"pair-{begin}")


def zipped(run: Run, first: Loader, second: Loader, epochs: int) -> Iterator[Any]:
    for _ in run.epochs(epochs):
        yield from zip(first, second, strict=False)


def by_next(run: Run, first: Loader, second: Loader, epochs: int) -> Iterator[Any]:
    for _ in run.epochs(epochs):
        others = iter(second)
        for batch in first:
            yield batch, next(others)


def one_after_the_other(run: Run, first: Loader, second: Loader, epochs: int) -> Iterator[Any]:
    for _ in run.epochs(epochs):
        for loader in (first, second):
            for batch in loader:
                yield batch, (torch.empty(0),)


def with_a_pass_beside(run: Run, first: Loader, second: Loader, epochs: int) -> Iterator[Any]:
    """As update_bn() of torch, or an evaluation on what was trained on."""
    for _ in run.epochs(epochs):
        for batch in first:
            yield batch, (torch.empty(0),)
        for _ in first:
            pass


def nested(run: Run, first: Loader, second: Loader, epochs: int) -> Iterator[Any]:
    for _ in run.epochs(epochs):
        for batch in first:
            for other in second:
                yield batch, other


def train(
    storage: Path,
    loop: Loop,
    names: tuple[str, str],
    *,
    until: int = 0,
    epochs: int = EPOCHS,
    kinds: tuple[Callable[[int], Loader], Callable[[int], Loader]] = (ours, ours),
) -> list[tuple[list[int], list[int]]]:
    """Return the batches of all steps of one attempt, which ends by an error after boundary `until`, if that comes."""
    storage.mkdir(exist_ok=True)
    first, second = kinds[0](0), kinds[1](100)
    objects: dict[str, Any] = dict(zip(names, (first, second), strict=True)) | {"model": nn.Linear(1, 1)}
    seen: list[tuple[list[int], list[int]]] = []
    with suppress(CrashError), everstep.attach("pair", **objects, storage=storage, every=1, slots=3) as run:
        run.restore()
        for (one,), (other,) in loop(run, first, second, epochs):
            seen.append((one.tolist(), other.tolist()))
            run.step()
            assert run.wait(60)
            if run.steps == until:
                assert run.report().last_complete.endswith(f".{until}")
                raise CrashError
    return seen


@pytest.mark.parametrize("make", [ours, shared])
def test_a_look_at_a_batch_before_training_is_not_counted(
    tmp_path: Path, make: Callable[[int], Loader]
) -> None:
    with service():
        looked_at, begun = make(0), make(100)
        next(iter(looked_at))
        looked_at.reset()
        first = iter(begun)
        next(first)
        with everstep.attach("look", loader=looked_at, other=begun, storage=tmp_path) as run:
            for _ in run.epochs(1):
                for _ in looked_at:
                    run.step()
                list(first)
    for loader in (looked_at, begun):
        assert loader.epoch == 1
        assert Ledger.verify([loader.ledger], loader.state_dict()) == []


@pytest.mark.parametrize("names", [("loader", "other"), ("source", "target")])
@pytest.mark.parametrize("loop", [zipped, by_next])
@pytest.mark.parametrize("until", [2, 3, 6])
def test_both_go_on_where_the_attempt_before_has_ended(
    tmp_path: Path, loop: Loop, names: tuple[str, str], until: int
) -> None:
    with service():
        whole = train(tmp_path / "whole", loop, names)
        begun = train(tmp_path / "part", loop, names, until=until)
        assert len(begun) == until
        assert begun + train(tmp_path / "part", loop, names) == whole


@pytest.mark.parametrize("loop", [zipped, by_next])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *product([ours], [with_a_sampler, streaming, shared]),
        (with_a_sampler, streaming),
        (streaming, shared),
        (shared, with_a_sampler),
    ],
)
def test_so_do_those_of_other_kinds(tmp_path: Path, loop: Loop, first: Loader, second: Loader) -> None:
    kinds = first, second
    with service():
        whole = train(tmp_path / "whole", loop, ("loader", "other"), kinds=kinds)
        assert len(whole) == 3 * EPOCHS
        begun = train(tmp_path / "part", loop, ("loader", "other"), until=3, kinds=kinds)
        assert begun + train(tmp_path / "part", loop, ("loader", "other"), kinds=kinds) == whole
        begun = train(tmp_path / "more", loop, ("loader", "other"), epochs=2, kinds=kinds)
        assert begun + train(tmp_path / "more", loop, ("loader", "other"), kinds=kinds) == whole


@pytest.mark.parametrize("loop", [zipped, by_next, one_after_the_other])
def test_both_go_on_with_more_epochs(tmp_path: Path, loop: Loop) -> None:
    with service():
        whole = train(tmp_path / "whole", loop, ("loader", "other"), epochs=5)
        begun = train(tmp_path / "part", loop, ("loader", "other"))
        assert begun + train(tmp_path / "part", loop, ("loader", "other"), epochs=5) == whole


def test_the_second_one_of_an_epoch_ends_with_it(tmp_path: Path) -> None:
    """The first one stands in the next epoch already, which begins after the restart: the second one does, too."""
    with service():
        whole = train(tmp_path / "whole", one_after_the_other, ("loader", "other"))
        begun = train(tmp_path / "part", one_after_the_other, ("loader", "other"), until=6)
        assert begun + train(tmp_path / "part", one_after_the_other, ("loader", "other")) == whole


@pytest.mark.parametrize("kind", [ours, streaming, shared])
def test_a_loader_may_be_passed_over_more_than_once_in_an_epoch(tmp_path: Path, kind: Any) -> None:
    """It counts its own epochs, the run others: a restart ended at once, with nothing left to train."""
    kinds = kind, ours
    with service():
        whole = train(tmp_path / "whole", with_a_pass_beside, ("loader", "other"), kinds=kinds)
        assert len(whole) == 3 * EPOCHS
        for until in (5, 6, 8):
            storage = tmp_path / f"part{until}"
            begun = train(storage, with_a_pass_beside, ("loader", "other"), until=until, kinds=kinds)
            assert begun + train(storage, with_a_pass_beside, ("loader", "other"), kinds=kinds) == whole
        begun = train(tmp_path / "more", with_a_pass_beside, ("loader", "other"), epochs=2, kinds=kinds)
        assert begun + train(tmp_path / "more", with_a_pass_beside, ("loader", "other"), kinds=kinds) == whole


@pytest.mark.parametrize("kinds", [(ours, ours), (ours, streaming), (shared, shared)])
def test_at_the_end_of_an_inner_loop_the_next_one_is_whole(tmp_path: Path, kinds: Any) -> None:
    """A batch of the outer one was handed out, and trained with none of the inner one."""
    with service():
        whole = train(tmp_path / "whole", nested, ("loader", "other"), kinds=kinds, epochs=2)
        assert len(whole) == 2 * 3 * 3
        for until in (3, 9):
            begun = train(tmp_path / f"part{until}", nested, ("loader", "other"), until=until, kinds=kinds)
            assert (
                begun + train(tmp_path / f"part{until}", nested, ("loader", "other"), kinds=kinds, epochs=2)
                == whole
            )


@pytest.mark.parametrize("kind", [ours, shared])
def test_a_batch_is_known_by_what_is_left(kind: Callable[[int], Loader]) -> None:
    """As docs/loops.md says: enumerate() counts from 0 behind a restart, too."""
    with service():
        whole, rest = kind(0), kind(0)
        next(iter(whole))
        rest.load_state_dict(whole.state_dict())
        check_left(rest)
        for loader in (whole, rest):
            if isinstance(loader, SharedLoader):
                loader.close()


def check_left(rest: Loader) -> None:
    batches = iter(rest)
    assert [(len(rest) - len(batches) - 1, len(batches) == 0) for _ in batches] == [(1, False), (2, True)]
