"""Tensors that share memory where a run is restored, and did not where it was saved: each gets its own bytes."""

import mmap
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.core.errors import StateMismatchError, StateTypeError
from everstep.hook.component import make_components
from everstep.hook.state_testing import bits, store, transfer


class Averaging(nn.Module):
    """Begins with a view of its weight, which the first forward pass replaces."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 4)
        if first:
            self.register_buffer("average", weight.detach())
        self.inner = nn.Linear(4, 4, bias=False)
        self.inner.weight = nn.Parameter(weight)
        if not first:
            self.register_buffer("average", weight.detach())

    def train_on(self) -> None:
        self.average = 0.5 * self.get_buffer("average") + 1.0


class Rows(nn.Module):
    """Two buffers that begin as one row."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(2, 3)
        self.register_buffer("one", table[0])
        self.register_buffer("two", table[0])

    def train_on(self) -> None:
        self.one, self.two = self.get_buffer("one") + 1.0, self.get_buffer("two") + 2.0


class Begun(nn.Module):
    """Two buffers, and a weight's copy that begins as the weight itself; each goes its own way."""

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(3)
        for name in ("one", "two", "three", "four"):
            self.register_buffer(name, zeros)
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("best", self.weight)

    def train_on(self) -> None:
        self.one = self.get_buffer("one") + 1.0
        self.three = self.four = self.get_buffer("three") + 3.0
        self.best = self.weight.detach() + 1.0


class Expanded(nn.Module):
    """One number for all, until there is one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(6))
        self.register_buffer("windows", torch.arange(9.0).unfold(0, 4, 1))

    def train_on(self) -> None:
        self.scale = self.get_buffer("scale") + torch.arange(6.0)
        self.windows = self.get_buffer("windows") * torch.rand(6, 4)


class Striped(nn.Module):
    """A buffer that stays a view of the weight, with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("even", self.weight.detach()[:, ::2])

    def train_on(self) -> None:
        with torch.no_grad():
            self.weight += 1.0


@pytest.mark.parametrize(
    "make",
    [lambda: Averaging(first=True), lambda: Averaging(first=False), Rows, Begun, Expanded, Striped],
    ids=["view, first", "view, last", "rows", "begun as one", "expanded", "striped"],
)
def test_each_gets_its_own_bytes(make: type[Rows]) -> None:
    torch.manual_seed(1)
    saved, fresh = make(), make()
    saved.train_on()
    transfer({"model": saved}, {"model": fresh})
    expected = saved.state_dict(keep_vars=True)
    for name, tensor in fresh.state_dict(keep_vars=True).items():
        assert bits(tensor) == bits(expected[name]), name


def test_what_shares_memory_on_both_sides_does_so_afterwards() -> None:
    saved, fresh = Striped(), Striped()
    saved.train_on()
    transfer({"model": saved}, {"model": fresh})
    fresh.train_on()
    assert torch.equal(fresh.get_buffer("even"), fresh.weight[:, ::2])


def test_those_that_are_one_again_go_on_together() -> None:
    saved, fresh = Begun(), Begun()
    saved.train_on()
    transfer({"model": saved}, {"model": fresh})
    fresh.get_buffer("three").add_(1.0)
    assert torch.equal(fresh.get_buffer("four"), torch.full((3,), 4.0))
    assert torch.equal(fresh.get_buffer("two"), torch.zeros(3))
    assert fresh.get_buffer("best") is not fresh.weight


def pair(*, tied: bool) -> nn.Sequential:
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    if tied:
        other.weight.data = one.weight.data
    return nn.Sequential(one, other)


def test_weights_that_share_memory_here_alone_are_refused() -> None:
    with pytest.raises(
        StateMismatchError, match=re.escape("0.weight shares memory with another tensor here")
    ):
        transfer({"model": pair(tied=False)}, {"model": pair(tied=True)})
    saved, fresh = pair(tied=True), pair(tied=True)
    transfer({"model": saved}, {"model": fresh})
    assert bits(fresh.get_parameter("1.weight")) == bits(saved.get_parameter("0.weight"))


def modules(one: torch.Tensor, two: torch.Tensor) -> dict[str, nn.Module]:
    weights = {"one": nn.Parameter(one), "two": nn.Parameter(two)}
    return {name: nn.ParameterDict({"w": weight}) for name, weight in weights.items()}


@pytest.mark.parametrize("part", [slice(0, 4), slice(2, 4)])
def test_weights_of_two_modules_that_share_memory_here_alone_are_refused(part: slice) -> None:
    """Two parameters over one memory, or a part of it: a teacher that is the student's own until it is cloned."""
    memory, together = torch.zeros(4), torch.randn(4)
    apart, fresh = modules(torch.randn(4), torch.randn(4)[part].clone()), modules(memory, memory[part])
    words = r"'two': one\.w and two\.w share memory here, and did not when they were saved: build them apart"
    with pytest.raises(StateMismatchError, match=words):
        transfer(apart, fresh)
    assert not memory.any()
    transfer(modules(together, together[part]), fresh)
    assert torch.equal(memory, together)


def test_weights_of_two_modules_in_one_memory_that_is_read_only_get_their_own(tmp_path: Path) -> None:
    file = tmp_path / "table"
    file.write_bytes(bytes(16))
    saved = modules(torch.randn(4), torch.randn(4))
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        warnings.catch_warnings(action="ignore"),  # that it is not writable
    ):
        fresh = modules(*(torch.frombuffer(mapped, dtype=torch.float32) for _ in range(2)))
        transfer(saved, fresh)
    for name, module in saved.items():
        assert bits(fresh[name].get_parameter("w")) == bits(module.get_parameter("w"))


def test_a_later_module_that_has_no_memory_is_refused_by_its_own_name() -> None:
    saved = {name: nn.Sequential(nn.Linear(2, 2)) for name in ("one", "two")}
    for second in (nn.LazyLinear(2), nn.Linear(2, 2, device="meta")):
        with pytest.raises(StateTypeError, match=r"two\.0\.weight"):
            transfer(saved, {"one": nn.Sequential(nn.Linear(2, 2)), "two": nn.Sequential(second)})


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("b", tensor)
    return module


def in_another_module_too(first: str, second: str) -> dict[str, nn.Module]:
    """The tensor of one attached module in another one, as one object or by its memory."""
    weights, memory = nn.ParameterDict({"b": nn.Parameter(torch.zeros(2))}), torch.zeros(2)
    kinds = {
        "weight": weights,
        "weight's memory": with_buffer(weights["b"].detach()),
        "buffer": with_buffer(memory),
        "same buffer": with_buffer(memory),
        "buffer's memory": with_buffer(memory.view(2)),
    }
    return {"one": kinds[first], "two": kinds[second]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("buffer", "same buffer"),
        ("buffer", "buffer's memory"),
        ("weight", "weight's memory"),
        ("weight's memory", "weight"),
    ],
)
def test_a_buffer_that_shares_memory_with_another_module_here_alone_gets_its_own(
    first: str, second: str
) -> None:
    saved, fresh = in_another_module_too(first, second), in_another_module_too(first, second)
    stays = {key: tensor for key, tensor in states(fresh).items() if isinstance(tensor, nn.Parameter)}
    for number, name in enumerate(saved):
        kind = in_another_module_too(first, second)[name]
        saved[name] = kind
        with torch.no_grad():
            kind.state_dict()["b"].fill_(number + 1)
    transfer(saved, fresh)
    found = states(fresh)
    assert {key: bits(tensor) for key, tensor in found.items()} == {
        key: bits(tensor) for key, tensor in states(saved).items()
    }
    assert all(found[key] is tensor for key, tensor in stays.items())
    with torch.no_grad():
        found["one.b"].fill_(7.0)
    assert found["two.b"].tolist() == [2.0, 2.0]


def states(of: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, module in of.items()
        for key, tensor in module.state_dict(keep_vars=True).items()
    }


def statistics() -> nn.Module:
    made = nn.BatchNorm1d(3, affine=False)
    made.get_buffer("running_mean").normal_()
    return made


def test_buffers_of_one_part_in_two_modules_or_places_are_refused_where_they_were_apart() -> None:
    """A replaced buffer would be the other place's, too."""
    shared = nn.Sequential(statistics())
    words = r"'two': one\.0\.running_mean and two\.0\.running_mean share memory here"
    with pytest.raises(StateMismatchError, match=words):
        transfer(
            {"one": nn.Sequential(statistics()), "two": nn.Sequential(statistics())},
            {"one": shared, "two": nn.Sequential(shared[0])},
        )
    words = r"0\.running_mean and 1\.running_mean are one tensor here \(tied\)"
    with pytest.raises(StateMismatchError, match=words):
        transfer(
            {"model": nn.Sequential(statistics(), statistics())},
            {"model": nn.Sequential(shared[0], shared[0])},
        )


@pytest.mark.parametrize("table", [torch.arange(3.0), torch.arange(3.0, dtype=torch.float64)], ids=str)
def test_constants_of_one_part_in_two_modules_or_places_may_have_been_apart(table: torch.Tensor) -> None:
    """Two tables of positions that became one in the script: they have the same bytes."""

    def apart() -> nn.Sequential:
        return nn.Sequential(with_buffer(table.clone()), with_buffer(table.clone()))

    shared = with_buffer(torch.zeros(3))
    transfer({"model": apart()}, {"model": nn.Sequential(shared, shared)})
    assert bits(shared.get_buffer("b")) == bits(table)
    shared = with_buffer(torch.zeros(3))
    transfer(
        {"one": apart(), "two": apart()},
        {"one": nn.Sequential(shared, shared), "two": nn.Sequential(shared, shared)},
    )
    assert bits(shared.get_buffer("b")) == bits(table)


def test_an_empty_tensor_of_a_shared_module_is_no_tie() -> None:
    def twice() -> nn.ModuleDict:
        shared = nn.Linear(2, 2)
        shared.register_buffer("cache", torch.empty(0))
        return nn.ModuleDict({"a": shared, "b": shared})

    saved, fresh = twice(), twice()
    transfer({"model": saved}, {"model": fresh})
    assert fresh["a"] is fresh["b"]
    assert bits(fresh.get_parameter("b.weight")) == bits(saved.get_parameter("a.weight"))


@pytest.mark.parametrize("left", [0, 8])
def test_a_weight_whose_memory_was_taken_away_is_refused(left: int) -> None:
    model = nn.Linear(6, 6)
    model.weight.untyped_storage().resize_(left)
    with pytest.raises(
        StateTypeError, match=f"model.weight needs 144 bytes of memory and its storage has {left}"
    ):
        store(make_components({"model": model}, world_size=1))


def test_a_dtype_that_the_format_lacks_is_refused_by_name() -> None:
    uint4 = vars(torch)["uint4"]  # which torch's stub lacks
    model = nn.Module()
    model.register_buffer("codes", torch.empty(4, dtype=uint4))
    with pytest.raises(StateTypeError, match=r"model\.codes: dtype 'uint4'"):
        store(make_components({"model": model}, world_size=1))
