"""Copies past the caches: every byte, no other, and memmove where nothing was compiled."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.hook import tensor_bytes
from everstep.hook.streaming_copy import STREAMED_BYTES_MIN, streaming_copy
from everstep.hook.tensor_bytes import COPY_PIECE_BYTES, copy_bytes

ROOM = 4096
HAS_COMPILER = shutil.which("gcc") is not None

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no compiler: nothing was compiled")


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def expect_copied(target_offset: int, source_offset: int, size_bytes: int) -> None:
    """Copy by streaming alone, and look at every byte around."""
    stream = streaming_copy()
    assert stream is not None
    source, target = random_bytes(size_bytes + ROOM), random_bytes(size_bytes + ROOM)
    expected = target.clone()
    expected[target_offset : target_offset + size_bytes] = source[source_offset : source_offset + size_bytes]
    stream(target.data_ptr() + target_offset, source.data_ptr() + source_offset, size_bytes)
    assert torch.equal(target, expected)


@needs_compiler
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 20_000))
@example(0, 0, 0)
@example(1, 0, 62)
@example(1, 0, 63)
@example(1, 0, 64)
@example(0, 1, 64)
@example(63, 1, 129)
def test_every_byte_is_copied_and_no_other(target_offset: int, source_offset: int, size_bytes: int) -> None:
    expect_copied(target_offset, source_offset, size_bytes)


@needs_compiler
@pytest.mark.parametrize("size_bytes", [STREAMED_BYTES_MIN, 2 * COPY_PIECE_BYTES + 77])
def test_large_copies_are_streamed_and_small_ones_are_not(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[int] = []
    stream = streaming_copy()
    assert stream is not None

    def noted(to: int, source: int, piece_bytes: int) -> None:
        streamed.append(piece_bytes)
        stream(to, source, piece_bytes)

    monkeypatch.setattr(tensor_bytes, "_stream", noted)
    source, target = random_bytes(size_bytes), random_bytes(size_bytes)
    copy_bytes(target.data_ptr(), source.data_ptr(), STREAMED_BYTES_MIN - 1)
    assert streamed == []
    copy_bytes(target.data_ptr(), source.data_ptr(), size_bytes)
    assert torch.equal(target, source)
    assert sum(streamed) == size_bytes
    assert max(streamed) <= COPY_PIECE_BYTES


def test_without_a_compiler_memmove_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streaming_copy(tmp_path / "_streaming_copy.abi3.so") is None
    monkeypatch.setattr(tensor_bytes, "_stream", None)
    source, target = random_bytes(5 * COPY_PIECE_BYTES + 3), random_bytes(5 * COPY_PIECE_BYTES + 3)
    copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
    assert torch.equal(target, source)


@needs_compiler
def test_it_is_there_for_whoever_is_told_of_its_end() -> None:
    """Stores past the caches are seen by another processor once the copy has returned."""
    stream = streaming_copy()
    assert stream is not None
    size_bytes = 2**20
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
        stream(target.data_ptr(), source.data_ptr(), size_bytes)
        copied.release()
        looked.acquire()
    looker.join()
    assert seen == [True] * 100
