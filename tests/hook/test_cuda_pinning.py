"""Pinning beside training, with a driver that takes as long as the test wants: no GPU has its part in this."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook import cuda_pinning
from everstep.hook.cuda_batch import SPAN_BYTES
from everstep.hook.cuda_copy import CudaCopies, CudaCopy, CudaWindows
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.report import CostBook
from everstep.hook.skip_reasons import PINNING
from everstep.proto.frames import SkipReason

SIZE_BYTES = 4096
OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""


class Driver:
    """A CUDA runtime that pins when it is let; notes on which devices, and what it has pinned."""

    def __init__(self) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.code = 0
        self.good = 0
        """Calls before the code is returned."""
        self.devices: list[int] = []
        self.pinned: list[int] = []
        self.sizes: list[int] = []
        self.threads: set[threading.Thread] = set()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.threads.add(threading.current_thread())
        self.begun.set()
        assert self.let.wait(20)
        if self.code and len(self.pinned) >= self.good:
            return self.code
        self.pinned.append(pointer)
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.pinned.remove(pointer)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(cuda_pinning, "cuda_runtime", lambda: made)
    monkeypatch.setattr(cuda_pinning, "is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", made.devices.append)
    yield made
    made.let.set()


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    fd = os.memfd_create("everstep-pinning-test")
    os.ftruncate(fd, SIZE_BYTES)
    made = MappedArena(1, fd, SIZE_BYTES, 1)
    yield made
    made.close()


def test_whoever_registers_goes_on_and_asks_until_it_is_over(driver: Driver, arena: MappedArena) -> None:
    copies = CudaCopies(CostBook())
    assert not copies.is_pinning(arena)
    copies.register(arena)
    copies.register(arena)
    assert driver.begun.wait(20)
    assert copies.is_pinning(arena)
    copies.wait_pinned(arena, 0.0)
    assert copies.is_pinning(arena)
    driver.let.set()
    copies.wait_pinned(arena, 20)
    assert not copies.is_pinning(arena)
    assert (driver.pinned, driver.devices) == ([arena.address], [3])
    assert threading.current_thread() not in driver.threads
    copies.unregister(arena)
    copies.unregister(arena)
    assert driver.pinned == []


def test_what_cannot_be_pinned_is_said_and_not_undone(
    driver: Driver, arena: MappedArena, caplog: pytest.LogCaptureFixture
) -> None:
    driver.code = OUT_OF_MEMORY
    driver.let.set()
    copies = CudaCopies(CostBook())
    with caplog.at_level(logging.WARNING):
        copies.register(arena)
        copies.wait_pinned(arena, 20)
    assert f"arena_not_pinned code={OUT_OF_MEMORY} size_bytes={SIZE_BYTES} pinned_bytes=0" in caplog.text
    copies.unregister(arena)
    assert driver.pinned == []


@pytest.fixture
def large_arena() -> Iterator[MappedArena]:
    """Two slots of two spans and a bit."""
    slot_size_bytes = 2 * SPAN_BYTES + SIZE_BYTES
    fd = os.memfd_create("everstep-pinning-test")
    os.ftruncate(fd, 2 * slot_size_bytes)
    made = MappedArena(1, fd, slot_size_bytes, 2)
    yield made
    made.close()


def test_each_slot_is_pinned_in_spans(driver: Driver, large_arena: MappedArena) -> None:
    driver.let.set()
    copies = CudaCopies(CostBook())
    copies.register(large_arena)
    copies.wait_pinned(large_arena, 60)
    begins = [large_arena.slot_address(slot) + at * SPAN_BYTES for slot in range(2) for at in range(3)]
    assert driver.pinned == begins
    assert driver.sizes == 2 * [SPAN_BYTES, SPAN_BYTES, SIZE_BYTES]
    copies.unregister(large_arena)
    assert driver.pinned == []


def test_where_slots_begin_within_a_page_all_is_pinned_in_one_call(
    driver: Driver, large_arena: MappedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinning, "PAGESIZE", 64 * 1024)
    driver.let.set()
    copies = CudaCopies(CostBook())
    copies.register(large_arena)
    copies.wait_pinned(large_arena, 60)
    assert (driver.pinned, driver.sizes) == ([large_arena.address], [large_arena.size_bytes])
    copies.unregister(large_arena)


def mapped_bytes(arena: MappedArena) -> int:
    """How much of an arena has pages in this process's tables."""
    ours = f"{arena.address:x}-{arena.address + arena.size_bytes:x} "
    _, _, after = Path("/proc/self/smaps").read_text().partition(ours)
    (line,) = [line for line in after.splitlines()[:25] if line.startswith("Rss:")][:1]
    return int(line.split()[1]) * 1024


def test_populating_maps_exactly_a_range(large_arena: MappedArena) -> None:
    assert mapped_bytes(large_arena) == 0
    large_arena.populate(SPAN_BYTES, 5 * SIZE_BYTES)
    assert mapped_bytes(large_arena) == 5 * SIZE_BYTES
    large_arena.populate(0, large_arena.size_bytes)
    assert mapped_bytes(large_arena) == large_arena.size_bytes


def test_who_undoes_it_waits_for_one_span_and_not_for_all(driver: Driver, large_arena: MappedArena) -> None:
    """An arena must not be unmapped while the driver locks its pages."""
    copies = CudaCopies(CostBook())
    copies.register(large_arena)
    assert driver.begun.wait(20)
    undoing = threading.Thread(target=copies.unregister, args=[large_arena])
    undoing.start()
    undoing.join(0.3)
    assert undoing.is_alive()
    driver.let.set()
    undoing.join(20)
    assert (len(driver.sizes), driver.pinned) == (1, [])


def test_what_was_pinned_before_a_refusal_stays_and_is_undone(
    driver: Driver, large_arena: MappedArena, caplog: pytest.LogCaptureFixture
) -> None:
    driver.code, driver.good = OUT_OF_MEMORY, 4
    driver.let.set()
    copies = CudaCopies(CostBook())
    with caplog.at_level(logging.WARNING):
        copies.register(large_arena)
        copies.wait_pinned(large_arena, 60)
    pinned_bytes = large_arena.slot_size_bytes + SPAN_BYTES
    assert f"size_bytes={large_arena.size_bytes} pinned_bytes={pinned_bytes}" in caplog.text
    assert len(driver.pinned) == 4
    copies.unregister(large_arena)
    assert driver.pinned == []


class Library:
    """What torch does not bind of the runtime: counts the errors that were taken back."""

    def __init__(self) -> None:
        self.cleared = 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.cleared += 1
        return OUT_OF_MEMORY

    def cudaThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802
        return 0


@pytest.mark.parametrize(("code", "cleared"), [(OUT_OF_MEMORY, 1), (0, 0)])
def test_a_refused_registration_leaves_no_error_behind_and_checkpoints_are_taken_without(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, cleared: int
) -> None:
    """CUDA's errors stick: torch would raise this one at its next, innocent launch."""
    library = Library()
    monkeypatch.setattr(cuda_pinning, "_cuda_library", lambda: library)
    driver.code = code
    driver.let.set()
    model, device = nn.Linear(8, 8), tmp_path / "d"
    device.mkdir()
    with (
        daemon_process(Path(os.environ["EVERSTEP_SOCKET"])),
        everstep.attach("unpinned", model=model, storage=device, every=10**6) as run,
    ):
        run.step()
        assert run.wait(20)
        run.checkpoint()
        run.step()
        assert run.wait(20)
        assert (run.report().checkpoints_complete, run.report().failures) == (1, ())
        assert (library.cleared, len(driver.pinned)) == (cleared, 0 if cleared else 2)  # slots


def test_checkpoints_are_skipped_meanwhile_with_that_reason_and_wait_waits_for_it(
    driver: Driver, tmp_path: Path
) -> None:
    model, device = nn.Linear(8, 8), tmp_path / "d"
    device.mkdir()
    with (
        daemon_process(Path(os.environ["EVERSTEP_SOCKET"])),
        everstep.attach("pinned", model=model, storage=device, every=10**6) as run,
    ):
        run.step()  # asks for the arena
        assert not run.wait(5), "the driver is not done"
        run.checkpoint()
        run.step()
        assert run.report().checkpoints_sealed == 0
        assert run.report().skipped[SkipReason.ARENA].example == PINNING
        driver.let.set()
        assert run.wait(20)
        run.checkpoint()
        run.step()
        assert run.wait(20)
        assert (run.report().checkpoints_complete, run.report().failures) == (1, ())
        assert len(driver.pinned) == 2  # slots
    assert driver.pinned == []


def test_the_copy_threads_first_call_is_for_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks 1 to 7 of a node each make a context on the first GPU."""
    calls: list[str] = []

    class Noted(Library):
        def cudaThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802
            calls.append("capture mode")
            return 0

    class End:
        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(cuda_pinning, "_cuda_library", Noted)
    monkeypatch.setattr(cuda_pinning, "is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"device {device}"))
    one = CudaCopy([], [End()])  # pyright: ignore[reportArgumentType]
    one.enqueue()
    one.wait()
    CudaWindows({}).copy([])
    assert calls == ["device 3", "capture mode", "synchronize", "device 3", "capture mode"]
