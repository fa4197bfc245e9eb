"""Copies that are enqueued together, over host memory: their bytes, what is kept between boundaries, and until when."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.hook import cuda_batch
from everstep.hook.capture import StateCapture, capture_state
from everstep.hook.component import make_components
from everstep.hook.copy_plan import Placed, merged
from everstep.hook.cuda_batch import CudaBatch, CudaPlan
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


class Slot:
    """Host memory with slots of one layout, one behind the other."""

    def __init__(self, layout: Layout) -> None:
        self._size_bytes = layout.slot_size_bytes
        self.memory = memoryview(bytearray(2 * layout.slot_size_bytes))

    def base(self, slot: int) -> int:
        """What tells slots from each other: an address."""
        return 2**40 + slot * self._size_bytes

    def offset(self, slot: int) -> int:
        return slot * self._size_bytes

    def view(self, offset: int, size: int) -> memoryview:
        return self.memory[offset : offset + size]

    def stored(self, slot: int, place: Placed) -> bytes:
        return bytes(self.view(self.offset(slot) + place.slot_offset_bytes, place.size_bytes))


def laid_out(capture: StateCapture) -> tuple[Layout, Places]:
    layout = plan_layout(capture.specs, capture.aliases, segment_count=2)
    return layout, Places(layout, capture)


def assert_copied(capture: StateCapture, places: Places, slots: Slot, slot: int) -> None:
    for place in places.placed:
        leaf = capture.leaves[place.leaf].tensor.detach()
        begin, end = place.offset_in_leaf_bytes, place.offset_in_leaf_bytes + place.size_bytes
        flat = torch.as_strided(leaf, (leaf.numel(),), (1,))  # in the order of memory
        assert slots.stored(slot, place) == bits(flat)[begin:end], capture.specs[place.leaf]


def batch_of(plan: CudaPlan, capture: StateCapture, slots: Slot, slot: int) -> CudaBatch:
    (batch,) = plan.at(capture.leaves, slots.base(slot), slots.offset(slot))
    return batch


@pytest.fixture(params=[cuda_batch.SPAN_BYTES, 5000], ids=["one-span", "several"])
def _spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(cuda_batch, "SPAN_BYTES", request.param)


@pytest.mark.usefixtures("_spans")
def test_the_bytes_are_those_of_every_leaf_in_each_slot_at_each_boundary() -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    slots = Slot(layout)
    for slot in (0, 1, 0, 1):
        with torch.no_grad():
            for tensor in tensors:
                flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
                flat.copy_(flat.flip(0))
        batch = batch_of(places.cuda_lazy, capture, slots, slot)
        assert len(batch.whole) > len(batch.pieces) > 0
        batch.to_host(slots.view)
        assert_copied(capture, places, slots, slot)


@pytest.mark.usefixtures("_spans")
def test_no_copy_crosses_the_end_of_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a slot's spans is registered with the driver by itself, which refuses a copy that crosses."""
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slot(layout)
    copied: list[tuple[int, int]] = []
    to_one, to_all = torch.Tensor.copy_, cuda_batch._copy_all

    def note(target: torch.Tensor) -> None:
        copied.append((target.data_ptr(), target.nbytes))

    def one(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        note(target)
        return to_one(target, source, non_blocking=non_blocking)

    def all_of(
        targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool
    ) -> None:
        for target in targets:
            note(target)
        to_all(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", one)
    monkeypatch.setattr(cuda_batch, "_copy_all", all_of)
    batch_of(places.cuda_lazy, capture, slots, 1).to_host(slots.view)
    batch = batch_of(places.cuda_lazy, capture, slots, 1)
    for offset, size in merged((each.arena_offset_bytes, each.size_bytes) for each in batch.in_pieces()):
        batch.copy_out(
            slots.view, offset, torch.zeros(size, dtype=torch.uint8)
        )  # as from a clone on the device
    begin = torch.frombuffer(slots.view(slots.offset(1), 1), dtype=torch.uint8).data_ptr()
    assert sum(size for _, size in copied) == 2 * layout.state_size_bytes
    assert slots.offset(1) % 5000, "the spans are a slot's, not the arena's"
    for address, size in copied:
        assert (address - begin) // cuda_batch.SPAN_BYTES == (
            address - begin + size - 1
        ) // cuda_batch.SPAN_BYTES


def test_other_tensors_of_the_same_structure_are_copied_without_anything_made_anew() -> None:
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slot(layout)
    first = batch_of(places.cuda_lazy, capture, slots, 0)
    others = captured([torch.clone(tensor.detach()).fill_(1) for tensor in mixed()])
    assert places.serve(layout, others)
    second = batch_of(places.cuda_lazy, others, slots, 0)
    assert first.targets(slots.view) is second.targets(slots.view)
    other_slot = batch_of(places.cuda_lazy, others, slots, 1)
    assert other_slot.targets(slots.view) is not second.targets(slots.view)
    second.to_host(slots.view)
    assert_copied(others, places, slots, 0)


def test_a_state_that_moved_to_another_device_gets_places_of_its_own() -> None:
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    assert places.serve(layout, captured(tensors))
    assert not places.serve(layout, captured(tensors, device=1))
    some = replace(capture, devices=(1, *capture.devices[1:]))
    assert not places.serve(layout, some)
    _, of_some = laid_out(some)
    batches = of_some.cuda_lazy.at(some.leaves, 0)
    assert min(len(batch.whole) + len(batch.pieces) for batch in batches) == 1


def test_pieces_by_way_of_the_device_are_all_of_it_in_the_order_of_their_places() -> None:
    capture = captured(mixed())
    layout, places = laid_out(capture)
    slots = Slot(layout)
    batch = batch_of(places.cuda_lazy, capture, slots, 1)
    pieces = batch.in_pieces()
    offsets = [piece.arena_offset_bytes for piece in pieces]
    assert offsets == sorted(offsets)
    assert sum(piece.size_bytes for piece in pieces) == batch.size_bytes == layout.state_size_bytes
    for piece in pieces:
        batch.copy_out(slots.view, piece.arena_offset_bytes, cuda_batch.octets(piece))
    assert_copied(capture, places, slots, 1)


def test_a_batch_keeps_no_memory_that_a_tensor_has_given_up() -> None:
    """Nothing of the sources is kept between boundaries, and targets own nothing."""
    tensors = mixed()
    capture = captured(tensors)
    layout, places = laid_out(capture)
    slots = Slot(layout)
    batch_of(places.cuda_lazy, capture, slots, 0).to_host(slots.view)
    storage = tensors[0].untyped_storage()
    held = torch.UntypedStorage._weak_ref(storage)  # pyright: ignore[reportAttributeAccessIssue]
    del capture, storage, tensors
    assert torch.UntypedStorage._expired(held)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_piece_at_an_odd_place_is_copied_by_bytes() -> None:
    capture = captured([torch.arange(8.0)])
    plan = CudaPlan([Placed(0, 0, 32, 3, segment=0)], capture)
    memory = bytearray(64)
    (batch,) = plan.at(capture.leaves, 0)
    batch.to_host(lambda offset, size: memoryview(memory)[offset : offset + size])
    assert not batch.whole
    assert bytes(memory[3:35]) == bits(capture.leaves[0].tensor)
