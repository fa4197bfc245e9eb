"""From the keywords of attach() to components."""

from typing import Any

import pytest
import torch
from torch import nn

from everstep.core.errors import UsageError
from everstep.hook.component import make_components
from everstep.hook.state_testing import transfer


def test_modules_come_before_optimizers_and_the_rest() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {
        "generator": torch.Generator(),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "model": model,
    }
    found = [component.name for component in make_components(objects, world_size=1)]
    assert found == ["model", "optimizer", "generator", "scheduler"]


@pytest.mark.parametrize("name", ["rng", "log", "a.b", "a b", "", "1", "everstep"])
def test_names_that_are_taken_or_no_keywords_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="another keyword"):
        make_components({name: nn.Linear(1, 1)}, world_size=1)


class NoHooks:
    """What DeepSpeed's and other wrappers look like."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, object]] = []

    def step(self) -> None: ...


def test_an_optimizer_without_hooks_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"NoHooks.*no register_step_pre_hook.*attach the optimizer inside it"
    ):
        make_components({"optimizer": NoHooks()}, world_size=1)


def test_an_optimizer_that_torch_never_saw_is_refused() -> None:
    class Unseen(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups, self.defaults = [], {}

    with pytest.raises(UsageError, match=r"Unseen, whose class does not call super\(\).__init__\(\)"):
        make_components({"optimizer": Unseen()}, world_size=1)


class Sam(torch.optim.Optimizer):
    """An optimizer around another that keeps the moments."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups)  # pyright: ignore[reportCallIssue]
        self.param_groups = self.base.param_groups

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()


def test_a_hidden_optimizer_must_be_attached_too() -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": Sam(model.parameters(), torch.optim.Adam)}

    saved, fresh = build(), build()
    with pytest.raises(UsageError, match=r"optimizer\.base is an optimizer.*optimizer_base=optimizer\.base"):
        make_components(saved, world_size=1)
    for objects in (saved, fresh):
        objects["optimizer_base"] = objects["optimizer"].base
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    stored = transfer(saved, fresh)
    assert "optimizer_base.state.weight.exp_avg" in stored


class Several(torch.optim.Optimizer):
    """Optimizers in a list or a dict, as one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        each = inner.values() if isinstance(inner, dict) else inner
        super().__init__([group for optimizer in each for group in optimizer.param_groups], {})


@pytest.mark.parametrize("places", [("[0]", "inner_0"), ("['first']", "inner_first")])
def test_optimizers_hidden_in_a_list_or_a_dict_must_be_attached_too(places: tuple[str, str]) -> None:
    place, keyword = places
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters())
    several = Several([inner] if place == "[0]" else {"first": inner})
    with pytest.raises(UsageError) as caught:
        make_components({"model": model, "optimizer": several}, world_size=1)
    assert f"optimizer.inner{place} is an optimizer" in caught.value.message
    assert f"optimizer_{keyword}=optimizer.inner{place}" in caught.value.hint
    make_components({"model": model, "optimizer": several, "first": inner}, world_size=1)


def test_what_is_no_optimizer_is_not_looked_at_closer() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise AssertionError

    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state = {Shy(): [Shy()]}  # pyright: ignore[reportAttributeAccessIssue]
    make_components({"model": model, "optimizer": optimizer}, world_size=1)


def test_a_sharded_optimizer_is_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Stands for torch's, which needs a process group."""

    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match="optimizer is a ZeroRedundancyOptimizer"):
        make_components({"optimizer": optimizer}, world_size=1)


def test_a_whole_training_state_at_once() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "ema": torch.optim.swa_utils.AveragedModel(model),
            "generator": torch.Generator().manual_seed(seed),
        }

    def iterate(objects: dict[str, Any]) -> float:
        objects["optimizer"].zero_grad()
        loss = objects["model"](torch.rand(8, 4, generator=objects["generator"])).pow(2).mean()
        loss.backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
        objects["ema"].update_parameters(objects["model"])
        return float(loss.detach())

    saved, fresh = build(1), build(2)
    for _ in range(3):
        iterate(saved)
    transfer(saved, fresh, device_count=3)
    assert [iterate(saved) for _ in range(4)] == [iterate(fresh) for _ in range(4)]
