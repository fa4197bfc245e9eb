"""Copies from CUDA tensors: in which order they run, what they hold, and what pinning leaves behind."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.cuda_copy import CudaCopies
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.state_testing import bits

SIZE_BYTES = 8 * 1024**2
LONG_CYCLES = 500_000_000
"""A kernel that runs this long keeps what is enqueued behind it back for a quarter of a second or more."""

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered"""


@pytest.fixture(scope="module", autouse=True)
def _cuda() -> None:  # pyright: ignore[reportUnusedFunction]
    """Make the context first: its descriptors stay to the end of the process."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    fd = os.memfd_create("everstep-cuda-test")
    os.ftruncate(fd, SIZE_BYTES)
    made = MappedArena(1, fd, SIZE_BYTES, 1, "digest")
    yield made
    made.close()


@pytest.fixture
def copies(arena: MappedArena) -> Iterator[CudaCopies]:
    """With the arena pinned, as for every snapshot."""
    made = CudaCopies()
    made.register(arena)
    yield made
    made.unregister(arena)


def stored(arena: MappedArena, tensor: torch.Tensor) -> bytes:
    """What lies at the arena's begin, where the tests put their copies."""
    return bytes(arena.view(0, tensor.nbytes))


def copy(copies: CudaCopies, arena: MappedArena, tensor: torch.Tensor, *, eager: bool) -> None:
    copies.copy(arena.view(0, tensor.nbytes), tensor, 0, eager=eager)


class TestWithoutCuda:
    def test_nothing_is_asked_of_cuda_before_the_first_tensor(
        self, arena: MappedArena, caplog: pytest.LogCaptureFixture
    ) -> None:
        copies = CudaCopies()
        if not torch.cuda.is_initialized():
            copies.register(arena)
        copies.record()()
        copies.guard()
        copies.unregister(arena)
        assert caplog.records == []

    def test_an_empty_tensor_has_nothing_to_copy(self, arena: MappedArena) -> None:
        for eager in (True, False):
            CudaCopies().copy(arena.view(0, 0), torch.empty(0, 3), 0, eager=eager)
        assert bytes(arena.view(0, 8)) == bytes(8)


@pytest.mark.gpu
class TestOrder:
    def test_an_eager_copy_runs_between_what_was_enqueued_before_and_after(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(3)
        copy(copies, arena, tensor, eager=True)
        wait = copies.record()
        tensor.fill_(9)  # nobody guards it
        wait()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_a_lazy_copy_waits_for_what_was_enqueued_before(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(3)
        copy(copies, arena, tensor, eager=False)
        copies.record()()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_after_the_guard_a_kernel_cannot_overtake_the_copy_and_the_host_goes_on(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        end = held_back(copies, arena, tensor)
        copies.guard()
        tensor.fill_(9)
        assert not end.query()  # the guard has blocked no host
        torch.cuda.synchronize()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_without_the_guard_it_would(self, arena: MappedArena, copies: CudaCopies) -> None:
        """What makes the test above one: the copy is held back long enough for a kernel to come first."""
        tensor = torch.full((1024,), 3.0, device="cuda")
        held_back(copies, arena, tensor)
        tensor.fill_(9)
        torch.cuda.synchronize()
        assert stored(arena, tensor) == bits(torch.full((1024,), 9.0))

    def test_a_tensor_that_is_freed_meanwhile_is_not_overwritten_by_the_next_one(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        held_back(copies, arena, tensor)
        nbytes = tensor.nbytes
        del tensor
        others = [torch.full((1024,), 9.0, device="cuda") for _ in range(64)]  # one would get its memory
        torch.cuda.synchronize()
        assert bytes(arena.view(0, nbytes)) == bits(torch.full((1024,), 3.0))
        assert len(others) == 64

    def test_the_next_snapshot_waits_for_the_compute_stream_anew(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        for value in (3.0, 4.0):
            torch.cuda._sleep(LONG_CYCLES)
            tensor.fill_(value)
            copy(copies, arena, tensor, eager=False)
            wait = copies.record()
            copies.guard()
            tensor.fill_(9)
            wait()
            assert stored(arena, tensor) == bits(torch.full((1024,), value))


def held_back(copies: CudaCopies, arena: MappedArena, tensor: torch.Tensor) -> torch.cuda.Event:
    """Enqueue a lazy copy behind a long kernel on its own stream; return the event of its end."""
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._side_stream(tensor.device)):
        torch.cuda._sleep(LONG_CYCLES)
    copy(copies, arena, tensor, eager=False)
    copies.record()
    ((_, end),) = copies._done
    return end


@pytest.mark.gpu
class TestBytes:
    @pytest.mark.parametrize("eager", [True, False])
    @pytest.mark.parametrize(
        "dtype",
        [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64],
        ids=str,
    )
    def test_are_those_of_every_dtype(
        self, arena: MappedArena, copies: CudaCopies, dtype: torch.dtype, eager: bool
    ) -> None:
        torch.manual_seed(1)
        tensor = (torch.randn(33, 7, device="cuda") * 3).to(dtype)
        copy(copies, arena, tensor, eager=eager)
        copies.record()()
        assert stored(arena, tensor) == bits(tensor)

    @pytest.mark.parametrize("eager", [True, False])
    def test_are_in_storage_order_where_a_dense_tensor_is_not_contiguous(
        self, arena: MappedArena, copies: CudaCopies, eager: bool
    ) -> None:
        image = torch.arange(2 * 3 * 4 * 5.0, device="cuda").view(2, 3, 4, 5)
        image = image.to(memory_format=torch.channels_last)
        copy(copies, arena, image, eager=eager)
        copies.record()()
        assert stored(arena, image) == bits(image.permute(0, 2, 3, 1))

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
    def test_of_scalars_and_empty_tensors(
        self, arena: MappedArena, copies: CudaCopies, shape: tuple[int, ...]
    ) -> None:
        for eager in (True, False):
            tensor = torch.full(shape, 2.5, device="cuda", requires_grad=True)
            copy(copies, arena, tensor, eager=eager)
            copies.record()()
            assert stored(arena, tensor) == bits(tensor)

    def test_of_a_piece_of_a_view(self, arena: MappedArena, copies: CudaCopies) -> None:
        """A leaf that begins within its storage, cut in two: the second piece begins at an odd byte."""
        view = torch.arange(200, dtype=torch.uint8, device="cuda")[50:150]
        copies.copy(arena.view(0, 33), view, 0, eager=False)
        copies.copy(arena.view(1000, 67), view, 33, eager=True)
        copies.record()()
        assert bytes(arena.view(0, 33)) == bytes(range(50, 83))
        assert bytes(arena.view(1000, 67)) == bytes(range(83, 150))


@pytest.mark.gpu
class TestPinning:
    def test_the_whole_arena_is_pinned_until_it_is_unregistered(self, arena: MappedArena) -> None:
        copies = CudaCopies()
        copies.register(arena)
        ends = [torch.frombuffer(arena.view(at, 8), dtype=torch.uint8) for at in (0, SIZE_BYTES - 8)]
        assert [end.is_pinned() for end in ends] == [True, True]
        copies.unregister(arena)
        assert [end.is_pinned() for end in ends] == [False, False]
        copies.unregister(arena)  # again is nothing

    def test_an_arena_that_cannot_be_pinned_is_said_and_torch_goes_on(
        self, arena: MappedArena, copies: CudaCopies, caplog: pytest.LogCaptureFixture
    ) -> None:
        second = CudaCopies()
        with caplog.at_level(logging.WARNING):
            second.register(arena)
        (record,) = caplog.records
        assert f"arena_not_pinned code={ALREADY_REGISTERED}" in record.getMessage()
        assert torch.ones(3, device="cuda").sum().item() == 3  # the error is not raised by an innocent kernel
        second.unregister(arena)
        assert torch.frombuffer(arena.view(0, 8), dtype=torch.uint8).is_pinned()

    def test_without_pinning_the_bytes_are_the_same(self, arena: MappedArena) -> None:
        copies, tensor = CudaCopies(), torch.arange(1024.0, device="cuda")
        copy(copies, arena, tensor, eager=False)
        copies.record()()
        assert stored(arena, tensor) == bits(tensor)


# -- through a daemon


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
    objects["optimizer"].zero_grad()
    objects["model"](torch.randn(32, 64, device="cuda")).square().mean().backward()
    objects["optimizer"].step()
    run.step()


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
