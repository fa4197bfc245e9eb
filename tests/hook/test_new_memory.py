"""Memory that is mapped before it is needed: what is written to it comes to stay, and no page is waited for."""

import ctypes
import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.leaf import whole_leaf
from everstep.core import advice
from everstep.hook.new_memory import NewMemory, page_ranges

MIB = 2**20
PAGE_BYTES = 4096
SIZES = {"large": 40 * MIB, "larger": 50 * MIB, "small": 100, "empty": 0}
"""The large ones are above what glibc keeps for itself: each is mapped anew."""
SPECS = {name: whole_leaf(name, "uint8", (size_bytes,)) for name, size_bytes in SIZES.items()}


@pytest.fixture(autouse=True)
def _trimmed() -> None:  # pyright: ignore[reportUnusedFunction]
    """What other tests have let go is no memory that is mapped already."""
    ctypes.CDLL(None).malloc_trim(0)


def mapping() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "everstep-map"]


def wait_until_mapped() -> None:
    for thread in mapping():
        thread.join()


def mapped_share(tensor: torch.Tensor) -> float:
    """Return which share of a tensor's pages is there, by mincore(2).

    Faults when they are written would say nothing: memory may come in huge pages, as where numpy has asked for them, by
    few faults, and the allocator's own words bring one at each end.
    """
    begin = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    count = (tensor.data_ptr() + tensor.nbytes - begin) // PAGE_BYTES
    pages = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * PAGE_BYTES), pages)
    assert not failed, ctypes.get_errno()
    return sum(page & 1 for page in pages) / count


def test_what_is_needed_is_mapped_ahead_and_nothing_else() -> None:
    memory = NewMemory(SPECS, ahead=["large", "small", "empty"])
    wait_until_mapped()
    assert mapped_share(memory.of("large")) > 0.99
    assert mapped_share(memory.of("larger")) < 0.2
    assert [memory.of(name).nbytes for name in SIZES] == list(SIZES.values())
    assert memory.of("small") is memory.of("small")
    memory.close()


def test_what_is_written_meanwhile_stays() -> None:
    memory = NewMemory({"a": whole_leaf("a", "uint8", (300 * MIB,))}, ahead=["a"])
    tensor = memory.of("a")
    for begin in range(0, tensor.nbytes, 10 * MIB):
        tensor[begin : begin + 10 * MIB] = begin // (10 * MIB) + 1
    wait_until_mapped()
    assert tensor.view(30, -1).min(dim=1).values.tolist() == list(range(1, 31))
    assert tensor.view(30, -1).max(dim=1).values.tolist() == list(range(1, 31))
    memory.close()


def test_stopping_waits_for_the_thread_and_leaves_the_memory() -> None:
    memory = NewMemory({"a": whole_leaf("a", "uint8", (500 * MIB,))}, ahead=["a"])
    tensor = memory.of("a")
    memory.stop()
    assert mapping() == []
    assert mapped_share(tensor) < 0.9
    tensor[-MIB:] = 7
    memory.close()
    memory.close()
    assert int(tensor[-1]) == 7


def test_for_small_leaves_there_is_no_thread() -> None:
    memory = NewMemory(SPECS, ahead=["small", "empty"])
    assert mapping() == []
    memory.close()


def test_a_kernel_that_cannot_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(address: int, size_bytes: int, what: int) -> bool:
        assert what == advice.POPULATE_WRITE
        asked.append((address, size_bytes))
        return False

    monkeypatch.setattr(advice, "madvise", refuse)
    memory = NewMemory(SPECS, ahead=["large", "larger"])
    wait_until_mapped()
    assert len(asked) == 1
    assert mapped_share(memory.of("large")) < 0.2
    memory.close()


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**16)), max_size=30))
def test_ranges_hold_every_piece_and_few_pages_more(pieces: list[tuple[int, int]]) -> None:
    found: list[Any] = list(page_ranges(pieces))
    for address, size_bytes in pieces:
        assert any(begin <= address and address + size_bytes <= end for begin, end in found)
    assert all(begin % PAGE_BYTES == end % PAGE_BYTES == 0 for begin, end in found)
    for (_, end), (begin, _) in itertools.pairwise(found):
        assert begin - end > 2 * PAGE_BYTES
    pages = {
        page for address, size in pieces for page in range(address // 4096, -(-(address + size) // 4096))
    }
    assert sum(end - begin for begin, end in found) // PAGE_BYTES <= len(pages) + 2 * len(pieces)
