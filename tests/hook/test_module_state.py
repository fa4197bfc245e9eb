"""Modules: every parameter and buffer under its own name, whatever wraps or ties them, bit for bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.ao import quantization
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel

from everstep.core.errors import StateMismatchError, StateTypeError
from everstep.hook.capture import StateCapture, capture_state
from everstep.hook.component import Laziness, make_components
from everstep.hook.state_testing import bits, store, transfer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def all_bits(module: nn.Module) -> dict[str, bytes]:
    """Parameters and all buffers of a plain module by the names that torch gives them."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: bits(tensor) for name, tensor in named}


def capture(**objects: object) -> StateCapture:
    return capture_state(make_components(objects, world_size=4))


def lazinesses(captured: StateCapture) -> dict[str, Laziness]:
    return {leaf.spec.name: leaf.laziness for leaf in captured.leaves}


@pytest.mark.parametrize("device_count", [1, 2, 3])
def test_a_module_comes_back_bit_for_bit(device_count: int) -> None:
    saved, fresh = small(), small()
    saved(torch.randn(5, 3))
    addresses = [parameter.data_ptr() for parameter in fresh.parameters()]
    transfer({"model": saved}, {"model": fresh}, device_count=device_count)
    assert all_bits(fresh) == all_bits(saved)
    assert [parameter.data_ptr() for parameter in fresh.parameters()] == addresses
    assert fresh[1].num_batches_tracked == 1


class Kinds(nn.Module):
    """One tensor of each kind that a module may hold."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(float(fill)))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.bf16 = nn.Parameter(torch.full((3,), fill, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2, 2), float(fill)), requires_grad=False)
        self.image = nn.Parameter(torch.full((2, 3, 4, 4), float(fill)).to(memory_format=torch.channels_last))
        self.register_buffer("complex", torch.full((2,), complex(fill, -fill)))
        self.register_buffer("fp8", torch.full((4,), fill).to(torch.float8_e4m3fn))
        self.register_buffer("fp8_other", torch.full((4,), fill).to(torch.float8_e5m2fnuz))
        self.register_buffer("flag", torch.tensor(fill > 1))
        self.register_buffer("wide", torch.tensor([fill], dtype=torch.uint64))
        self.register_buffer("cache", torch.full((2,), float(fill)), persistent=False)
        self.register_buffer("mask", torch.full((1, 2), float(fill)).expand(3, 2))
        self.register_buffer("conjugate", torch.full((2,), complex(fill, fill)).conj())
        self.register_buffer("none", None)


def test_every_kind_of_tensor_comes_back() -> None:
    saved, fresh = Kinds(2), Kinds(1)
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.image.is_contiguous(memory_format=torch.channels_last)


def test_into_other_strides() -> None:
    saved, fresh = Kinds(2), Kinds(1)
    with torch.no_grad():
        saved.image.copy_(torch.randn(2, 3, 4, 4))
    fresh.image.data = fresh.image.data.contiguous()
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.image.is_contiguous()


def test_how_lazy_each_kind_is() -> None:
    model = Kinds(1)
    optimizer = torch.optim.SGD([model.scalar, model.bf16])
    found = lazinesses(capture(model=model, optimizer=optimizer))
    expected = {
        "model.scalar": Laziness.OWNED,
        "model.bf16": Laziness.OWNED,
        "model.frozen": Laziness.FROZEN,
        "model.image": Laziness.EAGER,
        "model.flag": Laziness.EAGER,
        "model.cache": Laziness.EAGER,
        "model.mask": Laziness.EAGER,
    }
    assert {name: found[name] for name in expected} == expected


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.shared = self.head
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    saved, fresh = Tied(tie=True), Tied(tie=True)
    captured = capture(model=saved)
    assert [leaf.spec.name for leaf in captured.leaves] == ["model.embed.weight"]
    assert {alias.name for alias in captured.aliases} == {"model.head.weight", "model.shared.weight"}
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.head.weight is fresh.embed.weight


def test_tied_weights_into_a_module_without_ties(caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = Tied(tie=True), Tied(tie=False)
    transfer({"model": saved}, {"model": fresh})
    assert [text.partition(":")[0] for text in caplog.messages] == [
        f"weights_untied module=model first=embed.weight second={second}.weight"
        for second in ("head", "shared")
    ]
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.head.weight is not fresh.embed.weight


def test_weights_that_were_apart_are_not_restored_into_tied_ones() -> None:
    saved, fresh = Tied(tie=False), Tied(tie=True)
    before = all_bits(fresh)
    with pytest.raises(
        StateMismatchError, match=r"embed.weight and \S+ are one tensor here \(tied\), and two in"
    ):
        transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == before


class Flat(nn.Module):
    """Weights that are views of one buffer, as cuDNN packs an LSTM's."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(10)
        self.w = nn.Parameter(flat[:6].view(2, 3))
        self.b = nn.Parameter(flat[6:8])
        self.register_buffer("flat", flat)


def test_views_of_one_storage_are_stored_once() -> None:
    saved, fresh = Flat(), Flat()
    captured = capture(model=saved)
    assert [leaf.spec.name for leaf in captured.leaves] == ["model.flat"]
    assert [(alias.name, alias.offset_bytes) for alias in captured.aliases] == [
        ("model.w", 0),
        ("model.b", 24),
    ]
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.w.data_ptr() == fresh.flat.data_ptr()  # pyright: ignore[reportCallIssue]


class Lazy(nn.Module):
    """Its forward would make a view of the weight once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_buffer(name, None, persistent=False)


@pytest.mark.parametrize("name", ["a_view", "view"])
def test_a_buffer_that_was_made_as_a_view_of_a_weight_is_one_again(name: str) -> None:
    """By whichever of the two names the bytes are kept."""
    saved, fresh = Lazy(name), Lazy(name)
    setattr(saved, name, saved.weight.detach().view(-1))
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    with torch.no_grad():
        fresh.weight.fill_(7)
    assert torch.equal(getattr(fresh, name), torch.full((6,), 7.0))


def test_a_name_that_the_checkpoint_lacks_is_filled_by_the_one_that_it_is_tied_to() -> None:
    """Some tools write one name of a tied weight alone."""
    saved, weight = nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Parameter(torch.zeros(2, 2))
    fresh = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in fresh:
        layer.register_parameter("weight", weight)
    transfer({"model": saved}, {"model": fresh})
    assert torch.equal(weight, saved[0].get_parameter("weight"))


@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm])
def test_parametrised_modules(wrap: Callable[[nn.Module], nn.Module]) -> None:
    saved, fresh = wrap(nn.Linear(4, 3)), wrap(nn.Linear(4, 3))
    saved(torch.randn(2, 4))
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)


def test_two_modules_that_share_one_part() -> None:
    body = nn.Linear(2, 2)
    saved = {"one": nn.Sequential(body), "two": nn.Sequential(body, nn.Linear(2, 1))}
    fresh = copy.deepcopy(saved)
    with torch.no_grad():
        body.weight.fill_(7)
    transfer(saved, fresh)
    assert all_bits(fresh["two"]) == all_bits(saved["two"])


def test_a_part_that_two_modules_share_here_alone_is_refused() -> None:
    """A teacher that began as the student's own part and was copied in mid-run: one of the two was lost."""
    saved = {name: nn.Sequential(nn.Linear(2, 2)) for name in ("one", "two")}
    part = nn.Linear(2, 2)
    fresh = {name: nn.Sequential(part) for name in ("one", "two")}
    before = all_bits(fresh["one"])
    words = r"'two': one\.0\.weight and two\.0\.weight share memory here, and did not when they were saved"
    with pytest.raises(StateMismatchError, match=words):
        transfer(saved, fresh)
    assert all_bits(fresh["one"]) == before


def names(**objects: object) -> set[str]:
    captured = capture(**objects)
    return {leaf.spec.name for leaf in captured.leaves} | {alias.name for alias in captured.aliases}


def compiled(module: nn.Module) -> nn.Module:
    """The module in torch.compile's wrapper; nothing is compiled before a forward pass."""
    wrapped: object = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert wrapped is not module
    return wrapped


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_wrappers_leave_no_trace_in_names() -> None:
    plain = names(model=small())
    assert "model.0.weight" in plain
    assert names(model=compiled(small())) == plain
    assert names(model=nn.DataParallel(small())) == plain
    inner = small()
    inner[0] = checkpoint_wrapper(inner[0])
    assert names(model=inner) == plain
    inner[2] = compiled(inner[2])
    assert names(model=compiled(inner)) == plain
    assert names(model=torch.jit.script(small())) == plain


def test_a_users_own_child_named_module_keeps_its_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1, bias=False)

    assert names(model=Outer()) == {"model.module.weight"}


def test_an_averaged_model_is_eager() -> None:
    model = nn.Linear(2, 2)
    saved, fresh = AveragedModel(model), AveragedModel(nn.Linear(2, 2))
    saved.requires_grad_(requires_grad=False)
    saved.update_parameters(model)
    assert set(lazinesses(capture(ema=saved)).values()) == {Laziness.EAGER}
    transfer({"ema": saved}, {"ema": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert fresh.n_averaged == 1


def test_under_ddp_all_ranks_hold_the_same(tmp_path: Path) -> None:
    store_ = FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store_, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(small())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        captured = capture(model=model, optimizer=optimizer)
        replicas = {leaf.spec.name: leaf.spec.replicas for leaf in captured.leaves}
        assert replicas["model.1.running_mean"] == 4
        assert replicas["optimizer.state.0.weight.exp_avg"] == 4
        assert set(replicas.values()) == {4}
        fresh = small()
        transfer({"model": model}, {"model": fresh}, world_size=4)
        assert all_bits(fresh) == all_bits(model.module)
        del model
    finally:
        torch.distributed.destroy_process_group()


def test_what_ddp_is_told_to_ignore_each_rank_holds_of_its_own(tmp_path: Path) -> None:
    store_ = FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store_, rank=0, world_size=1)
    try:
        ignoring = small()
        ignored = ["0.weight", "1.running_mean"]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ignored)
        model = nn.parallel.DistributedDataParallel(ignoring)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        replicas = {
            leaf.spec.name: leaf.spec.replicas for leaf in capture(model=model, optimizer=optimizer).leaves
        }
        own = {name for name, count in replicas.items() if count == 1}
        assert own == {
            "model.0.weight",
            "model.1.running_mean",
            *(f"optimizer.state.0.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
        }
        del model, optimizer, ignoring
    finally:
        torch.distributed.destroy_process_group()


def test_without_ddp_each_rank_holds_its_own() -> None:
    assert {leaf.spec.replicas for leaf in capture(model=small()).leaves} == {1}


class WithExtra(nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_a_tied_weight_with_holes_is_one_tensor_in_the_checkpoint() -> None:
    """It is copied to be dense: once for each name, and nobody could restore what was two tensors then."""

    class Tied(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.a = nn.Linear(4, 8, bias=False)
            self.a.weight = nn.Parameter(torch.full((8, 8), fill)[:, :4])
            self.b = self.a

    saved, fresh = Tied(2.0), Tied(1.0)
    for _ in range(2):
        transfer({"model": saved}, {"model": fresh})
        assert bits(fresh.b.weight) == bits(saved.a.weight)
    components = make_components({"model": saved}, world_size=1)
    first = capture_state(components)
    with torch.no_grad():
        saved.a.weight.fill_(3.0)
    again = capture_state(components, previous=first)
    assert [alias.name for alias in again.aliases] == ["model.b.weight"]
    (leaf,) = [each for each in again.leaves if each.spec.name == "model.a.weight"]
    assert leaf.tensor.unique().tolist() == [3.0]


def test_a_module_whose_extra_state_cannot_be_read_is_named_beside_its_own_error() -> None:
    class Broken(nn.Module):
        def get_extra_state(self) -> object:
            raise KeyError("two")

    with pytest.raises(KeyError, match="two") as raised:
        transfer({"model": nn.Sequential(Broken())}, {"model": nn.Sequential(Broken())})
    assert raised.value.__notes__ == ["while get_extra_state() of 'model.0' was read for a snapshot"]


def test_extra_state_comes_back() -> None:
    extra = {"amax": torch.arange(3.0), 1: (None, b"x")}
    saved = nn.Sequential(WithExtra(extra), WithExtra(3))
    fresh = nn.Sequential(WithExtra(None), WithExtra(None))
    transfer({"model": saved}, {"model": fresh})
    found = fresh[0].extra
    assert isinstance(found, dict)
    assert found["amax"].tolist() == [0.0, 1.0, 2.0]  # pyright: ignore[reportArgumentType]
    assert found[1] == (None, b"x")
    assert fresh[1].extra == 3
    with pytest.raises(StateMismatchError, match=r"1\._extra_state is on one side only"):
        transfer({"model": saved}, {"model": nn.Sequential(WithExtra(None), nn.Module())})


class Grows(nn.Module):
    """Makes its cache in the forward pass, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("observed", torch.zeros(0))
        self.register_buffer("later", None)

    def forward(self, size: int) -> None:
        self.cache = torch.arange(float(size))
        self.observed = torch.arange(float(size))
        self.later = torch.ones(size)
        self.register_buffer("lazy", torch.ones(2), persistent=False)


def test_buffers_that_the_forward_pass_makes_come_back() -> None:
    saved, fresh = Grows(), Grows()
    saved(5)
    transfer({"model": saved}, {"model": fresh})
    assert all_bits(fresh) == all_bits(saved)
    assert list(fresh.state_dict()) == list(saved.state_dict())
    saved.cache = torch.arange(3.0)
    transfer({"model": saved}, {"model": fresh})
    assert fresh.cache.tolist() == [0.0, 1.0, 2.0]
    saved(3)
    with pytest.raises(StateMismatchError, match="observed"):
        transfer({"model": saved}, {"model": fresh})


def test_a_cache_that_was_not_there_is_left_alone() -> None:
    fresh = Grows()
    fresh.register_buffer("lazy", torch.ones(2), persistent=False)
    transfer({"model": Grows()}, {"model": fresh})
    assert fresh.lazy.tolist() == [1.0, 1.0]  # pyright: ignore[reportCallIssue]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_sparse_buffers_come_back() -> None:
    def module(values: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("pairs", values.to_sparse())
        made.register_buffer("rows", values.to_sparse_csr())
        return made

    saved, fresh = (
        module(torch.tensor([[0.0, 2.0], [3.0, 0.0]])),
        module(torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
    )
    held = fresh.get_buffer("pairs")
    transfer({"model": saved}, {"model": fresh})
    assert fresh.get_buffer("pairs") is held
    assert held.to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
    assert fresh.get_buffer("rows").to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
    with pytest.raises(StateMismatchError, match="pairs"):
        transfer({"model": saved}, {"model": module(torch.zeros(3, 3))})
    with pytest.raises(StateMismatchError, match="float64"):
        transfer({"model": saved}, {"model": module(torch.eye(2, dtype=torch.float64))})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("saves", ["more", "fewer"])
def test_a_compressed_sparse_buffer_with_another_number_of_elements_comes_back(saves: str) -> None:
    def module(values: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("mix", values.to_sparse_csr())
        return made

    full, few = torch.arange(1.0, 17.0).view(4, 4), torch.eye(4)
    saved, fresh = (full, few) if saves == "more" else (few, full)
    target = module(fresh)
    held = target.get_buffer("mix")
    transfer({"model": module(saved)}, {"model": target})
    assert target.get_buffer("mix") is held
    assert torch.equal(held.to_dense(), saved)


class Changed(nn.Module):
    def __init__(self, tensor: torch.Tensor, name: str = "w") -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(2))
        self.register_parameter(name, nn.Parameter(tensor))


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        (Changed(torch.zeros(3)), r"w is float32 \[2\] in the checkpoint, float32 \[3\] in the module"),
        (Changed(torch.zeros(2).double()), r"w is float32 \[2\] in the checkpoint, float64 \[2\]"),
        (Changed(torch.zeros(2), "v"), "w is in the checkpoint and not in the module; v is in the module"),
        (nn.Linear(1, 1), "kept is in the checkpoint"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_and_not_changed(fresh: nn.Module, message: str) -> None:
    before = all_bits(fresh)
    with pytest.raises(StateMismatchError, match=message):
        transfer({"model": Changed(torch.ones(2))}, {"model": fresh})
    assert all_bits(fresh) == before


def test_statistics_of_another_width_are_refused() -> None:
    with pytest.raises(
        StateMismatchError, match=r"running_mean is float32 \[3\] in the checkpoint, float32 \[4\] in"
    ):
        transfer(
            {"model": nn.BatchNorm1d(3, affine=False)},
            {"model": nn.BatchNorm1d(4, affine=False)},
        )


def test_only_the_first_differences_are_listed() -> None:
    fresh = nn.Sequential(*[nn.Linear(1, 1) for _ in range(10)])
    with pytest.raises(StateMismatchError, match="and 17 more"):
        transfer({"model": Changed(torch.ones(2))}, {"model": fresh})


def test_an_object_of_another_kind_is_refused() -> None:
    stored = store(make_components({"model": torch.Generator()}, world_size=1))
    (component,) = make_components({"model": small()}, world_size=1)
    with pytest.raises(StateMismatchError, match=r"'model' was of kind torch\.Generator.*of kind module now"):
        component.check(stored)


def test_parameters_on_meta_are_refused_by_name() -> None:
    with pytest.raises(StateTypeError, match=r"model\.0\.weight is on the meta device"):
        capture(model=nn.Sequential(nn.Linear(2, 2, device="meta")))


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(StateTypeError, match=r"model\.weight is a parameter without a shape yet"):
        capture(model=nn.LazyLinear(2))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("bound", [None, 1.0])
@pytest.mark.parametrize("trains", [True, False])
def test_an_embedding_that_forward_renormalises_does_not_wait(
    kind: type[nn.Embedding], bound: float | None, *, trains: bool
) -> None:
    model = nn.ModuleDict({"words": kind(4, 3, max_norm=bound), "next": nn.Linear(3, 4, bias=False)})
    model.requires_grad_(trains)
    waits = Laziness.OWNED if trains else Laziness.FROZEN
    embedding = waits if bound is None else Laziness.EAGER

    def found() -> dict[str, Laziness]:
        if not trains:
            return lazinesses(capture(model=model))
        return lazinesses(capture(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))

    assert found() == {"model.words.weight": embedding, "model.next.weight": waits}
    model["next"].weight = model["words"].weight
    assert list(found().values()) == [embedding]


def test_a_scale_that_fake_quantisation_learns_does_not_wait() -> None:
    """Its forward writes through `.data`, which no version of the tensor tells of."""
    observer = quantization.MovingAverageMinMaxObserver
    learnt = cast(Any, _LearnableFakeQuantize)(observer, quant_min=0, quant_max=255)
    learnt.enable_param_learning()
    learnt.scale.data.zero_()
    model = nn.Sequential(nn.Linear(2, 2), learnt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    version, before = learnt.scale._version, learnt.scale.clone()
    model(torch.rand(4, 2))
    assert learnt.scale._version == version
    assert not torch.equal(learnt.scale, before)
    found = lazinesses(capture(model=model, optimizer=optimizer))
    eager = {name for name, lazy in found.items() if lazy is Laziness.EAGER}
    assert {"model.1.scale", "model.1.zero_point"} <= eager
    assert found["model.0.weight"] is Laziness.OWNED


def meta() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 4, device="meta"))


def partly_meta() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 4))
    model[1].bias = nn.Parameter(torch.zeros(4, device="meta"))
    return model


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (meta, r"model\.1\.weight is on the meta device", "to_empty"),
        (partly_meta, r"model\.1\.bias is on the meta device", "to_empty"),
        (
            lambda: nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(4)),
            r"model\.1\.weight is a parameter without a shape yet",
            "one forward pass",
        ),
    ],
)
def test_a_restore_into_what_has_no_memory_is_refused_and_changes_nothing(
    build: Callable[[], nn.Sequential], message: str, hint: str
) -> None:
    saved, fresh = nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 4)), build()
    before = bits(cast("torch.Tensor", fresh[0].weight))
    with pytest.raises(StateTypeError, match=message) as caught:
        transfer({"model": saved}, {"model": fresh})
    assert hint in caught.value.hint
    assert bits(cast("torch.Tensor", fresh[0].weight)) == before


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_restore_into_a_sparse_buffer_on_meta_is_refused(layout: torch.layout) -> None:
    saved, fresh = nn.Module(), nn.Module()
    saved.register_buffer("pairs", torch.eye(2).to_sparse(layout=layout))
    fresh.register_buffer("pairs", torch.eye(2).to_sparse(layout=layout).to("meta"))
    with pytest.raises(StateTypeError, match=r"model\.pairs is on the meta device"):
        transfer({"model": saved}, {"model": fresh})


@pytest.mark.parametrize("persistent", [True, False])
def test_a_name_with_a_lone_surrogate_is_refused_by_its_path(*, persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("\ud800", torch.zeros(2), persistent=persistent)
    with pytest.raises(StateTypeError, match=r"'model\.0\.\\ud800' has lone surrogates"):
        capture(model=model)


def test_parameters_added_in_mid_run_are_in_the_next_capture() -> None:
    model = nn.ModuleList([nn.Linear(1, 1)])
    components = make_components({"model": model}, world_size=1)
    first = capture_state(components)
    model.append(nn.Linear(1, 1))
    second = capture_state(components, previous=first)
    assert len(second.leaves) == len(first.leaves) + 2


class _Remembering(nn.Module):
    """Its first forward makes two buffers, of which one is a part of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.all: torch.Tensor | None
        self.newest: torch.Tensor
        self.register_buffer("all", None)
        self.register_buffer("newest", None)

    def forward(self) -> torch.Tensor:
        if self.all is None:
            self.all = torch.zeros(6)
            self.newest = self.all[:3]
        self.all.add_(1)
        return self.newest


def test_buffers_made_by_forward_that_share_memory_share_it_again() -> None:
    saved, fresh = _Remembering(), _Remembering()
    saved()
    transfer({"model": saved}, {"model": fresh})
    assert torch.equal(saved(), fresh())
    assert torch.equal(saved.newest, torch.full((3,), 2.0))
