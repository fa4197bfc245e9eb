"""Optimizers: state by parameter name with its own dtype and device, in place, for every kind of optimizer."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from everstep.core.errors import StateMismatchError, StateTypeError, UsageError
from everstep.hook import optimizer_state
from everstep.hook.capture import capture_state
from everstep.hook.component import Component, Laziness, make_components
from everstep.hook.memory_ranges import RangeMap
from everstep.hook.state_testing import bits, store, transfer

Make = Callable[[list[nn.Parameter]], Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: Optimizer, steps: int) -> None:
    torch.manual_seed(5)
    inputs = torch.randn(8, 3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = module(inputs).pow(2).sum()
        found.backward()
        return found

    for _ in range(steps):
        optimizer.step(loss)  # pyright: ignore[reportArgumentType, reportCallIssue]


def same(left: object, right: object) -> bool:
    """Equal bit for bit, also inside of containers."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("used", [False, True])
def test_an_optimizer_comes_back_and_goes_on_alike(kind: str, used: bool) -> None:
    saved, fresh = model(), model()
    optimizer, other = MAKERS[kind](list(saved.parameters())), MAKERS[kind](list(fresh.parameters()))
    train(saved, optimizer, 3)
    if used:
        train(fresh, other, 1)
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other}, device_count=3)
    assert same(optimizer.state_dict(), other.state_dict())
    assert isinstance(other.state, defaultdict)
    train(saved, optimizer, 2)
    train(fresh, other, 2)
    assert all(map(same, saved.parameters(), fresh.parameters()))
    assert same(optimizer.state_dict(), other.state_dict())


def test_sgd_momentum_that_is_none() -> None:
    saved, fresh = model(), model()
    optimizer, other = (
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (saved, fresh)
    )
    for parameter in saved.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(optimizer.state_dict(), other.state_dict())
    assert len(other.state) == 4


def test_fp32_state_of_bf16_parameters_stays_fp32() -> None:
    saved, fresh = model().bfloat16(), model().bfloat16()
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (saved, fresh))
    for parameter in saved.parameters():
        optimizer.state[parameter] = {"master": torch.randn_like(parameter, dtype=torch.float32)}
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert other.state[two]["master"].dtype == torch.float32
        assert bits(other.state[two]["master"]) == bits(optimizer.state[one]["master"])


def test_existing_state_is_written_in_place_and_foreign_keys_go() -> None:
    saved, fresh = model(), model()
    optimizer, other = (torch.optim.Adam(module.parameters(), lr=0.1) for module in (saved, fresh))
    train(saved, optimizer, 2)
    train(fresh, other, 1)
    first = next(iter(fresh.parameters()))
    held, addresses = other.state, {key: value.data_ptr() for key, value in other.state[first].items()}
    other.state[first]["extra"] = 1
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert other.state is held
    assert {key: value.data_ptr() for key, value in other.state[first].items()} == addresses


def test_rates_that_were_apart_are_not_made_one_by_a_default_that_all_groups_have() -> None:
    """A new optimizer has one tensor in all its groups; a scheduler that writes to it would set all of them."""

    def made() -> tuple[nn.Module, Optimizer]:
        module = model()
        groups = [{"params": part.parameters()} for part in module.children() if list(part.parameters())]
        return module, torch.optim.AdamW(groups, lr=torch.tensor(1e-3), foreach=False)

    (saved, optimizer), (fresh, other), (third, together) = made(), made(), made()
    for group, rate in zip(optimizer.param_groups, (1e-3, 1e-4), strict=True):
        group["lr"] = torch.tensor(rate)
    assert other.param_groups[0]["lr"] is other.param_groups[1]["lr"]
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(optimizer.state_dict(), other.state_dict())
    other.param_groups[0]["lr"].fill_(0.5)
    assert other.param_groups[1]["lr"] == torch.tensor(1e-4)
    rate = together.param_groups[0]["lr"]
    transfer({"model": third, "optimizer": together}, {"model": third, "optimizer": together})
    assert all(group["lr"] is rate for group in together.param_groups), "what was one stays one"


def test_state_that_was_apart_is_not_made_one() -> None:
    saved, fresh = model(), model()
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (saved, fresh))
    counter = torch.zeros(1)
    for number, parameter in enumerate(saved.parameters()):
        optimizer.state[parameter]["count"] = torch.full((1,), float(number))
    for parameter in fresh.parameters():
        other.state[parameter]["count"] = counter
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert [float(other.state[each]["count"]) for each in fresh.parameters()] == [0.0, 1.0, 2.0, 3.0]


def test_state_that_the_checkpoint_has_not_goes() -> None:
    saved, fresh = model(), model()
    optimizer, other = (torch.optim.Adam(module.parameters(), lr=0.1) for module in (saved, fresh))
    train(fresh, other, 1)
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert not other.state


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            torch.optim.AdamW,
            torch.optim.SGD,
            "an optimizer with amsgrad, betas, .* of a SGD with dampening",
        ),
        (
            torch.optim.SGD,
            torch.optim.AdamW,
            "an optimizer with dampening, momentum, .* of a AdamW with amsgrad",
        ),
    ],
)
def test_another_class_of_optimizer_is_refused_before_anything_is_changed(
    one: type[torch.optim.Optimizer], other: type[torch.optim.Optimizer], words: str
) -> None:
    saved, fresh = model(), model()
    mine: Any = type("Mine", (one,), {})  # of torch's own the checkpoint knows the class
    optimizer = mine(saved.parameters(), lr=0.1)
    again = other(fresh.parameters(), lr=0.2)  # pyright: ignore[reportCallIssue]
    train(saved, optimizer, 1)
    with pytest.raises(StateMismatchError, match=words):
        transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": again})
    assert again.param_groups[0]["lr"] == 0.2
    assert not again.state


@pytest.mark.parametrize("here", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax])
def test_so_is_one_of_torchs_with_the_same_options(here: type[torch.optim.Optimizer]) -> None:
    """AdamW took Adam's state, and went on as Adam."""
    saved, fresh = model(), model()
    optimizer, again = torch.optim.Adam(saved.parameters()), here(fresh.parameters())  # pyright: ignore[reportCallIssue]
    train(saved, optimizer, 1)
    words = f"a torch.optim Adam saved it, and here is a {here.__name__}"
    with pytest.raises(StateMismatchError, match=words):
        transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": again})
    assert not again.state


def test_a_class_of_ones_own_may_be_renamed() -> None:
    class Mine(torch.optim.Adam):
        pass

    class Renamed(torch.optim.Adam):
        pass

    for one, other in ((Mine, Renamed), (Mine, torch.optim.Adam), (torch.optim.Adam, Mine)):
        saved, fresh = model(), model()
        optimizer, again = one(saved.parameters()), other(fresh.parameters())
        train(saved, optimizer, 1)
        transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": again})
        assert len(again.state) == len(optimizer.state)


def test_hyper_parameters_come_back_and_new_ones_stay() -> None:
    saved, fresh = model(), model()
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.5, betas=(0.1, 0.2), weight_decay=0.3)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.7
    other.param_groups[0]["of a newer torch"] = True
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.1, 0.2), 0.3)
    assert group["initial_lr"] == 0.7
    assert group["of a newer torch"] is True


def test_a_tensor_learning_rate_is_eager_and_written_in_place() -> None:
    saved, fresh = model(), model()
    optimizer = torch.optim.Adam(saved.parameters(), lr=torch.tensor(0.5), foreach=False)
    other = torch.optim.Adam(fresh.parameters(), lr=torch.tensor(0.1), foreach=False)
    held = other.param_groups[0]["lr"]
    captured = capture_state(make_components({"model": saved, "optimizer": optimizer}, world_size=1))
    found = {leaf.spec.name: leaf.laziness for leaf in captured.leaves}
    assert found["optimizer.groups[0].lr"] is Laziness.EAGER
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["lr"] is held
    assert held == 0.5


def test_leaves_have_the_names_of_their_parameters_and_are_owned() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    train(module, optimizer, 1)
    captured = capture_state(make_components({"net": module, "opt": optimizer}, world_size=1))
    found = {leaf.spec.name: leaf.laziness for leaf in captured.leaves if leaf.spec.name.startswith("opt.")}
    assert "opt.state.0.weight.exp_avg" in found
    assert "opt.state.2.bias.step" in found
    assert set(found.values()) == {Laziness.OWNED}


def test_one_optimizer_over_two_modules_names_both() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.1)
    both = nn.Sequential(one, two)
    train_one(both, optimizer)
    objects: dict[str, object] = {"g": one, "d": two, "optimizer": optimizer}
    captured = capture_state(make_components(objects, world_size=1))
    found = {leaf.spec.name for leaf in captured.leaves}
    assert {"optimizer.state.g.weight.exp_avg", "optimizer.state.d.weight.exp_avg"} <= found
    fresh = copy.deepcopy(objects)
    other = fresh["optimizer"]
    assert isinstance(other, Optimizer)
    transfer(objects, fresh)
    assert same(optimizer.state_dict(), other.state_dict())


def train_one(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 1)).sum().backward()
    optimizer.step()


def test_two_optimizers_of_a_gan() -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(2)
        g, d = nn.Linear(1, 1), nn.Linear(1, 1)
        return {
            "g": g,
            "d": d,
            "opt_g": torch.optim.Adam(g.parameters(), lr=0.1),
            "opt_d": torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9),
        }

    saved, fresh = build(), build()
    train_one(saved["g"], saved["opt_g"])
    train_one(saved["d"], saved["opt_d"])
    transfer(saved, fresh)
    for name in ("opt_g", "opt_d"):
        assert same(saved[name].state_dict(), fresh[name].state_dict())
    assert bits(fresh["d"].weight) == bits(saved["d"].weight)


def test_names_do_not_depend_on_a_second_module_that_holds_the_parameters() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    train(module, optimizer, 1)
    objects = {"head": module[2], "model": module, "optimizer": optimizer}  # pyright: ignore[reportIndexIssue]
    captured = capture_state(make_components(objects, world_size=1))
    assert "optimizer.state.0.weight.exp_avg" in {leaf.spec.name for leaf in captured.leaves}


def test_param_names_of_the_group_stand_in_for_a_module() -> None:
    def build() -> Optimizer:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return torch.optim.Adam([("alpha", parameter)], lr=0.1)

    saved, fresh = build(), build()
    saved.step()
    stored = transfer({"optimizer": saved}, {"optimizer": fresh})
    assert "optimizer.state.alpha.exp_avg" in stored
    assert same(saved.state_dict(), fresh.state_dict())


def masters(seed: int, *, width: int = 3) -> dict[str, Any]:
    """A model in bfloat16; its optimizer has float32 weights of its own, by the model's names."""
    torch.manual_seed(seed)
    module = nn.Linear(3, width).bfloat16()
    named = [(name, each.detach().float().requires_grad_()) for name, each in module.named_parameters()]
    return {"model": module, "optimizer": torch.optim.AdamW(named, lr=0.1)}


def test_weights_that_only_the_optimizer_has_come_back_with_it() -> None:
    saved, fresh = masters(0), masters(1)
    (group,), (other,) = saved["optimizer"].param_groups, fresh["optimizer"].param_groups
    for parameter in group["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved["optimizer"].step()
    stored = transfer(saved, fresh)
    assert "optimizer.params.weight" in stored
    assert [*map(bits, other["params"])] == [*map(bits, group["params"])]
    assert same(saved["optimizer"].state_dict(), fresh["optimizer"].state_dict())


def test_weights_of_another_shape_that_only_the_optimizer_has_are_refused() -> None:
    saved, fresh = masters(0), masters(1)
    (group,) = fresh["optimizer"].param_groups
    group["params"][0].data = torch.zeros(5, 5)
    with pytest.raises(
        StateMismatchError, match=r"weight is float32 \[3, 3\] in the checkpoint, float32 \[5, 5\]"
    ):
        transfer(saved, fresh)


def direct(seed: int) -> dict[str, Any]:
    """The same with an optimizer over the model's own weights."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 3).bfloat16()
    return {"model": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=0.1)}


def test_weights_that_one_side_alone_has_in_a_module_are_refused() -> None:
    with pytest.raises(
        StateMismatchError, match="weight was an attached module's, and is the optimizer's alone"
    ):
        transfer(direct(0), masters(1))
    with pytest.raises(
        StateMismatchError, match="weight was the optimizer's alone, and an attached module has it"
    ):
        transfer(masters(0), direct(1))


def test_of_a_checkpoint_of_before_it_is_said_that_they_stay(caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = masters(0), masters(1)
    stored = store(make_components(saved, world_size=1))
    document = stored.values("optimizer")
    assert isinstance(document, dict)
    del document["own"]
    for component in make_components(fresh, world_size=1):
        component.check(stored)
        component.apply(stored)
    assert any(
        "weights_left_as_given optimizer=optimizer weights=weight,bias" in text for text in caplog.messages
    )


def test_statistics_that_only_the_optimizer_has_do_not_wait() -> None:
    weight, mean = torch.zeros(3, 3, requires_grad=True), nn.Parameter(torch.zeros(3), requires_grad=False)
    objects = {"optimizer": torch.optim.SGD([("weight", weight), ("mean", mean)], lr=0.1)}
    leaves = capture_state(make_components(objects, world_size=1)).leaves
    assert {leaf.spec.name: leaf.laziness for leaf in leaves} == {
        "optimizer.params.weight": Laziness.OWNED,
        "optimizer.params.mean": Laziness.EAGER,
    }


@pytest.mark.filterwarnings("ignore:.*duplicate parameters:UserWarning")
def test_a_parameter_that_is_twice_in_a_group_comes_back() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        module = model()
        return {"model": module, "optimizer": torch.optim.Adam([*module.parameters(), *module.parameters()])}

    saved, fresh = build(0), build(1)
    for parameter in saved["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    saved["optimizer"].step()
    transfer(saved, fresh)
    for one, other in zip(saved["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert same(saved["optimizer"].state[one], fresh["optimizer"].state[other])


def test_a_parameter_without_a_name_is_refused() -> None:
    module = model()
    groups = [
        {"params": [*module.parameters()]},
        {"params": [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]},
    ]
    components = make_components(
        {"model": module, "optimizer": torch.optim.SGD(groups, lr=0.1)}, world_size=1
    )
    with pytest.raises(
        UsageError, match=r"optimizer has parameter 0 of group 1 \(shape \[1\]\).*attach the module"
    ):
        capture_state(components)


def replaced_layer() -> tuple[nn.Sequential, Optimizer, list[Component]]:
    """Return a model whose last layer was replaced after a snapshot, with its optimizer, which does not know."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    train(module, optimizer, 1)
    components = make_components({"model": module, "optimizer": optimizer}, world_size=1)
    capture_state(components)
    module[2] = nn.Linear(4, 2)
    return module, optimizer, components


def test_a_replaced_layer_that_the_optimizer_still_has_is_named_as_it_was() -> None:
    _, _, components = replaced_layer()
    words = (
        r"parameter 2 of group 0 \(shape \[2, 4\]\), which was '2\.weight' and is in no attached module any more"
        r" \(where a layer is replaced, build the optimizer anew"
    )
    for _ in range(2):
        with pytest.raises(UsageError, match=words):
            capture_state(components)


def test_what_a_replaced_layer_left_in_the_optimizers_state_is_left_out() -> None:
    module, optimizer, components = replaced_layer()
    optimizer.param_groups[0]["params"] = [*module.parameters()]
    train(module, optimizer, 1)
    assert len(optimizer.state) == 6
    for _ in range(2):
        names = [leaf.spec.name for leaf in capture_state(components).leaves]
        assert len([name for name in names if name.startswith("optimizer.state.2.weight.")]) == 3
    fresh, other, into = replaced_layer()
    other.param_groups[0]["params"] = [*fresh.parameters()]
    stored = store(components, device_count=1)
    for each in into:
        each.check(stored)
        each.apply(stored)
    assert len(other.state) == 4
    for one, another in zip(module.parameters(), fresh.parameters(), strict=True):
        assert same(optimizer.state[one], other.state[another])


def test_so_is_what_was_a_parameter_when_a_checkpoint_came_back() -> None:
    module, optimizer, components = replaced_layer()
    module[2] = nn.Linear(4, 2)
    optimizer.param_groups[0]["params"] = [*module.parameters()]
    stored = store(components, device_count=1)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    other = torch.optim.Adam(fresh.parameters(), lr=0.1)
    into = make_components({"model": fresh, "optimizer": other}, world_size=1)
    for each in into:
        each.check(stored)
        each.apply(stored)
    train(fresh, other, 1)
    fresh[2] = nn.Linear(4, 2)
    other.param_groups[0]["params"] = [*fresh.parameters()]
    names = [leaf.spec.name for leaf in capture_state(into).leaves]
    assert not any(name.startswith("optimizer.state.2.") for name in names)


def test_state_of_a_tensor_that_was_never_a_parameter_is_refused() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    optimizer.state[torch.zeros(3)] = {"step": 1}
    components = make_components({"model": module, "optimizer": optimizer}, world_size=1)
    with pytest.raises(
        UsageError,
        match=r"a tensor that is in no group but has state .*or delete its entry of optimizer\.state",
    ):
        capture_state(components)


def test_groups_that_do_not_fit_are_refused_and_nothing_is_changed() -> None:
    def build(names: list[list[str]]) -> dict[str, object]:
        module = model()
        table = dict(module.named_parameters())
        groups = [{"params": [table[name] for name in group]} for group in names]
        return {"model": module, "optimizer": torch.optim.SGD(groups, lr=0.1)}

    saved = build([["0.weight", "0.bias"], ["2.weight"]])
    transfer(saved, build([["0.bias", "0.weight"], ["2.weight"]]))
    for names, message in (
        ([["0.weight", "0.bias", "2.weight"]], "2 parameter groups in the checkpoint, 1 here"),
        ([["0.weight"], ["2.weight"]], r"group 0 has 0\.bias in the checkpoint only"),
        ([["0.weight", "0.bias"], ["2.weight", "2.bias"]], r"group 1 has 2\.bias here only"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            transfer(saved, build(names))


def test_lbfgs_depends_on_the_order_of_parameters() -> None:
    saved, fresh = model(), model()
    optimizer = torch.optim.LBFGS(saved.parameters())
    other = torch.optim.LBFGS(list(fresh.parameters())[::-1])
    with pytest.raises(StateMismatchError, match="another order"):
        transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})


def test_a_group_added_in_mid_run() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = model()
        return module, torch.optim.Adam(module[0].parameters(), lr=0.1)  # pyright: ignore[reportIndexIssue]

    (saved, optimizer), (fresh, other) = build(), build()
    train(saved, optimizer, 1)
    components = make_components({"model": saved, "optimizer": optimizer}, world_size=1)
    before = {leaf.spec.name: leaf.laziness for leaf in capture_state(components).leaves}
    optimizer.add_param_group({"params": list(saved[2].parameters()), "lr": 0.01})  # pyright: ignore[reportIndexIssue]
    train(saved, optimizer, 1)
    after = {leaf.spec.name: leaf.laziness for leaf in capture_state(components).leaves}
    assert (before["model.2.weight"], after["model.2.weight"]) == (Laziness.EAGER, Laziness.OWNED)
    with pytest.raises(StateMismatchError, match="parameter groups"):
        transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    other.add_param_group({"params": list(fresh[2].parameters())})  # pyright: ignore[reportIndexIssue]
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(optimizer.state_dict(), other.state_dict())


def test_state_of_a_group_that_was_removed_is_kept_by_name() -> None:
    saved, fresh = model(), model()
    optimizer, other = (
        torch.optim.Adam([{"params": list(part.parameters())} for part in (module[0], module[2])], lr=0.1)  # pyright: ignore[reportIndexIssue]
        for module in (saved, fresh)
    )
    train(saved, optimizer, 1)
    del optimizer.param_groups[1], other.param_groups[1]
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert len(other.state) == 4


def test_nested_state_and_keys_of_other_types() -> None:
    saved, fresh = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (saved, fresh))
    state = {1: "one", "nested": [torch.arange(3.0), {"a": (torch.tensor(2), None)}], "flag": True}
    optimizer.state[saved.weight] = state
    optimizer.state["counters"] = {"k": torch.ones(2)}  # pyright: ignore[reportArgumentType]
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(other.state[fresh.weight], state)
    assert same(other.state["counters"], {"k": torch.ones(2)})  # pyright: ignore[reportArgumentType]


def test_state_that_was_one_tensor_for_all_is_one_again() -> None:
    saved, fresh = model(), model()
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (saved, fresh))
    step = torch.tensor(3.0)
    for parameter in saved.parameters():
        optimizer.state[parameter] = {"step": step}
    transfer({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    steps = [other.state[parameter]["step"] for parameter in fresh.parameters()]
    steps[0] += 1
    assert [float(found) for found in steps] == [4.0] * 4


@pytest.mark.parametrize(("module", "optimizer"), [("model", "optimizer"), ("net", "adam")])
def test_state_that_was_its_weight_or_a_part_of_it_is_so_again(module: str, optimizer: str) -> None:
    """By whichever of the two names the bytes are kept."""
    saved, fresh = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (saved, fresh))
    weight = saved.weight.data
    one.state[saved.weight] = {"fast": weight, "head": weight[1:3], "mean": weight.clone()}
    transfer({module: saved, optimizer: one}, {module: fresh, optimizer: other})
    state = other.state[fresh.weight]
    assert same(state, one.state[saved.weight])
    with torch.no_grad():
        fresh.weight.fill_(7)
    assert (bool((state["fast"] == 7).all()), bool((state["head"] == 7).all())) == (True, True)
    assert same(state["mean"], weight)
    assert not any(each.requires_grad for each in state.values())


def test_of_a_weight_in_another_memory_format_it_is_a_copy() -> None:
    saved, fresh = (nn.Conv2d(2, 3, 3, bias=False) for _ in range(2))
    fresh.weight.data = fresh.weight.data.contiguous(memory_format=torch.channels_last)
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (saved, fresh))
    one.state[saved.weight] = {"fast": saved.weight.data, "head": saved.weight.data[:2]}
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert same(fresh.weight, saved.weight)
    assert same(other.state[fresh.weight], one.state[saved.weight])


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 2), slice(1, 3)])
def test_a_weight_is_not_written_over_by_state_that_lies_in_it_here_and_did_not_when_it_was_saved(
    rows: slice,
) -> None:
    saved, fresh = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (saved, fresh))
    slow = torch.zeros(rows.stop - rows.start, 3)
    one.state[saved.weight]["slow"] = slow
    other.state[fresh.weight]["slow"] = fresh.weight.data[rows]
    transfer({"model": saved, "optimizer": one}, {"model": fresh, "optimizer": other})
    assert same(fresh.weight, saved.weight)
    assert same(other.state[fresh.weight]["slow"], slow)


def test_state_that_is_no_dict_is_refused() -> None:
    module = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = [1]
    components = make_components({"model": module, "optimizer": optimizer}, world_size=1)
    with pytest.raises(StateTypeError, match=r"optimizer\.state\.weight is a list"):
        capture_state(components)


def test_a_name_with_a_lone_surrogate_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([("\ud800", parameter)], lr=0.1)
    with pytest.raises(StateTypeError, match=r"'\\ud800' has lone surrogates"):
        capture_state(make_components({"optimizer": optimizer}, world_size=1))


@pytest.mark.parametrize(
    ("key", "host", "told", "on_host"),
    [
        ("step", None, None, True),  # of a checkpoint of a CPU, or of before
        ("step", [], None, False),  # an optimizer of one's own that keeps it on the device
        ("step", ["step"], None, True),
        ("step", [], False, True),  # one of torch's, whose group says where
        ("step", ["step"], True, False),
        ("exp_avg", None, None, False),
        ("exp_avg", ["exp_avg"], False, True),
        ("exp_avg", ["step"], False, False),
    ],
)
def test_new_state_goes_where_it_lay_and_steps_where_the_group_says(
    key: str, host: list[str] | None, told: bool | None, on_host: bool
) -> None:
    tensor = torch.empty(2, device="meta")
    steps = {} if told is None else {id(tensor): told}
    restoring = optimizer_state._Restoring(
        stored=Any,  # pyright: ignore[reportArgumentType]
        maker=Any,  # pyright: ignore[reportArgumentType]
        known=RangeMap(()),
        steps_on_device=steps,
    )
    parameter = optimizer_state._Parameter("w", tensor, 1, "model.w")
    assert restoring.device(parameter, key, host).type == ("cpu" if on_host else "meta")


@pytest.mark.parametrize("saved", [False, True])
def test_the_step_of_new_state_goes_where_the_restored_group_says(
    monkeypatch: pytest.MonkeyPatch, *, saved: bool
) -> None:
    """The script may have made it with another option, which the checkpoint's takes the place of."""
    seen = list[set[bool]]()

    class Seen(optimizer_state._Restoring):
        def device(self, parameter: Any, key: str, host: Any) -> torch.device:
            seen.append(set(self.steps_on_device.values()))
            return super().device(parameter, key, host)

    monkeypatch.setattr(optimizer_state, "_Restoring", Seen)
    trained, anew = model(), model()
    optimizer = torch.optim.AdamW(trained.parameters())
    train(trained, optimizer, 1)
    other = torch.optim.AdamW(anew.parameters(), capturable=not saved)
    optimizer.param_groups[0]["capturable"] = saved
    transfer({"model": trained, "optimizer": optimizer}, {"model": anew, "optimizer": other})
    assert other.param_groups[0]["capturable"] is saved
    assert seen
    assert all(each == {saved} for each in seen)


def test_a_step_that_lies_elsewhere_than_its_group_says_is_made_anew() -> None:
    weight = torch.empty(2, device="meta")
    parameter = optimizer_state._Parameter("w", weight, 1, "model.w")
    for with_parameter, where in ((True, "cpu"), (False, "meta")):
        restoring = optimizer_state._Restoring(
            stored=Any,  # pyright: ignore[reportArgumentType]
            maker=Any,  # pyright: ignore[reportArgumentType]
            known=RangeMap(()),
            steps_on_device={id(weight): with_parameter},
        )
        assert not restoring.is_in_place(parameter, "step", torch.empty((), device=where))
        assert restoring.is_in_place(parameter, "exp_avg", torch.empty((), device=where))
        right = "meta" if with_parameter else "cpu"
        assert restoring.is_in_place(parameter, "step", torch.empty((), device=right))
