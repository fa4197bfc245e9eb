"""What torch.compile makes of a model, and of an optimizer's step, under a copy that is as late as can be."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import tqdm
from overlapping import Loop, Slow, data, exercise, normalised, spectral, supervised
from torch import nn
from torch._inductor import config

import everstep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]
Compile = Callable[[Callable[[], object]], Callable[[], object]]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles in this process, and leaves no thread that watches progress bars."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    torch.compiler.reset()
    with config.patch(compile_threads=1):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("model", [normalised, spectral])
@pytest.mark.parametrize(
    ("backend", "is_compiled_at"),
    [
        ("eager", "save"),
        ("eager", "restore"),
        ("aot_eager", "both"),
        # What it computes is not bit for bit what eager does.
        pytest.param("inductor", "both", marks=needs_compiler),
    ],
)
def test_a_compiled_model_goes_by_its_own_names(
    devices: list[Path], slow: Slow, model: Callable[[], nn.Module], backend: str, is_compiled_at: str
) -> None:
    """Its program writes buffers within forward."""

    def make(seed: int) -> Loop:
        torch.manual_seed(seed)
        net = model()
        is_compiled = is_compiled_at in ("both", "save" if seed == 0 else "restore")
        wrapped = cast(nn.Module, torch.compile(net, backend=backend)) if is_compiled else net
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        return Loop(
            {"model": wrapped, "optimizer": optimizer},
            lambda number, run: supervised(wrapped, optimizer, number),
            plain_of={"model": net},
        )

    exercise(make, devices, slow)


def stepping(seed: int, compiled: Compile) -> Loop:
    torch.manual_seed(seed)
    net = normalised()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    @compiled
    def step() -> None:
        optimizer.step()

    def iterate(number: int, run: everstep.Run) -> None:
        optimizer.zero_grad()
        net(data(number, 4, 6)).square().mean().backward()
        step()

    return Loop({"model": net, "optimizer": optimizer}, iterate)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_waits_for_the_copy_each_time(devices: list[Path], slow: Slow, backend: str) -> None:
    exercise(lambda seed: stepping(seed, torch.compile(backend=backend)), devices, slow)


def test_a_compiled_step_is_not_compiled_again_because_of_checkpoints(devices: list[Path]) -> None:
    programs: list[torch.fx.GraphModule] = []

    def backend(program: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        programs.append(program)
        return program.forward

    def compiled_once(every: int) -> int:
        programs.clear()
        torch.compiler.reset()
        loop = stepping(0, torch.compile(backend=backend))
        with everstep.attach(f"every{every}", **loop.objects, storage=devices, every=every) as run:
            for number in range(12):
                loop.iterate(number, run)
                run.step()
                assert run.wait(20)
        return len(programs)

    assert compiled_once(every=1) == compiled_once(every=10**6) < 12
    assert programs
