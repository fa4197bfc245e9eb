"""A training loop whose snapshot is copied as late as can be, restored elsewhere and trained on from."""

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import everstep
from everstep.hook import capture
from everstep.hook import copier as copier_module
from everstep.hook.copier import Copier
from everstep.hook.copy_plan import Moves
from everstep.hook.gather import copy
from everstep.hook.run import Run
from everstep.hook.state_testing import bits

WARM, AFTER = 3, 3
"""Iterations before the one whose boundary is saved, and after it."""


class Slow:
    """Copies nothing until somebody waits for it: the optimizer's hook, or `mutating()`."""

    def __init__(self) -> None:
        self.held = 0
        self._armed = False
        self._awaited = threading.Event()

    def arm(self) -> None:
        self._awaited.clear()
        self._armed = True

    def open(self) -> None:
        self._awaited.set()

    def copy(self, moves: Moves) -> None:
        if self._armed:
            self.held += 1
            assert self._awaited.wait(20)
        copy(moves)

    def guarding(self) -> Callable[[Copier], float]:
        real = Copier.guard

        def guard(copier: Copier) -> float:
            self._awaited.set()
            return real(copier)

        return guard


@contextlib.contextmanager
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Generator[Slow]:
    """Every late copy of this process is a slow one, once it is armed; small leaves, too, are copied late."""
    made = Slow()
    monkeypatch.setattr(capture, "AT_ONCE_BYTES_MAX", 0)
    monkeypatch.setattr(copier_module, "copy", made.copy)
    monkeypatch.setattr(Copier, "guard", made.guarding())
    yield made
    made.open()


Iterate = Callable[[int, Run], None]


@dataclass
class Loop:
    """A training loop: what is attached, and one iteration without its boundary, by number."""

    objects: dict[str, Any]
    iterate: Iterate
    more: Callable[[], object] = field(default=lambda: None)
    """State that no attached object shows."""
    plain_of: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    """Modules inside the wrappers that are attached."""


def facts(loop: Loop) -> object:
    """All of a loop's state, as plain values."""
    found = {name: _facts(value) for name, value in (loop.objects | loop.plain_of).items()}
    return found | {"rng": bits(torch.get_rng_state()), "more": _plain(loop.more())}


def _facts(value: Any) -> object:
    if isinstance(value, nn.Module):
        named = [
            *value.named_parameters(remove_duplicate=False),
            *value.named_buffers(remove_duplicate=False),
        ]
        return _plain(dict(named))
    return _plain(value.state_dict())


def _plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        return (str(value.dtype), tuple(value.shape), bits(dense))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    return value


class _Left(Exception):  # noqa: N818
    """What a run without a last boundary is left by."""


@contextlib.contextmanager
def attached(loop: Loop, devices: list[Path], *, debug: bool = False) -> Generator[Run]:
    with (
        contextlib.suppress(_Left),
        everstep.attach("overlap", **loop.objects, storage=devices, every=10**6, debug=debug) as run,
    ):
        yield run
        raise _Left


def take(run: Run) -> None:
    """Pass boundaries, at which nothing changes, until there is an arena for this structure."""
    skipped = -1
    while (now := sum(each.count for each in run.report().skipped.values())) != skipped:
        skipped = now
        assert run.wait(20)
        run.checkpoint()
        run.step()


def exercise(make: Callable[[int], Loop], devices: list[Path], slow: Slow) -> None:
    """Save one boundary under the slow copy, train on, restore into new objects, train on from there."""
    loop = make(0)
    with attached(loop, devices) as run:
        for number in range(WARM):
            loop.iterate(number, run)
            run.step()
            assert run.wait(20)
        loop.iterate(WARM, run)
        slow.arm()
        take(run)
        at_boundary = facts(loop)
        for number in range(WARM + 1, WARM + 1 + AFTER):
            loop.iterate(number, run)
            run.step()
        slow.open()
        assert run.wait(20)
        report = run.report()
        assert (report.checkpoints_complete, report.failures) == (1, ())
        assert slow.held
        at_end = facts(loop)
    again = make(99)
    with attached(again, devices) as run:
        assert run.restore() is not None
        assert facts(again) == at_boundary
        for number in range(WARM + 1, WARM + 1 + AFTER):
            again.iterate(number, run)
            run.step()
        assert facts(again) == at_end


def data(number: int, *shape: int) -> torch.Tensor:
    """The batch of an iteration; draws nothing from the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + number))


def supervised(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, set_to_none: bool = True
) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad(set_to_none=set_to_none)
    model(data(number, 4, 6)).square().mean().backward()
    optimizer.step()


def simple(
    seed: int,
    model: Callable[[], nn.Module] = lambda: nn.Linear(6, 6),
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01
    ),
) -> Loop:
    torch.manual_seed(seed)
    net = model()
    made = optimizer(list(net.parameters()))
    return Loop({"model": net, "optimizer": made}, lambda number, run: supervised(net, made, number))


def normalised() -> nn.Module:
    """A model with running statistics, which draws random numbers."""
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 6))


def bounded(seed: int) -> Loop:
    """Forward renormalises the rows that it reads, in place."""
    torch.manual_seed(seed)
    words, bags = nn.Embedding(20, 4, max_norm=0.5), nn.EmbeddingBag(20, 4, max_norm=0.5)
    model = nn.ModuleDict({"words": words, "bags": bags, "last": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def iterate(number: int, run: Run) -> None:
        optimizer.zero_grad()
        rows = torch.tensor([[number, 2 * number + 1]])
        model["last"](words(rows).sum(1) + bags(rows)).square().sum().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)
