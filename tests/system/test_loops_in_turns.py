"""Loops over several loaders in turns, killed at each boundary: batches and random numbers as without a break."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import service
from torch import nn
from torch.utils.data import TensorDataset

import everstep
from everstep.dataloader import DataLoader, SharedLoader
from everstep.hook.run import Run

Loader = Any
Batches = Iterator[tuple[object, object]]
Loop = Callable[[Run, Loader, Loader], Batches]
Seen = list[tuple[int, object, object, float]]


class CrashError(Exception):
    pass


def warm_up(run: Run, first: Loader, second: Loader) -> Batches:
    while run.steps < 3:
        yield "noise", None
    for epoch in run.epochs(2):
        for batch in first:
            yield epoch, batch


def one_after_the_other(run: Run, first: Loader, second: Loader) -> Batches:
    for epoch in run.epochs(2):
        for loader in (first, second):
            for batch in loader:
                yield epoch, batch


def alternating(run: Run, first: Loader, second: Loader) -> Batches:
    for epoch in run.epochs(3):
        for batch in second if epoch % 2 else first:
            yield epoch, batch


def in_phases(run: Run, first: Loader, second: Loader) -> Batches:
    for epoch in run.epochs(3):
        for batch in first if epoch == 1 else second:
            yield epoch, batch


def zipped_behind_a_boundary(run: Run, first: Loader, second: Loader) -> Batches:
    for epoch in run.epochs(2):
        if run.steps == 3 * epoch:  # a restart in the zip comes by here again
            yield epoch, "noise"
        for one, other in zip(first, second, strict=False):
            yield epoch, (one, other)


def evaluated(run: Run, first: Loader, second: Loader) -> Batches:
    for epoch in run.epochs(2):
        for batch in first:
            yield epoch, batch
        yield epoch, sum(other.sum().item() for (other,) in second)


ONLY_LOOPS = (one_after_the_other, alternating, in_phases)
"""Each boundary is in a loop over a loader: what is drawn before its next batch is undone."""


def ours(begin: int, count: int) -> Loader:
    data = TensorDataset(torch.arange(count) + begin)
    return DataLoader(data, batch_size=4, shuffle=True, seed=begin)


def shared(begin: int, count: int) -> Loader:
    data = TensorDataset(torch.arange(count) + begin)
    return SharedLoader(data, batch_size=4, shuffle=True, seed=begin, group=f"turns-{begin}")


def comparable(value: Any) -> object:
    return (
        [comparable(each) for each in value]
        if isinstance(value, list | tuple)
        else (value.tolist() if isinstance(value, torch.Tensor) else value)
    )


def train(storage: Path, loop: Loop, make: Callable[[int, int], Loader], until: int = 0) -> Seen:
    """Return what each step of an attempt was given, which ends by an error after boundary `until`, if that comes."""
    storage.mkdir(exist_ok=True)
    torch.manual_seed(0)
    first, second = make(0, 12), make(100, 8)
    seen: Seen = []
    with (
        suppress(CrashError),
        everstep.attach(
            "turns", model=nn.Linear(1, 1), loader=first, other=second, storage=storage, every=1, slots=3
        ) as run,
    ):
        run.restore()
        if loop in ONLY_LOOPS:
            torch.rand(3)  # as the iterators of torch's loaders
        for epoch, batch in loop(run, first, second):
            seen.append((run.steps + 1, epoch, comparable(batch), torch.rand(()).item()))
            run.step()
            assert run.wait(60)
            if run.steps == until:
                raise CrashError
    return seen


LOOPS = [warm_up, one_after_the_other, alternating, in_phases, zipped_behind_a_boundary, evaluated]


@pytest.mark.parametrize(
    ("loop", "make"),
    [*product(LOOPS, [ours]), *product([one_after_the_other, alternating], [shared])],
)
def test_a_restart_at_any_boundary_goes_on_as_if_there_had_been_none(
    tmp_path: Path, loop: Loop, make: Callable[[int, int], Loader]
) -> None:
    with service():
        whole = train(tmp_path / "whole", loop, make)
        for until in range(2, len(whole) + 1):
            storage = tmp_path / str(until)
            begun = train(storage, loop, make, until)
            assert begun == whole[:until]
            assert begun + train(storage, loop, make) == whole, until
