"""Ten thousand short completions in one transfer, of each engine: the kernel moves part of each block, again and again.

A block is asked for in part, and the engine believes that it asked for all of it: what it sees is a short completion
with the bytes that really moved.
"""

import os
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import plain_engine
from everstep.checkpoint.engine import EngineConfig, EngineKind, Transfer, TransferKind
from everstep.checkpoint.engine_kinds import make_engine
from everstep.checkpoint.kernel_aio import AioContext
from everstep.checkpoint.linux import dio_alignment
from everstep.checkpoint.uring import Ring

SHORT = 10_000
BLOCKS, BLOCK_UNITS = 64, 256
"""Of which each takes some 170 calls."""
SEED = 20261122


class Shortener:
    """Says how much of a block the kernel is asked for: one unit or two, or all of it when no more is left."""

    def __init__(self, unit_bytes: int, *, is_exact: bool) -> None:
        """Take the unit; where it is not exact any number of bytes up to twice as many will do."""
        self.lengths: list[int] = []
        """Of those that were cut short."""
        self._unit_bytes, self._is_exact = unit_bytes, is_exact
        self._random = random.Random(SEED)

    def __call__(self, length_bytes: int) -> int:
        units = self._random.randint(1, 2) * self._unit_bytes
        part = units if self._is_exact else self._random.randint(1, units)
        if part >= length_bytes:
            return length_bytes
        self.lengths.append(part)
        return part


def shorten_queue(queue: type[AioContext] | type[Ring]) -> Callable[[pytest.MonkeyPatch, Shortener], None]:
    def install(patch: pytest.MonkeyPatch, shorten: Shortener) -> None:
        real = queue.prepare

        def prepare(self: Any, slot: int, kind: TransferKind, *, length_bytes: int, **more: int) -> None:
            real(self, slot, kind, length_bytes=shorten(length_bytes), **more)

        patch.setattr(queue, "prepare", prepare)

    return install


def shorten_calls(patch: pytest.MonkeyPatch, shorten: Shortener) -> None:
    write, read = os.pwrite, os.preadv
    patch.setattr(
        plain_engine.os, "pwrite", lambda fd, block, offset: write(fd, block[: shorten(len(block))], offset)
    )
    patch.setattr(
        plain_engine.os,
        "preadv",
        lambda fd, blocks, offset: read(fd, [blocks[0][: shorten(len(blocks[0]))]], offset),
    )


SHORTENED: dict[EngineKind, Callable[[pytest.MonkeyPatch, Shortener], None]] = {
    EngineKind.AIO: shorten_queue(AioContext),
    EngineKind.URING: shorten_queue(Ring),
    EngineKind.PLAIN: shorten_calls,
}


@dataclass(frozen=True)
class File:
    """An open file and the unit in which it can be written."""

    path: Path
    fd: int
    unit_bytes: int
    is_direct: bool


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[File]:
    path, is_direct = tmp_path / "file", bool(request.param)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0))
    try:
        told = dio_alignment(fd)
        if is_direct and (told is None or not told.is_possible):
            pytest.skip(f"files in {tmp_path} cannot do direct I/O")
        unit_bytes = max(told.memory_bytes, told.offset_bytes) if is_direct and told else 512
        yield File(path, fd, unit_bytes, is_direct)
    finally:
        os.close(fd)


@pytest.mark.parametrize("direction", TransferKind, ids=lambda each: each.value)
@pytest.mark.parametrize("kind", SHORTENED, ids=lambda each: each.value)
def test_ten_thousand_short_completions_lose_no_byte(
    kind: EngineKind, direction: TransferKind, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_write = direction is TransferKind.WRITE
    size_bytes = BLOCKS * BLOCK_UNITS * file.unit_bytes
    content = random.Random(SEED).randbytes(size_bytes)
    file.path.write_bytes(bytes(size_bytes) if is_write else content)
    arena_fd = os.memfd_create("everstep-test-arena")
    os.write(arena_fd, content if is_write else bytes(size_bytes))
    shorten = Shortener(file.unit_bytes, is_exact=file.is_direct)
    SHORTENED[kind](monkeypatch, shorten)
    engine = make_engine(kind, EngineConfig(block_size_bytes=BLOCK_UNITS * file.unit_bytes))
    done = engine.run(
        Transfer(
            kind=direction,
            arena_fd=arena_fd,
            arena_offset_bytes=0,
            file_fd=file.fd,
            file_offset_bytes=0,
            length_bytes=size_bytes,
        )
    )
    engine.close()
    monkeypatch.undo()
    assert done.bytes_moved == size_bytes
    assert len(shorten.lengths) >= SHORT
    assert file.path.read_bytes() == content
    assert os.pread(arena_fd, size_bytes, 0) == content
    os.close(arena_fd)
