"""Optimizers that step on and on without a boundary are told of; one iteration of many optimizers is not."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.hook import guard as guard_module
from everstep.hook.guard import OptimizerGuard

STEPS_MAX = 10


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(guard_module, "STEPS_WITHOUT_BOUNDARY_MAX", STEPS_MAX)


def optimizers(count: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(count)]


def step(made: list[torch.optim.Optimizer], times: int) -> None:
    for _ in range(times):
        for optimizer in made:
            optimizer.step()


def guarded(made: list[torch.optim.Optimizer], before: list[None]) -> OptimizerGuard:
    objects = {f"optimizer{number}": each for number, each in enumerate(made)}
    return OptimizerGuard(objects | {"model": nn.Linear(1, 1)}, lambda: before.append(None))


@pytest.mark.parametrize("count", [1, 3])
def test_steps_without_a_boundary_are_told_once_per_boundary(count: int) -> None:
    made, before = optimizers(count), list[None]()
    guard = guarded(made, before)
    with warnings.catch_warnings(action="error"):
        step(made, STEPS_MAX - 1)
        guard.boundary()
        step(made, STEPS_MAX - 1)
    with pytest.warns(UserWarning, match=rf"{count * STEPS_MAX} optimizer steps without run\.step\(\)"):
        step(made, 1)
    with warnings.catch_warnings(action="error"):
        step(made, 3 * STEPS_MAX)
    assert len(before) == count * (5 * STEPS_MAX - 1)
    guard.close()
    step(made, 1)
    assert len(before) == count * (5 * STEPS_MAX - 1)


def test_every_hook_waits_whoever_registered_it_first() -> None:
    made, order = optimizers(1), list[str]()
    earlier = register_optimizer_step_pre_hook(lambda *_: order.append("earlier"))
    guard = OptimizerGuard({"optimizer": made[0]}, lambda: order.append("guard"))
    later = register_optimizer_step_pre_hook(lambda *_: order.append("later"))
    try:
        step(made, 1)
    finally:
        for each in (earlier, guard, later):
            each.close() if isinstance(each, OptimizerGuard) else each.remove()
    assert order == ["guard", "earlier", "later"]


def passed(guard: OptimizerGuard, made: list[torch.optim.Optimizer], steps: list[int]) -> list[str]:
    """Return what is warned of where before each boundary so many steps are made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for times in steps:
            step(made, times)
            guard.boundary()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    "steps", [[0, 0, 0, 1] * 5, [1, 0, 0, 0] * 5, [0] * 20 + [1] + [0] * 7], ids=["last", "first", "late"]
)
def test_boundaries_of_each_micro_batch_are_told_once(steps: list[int]) -> None:
    made = optimizers(1)
    guard = guarded(made, [])
    (text,) = passed(guard, made, steps)
    assert "nothing stepped between two calls of run.step()" in text
    assert "only after optimizer.step()" in text
    guard.close()


@pytest.mark.parametrize(
    "steps",
    [[1] * 20, [0] * 20, [0, 1, 1, 1, 0, 1], [1, 0, 1, 0] * 5, [3, 2, 0, 5, 1], [1] * 5 + [0] * 10],
    ids=["each", "no optimizer", "skipped by a scaler", "every other", "several", "frozen later"],
)
def test_boundaries_of_other_loops_are_not(steps: list[int]) -> None:
    made = optimizers(1)
    guard = guarded(made, [])
    assert passed(guard, made, steps) == []
    guard.close()


def test_more_optimizers_than_steps_without_a_boundary_are_one_iteration() -> None:
    """A step within backward for each parameter."""
    made = optimizers(2 * STEPS_MAX)
    guard = guarded(made, [])
    with warnings.catch_warnings(action="error"):
        step(made, 2)
    guard.close()


def test_a_scaler_that_is_updated_waits_once_for_each_guard_that_is_open() -> None:
    """However often runs were attached, and of closed ones, or such as are gone, nothing is asked."""
    parameter = nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu", init_scale=2.0), torch.optim.SGD([parameter])
    waited: list[str] = []
    open_one, closed = (
        OptimizerGuard({}, lambda name=name: waited.append(name)) for name in ("open", "closed")
    )
    OptimizerGuard({}, lambda: waited.append("gone"))
    gc.collect()
    closed.close()
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert waited == [], "the step was left out"
    scaler.update()
    assert waited == ["open"]
    assert scaler.get_scale() == 1.0
    scaler.update(8.0)
    assert (scaler.get_scale(), waited) == (8.0, ["open", "open"])
    open_one.close()
    scaler.update(4.0)
    assert waited == ["open", "open"]
