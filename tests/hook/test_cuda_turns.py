"""Turns of two streams: each behind the one before, all of them between what comes before and behind them."""

import os
from array import array
from typing import Any

import pytest
import torch
from stub_turns import StubStream, stub_turns

from everstep.hook import cuda_device, cuda_memcpy
from everstep.hook.copy_plan import WORD
from everstep.hook.cuda_batch import SPAN_BYTES, CudaBatch
from everstep.hook.cuda_device import CudaDevice
from everstep.hook.cuda_memcpy import Copies
from everstep.hook.cuda_pinning import Pinning
from everstep.hook.cuda_turns import Turns
from everstep.hook.mapped_arena import MappedArena

NONE = Copies(targets=array(WORD), sources=array(WORD), sizes=array(WORD))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was enqueued, and what waits for what."""
    found: list[str] = []

    def enqueue(copies: Copies, stream: Any) -> None:
        found.append(f"copy on {stream.name}")

    monkeypatch.setattr(cuda_memcpy, "enqueue", enqueue)
    return found


def test_each_turn_is_behind_the_one_before_and_main_behind_the_last(events: list[str]) -> None:
    stub_turns(events).copy([NONE, NONE, NONE])
    assert events == [
        "copy on main",
        "other behind main",
        "copy on other",
        "main behind other",
        "copy on main",
    ]


def test_a_single_turn_is_on_main(events: list[str]) -> None:
    stub_turns(events).copy([NONE])
    assert events == ["copy on main"]


def test_after_a_failure_main_is_behind_what_was_enqueued(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = cuda_memcpy.enqueue

    def failing(copies: Copies, stream: Any) -> None:
        enqueue(copies, stream)
        if stream.name == "other":
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cuda_memcpy, "enqueue", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stub_turns(events).copy([NONE, NONE])
    assert events == ["copy on main", "other behind main", "copy on other", "main behind other"]


def test_what_is_copied_at_once_is_behind_the_compute_stream_which_goes_on_behind_it(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = CudaDevice.__new__(CudaDevice)
    device._device, device.turns = torch.device("cuda", 0), stub_turns(events)
    device._stream = device.turns.main
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: StubStream("compute", events))
    monkeypatch.setattr(cuda_device, "event", lambda stream: f"the end of {stream.name}")
    batch = CudaBatch(device=device._device, base=0, copies=NONE, turns=[(0, 0), (0, 0)], size_bytes=0)
    assert device.copy_at_once(batch) == "the end of main"
    assert events == [
        "main behind the end of compute",
        "copy on main",
        "other behind main",
        "copy on other",
        "main behind other",
        "compute behind the end of main",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("in_turns", [True, False])
def test_what_training_reads_back_comes_between_two_turns(in_turns: bool) -> None:
    """In one piece it would come behind all of it: 20 ms later."""
    count, size_bytes = 64, 64 * SPAN_BYTES
    fd = os.memfd_create("everstep-cuda-test")
    os.ftruncate(fd, size_bytes)
    arena = MappedArena(1, fd, size_bytes, 1)
    pinning = Pinning(arena)
    pinning.wait()
    source = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    loss = torch.full((), 2.5, device="cuda")
    copies = Copies(
        targets=array(WORD, range(arena.address, arena.address + size_bytes, SPAN_BYTES)),
        sources=array(WORD, range(source.data_ptr(), source.data_ptr() + size_bytes, SPAN_BYTES)),
        sizes=array(WORD, [SPAN_BYTES] * count),
    )
    turns = Turns(loss.device)
    torch.cuda.synchronize()
    turns.copy([copies.part(index, index + 1) for index in range(count)] if in_turns else [copies])
    end = turns.main.record_event()
    assert loss.item() == 2.5
    assert end.query() is not in_turns
    end.synchronize()
    assert torch.frombuffer(arena.view(0, size_bytes), dtype=torch.uint8).min() == 1
    pinning.undo()
    arena.close()
