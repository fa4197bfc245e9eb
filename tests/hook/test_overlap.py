"""A snapshot is the state at its boundary though forward, backward and hooks run before one lazy byte is copied.

The copy is held back until the next iteration has reached its optimizer, so all that forward and backward change has
changed by then. What is restored must be what was there at the boundary, and training on from it must give what
training on without a break gave, bit for bit.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from overlapping import (
    WARM,
    Loop,
    Slow,
    attached,
    bounded,
    data,
    exercise,
    facts,
    normalised,
    simple,
    spectral,
    supervised,
    take,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from writing_modules import Hooked, Observed, Remade, Statistics

from everstep.core.errors import StateTypeError
from everstep.hook.run import Run

# -- modules whose forward writes


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("model", [normalised, spectral, Observed, Hooked, Statistics, Remade])
def test_modules_whose_forward_writes_buffers(
    model: Callable[[], nn.Module], devices: list[Path], slow: Slow
) -> None:
    exercise(lambda seed: simple(seed, model), devices, slow)


# -- optimizers


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
    ],
    ids=["foreach", "fused", "fused-sgd", "tensor-lr", "stateless", "rmsprop"],
)
def test_optimizers(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], devices: list[Path], slow: Slow
) -> None:
    exercise(lambda seed: simple(seed, normalised, optimizer), devices, slow)


def lbfgs(seed: int) -> Loop:
    """The closure runs inside the step, behind the guard: there is nothing to overlap with."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def iterate(number: int, run: Run) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(data(number, 4, 6)).square().mean()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def gan(seed: int) -> Loop:
    torch.manual_seed(seed)
    maker, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.RMSprop(judge.parameters(), lr=0.01)

    def iterate(number: int, run: Run) -> None:
        judges.zero_grad()
        (judge(data(number, 4, 6)).mean() - judge(maker(torch.randn(4, 6)).detach()).mean()).backward()
        judges.step()
        makes.zero_grad()
        judge(maker(torch.randn(4, 6))).mean().backward()
        makes.step()

    return Loop({"maker": maker, "judge": judge, "makes": makes, "judges": judges}, iterate)


def sam(seed: int) -> Loop:
    """Sharpness-aware minimisation: weights go up the slope and back before the step, by hand."""
    loop = simple(seed, normalised)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]

    def iterate(number: int, run: Run) -> None:
        optimizer.zero_grad()
        model(data(number, 4, 6)).square().mean().backward()
        with run.mutating(), torch.no_grad():
            moved = [0.05 * parameter.grad for parameter in model.parameters()]
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.add_(by)
        optimizer.zero_grad()
        model(data(number, 4, 6)).square().mean().backward()
        with run.mutating(), torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()

    return Loop(loop.objects, iterate)


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation as most have it: an optimizer around another one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.01)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], object]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure()
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            self.state[parameter]["moved"] = self.param_groups[0]["rho"] * parameter.grad
            parameter.add_(self.state[parameter]["moved"])
        closure()
        for parameter in parameters:
            parameter.sub_(self.state[parameter]["moved"])
        self.base.step()


def sharp(seed: int) -> Loop:
    """Its own step is held back, so that what it writes to weights needs no `mutating()`."""
    torch.manual_seed(seed)
    model = normalised()
    optimizer = Sharp(list(model.parameters()))

    def iterate(number: int, run: Run) -> None:
        def closure() -> None:
            with torch.enable_grad():
                model.zero_grad()
                model(data(number, 4, 6)).square().mean().backward()

        optimizer.step(closure)

    return Loop({"model": model, "optimizer": optimizer, "base": optimizer.base}, iterate)


def in_backward(seed: int) -> Loop:
    """Each parameter has an optimizer of its own, which steps within backward, as soon as the gradient is whole."""
    torch.manual_seed(seed)
    model = normalised()
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in reversed([*model.parameters()])
    }

    def update(parameter: torch.Tensor) -> None:
        optimizer = optimizers[cast(nn.Parameter, parameter)]
        optimizer.step()
        optimizer.zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    named = {f"optimizer{number}": each for number, each in enumerate(optimizers.values())}
    return Loop(
        {"model": model} | named, lambda number, run: model(data(number, 4, 6)).square().mean().backward()
    )


def accumulated(seed: int) -> Loop:
    loop = simple(seed, normalised)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]

    def iterate(number: int, run: Run) -> None:
        for part in range(3):
            model(data(10 * number + part, 4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Loop(loop.objects, iterate)


def scaled(seed: int) -> Loop:
    """The iteration after the boundary overflows: its step is skipped, no optimizer waits, the scale changes."""
    loop = simple(seed)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def iterate(number: int, run: Run) -> None:
        optimizer.zero_grad()
        factor = float("inf") if number == WARM + 1 else 1.0
        scaler.scale(model(data(number, 4, 6)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    return Loop(loop.objects | {"scaler": scaler}, iterate)


def clipped(seed: int) -> Loop:
    """The same, and behind the skipped step weights are clipped, and averaged by hand, in ways that move no version."""
    loop = scaled(seed)
    model = loop.objects["model"]
    shadow = copy.deepcopy(model).requires_grad_(False)

    def iterate(number: int, run: Run) -> None:
        loop.iterate(number, run)
        for weight, average in zip(model.parameters(), shadow.parameters(), strict=True):
            weight.data.clamp_(-0.1, 0.1)
            average.data.mul_(0.9).add_(weight.data, alpha=0.1)

    return Loop(loop.objects | {"shadow": shadow}, iterate)


def scheduled(seed: int) -> Loop:
    loop = simple(seed, normalised)
    optimizer = loop.objects["optimizer"]
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[3])

    def iterate(number: int, run: Run) -> None:
        supervised(loop.objects["model"], optimizer, number)
        scheduler.step()

    return Loop(loop.objects | {"scheduler": scheduler}, iterate)


def averaged(seed: int) -> Loop:
    """EMA and SWA copies, written before the optimizer's step: while the snapshot is copied."""
    loop = simple(seed, normalised)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)

    def iterate(number: int, run: Run) -> None:
        ema.update_parameters(model)
        swa.update_parameters(model)
        supervised(model, optimizer, number)
        schedule.step()

    return Loop(loop.objects | {"ema": ema, "swa": swa, "schedule": schedule}, iterate)


class Shadow:
    """An EMA by hand: an object with clones, written at the start of each iteration."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self) -> None:
        for name, value in self.model.named_parameters():
            self.copies[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.copies

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.copies = state


def shadowed(seed: int) -> Loop:
    loop = simple(seed)
    shadow = Shadow(loop.objects["model"])

    def iterate(number: int, run: Run) -> None:
        shadow.update()
        supervised(loop.objects["model"], loop.objects["optimizer"], number)

    return Loop(loop.objects | {"shadow": shadow}, iterate)


class Branches(nn.Module):
    """The second branch is used only from the iteration after the boundary on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.both = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.one(batch) + (self.two(batch) if self.both else 0)


def lazily_optimized(seed: int) -> Loop:
    loop = simple(seed, Branches)
    model = loop.objects["model"]

    def iterate(number: int, run: Run) -> None:
        model.both = number > WARM
        supervised(model, loop.objects["optimizer"], number)

    return Loop(loop.objects, iterate)


def embedded(seed: int) -> Loop:
    torch.manual_seed(seed)
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def iterate(number: int, run: Run) -> None:
        optimizer.zero_grad()
        model(torch.tensor([number, 2 * number + 1])).square().sum().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)


class Counted(torch.optim.SGD):
    """Counts in its state, in a sparse tensor that each step writes to, how often each row had a gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            if "rows" not in own:
                own["rows"] = torch.eye(4).to_sparse()
            own["rows"].values().add_(1.0)
        super().step(closure)


def sparsely(seed: int) -> Loop:
    """Sparse optimizer state, and a compressed sparse buffer that forward writes to and replaces."""
    torch.manual_seed(seed)
    model = Csr()
    optimizer = Counted(model.parameters(), lr=0.1)
    return Loop(
        {"model": model, "optimizer": optimizer}, lambda number, run: supervised(model, optimizer, number)
    )


class Csr(nn.Module):
    """Mixes features by a compressed sparse matrix, which changes in each forward pass."""

    mix: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mix", torch.eye(6).to_sparse_csr())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mix.values().mul_(0.9)
        self.mix = (self.mix.to_dense() + 0.1 * torch.eye(6).flip(0)).to_sparse_csr()
        return self.layer(batch @ self.mix.to_dense())


class Flat(nn.Module):
    """Weights that are views of one buffer, as cuDNN lays out an LSTM's."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.randn(42)
        self.weight = nn.Parameter(self.flat[:36].view(6, 6))
        self.bias = nn.Parameter(self.flat[36:])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return functional.linear(batch, self.weight, self.bias)


def flat(seed: int) -> Loop:
    loop = simple(seed, Flat)
    loop.more = lambda: loop.objects["model"].flat
    return loop


class Columns(nn.Module):
    """Forward writes to columns of a weight through a buffer that is a view of them."""

    columns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("columns", self.layer.weight.data[:, ::2])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.columns.add_(1.0)
        return self.layer(batch)


def inferred(seed: int) -> Loop:
    """A frozen layer that was made in inference mode, so that nothing counts its versions, below one that trains."""
    with torch.inference_mode():
        base = nn.Linear(6, 6).requires_grad_(False)
    loop = simple(seed, lambda: nn.Sequential(base, nn.Linear(6, 6)))
    loop.objects["optimizer"].param_groups[0]["params"] = list(loop.objects["model"][1].parameters())
    return loop


class Codebook(nn.Module):
    """A VQ layer whose forward moves its codes, a parameter without gradient, and no version with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(6, 6), nn.Embedding(4, 6)
        self.codes.weight.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.layer(batch)
        self.codes.weight.data.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        return found + self.codes.weight.mean(0)


def forgetful(seed: int) -> Loop:
    """Nothing but the forward pass writes to the codes, and nobody says so."""
    return simple(seed, Codebook, lambda parameters: torch.optim.AdamW(parameters[:2], lr=0.01))


def quantised(seed: int) -> Loop:
    loop = forgetful(seed)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]

    def iterate(number: int, run: Run) -> None:
        optimizer.zero_grad()
        with run.mutating():
            found = model(data(number, 4, 6))
        found.square().mean().backward()
        optimizer.step()

    return Loop(loop.objects, iterate)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lbfgs, gan, sam, sharp, in_backward, accumulated, scaled, clipped, scheduled, averaged, shadowed,
        lazily_optimized, embedded, bounded, sparsely, flat, inferred, quantised,
    ],
)  # fmt: skip
def test_training_loops(make: Callable[[int], Loop], devices: list[Path], slow: Slow) -> None:
    exercise(make, devices, slow)


def test_a_weight_that_forward_writes_through_a_view_with_holes(devices: list[Path], slow: Slow) -> None:
    """Restored into a model whose buffer is no view: there, what it holds does not mend the weight."""
    loop, again = simple(0, Columns), simple(99, Columns)
    with attached(loop, devices) as run:
        loop.iterate(0, run)
        run.step()
        slow.arm()
        take(run)
        at_boundary = facts(loop)
        loop.iterate(1, run)
        assert run.wait(20)
        assert (run.report().checkpoints_complete, run.report().failures) == (1, ())
        assert slow.held
    again.objects["model"].columns = torch.zeros(6, 3)
    with attached(again, devices) as run:
        assert run.restore() is not None
        assert facts(again) == at_boundary


def test_gradients_that_stay_zeros(devices: list[Path], slow: Slow) -> None:
    def make(seed: int) -> Loop:
        loop = simple(seed)
        model, optimizer = loop.objects["model"], loop.objects["optimizer"]
        return Loop(loop.objects, lambda number, run: supervised(model, optimizer, number, set_to_none=False))

    exercise(make, devices, slow)


# -- the structure changes


class Growing(nn.Module):
    """Gets another layer, and its first one frozen, some iterations into training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])

    def grow(self, optimizer: torch.optim.Optimizer) -> None:
        self.layers.append(nn.Linear(6, 6))
        optimizer.add_param_group({"params": list(self.layers[-1].parameters()), "lr": 0.05})
        self.first.requires_grad_(False)
        optimizer.param_groups[0]["params"] = [
            parameter for parameter in optimizer.param_groups[0]["params"] if parameter.requires_grad
        ]
        for parameter in self.first.parameters():
            optimizer.state.pop(parameter, None)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.first(batch)
        for layer in self.layers:
            found = layer(found)
        return found


@pytest.mark.parametrize("grows_at", [1, WARM, WARM + 1])
def test_parameters_frozen_and_added_in_mid_run(devices: list[Path], slow: Slow, grows_at: int) -> None:
    """Before a checkpoint, right before its boundary, and while it is copied."""

    def make(seed: int) -> Loop:
        loop = simple(seed, Growing)
        model, optimizer = loop.objects["model"], loop.objects["optimizer"]
        if seed and grows_at <= WARM:  # a restart builds what the checkpoint has
            model.grow(optimizer)

        def iterate(number: int, run: Run) -> None:
            if number == grows_at:
                torch.manual_seed(number)
                model.grow(optimizer)
            supervised(model, optimizer, number)

        return Loop(loop.objects, iterate)

    exercise(make, devices, slow)


# -- wrappers


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_under_ddp_goes_by_its_own_names(devices: list[Path], slow: Slow) -> None:
    def make(seed: int) -> Loop:
        torch.manual_seed(seed)
        model = normalised()
        wrapped = nn.parallel.DistributedDataParallel(model) if seed == 0 else model
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        return Loop(
            {"model": wrapped, "optimizer": optimizer},
            lambda number, run: supervised(wrapped, optimizer, number),
            plain_of={"model": model},
        )

    exercise(make, devices, slow)


# -- what is refused, and what is caught


@pytest.mark.parametrize("where", ["all", "part"])
def test_tensors_on_meta_are_refused_by_their_path(devices: list[Path], where: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    if where == "all":
        model.to("meta")
    path = "model.0.weight" if where == "all" else "model.1.weight"
    loop = Loop({"model": model}, lambda number, run: None)
    with attached(loop, devices) as run, pytest.raises(StateTypeError) as caught:
        run.step()
    assert caught.value.message.startswith(f"{path} is on the meta device")
    assert "materialise it" in caught.value.hint


def failure_of(
    loop: Loop, change: Callable[[], None], devices: list[Path], slow: Slow, *, debug: bool = False
) -> str:
    """Return how the snapshot fails that is being copied while `change` writes without `mutating()`."""
    with attached(loop, devices, debug=debug) as run:
        loop.iterate(0, run)
        run.step()
        slow.arm()
        take(run)
        change()
        loop.iterate(1, run)
        assert run.wait(20)
        report = run.report()
        assert report.checkpoints_complete == 0
        (failure,) = report.failures
        return failure


@pytest.mark.parametrize("way", ["in place", "moved"])
def test_a_weight_written_by_hand_while_it_is_copied_drops_the_snapshot_by_its_name(
    devices: list[Path], slow: Slow, way: str
) -> None:
    """SAM without `mutating()`. The optimizer owns the weight, so it is copied late: the guard compares it."""
    loop = simple(0)
    weight = loop.objects["model"].weight

    def change() -> None:
        with torch.no_grad():
            if way == "in place":
                weight.add_(0.1)
            else:
                memory = StorageWeakRef(weight.untyped_storage())
                weight.data = weight.data + 0.1
                assert (
                    not memory.expired()
                )  # else what is allocated there next could pass for what was copied

    failure = failure_of(loop, change, devices, slow)
    assert "model.weight changed while its snapshot was being copied" in failure
    assert "with run.mutating()" in failure
    assert ("flatten_parameters() in forward" in failure) == (way == "moved")


class Tied(nn.Module):
    """A layer's weight, or some rows of it, is another one's, set by `.data`: each counts its own versions."""

    def __init__(self, *, rows: int, frozen: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, rows, bias=False)
        self.b.weight.data = self.a.weight.data[6 - rows :]
        self.a.requires_grad_(not frozen)
        self.b.requires_grad_(not frozen)
        self.last = nn.Linear(rows, 6)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(batch)))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("rows", [6, 2], ids=["whole", "rows"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_memory_with_two_counters_written_by_either_name_drops_the_snapshot(
    devices: list[Path], slow: Slow, which: str, rows: int, *, frozen: bool
) -> None:
    loop = simple(
        0,
        lambda: Tied(rows=rows, frozen=frozen),
        lambda parameters: torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=0.01),
    )
    model = loop.objects["model"]
    written, other = model.a.weight, model.b.weight
    if which == "b":
        written, other = other, written

    def change() -> None:
        before = other._version
        with torch.no_grad():
            written.add_(100.0)
        assert other._version == before

    failure = failure_of(loop, change, devices, slow)
    assert f"model.{which}.weight changed while its snapshot was being copied" in failure


def test_optimizer_state_written_by_hand_while_it_is_copied_drops_the_snapshot_by_its_name(
    devices: list[Path], slow: Slow
) -> None:
    """Momentum that is restarted after the boundary, without `mutating()`."""
    loop = simple(0)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]

    def change() -> None:
        optimizer.state[model.weight]["exp_avg"].zero_()

    failure = failure_of(loop, change, devices, slow)
    assert "optimizer.state.weight.exp_avg changed while its snapshot was being copied" in failure
    assert "with run.mutating()" in failure


@pytest.mark.parametrize("what", ["weight", "momentum"])
def test_the_debug_mode_catches_what_moves_no_version(devices: list[Path], slow: Slow, what: str) -> None:
    """Writes through `.data`."""
    loop = simple(0)
    model, optimizer = loop.objects["model"], loop.objects["optimizer"]

    def change() -> None:
        tensor = optimizer.state[model.weight]["exp_avg"] if what == "momentum" else model.weight
        version, before = tensor._version, tensor.clone()
        tensor.data.mul_(2)
        assert tensor._version == version
        assert not torch.equal(tensor, before)

    failure = failure_of(loop, change, devices, slow, debug=True)
    name = "optimizer.state.weight.exp_avg" if what == "momentum" else "model.weight"
    assert f"{name} was written to while its snapshot was being copied" in failure
    assert "with run.mutating()" in failure


def test_the_debug_mode_catches_a_codebook_that_forward_writes(devices: list[Path], slow: Slow) -> None:
    failure = failure_of(forgetful(0), lambda: None, devices, slow, debug=True)
    assert "model.codes.weight was written to while its snapshot was being copied" in failure
    assert "with run.mutating()" in failure


def test_the_debug_mode_lets_what_is_right_pass(devices: list[Path], slow: Slow) -> None:
    loop = sam(0)
    with attached(loop, devices, debug=True) as run:
        loop.iterate(0, run)
        run.step()
        slow.arm()
        take(run)
        loop.iterate(1, run)
        assert run.wait(20)
        assert (run.report().checkpoints_complete, run.report().failures) == (1, ())


def test_lbfgs_is_said_to_overlap_with_nothing(devices: list[Path]) -> None:
    with attached(lbfgs(0), devices) as run:
        assert run.report().notes == (
            "optimizer is LBFGS, which runs forward and backward inside step(): it waits for each whole copy",
        )


@pytest.mark.gpu
def test_modules_on_several_devices(devices: list[Path], slow: Slow) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = normalised(), normalised().cuda()

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(batch).cuda())

    exercise(lambda seed: simple(seed, Split), devices, slow)


@pytest.mark.gpu
def test_an_lstm_whose_weights_cudnn_has_laid_out_in_one_buffer(devices: list[Path], slow: Slow) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True).cuda()
            self.lstm.flatten_parameters()
            storages = {each.untyped_storage().data_ptr() for each in self.lstm.parameters()}
            assert len(storages) == 1

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.lstm(batch.cuda()[:, None])[0]

    exercise(lambda seed: simple(seed, Recurrent), devices, slow)
