"""Hooks that run when state is loaded: post hooks run at a restore, too, and what does not is said once."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from overlapping import Loop, attached
from torch import nn
from torch.optim import SGD

from everstep.core.errors import StateMismatchError
from everstep.hook.load_hooks import call_load_hooks, notes_on_loading


class Packed(nn.Module):
    """A layer that keeps what it derives from its weight outside of buffers, and makes it anew when it is loaded."""

    def __init__(self, order: list[str] | None = None, name: str = "packed") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.packed = self.weight.sum().item()
        self.register_load_state_dict_post_hook(self._loaded)
        self.order, self.name = order if order is not None else [], name

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        assert (module, keys.missing_keys, keys.unexpected_keys) == (self, [], [])
        self.packed = self.weight.sum().item()
        self.order.append(self.name)


class LoadsItself(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


def noted(optimizer: SGD, steps: list[float]) -> None:
    optimizer.register_load_state_dict_post_hook(lambda it: steps.append(it.param_groups[0]["lr"]))


def test_post_hooks_see_all_restored_state(devices: list[Path]) -> None:
    def make(lr: float) -> Loop:
        model = nn.Sequential(Packed(), nn.Linear(3, 3))
        return Loop({"model": model, "optimizer": SGD(model.parameters(), lr=lr)}, lambda number, run: None)

    first = make(0.5)
    with attached(first, devices) as run:
        for _ in range(2):  # the first one allocates the arena
            run.checkpoint()
            run.step()
            assert run.wait(20)
    again, rates = make(0.25), list[float]()
    noted(again.objects["optimizer"], rates)
    with attached(again, devices) as run:
        assert run.restore() is not None
    assert again.objects["model"][0].packed == first.objects["model"][0].packed
    assert rates == [0.5]


def test_hooks_are_called_in_torchs_order_and_once_for_each_module() -> None:
    order: list[str] = []
    outer, first, second = (Packed(order, name) for name in ("outer", "first", "second"))
    first.inner = Packed(order, "inner")
    outer.one, outer.two, outer.again = first, second, first
    outer.load_state_dict(outer.state_dict())
    expected = list(dict.fromkeys(order))
    order.clear()
    call_load_hooks({"model": torch.compile(outer, backend="eager"), "counter": object()})
    assert order == expected == ["inner", "first", "second", "outer"]


def test_a_hook_that_fails_names_its_object() -> None:
    model = nn.Linear(1, 1)
    model.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.pop())
    with pytest.raises(StateMismatchError, match=r"model.*hook raised IndexError: pop from empty list"):
        call_load_hooks({"model": model})


def test_what_is_not_called_is_said(caplog: pytest.LogCaptureFixture, devices: list[Path]) -> None:
    model = nn.Sequential(LoadsItself(2, 2), nn.BatchNorm1d(2))
    model[1].register_load_state_dict_pre_hook(lambda *_: None)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    rest = "a restore writes into the tensors and does not call it; register_load_state_dict_post_hook() is called"
    expected = [
        f"model.0._load_from_state_dict() and 1 more: {rest}",
        f"a load_state_dict() pre hook of optimizer: {rest}",
    ]
    loop = Loop({"model": model, "optimizer": optimizer}, lambda number, run: None)
    with caplog.at_level(logging.WARNING), attached(loop, devices) as run:
        assert list(run.report().notes) == expected
    assert [text for text in caplog.messages if text.startswith("load_not_called")] == [
        f"load_not_called run=overlap: {text}" for text in expected
    ]


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 2),
        nn.LazyLinear(2),
        nn.MultiheadAttention(2, 1),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        torch.ao.quantization.MovingAverageMinMaxObserver(),
        torch.compile(nn.Linear(2, 2), backend="eager"),
        torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_of_torchs_own_nothing_is_said(module: nn.Module) -> None:
    assert notes_on_loading({"model": module}) == []
