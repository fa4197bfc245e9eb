"""Copies that are enqueued together, over host memory: their bytes, how they are cut, what is made once."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from stub_turns import stub_turns

from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.hook import cuda_batch, cuda_memcpy
from everstep.hook.capture import StateCapture, capture_state
from everstep.hook.component import make_components
from everstep.hook.copy_plan import Placed
from everstep.hook.cuda_batch import CudaBatch, CudaPlan
from everstep.hook.cuda_memcpy import Copies
from everstep.hook.slot_places import Places
from everstep.hook.state_testing import bits


class Tensors:
    """An object with some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(number): tensor for number, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


def mixed() -> list[torch.Tensor]:
    """Every kind of leaf: small and cut, odd sizes, dense but not row-major, scalars, none of it empty but one."""
    torch.manual_seed(1)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    found = [(3 * torch.randn(5, 3)).to(dtype) for dtype in dtypes]
    found += [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).t()]
    found += [torch.tensor(7.0), torch.empty(0, 3), torch.nn.Parameter(torch.randn(4, 4))]
    nans = torch.arange(16, dtype=torch.int32) + 0x7F800001  # signalling ones
    return [*found, nans.view(torch.float32), torch.arange(5000.0)]


def captured(tensors: Sequence[torch.Tensor], device: int = 0) -> StateCapture:
    """As if the tensors lay on a CUDA device, and nothing had to be copied at once."""
    capture = capture_state(make_components({"t": Tensors(tensors)}, world_size=1))
    count = len(capture.leaves)
    return replace(capture, devices=(device,) * count, at_once=(False,) * count)


class Slots:
    """Host memory with slots of one layout, one behind the other."""

    def __init__(self, layout: Layout) -> None:
        self._size_bytes = layout.slot_size_bytes
        self.memory = torch.zeros(2 * layout.slot_size_bytes, dtype=torch.uint8)

    def base(self, slot: int) -> int:
        return self.memory.data_ptr() + slot * self._size_bytes

    def stored(self, slot: int, place: Placed) -> bytes:
        begin = slot * self._size_bytes + place.slot_offset_bytes
        return bits(self.memory[begin : begin + place.size_bytes])


@pytest.fixture(autouse=True)
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[Copies]:
    """All that was enqueued; it is copied at once, by the host."""
    found: list[Copies] = []

    def enqueue(copies: Copies, _: object, *, beside_kernels: bool = True) -> None:
        assert beside_kernels or not found, "the device's own copies come first"
        for target, source, size in zip(copies.targets, copies.sources, copies.sizes, strict=True):
            ctypes.memmove(target, source, size)
        found.append(copies)

    monkeypatch.setattr(cuda_memcpy, "enqueue", enqueue)
    return found


def laid_out(capture: StateCapture) -> tuple[Layout, Places]:
    layout = plan_layout(capture.specs, capture.aliases, segment_count=2)
    return layout, Places(layout, capture)


def assert_copied(capture: StateCapture, places: Places, slots: Slots, slot: int) -> None:
    for place in places.placed:
        leaf = capture.leaves[place.leaf].tensor.detach()
        begin, end = place.offset_in_leaf_bytes, place.offset_in_leaf_bytes + place.size_bytes
        flat = torch.as_strided(leaf, (leaf.numel(),), (1,))  # in the order of memory
        assert slots.stored(slot, place) == bits(flat)[begin:end], capture.specs[place.leaf]


def batch_of(plan: CudaPlan, capture: StateCapture, slots: Slots, slot: int) -> CudaBatch:
    (batch,) = plan.at(capture.addresses, slots.base(slot))
    return batch


@pytest.fixture(params=[cuda_batch.SPAN_BYTES, 5000], ids=["one-span", "several"])
def _spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(cuda_batch, "SPAN_BYTES", request.param)
    monkeypatch.setattr(cuda_batch, "TURN_BYTES", request.param)


def overwrite(tensors: Sequence[torch.Tensor]) -> None:
    """Give each other bytes."""
    with torch.no_grad():
        for tensor in tensors:
            flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
            flat.copy_(flat.flip(0))


@pytest.mark.usefixtures("_spans")
def test_the_bytes_are_those_of_every_leaf_in_each_slot_at_each_boundary() -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    slots = Slots(layout)
    for slot in (0, 1, 0, 1):
        overwrite(tensors)
        batch = batch_of(places.cuda_lazy, capture, slots, slot)
        assert batch.size_bytes == layout.state_size_bytes
        batch.to_host(stub_turns())
        assert_copied(capture, places, slots, slot)


@pytest.mark.usefixtures("_spans")
def test_by_way_of_the_device_all_bytes_come_to_the_same_places(enqueued: list[Copies]) -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    slots = Slots(layout)
    clone = torch.zeros(layout.state_size_bytes, dtype=torch.uint8)
    batch = batch_of(places.cuda_lazy, capture, slots, 1)
    batch.to_clone(clone.data_ptr(), stub_turns().main)
    overwrite(tensors)
    batch.from_clone(clone.data_ptr(), stub_turns())
    overwrite(tensors)  # what is turned round twice is as before
    assert_copied(capture, places, slots, 1)
    assert sum(map(len, (copies.sizes for copies in enqueued[1:]))) < len(enqueued[0].sizes)


@pytest.mark.usefixtures("_spans")
def test_no_copy_into_a_slot_crosses_the_end_of_a_span_and_turns_are_short(enqueued: list[Copies]) -> None:
    """Each of a slot's spans is registered with the driver by itself, which refuses a copy that crosses."""
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slots(layout)
    batch = batch_of(places.cuda_lazy, capture, slots, 1)
    batch.to_host(stub_turns())
    clone = torch.zeros(layout.state_size_bytes, dtype=torch.uint8)
    batch.from_clone(clone.data_ptr(), stub_turns())
    assert slots.base(1) % 5000 != slots.base(0) % 5000, "the spans are a slot's, not the arena's"
    assert sum(sum(copies.sizes) for copies in enqueued) == 2 * layout.state_size_bytes
    for copies in enqueued:
        assert sum(copies.sizes) <= cuda_batch.TURN_BYTES
        for address, size in zip(copies.targets, copies.sizes, strict=True):
            begin = address - slots.base(1)
            assert begin // cuda_batch.SPAN_BYTES == (begin + size - 1) // cuda_batch.SPAN_BYTES


MIB = 1024**2


@pytest.mark.parametrize(
    ("sizes", "turns"),
    [
        ([], []),
        ([1], [(0, 1)]),
        ([1000] * 100, [(0, 100)]),
        ([16 * MIB, 1, 15 * MIB, 2 * MIB], [(0, 1), (1, 3), (3, 4)]),
        ([16 * MIB] * 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_turn_takes_what_fits(sizes: list[int], turns: list[tuple[int, int]]) -> None:
    assert cuda_batch.in_turns(sizes) == turns


def test_of_a_large_state_turns_are_larger_and_not_more() -> None:
    turns = cuda_batch.in_turns([16 * MIB] * 2560)  # 40 GiB
    assert {end - begin for begin, end in turns} == {20}
    assert [begin for begin, _ in turns[1:]] == [end for _, end in turns[:-1]]


def test_what_stays_the_same_is_not_made_anew() -> None:
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slots(layout)
    first = batch_of(places.cuda_lazy, capture, slots, 0).copies
    again = batch_of(places.cuda_lazy, capture, slots, 0).copies
    assert (again.targets, again.sources, again.sizes) == (first.targets, first.sources, first.sizes)
    assert (again.targets is first.targets, again.sources is first.sources) == (True, True)
    assert batch_of(places.cuda_lazy, capture, slots, 1).copies.targets is not first.targets


def test_other_tensors_of_the_same_structure_are_copied_and_an_earlier_batch_stays_what_it_was() -> None:
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slots(layout)
    first = batch_of(places.cuda_lazy, capture, slots, 0)
    others = captured([torch.clone(tensor.detach()).fill_(1) for tensor in mixed()])
    assert places.serve(layout, others)
    batch_of(places.cuda_lazy, others, slots, 1).to_host(stub_turns())
    first.to_host(stub_turns())
    assert_copied(others, places, slots, 1)
    assert_copied(capture, places, slots, 0)


def test_a_state_that_moved_to_another_device_gets_places_of_its_own() -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    assert places.serve(layout, captured(tensors))
    assert not places.serve(layout, captured(tensors, device=1))
    some = replace(capture, devices=(1, *capture.devices[1:]))
    assert not places.serve(layout, some)
    _, of_some = laid_out(some)
    batches = of_some.cuda_lazy.at(some.addresses, 0)
    assert {batch.device.index: batch.size_bytes for batch in batches} == {
        1: some.specs[0].size_bytes,
        0: layout.state_size_bytes - some.specs[0].size_bytes,
    }


def test_a_plan_keeps_no_memory_that_a_tensor_has_given_up() -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    slots = Slots(layout)
    batch_of(places.cuda_lazy, capture, slots, 0).to_host(stub_turns())
    storage = tensors[0].untyped_storage()
    held = torch.UntypedStorage._weak_ref(storage)  # pyright: ignore[reportAttributeAccessIssue]
    del capture, storage, tensors
    assert torch.UntypedStorage._expired(held)  # pyright: ignore[reportAttributeAccessIssue]
