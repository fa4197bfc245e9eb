"""Copies from CUDA tensors: in which order they run, what they hold, which way they go, what pinning leaves behind."""

import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from everstep.hook import cuda_batch, cuda_copy
from everstep.hook.copy_plan import WORD
from everstep.hook.cuda_batch import SPAN_BYTES, CudaBatch, in_turns, spans
from everstep.hook.cuda_copy import CudaCopies
from everstep.hook.cuda_device import Passage
from everstep.hook.cuda_memcpy import Copies
from everstep.hook.cuda_room import CudaRoom
from everstep.hook.cuda_turns import Turns
from everstep.hook.device_first_machine import STREAK, CopyTimes, DeviceFirstMachine, Way
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.report import CostBook
from everstep.hook.state_testing import bits

SIZE_BYTES = 8 * 1024**2
LONG_CYCLES = 500_000_000
"""A kernel that runs this long keeps what is enqueued behind it back for a quarter of a second or more."""

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered"""


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    fd = os.memfd_create("everstep-cuda-test")
    os.ftruncate(fd, SIZE_BYTES)
    made = MappedArena(1, fd, SIZE_BYTES, 1)
    yield made
    made.close()


@pytest.fixture
def copies(arena: MappedArena, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCopies]:
    """With the arena pinned, as for every snapshot; a KiB is a turn, so that small tensors take several."""
    made = CudaCopies(CostBook())
    pin(made, arena)
    monkeypatch.setattr(cuda_batch, "SPAN_BYTES", 1024)
    monkeypatch.setattr(cuda_batch, "TURN_BYTES", 1024)
    yield made
    made.unregister(arena)


def pin(copies: CudaCopies, arena: MappedArena) -> None:
    """Pin it, and wait for that."""
    copies.register(arena)
    copies.wait_pinned(arena, 60)
    assert not copies.is_pinning(arena)


def stored(arena: MappedArena, tensor: torch.Tensor) -> bytes:
    """What lies at the arena's begin, where the tests put their copies."""
    return bytes(arena.view(0, tensor.nbytes))


def copy(copies: CudaCopies, arena: MappedArena, tensor: torch.Tensor, *, eager: bool) -> Callable[[], None]:
    batches = in_batches(arena, (tensor, 0, tensor.nbytes, 0))
    return begun(copies, eager=batches if eager else [], lazy=[] if eager else batches)


def in_batches(arena: MappedArena, *pieces: tuple[torch.Tensor, int, int, int]) -> list[CudaBatch]:
    """Of one device: bytes [offset in tensor, +size) of each tensor, to an offset in the arena's first slot."""
    cuts = [
        (arena.address + offset + begin, tensor.data_ptr() + offset_in_tensor + begin, end - begin)
        for tensor, offset_in_tensor, size, offset in sorted(pieces, key=lambda piece: piece[3])
        for begin, end in spans(offset, size)
    ]
    if not cuts:
        return []
    targets, sources, sizes = (array(WORD, words) for words in zip(*cuts, strict=True))
    return [
        CudaBatch(
            device=pieces[0][0].device,
            base=arena.address,
            copies=Copies(targets=targets, sources=sources, sizes=sizes),
            turns=in_turns(sizes),
            size_bytes=sum(sizes),
        )
    ]


def begun(copies: CudaCopies, *, eager: Sequence[CudaBatch], lazy: Sequence[CudaBatch]) -> Callable[[], None]:
    """Enqueue all of it, as the copy thread does; return what waits."""
    made = copies.copy(eager=eager, lazy=lazy)
    made.enqueue()
    return made.wait


class TestWithoutCuda:
    def test_nothing_is_asked_of_cuda_before_the_first_tensor(
        self, arena: MappedArena, caplog: pytest.LogCaptureFixture
    ) -> None:
        copies = CudaCopies(CostBook())
        if not torch.cuda.is_initialized():
            copies.register(arena)
        begun(copies, eager=[], lazy=[])()
        copies.guard()
        copies.unregister(arena)
        assert caplog.records == []

    def test_an_empty_tensor_has_nothing_to_copy(self, arena: MappedArena) -> None:
        for eager in (True, False):
            copy(CudaCopies(CostBook()), arena, torch.empty(0, 3), eager=eager)()
        assert bytes(arena.view(0, 8)) == bytes(8)


class StubStream:
    """A side stream of a device that there is not: what is enqueued on it goes on until somebody waits for it."""

    def __init__(self) -> None:
        self.enqueued = self.synchronized = 0


class TestFailing:
    def test_what_was_enqueued_is_waited_for_also_where_enqueuing_failed(
        self, arena: MappedArena, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a device: the first leaf's copies are enqueued, the second one's fail."""
        stream, copies = StubStream(), CudaCopies(CostBook())

        class Device:
            def __init__(self) -> None:
                self.stream = stream

            def begin(self, size_bytes: int) -> Passage:
                stream.enqueued += 1
                raise RuntimeError("CUDA out of memory")

        class Event:
            def __init__(self, of: StubStream) -> None:
                self._of = of

            def synchronize(self) -> None:
                self._of.synchronized += 1

        monkeypatch.setattr(copies, "_device", lambda _: Device())
        monkeypatch.setattr(cuda_copy, "event", Event)
        with pytest.raises(RuntimeError, match="out of memory"):
            copy(copies, arena, torch.ones(4), eager=False)
        assert (stream.enqueued, stream.synchronized) == (1, 0)
        copies.finish()
        assert stream.synchronized == 1
        copies.finish()
        assert stream.synchronized == 1, "again is nothing"

    @pytest.mark.gpu
    def test_after_finish_nothing_writes_to_the_slot_any_more(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        held_back(copies, arena, tensor)
        copies.finish()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))
        arena.view(0, tensor.nbytes)[:] = bytes(tensor.nbytes)
        torch.cuda.synchronize()
        assert stored(arena, tensor) == bytes(tensor.nbytes)


@pytest.mark.gpu
class TestOrder:
    def test_an_eager_copy_runs_between_what_was_enqueued_before_and_after(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(3)
        wait = copy(copies, arena, tensor, eager=True)
        tensor.fill_(9)  # nobody guards it
        wait()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_a_lazy_copy_waits_for_what_was_enqueued_before(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(3)
        copy(copies, arena, tensor, eager=False)()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_after_the_guard_a_kernel_cannot_overtake_the_copy_and_the_host_goes_on(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        held_back(copies, arena, tensor)
        end = ended(copies, tensor)
        copies.guard()
        tensor.fill_(9)
        assert not end.query()  # the guard has blocked no host
        torch.cuda.synchronize()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_the_guard_orders_every_stream_that_writes(self, arena: MappedArena, copies: CudaCopies) -> None:
        """Two optimizers, each on a stream of its own; the second one's weights are the copied ones."""
        tensor = torch.full((1024,), 3.0, device="cuda")
        wait = held_back(copies, arena, tensor)
        with torch.cuda.stream(torch.cuda.Stream()):
            copies.guard()
        with torch.cuda.stream(torch.cuda.Stream()):
            copies.guard()
            tensor.fill_(9)
        wait()
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
        """As a `CopyJob` does, `kept` keeps its memory until the copies have ended."""
        tensor = torch.full((1024,), 3.0, device="cuda")
        wait, kept = held_back(copies, arena, tensor), tensor.untyped_storage()
        nbytes = tensor.nbytes
        del tensor
        others = [torch.full((1024,), 9.0, device="cuda") for _ in range(64)]  # one would get its memory
        wait()
        assert bytes(arena.view(0, nbytes)) == bits(torch.full((1024,), 3.0))
        assert (len(others), kept.nbytes()) == (64, nbytes)

    def test_the_next_snapshot_waits_for_the_compute_stream_anew(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.zeros(1024, device="cuda")
        for value in (3.0, 4.0):
            torch.cuda._sleep(LONG_CYCLES)
            tensor.fill_(value)
            wait = copy(copies, arena, tensor, eager=False)
            copies.guard()
            tensor.fill_(9)
            wait()
            assert stored(arena, tensor) == bits(torch.full((1024,), value))


@pytest.mark.gpu
def test_a_graph_that_is_being_captured_and_what_another_thread_enqueues_leave_each_other_alone(
    arena: MappedArena, copies: CudaCopies
) -> None:
    """As training and the copy thread; a capture ends by default at what any thread does that is unsafe in one."""
    tensor, counted = torch.full((1024,), 3.0, device="cuda"), torch.zeros((), device="cuda")
    made = copies.copy(eager=[], lazy=in_batches(arena, (tensor, 0, tensor.nbytes, 0)))
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as copy_thread, torch.cuda.graph(graph):
        counted.add_(1)
        copy_thread.submit(made.enqueue).result(20)
        copy_thread.submit(made.wait).result(20)
        counted.add_(1)
    assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))
    graph.replay()
    assert counted.item() == 2


def ended(copies: CudaCopies, tensor: torch.Tensor) -> torch.cuda.Event:
    """The end of the newest snapshot's copies from a tensor's device."""
    found = copies._passages[tensor.device].ended
    assert found is not None
    return found


def held_back(copies: CudaCopies, arena: MappedArena, tensor: torch.Tensor) -> Callable[[], None]:
    """Enqueue a lazy copy behind a long kernel on its own stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._device(tensor.device)._stream):
        torch.cuda._sleep(LONG_CYCLES)
    return copy(copies, arena, tensor, eager=False)


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
        copy(copies, arena, tensor, eager=eager)()
        assert stored(arena, tensor) == bits(tensor)

    @pytest.mark.parametrize("eager", [True, False])
    def test_are_in_storage_order_where_a_dense_tensor_is_not_contiguous(
        self, arena: MappedArena, copies: CudaCopies, eager: bool
    ) -> None:
        image = torch.arange(2 * 3 * 4 * 5.0, device="cuda").view(2, 3, 4, 5)
        image = image.to(memory_format=torch.channels_last)
        copy(copies, arena, image, eager=eager)()
        assert stored(arena, image) == bits(image.permute(0, 2, 3, 1))

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
    def test_of_scalars_and_empty_tensors(
        self, arena: MappedArena, copies: CudaCopies, shape: tuple[int, ...]
    ) -> None:
        for eager in (True, False):
            tensor = torch.full(shape, 2.5, device="cuda", requires_grad=True)
            copy(copies, arena, tensor, eager=eager)()
            assert stored(arena, tensor) == bits(tensor)

    def test_of_a_piece_of_a_view(self, arena: MappedArena, copies: CudaCopies) -> None:
        """A leaf that begins within its storage, cut in two: the second piece begins at an odd byte."""
        view = torch.arange(200, dtype=torch.uint8, device="cuda")[50:150]
        eager, lazy = in_batches(arena, (view, 33, 67, 1000)), in_batches(arena, (view, 0, 33, 0))
        begun(copies, eager=eager, lazy=lazy)()
        assert bytes(arena.view(0, 33)) == bytes(range(50, 83))
        assert bytes(arena.view(1000, 67)) == bytes(range(83, 150))


@pytest.mark.gpu
class TestPinning:
    def test_the_whole_arena_is_pinned_until_it_is_unregistered(self, arena: MappedArena) -> None:
        copies = CudaCopies(CostBook())
        pin(copies, arena)
        ends = [torch.frombuffer(arena.view(at, 8), dtype=torch.uint8) for at in (0, SIZE_BYTES - 8)]
        assert [end.is_pinned() for end in ends] == [True, True]
        copies.unregister(arena)
        assert [end.is_pinned() for end in ends] == [False, False]
        copies.unregister(arena)  # again is nothing

    def test_copies_into_several_spans_are_whole_and_one_that_crosses_is_refused(self) -> None:
        """Why copies are cut: the driver takes none that crosses from one registration into another."""
        slot_size_bytes = 2 * SPAN_BYTES
        fd = os.memfd_create("everstep-cuda-test")
        os.ftruncate(fd, slot_size_bytes)
        arena, copies = MappedArena(1, fd, slot_size_bytes, 1), CudaCopies(CostBook())
        pin(copies, arena)
        tensor = torch.randint(256, (slot_size_bytes - 1000,), dtype=torch.uint8, device="cuda")
        begun(copies, eager=[], lazy=in_batches(arena, (tensor, 0, tensor.nbytes, 1000)))()
        assert torch.equal(torch.frombuffer(arena.view(1000, tensor.nbytes), dtype=torch.uint8), tensor.cpu())
        across = torch.frombuffer(arena.view(SPAN_BYTES - 500, 1000), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="invalid argument"):
            across.copy_(tensor[:1000], non_blocking=True)
        del across
        copies.unregister(arena)
        arena.close()

    def test_registered_again_it_stays_as_it_is(
        self, arena: MappedArena, copies: CudaCopies, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Before each snapshot, in case that CUDA came into use after the arena was mapped."""
        pin(copies, arena)
        assert caplog.records == []
        assert torch.frombuffer(arena.view(0, 8), dtype=torch.uint8).is_pinned()

    def test_an_arena_that_cannot_be_pinned_is_said_and_torch_goes_on(
        self, arena: MappedArena, copies: CudaCopies, caplog: pytest.LogCaptureFixture
    ) -> None:
        second = CudaCopies(CostBook())
        with caplog.at_level(logging.WARNING):
            pin(second, arena)
        (record,) = caplog.records
        assert f"arena_not_pinned code={ALREADY_REGISTERED}" in record.getMessage()
        assert torch.ones(3, device="cuda").sum().item() == 3  # the error is not raised by an innocent kernel
        second.unregister(arena)
        assert torch.frombuffer(arena.view(0, 8), dtype=torch.uint8).is_pinned()

    def test_without_pinning_the_bytes_are_the_same_and_batches_go_on(
        self, arena: MappedArena, caplog: pytest.LogCaptureFixture
    ) -> None:
        copies, tensor = CudaCopies(CostBook()), torch.arange(1024.0, device="cuda")
        copy(copies, arena, tensor, eager=False)()
        assert stored(arena, tensor) == bits(tensor)
        assert "cuda_batch_refused" not in caplog.text


# -- on the device first


def made_late(copies: CudaCopies, device: torch.device) -> DeviceFirstMachine:
    """Let earlier copies have been late: the next one goes by the device, if memory is free."""
    machine = copies._device(device)._machine
    for _ in range(STREAK):
        machine.measured(CopyTimes(copy_s=1.0, window_s=0.1))
    return machine


@pytest.fixture
def host_copy_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds the copy from a clone to the host back, and not the one into the clone."""
    copied = CudaBatch.from_clone

    def late(self: CudaBatch, clone: int, turns: Turns) -> None:
        with torch.cuda.stream(turns.main):
            torch.cuda._sleep(LONG_CYCLES)
        copied(self, clone, turns)

    monkeypatch.setattr(CudaBatch, "from_clone", late)


@pytest.fixture
def no_more_memory() -> Iterator[None]:
    """torch may take nothing more from the driver, and has nothing in reserve."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
class TestDeviceFirst:
    def test_by_default_no_memory_of_the_device_is_taken(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024**2,), 3.0, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        wait = copy(copies, arena, tensor, eager=False)
        assert copies._passages[tensor.device].way is Way.HOST
        copies.guard()
        wait()
        assert torch.cuda.max_memory_allocated() == before
        assert copies._costs.device_first == 0

    @pytest.mark.usefixtures("host_copy_late")
    def test_the_tensor_may_change_while_the_copy_to_the_host_has_not_begun(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        made_late(copies, tensor.device)
        wait = copy(copies, arena, tensor, eager=False)
        passage = copies._passages[tensor.device]
        assert passage.way is Way.DEVICE
        copies.guard()
        tensor.fill_(9)
        torch.cuda.current_stream().synchronize()  # by now it is overwritten
        assert not ended(copies, tensor).query()
        wait()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))
        assert copies._costs.device_first == 1
        assert copies._costs.cuda_copies.startswith("copied on the device first: 1 s to the host")

    def test_after_the_guard_a_kernel_cannot_overtake_the_copy_on_the_device(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        made_late(copies, tensor.device)
        wait = held_back(copies, arena, tensor)
        passage = copies._passages[tensor.device]
        copies.guard()
        tensor.fill_(9)
        assert passage.copied is not None
        assert not passage.copied.query()
        wait()
        assert stored(arena, tensor) == bits(torch.full((1024,), 3.0))

    def test_pieces_come_to_their_places(self, arena: MappedArena, copies: CudaCopies) -> None:
        tensors = [torch.arange(count, dtype=torch.uint8, device="cuda") for count in (100, 33, 7)]
        made_late(copies, tensors[0].device)
        first, second, third = tensors
        batches = in_batches(
            arena, (third, 0, 7, 5000), (first, 60, 40, 60), (second, 0, 33, 100), (first, 0, 60, 0)
        )
        begun(copies, eager=[], lazy=batches)()
        assert bytes(arena.view(0, 133)) == bits(first) + bits(second)
        assert bytes(arena.view(5000, 7)) == bits(third)
        assert bytes(arena.view(133, 5000 - 133)) == bytes(5000 - 133)

    @pytest.mark.usefixtures("host_copy_late")
    def test_a_tensor_that_is_freed_meanwhile_is_not_overwritten_by_the_next_one(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        made_late(copies, tensor.device)
        wait, kept = held_back(copies, arena, tensor), tensor.untyped_storage()
        nbytes = tensor.nbytes
        del tensor
        others = [torch.full((1024,), 9.0, device="cuda") for _ in range(64)]
        wait()
        assert bytes(arena.view(0, nbytes)) == bits(torch.full((1024,), 3.0))
        assert (len(others), kept.nbytes()) == (64, nbytes)

    def test_its_memory_is_held_until_the_copy_has_ended_and_no_longer(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024**2,), 3.0, device="cuda")
        made_late(copies, tensor.device)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            wait = copy(copies, arena, tensor, eager=False)
            assert torch.cuda.memory_allocated() == before + tensor.nbytes
            copies.guard()
            assert torch.cuda.memory_allocated() == before + tensor.nbytes
            wait()
            assert torch.cuda.memory_allocated() == before

    def test_where_no_memory_is_free_it_goes_to_the_host_and_says_so(
        self, arena: MappedArena, copies: CudaCopies, request: pytest.FixtureRequest
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        made_late(copies, tensor.device)
        request.getfixturevalue("no_more_memory")
        copy(copies, arena, tensor, eager=False)()
        assert copies._passages[tensor.device].way is Way.HOST
        assert stored(arena, tensor) == bits(tensor)
        assert copies._costs.cuda_copies.endswith("but 4.0 KiB of GPU memory are not free")

    def test_memory_that_is_refused_after_all_loses_nothing(
        self,
        arena: MappedArena,
        copies: CudaCopies,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        request: pytest.FixtureRequest,
    ) -> None:
        """As when another process takes it between the look and the allocation."""
        tensor = torch.arange(1024.0**2, device="cuda")
        machine = made_late(copies, tensor.device)
        request.getfixturevalue("no_more_memory")
        monkeypatch.setattr(CudaRoom, "free_bytes", lambda *_: 2**40)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                wait = copy(copies, arena, tensor, eager=False)
                assert copies._passages[tensor.device].way is machine.way is Way.HOST
                copies.guard()
                wait()
                assert stored(arena, tensor) == bits(tensor)
        (record,) = caplog.records  # the second one asked for none
        assert "cuda_memory_short" in record.getMessage()

    def test_that_training_ran_short_beside_a_copy_ends_it(
        self, arena: MappedArena, copies: CudaCopies, request: pytest.FixtureRequest
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        machine = made_late(copies, tensor.device)
        copy(copies, arena, tensor, eager=False)()
        assert machine.way is Way.DEVICE
        request.getfixturevalue("no_more_memory")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * 1024**2, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        copy(copies, arena, tensor, eager=False)()
        assert machine.way is Way.HOST

    def test_it_can_be_forbidden(self, arena: MappedArena) -> None:
        copies, tensor = CudaCopies(CostBook(), device_first=False), torch.arange(1024.0, device="cuda")
        made_late(copies, tensor.device)
        copy(copies, arena, tensor, eager=False)()
        assert copies._passages[tensor.device].way is Way.HOST
        assert copies._costs.cuda_copies == ""

    def test_copies_that_are_late_are_measured_and_the_next_ones_go_by_the_device(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        for snapshot in range(STREAK):
            wait = held_back(copies, arena, tensor)  # the window is next to nothing
            assert copies._passages[tensor.device].way is Way.HOST
            copies.guard()
            torch.cuda.synchronize()
            wait()
            assert (copies._costs.cuda_wait_s > 0) == (snapshot > 0)
            assert copies.take_wait_s() > 0
            assert copies.take_wait_s() == 0
        copy(copies, arena, tensor, eager=False)()
        assert copies._passages[tensor.device].way is Way.DEVICE

    def test_what_has_not_happened_yet_is_not_waited_for(
        self, arena: MappedArena, copies: CudaCopies
    ) -> None:
        tensor = torch.full((1024,), 3.0, device="cuda")
        wait = copy(copies, arena, tensor, eager=False)
        torch.cuda._sleep(LONG_CYCLES)  # the compute stream is far from the guard
        copies.guard()
        wait()
        (passages,) = copies._unread
        (unread,) = passages.values()
        copy(copies, arena, tensor, eager=False)
        assert list(copies._unread) == [passages]
        assert not unread.is_over
        torch.cuda.synchronize()
        copy(copies, arena, tensor, eager=False)()
        assert not copies._unread
