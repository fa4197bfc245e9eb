import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.arena_map import ArenaMap, ArenaMaps
from everstep.checkpoint.block_io import Span, open_span
from everstep.checkpoint.engine import Transfer, TransferKind
from everstep.checkpoint.linux import dio_alignment

UNIT = 512
LENGTH_MAX = 40 * UNIT
FILE_OFFSET = 1 << 20


@pytest.fixture(scope="module")
def arena() -> Iterator[ArenaMap]:
    fd = os.memfd_create("everstep-test-arena")
    os.ftruncate(fd, LENGTH_MAX)
    mapped = ArenaMap(fd, size_bytes=LENGTH_MAX, writable=True)
    os.close(fd)
    yield mapped
    mapped.close()


def _span(arena: ArenaMap, kind: TransferKind, length: int, *, unit: int) -> Span:
    transfer = Transfer(
        kind=kind,
        arena_fd=0,
        arena_offset_bytes=0,
        file_fd=0,
        file_offset_bytes=FILE_OFFSET,
        length_bytes=length,
    )
    io_length = -(-length // unit) * unit
    return Span(transfer=transfer, arena=arena, alignment_bytes=unit, io_length_bytes=io_length)


@pytest.mark.parametrize("kind", TransferKind)
@pytest.mark.parametrize("unit", [1, UNIT])
def test_any_short_completions_leave_no_gap_and_stay_aligned(
    arena: ArenaMap, kind: TransferKind, unit: int
) -> None:
    @given(data=st.data(), length=st.integers(1, LENGTH_MAX))
    def property_holds(data: st.DataObject, length: int) -> None:
        if kind is TransferKind.WRITE:
            length = -(-length // unit) * unit
        span = _span(arena, kind, length, unit=unit)
        covered = 0
        while covered < span.io_length_bytes:
            asked = span.io_length_bytes - covered
            moved = data.draw(st.integers(unit, asked) if asked >= unit else st.just(asked))
            done = span.progress(covered, asked, moved)
            # What counts as done did move, or lies behind the bytes that were wanted.
            assert done <= moved or covered + moved >= length
            assert done % unit == 0
            covered += done
        assert covered == span.io_length_bytes

    property_holds()


@pytest.mark.parametrize("moved", [0, 1, UNIT - 1])
@pytest.mark.parametrize(
    ("kind", "number"), [(TransferKind.READ, errno.ENODATA), (TransferKind.WRITE, errno.EIO)]
)
def test_less_than_a_sector_is_no_progress(
    arena: ArenaMap, kind: TransferKind, number: int, moved: int
) -> None:
    span = _span(arena, kind, 8 * UNIT, unit=UNIT)

    with pytest.raises(OSError, match=f"at byte {FILE_OFFSET + 2 * UNIT + moved}") as caught:
        span.progress(2 * UNIT, 4 * UNIT, moved)
    assert caught.value.errno == number


def test_a_short_direct_completion_goes_on_at_the_sector_before_its_end(arena: ArenaMap) -> None:
    span = _span(arena, TransferKind.WRITE, 8 * UNIT, unit=UNIT)

    assert span.progress(0, 8 * UNIT, 3 * UNIT + 17) == 3 * UNIT


@pytest.mark.parametrize(("wanted", "given"), [(4096, 4096), (4097, 4608), (1, 512)])
def test_blocks_are_multiples_of_the_alignment(arena: ArenaMap, wanted: int, given: int) -> None:
    assert _span(arena, TransferKind.READ, UNIT, unit=UNIT).block_size_bytes(wanted) == given


def test_only_a_direct_read_asks_for_more_than_its_length(tmp_path: Path) -> None:
    arena_fd = os.memfd_create("everstep-test-arena")
    os.ftruncate(arena_fd, LENGTH_MAX)
    maps = ArenaMaps()
    for direct in (False, True):
        file_fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR | (os.O_DIRECT if direct else 0))
        known = dio_alignment(file_fd)
        unit = max(known.memory_bytes, known.offset_bytes) if known and known.is_possible else 4096
        transfer = Transfer(
            kind=TransferKind.READ,
            arena_fd=arena_fd,
            arena_offset_bytes=0,
            file_fd=file_fd,
            file_offset_bytes=0,
            length_bytes=unit + 1,
        )
        assert open_span(transfer, maps).io_length_bytes == (2 * unit if direct else unit + 1)
        os.close(file_fd)
    maps.close()
    os.close(arena_fd)
