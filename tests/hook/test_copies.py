"""Compiled copies: every byte, no other, and memmove where nothing was compiled."""

import shutil
import subprocess
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.hook import copies
from everstep.hook.copies import Copies, load_copies
from everstep.hook.copy_plan import WORD
from everstep.hook.tensor_bytes import COPY_PIECE_BYTES, copy_bytes

ROOM = 4096

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler: nothing was compiled")


def compiled() -> Copies:
    found = load_copies()
    assert found is not None
    return found


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@needs_compiler
@given(st.integers(0, 200), st.integers(0, 200), st.one_of(st.integers(0, 300), st.integers(1900, 20_000)))
@example(0, 0, 0)
@example(1, 0, 2047)
@example(1, 0, 2048)
@example(63, 1, 2049)
def test_every_byte_is_copied_and_no_other(target_offset: int, source_offset: int, size_bytes: int) -> None:
    source, target = random_bytes(size_bytes + ROOM), random_bytes(size_bytes + ROOM)
    expected = target.clone()
    expected[target_offset : target_offset + size_bytes] = source[source_offset : source_offset + size_bytes]
    compiled().everstep_copy(target.data_ptr() + target_offset, source.data_ptr() + source_offset, size_bytes)
    assert torch.equal(target, expected)


@needs_compiler
@given(st.lists(st.integers(0, 5000), max_size=40), st.lists(st.integers(0, 2**16), max_size=8))
def test_sources_come_one_behind_the_other_wherever_targets_end(
    source_sizes: Sequence[int], cuts: Sequence[int]
) -> None:
    """Targets of other sizes than the sources, empty ones among them, with a gap behind each."""
    sources = [random_bytes(size) for size in source_sizes]
    total = sum(source_sizes)
    ends = sorted({min(cut, total) for cut in cuts} | {total})
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    slot = torch.full((total + len(sizes),), 0xEE, dtype=torch.uint8)
    targets, at = array(WORD), slot.data_ptr()
    for size in sizes:
        targets.extend((at, size))
        at += size + 1
    words = array(WORD, [word for each in sources for word in (each.data_ptr(), each.nbytes)])
    compiled().everstep_gather(targets.buffer_info()[0], words.buffer_info()[0], len(sources))
    joined = torch.cat([*sources, torch.zeros(0, dtype=torch.uint8)])
    expected = [
        torch.cat([joined[end - size : end], torch.full((1,), 0xEE, dtype=torch.uint8)])
        for size, end in zip(sizes, ends, strict=True)
    ]
    assert torch.equal(slot, torch.cat(expected))


def test_without_a_compiler_memmove_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_copies(tmp_path / "_copies.abi3.so") is None
    monkeypatch.setattr(copies, "COPIES", None)
    source, target = random_bytes(5 * COPY_PIECE_BYTES + 3), random_bytes(5 * COPY_PIECE_BYTES + 3)
    copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
    assert torch.equal(target, source)


def test_a_library_from_another_source_is_none(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "_copies.abi3.so"
    source.write_text("void everstep_copy(void) {}")
    if shutil.which("gcc") is None:
        library.write_text("no library")
    else:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert load_copies(library) is None


@pytest.mark.parametrize("shift", [-3000, -64, -1, 0, 1, 64, 3000])
@pytest.mark.parametrize("size_bytes", [10_000, 2 * COPY_PIECE_BYTES + 5])
def test_places_that_overlap_are_copied_as_by_memmove(shift: int, size_bytes: int) -> None:
    memory = random_bytes(size_bytes + 8000)
    expected = memory.clone()
    expected[4000 + shift : 4000 + size_bytes + shift] = memory[4000 : 4000 + size_bytes]
    copy_bytes(memory.data_ptr() + 4000 + shift, memory.data_ptr() + 4000, size_bytes)
    assert torch.equal(memory, expected)


@needs_compiler
def test_it_is_there_for_whoever_is_told_of_its_end() -> None:
    """Stores past the caches are seen by another processor once the copy has returned."""
    copy, size_bytes = compiled().everstep_copy, 2**20
    source, target = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    copied, looked = threading.Semaphore(0), threading.Semaphore(0)
    seen: list[bool] = []

    def look() -> None:
        for value in range(1, 101):
            copied.acquire()
            seen.append(bool((target == value).all()))
            looked.release()

    looker = threading.Thread(target=look)
    looker.start()
    for value in range(1, 101):
        source.fill_(value)
        copy(target.data_ptr(), source.data_ptr(), size_bytes)
        copied.release()
        looked.acquire()
    looker.join()
    assert seen == [True] * 100
