"""Memory that an optimizer's state shared with weights or other state when it was saved, and what is left of it."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from everstep.hook.component import make_components
from everstep.hook.state_testing import bits, store, transfer


def one_weight() -> tuple[nn.Module, Optimizer]:
    module = nn.Linear(3, 4, bias=False)
    return module, SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(("module", "optimizer"), [("model", "optimizer"), ("net", "adam")])
def test_state_in_containers_that_was_its_weight_or_other_state_is_so_again(
    module: str, optimizer: str
) -> None:
    """By whichever of the names the bytes are kept."""
    (saved, one), (fresh, other) = one_weight(), one_weight()
    weight, mean = saved.get_parameter("weight").data, torch.randn(5)
    one.state[saved.get_parameter("weight")] = {"mean": mean, "old": [weight, {"head": weight[1:3]}, mean]}
    one.state["all"] = {"fast": weight}  # pyright: ignore[reportArgumentType]
    transfer({module: saved, optimizer: one}, {module: fresh, optimizer: other})
    parameter = fresh.get_parameter("weight")
    state: dict[str, Any] = other.state[parameter]
    old, shared = state["old"], other.state["all"]  # pyright: ignore[reportArgumentType]
    assert bits(parameter) == bits(weight)
    with torch.no_grad():
        parameter.fill_(7.0)
    state["mean"].fill_(8.0)
    assert (old[0].unique().tolist(), old[1]["head"].unique().tolist()) == ([7.0], [7.0])
    assert (shared["fast"].unique().tolist(), old[2].unique().tolist()) == ([7.0], [8.0])


def test_state_in_containers_that_was_state_which_stays_is_so_again() -> None:
    (saved, one), (fresh, other) = one_weight(), one_weight()
    mean, present = torch.randn(5), torch.zeros(5)
    one.state[saved.get_parameter("weight")] = {"mean": mean, "old": [mean]}
    other.state[fresh.get_parameter("weight")] = {"mean": present}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert bits(present) == bits(mean)
    present.fill_(8.0)
    assert other.state[fresh.get_parameter("weight")]["old"][0].unique().tolist() == [8.0]


def flattened(*begins: int, key: str = "flat") -> tuple[nn.ParameterList, Optimizer]:
    """Weights that are parts of one buffer, which the optimizer steps on."""
    flat = torch.randn(16)
    module = nn.ParameterList(nn.Parameter(flat[begin : begin + 4]) for begin in begins)
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.state[module[0]] = {key: flat}
    return module, optimizer


@pytest.mark.parametrize("begins", [(0, 4), (2, 8), (8, 2)])
def test_a_buffer_of_the_state_that_weights_are_parts_of_is_so_again_where_it_is_here(
    begins: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    (saved, one), (fresh, other) = flattened(*begins), flattened(*begins)
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    flat = other.state[fresh[0]]["flat"]
    assert bits(flat) == bits(one.state[saved[0]]["flat"])
    assert all(bits(here) == bits(there) for here, there in zip(fresh, saved, strict=True))
    flat.fill_(7.0)
    assert [weight.unique().tolist() for weight in fresh] == [[7.0], [7.0]]
    assert not caplog.messages


@pytest.mark.parametrize("begins", [(0, 8), (4, 0)])
def test_where_weights_are_other_parts_of_it_here_none_is_written_over(
    begins: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    (saved, one), (fresh, other) = flattened(0, 4), flattened(*begins)
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert bits(other.state[fresh[0]]["flat"]) == bits(one.state[saved[0]]["flat"])
    assert all(bits(here) == bits(there) for here, there in zip(fresh, saved, strict=True))
    assert said(caplog) == ["memory_apart leaf=optimizer.state.0.flat"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text.partition(":")[0] for text in caplog.messages]


def test_it_is_said_where_the_state_has_not_made_its_buffer_yet(caplog: pytest.LogCaptureFixture) -> None:
    """The weights stay where they are: the buffer is a copy, which they are trained apart from."""
    (saved, one), (fresh, other) = flattened(2, 8), flattened(2, 8)
    other.state.clear()
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert bits(other.state[fresh[0]]["flat"]) == bits(one.state[saved[0]]["flat"])
    assert said(caplog) == ["memory_apart leaf=optimizer.state.0.flat"]


def test_it_is_said_where_its_buffer_is_here_and_the_weights_are_not_in_it_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where the first step copies them in: the run has taken that step, so nothing will do it again."""
    (saved, one), (fresh, other) = flattened(2, 8), flattened(2, 8)
    other.state[fresh[0]]["flat"] = torch.zeros(16)
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert bits(other.state[fresh[0]]["flat"]) == bits(one.state[saved[0]]["flat"])
    assert all(bits(here) == bits(there) for here, there in zip(fresh, saved, strict=True))
    assert said(caplog) == ["memory_apart leaf=optimizer.state.0.flat"]


def test_what_was_the_weight_is_the_weight_again_beside_state_that_is_a_copy_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (saved, one), (fresh, other) = one_weight(), one_weight()
    weight, parameter = saved.get_parameter("weight"), fresh.get_parameter("weight")
    one.state[weight] = {"fast": weight.data, "old": [weight.data]}
    other.state[parameter] = {"fast": torch.zeros(4, 3)}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    state = other.state[parameter]
    assert bits(state["fast"]) == bits(weight)
    with torch.no_grad():
        parameter.fill_(7.0)
    assert state["old"][0].unique().tolist() == [7.0]
    assert said(caplog) == ["memory_apart leaf=optimizer.state.weight.fast"]


def test_state_that_was_a_hyper_parameter_is_the_one_that_stays() -> None:
    """A scheduler writes into the group's tensor."""
    (saved, one), (fresh, other) = one_weight(), one_weight()
    for optimizer in (one, other):
        optimizer.param_groups[0]["lr"] = torch.zeros(())
    (group,), (present,) = one.param_groups, (each["lr"] for each in other.param_groups)
    group["lr"].fill_(0.5)
    one.state[saved.get_parameter("weight")] = {"lr": group["lr"], "rates": [group["lr"]]}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["lr"] is present
    assert present.item() == 0.5
    present.fill_(0.25)
    state = other.state[fresh.get_parameter("weight")]
    assert (state["lr"].item(), state["rates"][0].item()) == (0.25, 0.25)


def test_it_is_said_of_a_weight_that_has_another_memory_format(caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = (nn.Conv2d(2, 3, 3, bias=False) for _ in range(2))
    fresh.weight.data = fresh.weight.data.contiguous(memory_format=torch.channels_last)
    one, other = (SGD(each.parameters(), lr=0.1) for each in (saved, fresh))
    one.state[saved.weight] = {"fast": saved.weight.data}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert said(caplog) == ["memory_apart leaf=optimizer.state.weight.fast"]


def test_state_that_was_a_weight_in_a_larger_buffer_of_the_module_is_that_weight_again() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        flat, module = torch.randn(16), nn.Module()
        module.register_buffer("flat", flat)
        module.register_parameter("w", nn.Parameter(flat[4:8]))
        return module, SGD(module.parameters(), lr=0.1)

    (saved, one), (fresh, other) = build(), build()
    weight = saved.get_parameter("w")
    one.state[weight] = {"fast": weight.data, "head": weight.data[1:3]}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    with torch.no_grad():
        fresh.get_parameter("w").fill_(7.0)
    state = other.state[fresh.get_parameter("w")]
    assert (state["fast"].tolist(), state["head"].tolist()) == ([7.0] * 4, [7.0] * 2)


def test_it_is_said_of_a_buffer_of_a_module_that_a_weight_was_a_part_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, fresh = nn.Module(), nn.Module()
    flat = torch.randn(8)
    for module, tensor in ((saved, flat[2:6]), (fresh, torch.zeros(4))):
        module.register_parameter("w", nn.Parameter(tensor))
        module.register_buffer("flat", None)
    saved.flat = flat
    transfer({"model": saved}, {"model": fresh})
    assert bits(fresh.get_buffer("flat")) == bits(flat)
    assert said(caplog) == ["memory_apart leaf=model.flat"]


def calls_to_restore(weights: int) -> int:
    """How many functions run to put back an optimizer of so many weights, each the memory of its own state."""

    def build() -> tuple[nn.ParameterList, Optimizer]:
        module = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(weights))
        optimizer = SGD(module.parameters(), lr=0.1)
        optimizer.state.update({weight: {"fast": weight.data} for weight in module})
        return module, optimizer

    (saved, one), (fresh, other) = build(), build()
    components = make_components({"model": fresh, "optimizer": other}, world_size=1)
    stored = store(make_components({"model": saved, "optimizer": one}, world_size=1))
    for component in components:
        component.check(stored)
    counts = Counter[str]()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        for component in components:
            component.apply(stored)
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def test_each_more_weight_that_state_lies_on_costs_as_much_as_the_last_one() -> None:
    """Counted, not timed: a restore must not take minutes for thousands of weights."""
    few, some, many = map(calls_to_restore, (50, 100, 200))
    assert many - some < 2.5 * (some - few)
