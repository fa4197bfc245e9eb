"""Training on a CUDA device through a daemon: what is restored, what waits for nothing, graphs."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.report import Skipped
from everstep.hook.skip_reasons import CAPTURING
from everstep.hook.state_testing import bits
from everstep.proto.frames import SkipReason

LONG_CYCLES = 500_000_000
"""A kernel that runs this long keeps what is enqueued behind it back for a quarter of a second or more."""


class Net(nn.Module):
    """Weights that train, a frozen layer, running statistics, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 8)
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.trained(x))


def made(seed: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().cuda()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, **options)}


def train(run: everstep.Run, objects: dict[str, Any]) -> None:
    iterate(objects)
    run.step()


def iterate(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.randn(32, 64, device="cuda")).square().mean().backward()
    objects["optimizer"].step()


def state_of(objects: dict[str, Any]) -> dict[str, bytes]:
    """The bits of everything that is saved, the generator of the device included."""
    model, optimizer = objects["model"], objects["optimizer"]
    found = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": bits(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found | {"generator": bits(torch.cuda.get_rng_state())}


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        yield process


@pytest.mark.gpu
@pytest.mark.usefixtures("daemon")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}], ids=str)
def test_what_is_restored_is_bit_identical_though_training_went_on_beside_the_copy(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    objects, device = made(1, **options), tmp_path / "d"
    device.mkdir()
    saved: dict[str, dict[str, bytes]] = {}
    with everstep.attach("cuda", **objects, storage=device, every=4, slots=3) as run:
        while run.report().checkpoints_complete < 3:
            train(run, objects)
            if run.steps % 4 == 0:
                saved[f"{run.attempt}.{run.steps}"] = state_of(objects)
                train(run, objects)  # at once, while the copy may still run
                assert run.wait(60)
        assert run.report().failures == ()
    saved[run.report().last_complete] = state_of(objects)
    again = made(2, **options)
    with everstep.attach("cuda", **again, storage=device, every=10**6) as run:
        restored = run.restore()
        assert restored is not None
        assert state_of(again) == saved[str(restored.checkpoint)]
        train(run, again)  # the optimizer takes its state


@pytest.mark.gpu
@pytest.mark.usefixtures("daemon")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_boundary_with_a_checkpoint_waits_for_no_device(tmp_path: Path) -> None:
    """Neither scaler, nor step counts, nor a learning rate on the device are read back: the host is ahead of it."""
    rate = torch.tensor(0.01, device="cuda")
    objects, device = made(1, capturable=True), tmp_path / "d"
    objects["scaler"] = GradScaler("cuda")
    objects["optimizer"].param_groups[0]["lr"] = rate
    device.mkdir()
    with everstep.attach("ahead", **objects, storage=device, every=10**6) as run:
        loss = objects["model"](torch.randn(32, 64, device="cuda")).square().mean()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        for _ in range(2):  # memory is asked for, then mapped and pinned: once, and that may wait
            run.checkpoint()
            run.step()
            assert run.wait(60)
        assert run.report().checkpoints_complete == 1
        for _ in range(2):
            run.checkpoint()
            torch.cuda._sleep(LONG_CYCLES)
            far_behind = torch.cuda.Event()
            far_behind.record()
            run.step()
            assert not far_behind.query()
            assert run.wait(60)
        assert run.report().checkpoints_complete == 3
        assert run.report().failures == ()


@pytest.mark.gpu
@pytest.mark.usefixtures("daemon")
def test_a_host_ahead_of_its_device_takes_a_checkpoint_at_each_step_whose_copy_fits_in_it(
    tmp_path: Path,
) -> None:
    """It is at the next boundary while the device is in the middle of the step, the copy of which goes on."""
    objects, device = made(1), tmp_path / "d"
    device.mkdir()
    with everstep.attach("each-step", **objects, storage=device, every=10**6) as run:
        while run.report().checkpoints_complete < 1:
            run.checkpoint()
            train(run, objects)
            assert run.wait(60)
        before = run.report()
        for _ in range(8):
            run.checkpoint()
            run.step()
            torch.cuda._sleep(LONG_CYCLES)
            iterate(objects)
        assert run.wait(60)
        after = run.report()
        assert after.skipped == before.skipped
        assert after.checkpoints_complete == before.checkpoints_complete + 8
        assert after.ahead_s > before.ahead_s


class Wide(nn.Module):
    """A step of next to nothing, beside a gigabyte that has to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(64, 8)
        self.frozen = nn.Parameter(torch.randn(256 * 1024**2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x)


class Left(Exception):  # noqa: N818
    """What a run without a last boundary is left by."""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("daemon")
def test_copies_too_long_for_the_step_go_by_the_device_and_are_bit_identical(tmp_path: Path) -> None:
    model = Wide().cuda()
    optimizer, device = torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "d"
    device.mkdir()
    saved: dict[str, torch.Tensor] = {}
    with (
        contextlib.suppress(Left),
        everstep.attach("wide", model=model, optimizer=optimizer, storage=device, every=1) as run,
    ):
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(4, 64, device="cuda")).square().mean().backward()
            optimizer.step()  # straight after the boundary, while the gigabyte is on its way
            assert run.wait(60)
            run.step()
            saved[f"{run.attempt}.{run.steps}"] = model.trained.weight.detach().clone()
            if run.report().copied_on_device_first == 3:
                break
        report = run.report()
        assert report.copied_on_device_first == 3
        assert report.cuda_copies.startswith("copied on the device first: ")
        assert report.cuda_wait_s > 0
        assert report.failures == ()
        optimizer.zero_grad()
        model.trained.weight.grad = torch.ones_like(model.trained.weight)
        optimizer.step()  # overwrites what the last copy took
        assert run.wait(60)
        raise Left
    again = Wide().cuda()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    with everstep.attach("wide", model=again, optimizer=optimizer, storage=device, every=10**6) as run:
        restored = run.restore()
        assert restored is not None
        assert str(restored.checkpoint) == list(saved)[-1]
        assert torch.equal(again.frozen, model.frozen)
        assert torch.equal(again.trained.weight, saved[str(restored.checkpoint)])
        assert not torch.equal(again.trained.weight, model.trained.weight)


@pytest.mark.gpu
@pytest.mark.usefixtures("daemon")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_graph_can_be_captured_though_a_snapshot_was_taken_before_and_none_is_taken_in_it(
    tmp_path: Path,
) -> None:
    objects, device = made(1, capturable=True), tmp_path / "d"
    device.mkdir()
    optimizer = objects["optimizer"]
    with everstep.attach("captured", **objects, storage=device, every=1) as run:
        while run.report().checkpoints_complete < 1:
            train(run, objects)
            assert run.wait(60)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the newest snapshot's guard was not passed yet
            optimizer.step()
            run.step()
        assert run.report().skipped[SkipReason.CAPTURING] == Skipped(count=1, example=CAPTURING)
        with run.mutating():
            graph.replay()
        run.step()
        assert run.wait(60)
        assert run.report().failures == ()
    after = state_of(objects)
    again = made(2, capturable=True)
    with everstep.attach("captured", **again, storage=device, every=10**6) as run:
        assert run.restore() is not None
        assert state_of(again) == after


@pytest.mark.gpu
@pytest.mark.usefixtures("daemon")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_graph_with_the_optimizers_step_is_replayed_behind_a_copy_in_flight(tmp_path: Path) -> None:
    """The copy is held back on its stream; the replay is enqueued at once, and must not write before it has read."""
    objects, device = made(1, capturable=True), tmp_path / "d"
    device.mkdir()
    model, optimizer = objects["model"], objects["optimizer"]
    weight = model.trained[0].weight
    at_boundary, after = dict[str, bytes](), dict[str, bytes]()
    with (
        contextlib.suppress(Left),
        everstep.attach("replayed", **objects, storage=device, every=10**6) as run,
    ):
        while run.report().checkpoints_complete < 1:
            run.checkpoint()
            train(run, objects)
            assert run.wait(60)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()  # with the gradients of the last iteration, again and again
        at_boundary = state_of(objects)
        copies = run._snapshotter._cuda
        with torch.cuda.stream(copies._device(weight.device)._stream):
            torch.cuda._sleep(LONG_CYCLES)
        run.checkpoint()
        run.step()
        with run.mutating():
            graph.replay()
        passage = copies._passages[weight.device]
        assert passage.ended is not None
        assert not passage.ended.query()
        assert run.wait(60)
        assert (run.report().checkpoints_complete, run.report().failures) == (2, ())
        after = state_of(objects)
        raise Left
    again = made(2, capturable=True)
    with everstep.attach("replayed", **again, storage=device, every=10**6) as run:
        assert run.restore() is not None
        assert state_of(again) == at_boundary
        assert at_boundary != after
