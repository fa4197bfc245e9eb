"""A capture that trusts what the last one walked equals one that trusts nothing, whatever happened in between."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from everstep.core.errors import EverstepError, UsageError
from everstep.hook import tensor_watch
from everstep.hook.capture import AT_ONCE_BYTES_MAX, StateCapture, capture_state
from everstep.hook.component import make_components
from everstep.hook.state_protocol import Laziness
from everstep.hook.state_testing import bits
from everstep.hook.tensor_watch import TensorWatch


class Extra(nn.Module):
    """Extra state with a number and a tensor, made anew at each call; buffers that nothing reads."""

    wide: torch.Tensor
    long: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.register_buffer("wide", torch.arange(3.0))
        self.register_buffer("long", torch.arange(4.0))

    def get_extra_state(self) -> dict[str, object]:
        return {"count": self.count, "mean": torch.full((2,), float(self.count))}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Shadow:
    """An object that holds tensors, perhaps the model's own."""

    def __init__(self) -> None:
        self.tensors: dict[str, object] = {"own": torch.zeros(3)}

    def state_dict(self) -> dict[str, object]:
        return self.tensors

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.tensors = state


class World:
    """A model, an optimizer and an object, and all that training scripts do to them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.a, self.b, self.norm, self.extra = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
            Extra(),
        )
        self.words = nn.Embedding(3, 2)
        self.model = nn.Sequential(self.a, self.norm, self.b, self.extra, self.words)
        named = [*self.a.named_parameters("0"), *self.b.named_parameters("2")]
        self.optimizer = torch.optim.AdamW([{"params": named}], lr=0.1)
        self.shadow = Shadow()
        self.components = make_components(
            {"model": self.model, "optimizer": self.optimizer, "shadow": self.shadow}, world_size=1
        )

    @property
    def state(self) -> dict[torch.Tensor, dict[object, object]]:
        return cast("dict[torch.Tensor, dict[object, object]]", self.optimizer.state)

    def own(self) -> dict[object, object]:
        """The optimizer's state of one parameter."""
        return self.state.setdefault(self.optimizer.param_groups[0]["params"][0], {})

    # -- what may happen between two boundaries

    def train(self) -> None:
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.norm(torch.randn(4, 3))
        self.extra.count += 1

    def freeze(self) -> None:
        self.a.requires_grad_(False)

    def unfreeze(self) -> None:
        self.a.requires_grad_(True)

    def replace_parameter(self) -> None:
        self.b.bias = nn.Parameter(torch.randn(3))

    def set_data(self) -> None:
        self.b.weight.data = self.b.weight.data.clone()

    def set_data_to_a_view(self) -> None:
        self.b.weight.data = self.b.weight.data.t()

    def set_data_to_another_shape(self) -> None:
        self.extra.wide.data = self.extra.wide.data[None]

    def set_data_of_another_dtype(self) -> None:
        self.extra.wide.data = self.extra.wide.data.to(torch.float64)

    def resize(self) -> None:
        self.extra.long.resize_(2)

    def tie(self) -> None:
        self.b.weight = self.a.weight

    def add_module(self) -> None:
        self.model.append(nn.Linear(2, 2))

    def remove_module(self) -> None:
        del self.model[len(self.model) - 1]

    def move_between_modules(self) -> None:
        if "late" in self.a._parameters:
            self.b._parameters["late"] = self.a._parameters.pop("late")
        else:
            self.b._parameters.pop("late", None)
            self.a.register_parameter("late", nn.Parameter(torch.zeros(1)))

    def reorder(self) -> None:
        self.a._parameters["weight"] = self.a._parameters.pop("weight")

    def exchange_registry(self) -> None:
        vars(self.norm)["_buffers"] = dict(reversed(self.norm._buffers.items()))

    def exchange_registry_for_an_equal_one(self) -> None:
        vars(self.a)["_buffers"] = dict(self.a._buffers)

    def bound_norm(self) -> None:
        self.words.max_norm = 1.0 if self.words.max_norm is None else None

    def add_buffer_of_columns(self) -> None:
        self.extra.register_buffer("columns", self.a.weight.detach()[:, ::2])

    def hold_columns(self) -> None:
        self.shadow.tensors["columns"] = self.b.weight.detach()[:, ::2]

    def add_buffer(self) -> None:
        self.a._buffers["more"] = torch.arange(4.0)

    def drop_buffer(self) -> None:
        self.a._buffers["more"] = None

    def expanded_buffer(self) -> None:
        self.a._buffers["more"] = torch.arange(6.0)[::2]

    def sparse_buffer(self) -> None:
        self.a._buffers["more"] = torch.eye(3).to_sparse()

    def buffer_that_nobody_saves(self) -> None:
        self.norm._non_persistent_buffers_set ^= {"running_mean"}

    def parametrize(self) -> None:
        if not hasattr(self.b, "parametrizations"):
            parametrizations.weight_norm(self.b)

    def buffer_on_meta(self) -> None:
        self.a._buffers["more"] = torch.zeros(2, device="meta")

    def write_expanded(self) -> None:
        found = self.a._buffers.get("more")
        if found is not None and found.layout is torch.strided:
            found += 1

    def learning_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def tensor_learning_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)

    def add_group(self) -> None:
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        new = [(name, found) for name, found in self.model.named_parameters() if id(found) not in known]
        if new:
            self.optimizer.add_param_group({"params": new[:1]})

    def remove_group(self) -> None:
        if len(self.optimizer.param_groups) > 1:
            self.optimizer.param_groups.pop()

    def rename_parameters(self) -> None:
        self.optimizer.param_groups[0]["param_names"] = [f"p{number}" for number in range(4)]

    def clear_state(self) -> None:
        self.optimizer.state.clear()

    def drop_state(self) -> None:
        if self.state:
            self.state.popitem()

    def reload_optimizer(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def replace_state(self) -> None:
        self.own()["exp_avg"] = torch.ones(3, 3)

    def number_in_state(self) -> None:
        self.own()["count"] = cast(int, self.own().get("count", 0)) + 1

    def lazily_made_state(self) -> None:
        self.own()["momentum"] = None if "momentum" not in self.own() else torch.zeros(2)

    def list_in_state(self) -> None:
        cast("list[torch.Tensor]", self.own().setdefault("old", [])).append(torch.ones(2))

    def shared_state(self) -> None:
        cast("dict[object, object]", self.optimizer.state)["calls"] = len(self.state)

    def exchange_state(self) -> None:
        self.state[self.optimizer.param_groups[0]["params"][0]] = dict(self.own())

    def hold_a_weight(self) -> None:
        self.shadow.tensors["weight"] = self.a.weight

    def hold_a_part(self) -> None:
        self.shadow.tensors["part"] = self.b.weight.detach()[1]

    def let_go(self) -> None:
        self.shadow.tensors = {"own": torch.ones(3), "text": "x"}

    def become_unsaveable(self) -> None:
        self.shadow.tensors["odd"] = print


EVENTS = [
    cast("Callable[[World], None]", found)
    for name, found in vars(World).items()
    if callable(found) and not name.startswith("_") and name != "own"
]


def happen(world: World, event: Callable[[World], None]) -> None:
    """What torch refuses after other events leaves whatever it had done by then: an event, too."""
    with contextlib.suppress(RuntimeError, KeyError, IndexError, AttributeError, TypeError, ValueError):
        event(world)


def facts(capture: StateCapture) -> list[object]:
    """All that a capture says; the bytes of what is eager, which may be a copy."""
    leaves = [
        (leaf.spec, leaf.laziness, leaf.tensor.dtype, leaf.tensor.stride(), bits(leaf.tensor))
        for leaf in capture.leaves
    ]
    assert capture.specs == tuple(leaf.spec for leaf in capture.leaves)
    assert capture.at_once == tuple(
        leaf.laziness is Laziness.EAGER or leaf.spec.size_bytes <= AT_ONCE_BYTES_MAX
        for leaf in capture.leaves
    )
    assert capture.addresses == tuple(leaf.tensor.data_ptr() for leaf in capture.leaves)
    assert capture.devices == (-1,) * len(leaves)
    lazy = zip(capture.lazy.names, capture.lazy.addresses, capture.lazy.noted.versions, strict=True)
    return [leaves, capture.aliases, capture.values, sorted(lazy)]


def outcome(
    world: World, previous: StateCapture | None
) -> tuple[StateCapture | None, list[object] | tuple[type, str]]:
    try:
        capture = capture_state(world.components, previous=previous)
    except EverstepError as error:
        return previous, (type(error), error.message)
    return capture, facts(capture)


@given(st.lists(st.lists(st.sampled_from(EVENTS), max_size=3), max_size=8))
@example([[World.hold_columns], [World.let_go]])
def test_a_cached_capture_equals_a_fresh_one(boundaries: Sequence[Sequence[Callable[[World], None]]]) -> None:
    world = World()
    last: StateCapture | None = None
    for events in ((World.train,), *boundaries, ()):
        for event in events:
            happen(world, event)
        last, cached = outcome(world, last)
        _, fresh = outcome(world, None)
        assert cached == fresh


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_after_every_change_by_itself_too(event: Callable[[World], None]) -> None:
    """The search above draws few of the events together; here each is followed by two boundaries."""
    world = World()
    world.train()
    last, _ = outcome(world, None)
    for _ in range(2):
        happen(world, event)
        for _ in range(2):
            last, cached = outcome(world, last)
            assert cached == outcome(world, None)[1]


class Joining(torch.optim.SGD):
    """Its state is joined of others', a new dict at each look."""

    @property
    def state(self) -> dict[object, object]:
        return dict(self._joined)

    @state.setter
    def state(self, joined: dict[object, object]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._joined = joined


def test_a_state_that_is_a_new_dict_at_each_look_is_not_walked_again_until_it_holds_something_else() -> None:
    model = nn.Linear(2, 2)
    optimizer = Joining(model.parameters(), lr=0.1)
    optimizer._joined[model.weight] = {"momentum_buffer": torch.zeros(2, 2)}
    components = make_components({"model": model, "optimizer": optimizer}, world_size=1)
    first = capture_state(components)
    again = capture_state(components, previous=first)
    assert not again.walked
    optimizer._joined[model.bias] = {"momentum_buffer": torch.zeros(2)}
    later = capture_state(components, previous=again)
    assert later.walked
    assert len(later.leaves) == len(first.leaves) + 1


class TestWhenNothingIsWalkedAgain:
    @pytest.mark.parametrize(
        "event",
        [World.train, World.learning_rate, World.tensor_learning_rate, World.let_go, World.number_in_state],
    )
    def test_what_training_does_at_each_step_needs_no_walk(self, event: Callable[[World], None]) -> None:
        world = World()
        world.train()
        event(world)
        first = capture_state(world.components)
        event(world)
        second = capture_state(world.components, previous=first)
        assert first.walked
        assert not second.walked
        assert second.walk is first.walk

    def test_a_weight_that_an_object_holds_as_well_is_walked_each_time(self) -> None:
        world = World()
        world.hold_a_weight()
        first = capture_state(world.components)
        assert capture_state(world.components, previous=first).walked

    def test_a_view_with_holes_that_an_object_holds_lets_the_weight_not_wait(self) -> None:
        world = World()
        world.shadow.tensors["columns"] = world.a.weight.detach()[:, ::2]
        last = None
        for _ in range(3):
            last = capture_state(world.components, previous=last)
            lazinesses = {leaf.spec.name: leaf.laziness for leaf in last.leaves}
            assert lazinesses["model.0.weight"] is Laziness.EAGER
            assert lazinesses["model.2.weight"] is Laziness.OWNED

    def test_a_view_with_holes_of_a_weight_is_read_again_without_a_walk(self) -> None:
        world = World()
        columns = world.a.weight.detach()[:, ::2]
        world.a.register_buffer("columns", columns)
        first = capture_state(world.components)
        world.shadow.tensors["columns"] = columns.t()
        columns.fill_(7)
        second = capture_state(world.components, previous=first)
        assert facts(second) == facts(capture_state(world.components))

    def test_copies_of_one_view_in_a_module_and_an_object_need_no_walk(self) -> None:
        world = World()
        columns = torch.zeros(3, 4)[:, ::2]
        world.a.register_buffer("columns", columns)
        world.shadow.tensors["columns"] = columns
        first = capture_state(world.components)
        assert not capture_state(world.components, previous=first).walked

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_memory_that_counts_its_versions_twice_is_compared_by_each_and_one_tensor_once(
        self, which: int
    ) -> None:
        layers = [nn.Linear(32, 32, bias=False) for _ in range(4)]
        layers[1].weight.data = layers[0].weight.data
        layers[2].weight.data = layers[0].weight.data[8:24]
        layers[3].weight = layers[0].weight
        components = make_components({"model": nn.Sequential(*layers).requires_grad_(False)}, world_size=1)
        first = capture_state(components)
        second = capture_state(components, previous=first)
        assert (first.walked, second.walked) == (True, False)
        assert [leaf.spec.name for leaf in second.leaves] == ["model.0.weight"]
        for capture in (first, second):
            assert capture.lazy.names == ["model.0.weight", "model.1.weight", "model.2.weight"]
            capture.lazy.check()
        layers[which].weight.zero_()
        for capture in (first, second):
            with pytest.raises(UsageError, match=rf"model\.{which}\.weight changed"):
                capture.lazy.check()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
    def test_a_scripted_module_is_walked_each_time(self) -> None:
        scripted = cast("Callable[[nn.Module], nn.Module]", torch.jit.script)(nn.Linear(2, 2))
        components = make_components({"model": scripted}, world_size=1)
        first = capture_state(components)
        assert facts(capture_state(components, previous=first)) == facts(first)


class TestTensorWatch:
    @pytest.fixture(params=["facts", "guards", "attributes"])
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """All ways to compare: compiled code, torch's guards, and attributes for a torch without these."""
        if request.param == "facts":
            if tensor_watch.facts is None and shutil.which("gcc") is None:
                pytest.skip("needs what is compiled where gcc is")
            if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
                pytest.skip("needs a torch with DLPack's C functions, as 2.13")
            assert tensor_watch._by_facts((torch.zeros(1),), 1) is not None
        else:
            monkeypatch.setattr(tensor_watch, "facts", None)
        if request.param == "attributes":
            monkeypatch.setattr(tensor_watch, "_by_guard", lambda tensors: None)
        return request.param

    @pytest.mark.usefixtures("way")
    @pytest.mark.parametrize(
        "change",
        [
            lambda tensor: tensor.resize_(2),
            lambda tensor: tensor.t_(),
            lambda tensor: tensor.requires_grad_(True),
            lambda tensor: setattr(tensor, "data", tensor.data.clone()),
            lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
            lambda tensor: setattr(tensor, "data", tensor.data.view(3, 2)),
        ],
        ids=["size", "strides", "gradient", "address", "dtype", "shape"],
    )
    @pytest.mark.parametrize("grad", [True, False])
    def test_it_notices(self, change: Callable[[torch.Tensor], object], *, grad: bool) -> None:
        tensor = torch.zeros(2, 3)
        with torch.set_grad_enabled(grad):
            watch = TensorWatch([torch.zeros(()), tensor, tensor], graded=[tensor])
            assert watch.look() is not None
            tensor.add_(1)
            assert watch.look() is not None
            change(tensor)
            assert watch.look() is None

    @pytest.mark.usefixtures("way")
    @pytest.mark.parametrize("count", [1, 3])
    def test_it_notices_conjugates_and_negatives_of_the_same_memory(self, count: int) -> None:
        whole = torch.zeros(count, dtype=torch.complex64)
        half, other = whole.imag[:], whole[:]
        watch = TensorWatch([half, other, torch.zeros(2)])
        assert watch.look() is not None
        half.data = whole.conj().imag
        assert half.is_neg()
        assert watch.look() is None
        watch = TensorWatch([whole])
        address = whole.data_ptr()
        whole.data = other.conj()
        assert (whole.is_conj(), whole.data_ptr()) == (True, address)
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    def test_it_notices_a_negative_of_one_number(self) -> None:
        number = torch.tensor([1 + 2j])
        half = number.imag.unsqueeze(-1)
        watch = TensorWatch([half])
        assert watch.look() is not None
        half.data = number.conj().imag.unsqueeze(-1)
        assert half.item() == -2.0
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    @pytest.mark.parametrize(("dtype", "narrow"), [(torch.int8, "int4"), (torch.uint8, "uint2")])
    def test_it_notices_fewer_bits(self, dtype: torch.dtype, narrow: str) -> None:
        tensor = torch.zeros(4, dtype=dtype)
        watch = TensorWatch([tensor])
        assert watch.look() is not None
        tensor.data = tensor.data.view(getattr(torch, narrow))
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    def test_what_cannot_be_asked_any_more_has_changed(self) -> None:
        tensor = nn.Parameter(torch.zeros(2))
        watch = TensorWatch([], [tensor])
        assert watch.look() is not None
        cast("Any", tensor).__class__ = nn.UninitializedParameter
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    def test_the_memory_is_torchs_word_and_no_other(self) -> None:
        tensor = torch.zeros(2)
        cast("Any", tensor).untyped_storage = lambda: None
        found = TensorWatch([], [tensor]).look()
        assert found is not None
        assert [each.data_ptr() for each in found.storages] == [tensor.data_ptr()]

    @pytest.mark.usefixtures("way")
    def test_it_notices_another_type(self) -> None:
        one, other = torch.zeros(2), nn.Parameter(torch.zeros(2), requires_grad=False)
        watch = TensorWatch([one])
        torch.utils.swap_tensors(one, other)
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16])
    @pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (2, 3, 2, 2, 1, 2)])
    def test_every_dtype_and_shape_stays_as_it_is(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.zeros(shape).to(dtype)
        watch = TensorWatch([tensor, torch.ones(3)])
        assert watch.look() is not None
        tensor.zero_()
        assert watch.look() is not None
        tensor.data = torch.zeros((2, *shape)).to(dtype)
        assert watch.look() is None

    def test_a_tensor_without_an_address_is_a_change(self) -> None:
        tensor = torch.zeros(2)
        watch = TensorWatch([tensor])
        with torch.no_grad():
            tensor.set_(torch.zeros(2).untyped_storage())
            tensor.untyped_storage().resize_(0)
        assert watch.look() is None

    @pytest.mark.usefixtures("way")
    def test_it_notes_the_lazy_ones_in_their_order(self) -> None:
        def one_of(number: int) -> torch.Tensor:
            tensor = torch.zeros((1,) * (number % 7))
            return nn.Parameter(tensor, requires_grad=False) if number % 3 == 0 else tensor

        tensors = [one_of(number) for number in range(tensor_watch.CHUNK + 5)]
        lazy = [tensors[-1], *tensors[1:]][: tensor_watch.CHUNK + 2]
        for count, tensor in enumerate(lazy):
            for _ in range(count % 5):
                tensor.add_(1)
        found = TensorWatch(tensors, lazy).look()
        assert found is not None
        assert found.versions == [count % 5 for count in range(len(lazy))]
        assert [each.data_ptr() for each in found.storages] == [each.data_ptr() for each in lazy]

    @pytest.mark.usefixtures("way")
    def test_it_notes_what_was_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            made = torch.zeros(2)
        counted = torch.zeros(2).add_(1)
        found = TensorWatch([], [counted, made]).look()
        assert found is not None
        assert found.versions == [1, 0]
        assert [each.data_ptr() for each in found.storages] == [counted.data_ptr(), made.data_ptr()]

    @pytest.mark.usefixtures("way")
    def test_what_it_notes_keeps_the_memory(self) -> None:
        """Of a tensor that gets another memory, the copy that is under way still reads the one that it had."""
        tensor = torch.full((1000,), 7.0)
        found = TensorWatch([], [tensor]).look()
        assert found is not None
        address, tensor.data = tensor.data_ptr(), torch.zeros(1000)
        others = [torch.zeros(1000) for _ in range(16)]
        assert address not in [each.data_ptr() for each in others]
        (kept,) = found.storages
        assert torch.tensor([]).set_(kept).eq(7.0).sum() == 1000

    def test_torch_still_has_the_comparison_that_makes_it_fast(self) -> None:
        assert tensor_watch._by_guard((torch.zeros(2),)) is not None
