"""The bytes of an arena's state: what is written is read, and what is damaged, foreign or newer is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import CorruptDataError, FormatVersionError
from everstep.daemon.fd_store import state_format as form
from everstep.daemon.fd_store.inherited_plan import StoredPair, names_of, sort_inherited

HEAD = form.ArenaHead(
    run_name="llama",
    uid=1000,
    store_id="0" * 32,
    rank=1,
    world_size=4,
    device_ids=["1" * 32],
    layout_digest="abc",
    slot_size_bytes=1 << 20,
    slot_count=2,
    arena_inode=7,
)
TOKEN = "a" * 32


def padded(frame: bytes) -> bytes:
    return frame.ljust(form.PAGE_BYTES, b"\0")


def test_a_head_and_its_mappers_are_read_as_they_were_written() -> None:
    assert form.decode_head(padded(form.encode_head(HEAD))) == HEAD
    assert form.decode_mappers(padded(form.encode_mappers([3, 0]))) == [3, 0]


def test_too_many_mappers_are_one_that_nobody_knows() -> None:
    assert form.decode_mappers(form.encode_mappers(list(range(1, 300)))) == [0]


def test_the_longest_head_fits_on_a_page() -> None:
    longest = form.ArenaHead(
        run_name="\u00e9" * 100,
        uid=2**32,
        store_id="f" * 32,
        rank=2**31,
        world_size=2**31 - 1,
        device_ids=[f"{number:032x}" for number in range(64)],
        layout_digest="f" * 64,
        slot_size_bytes=2**49,
        slot_count=64,
        arena_inode=2**61,
    )
    assert form.decode_head(padded(form.encode_head(longest))) == longest


@given(st.integers(0, 8 * (len(form.encode_head(HEAD)) - 1) + 7))
def test_no_flipped_bit_of_a_head_is_believed(bit: int) -> None:
    page = bytearray(padded(form.encode_head(HEAD)))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptDataError, FormatVersionError)):
        form.decode_head(bytes(page))


@given(st.binary(max_size=200))
def test_no_bytes_are_a_head(content: bytes) -> None:
    with pytest.raises((CorruptDataError, FormatVersionError)):
        form.decode_head(content)
    with pytest.raises((CorruptDataError, FormatVersionError)):
        form.decode_mappers(content)


def test_another_version_is_said_to_be_one() -> None:
    page = bytearray(padded(form.encode_head(HEAD)))
    page[8] = 9
    with pytest.raises(FormatVersionError, match="version 9, this daemon reads 1"):
        form.decode_head(bytes(page))
    frame = bytearray(form.record_frame(b"draft"))
    frame[8] = 9
    with pytest.raises(FormatVersionError):
        form.record_length_bytes(bytes(frame))


@given(st.binary(min_size=1, max_size=300), st.integers(min_value=0))
def test_a_record_is_of_one_draft(draft: bytes, bit: int) -> None:
    frame = form.record_frame(draft)
    assert form.record_length_bytes(frame) == len(draft)
    form.check_record(frame, draft)
    changed = bytearray(draft)
    changed[bit // 8 % len(draft)] ^= 1 << bit % 8
    with pytest.raises(CorruptDataError):
        form.check_record(frame, bytes(changed))


def test_an_empty_record_is_none() -> None:
    assert form.record_length_bytes(bytes(48)) == 0


def test_regions_do_not_overlap() -> None:
    ends = [form.record_offset_bytes(slot) for slot in range(form.SLOTS_MAX)]
    assert {after - before for before, after in itertools.pairwise(ends)} == {form.REGION_BYTES}
    assert ends[0] > form.MAPPERS_OFFSET_BYTES
    assert form.state_size_bytes(2) == ends[2]


def test_descriptors_are_told_by_their_names() -> None:
    found = sort_inherited(
        [
            "everstep-data",
            f"everstep-state-{TOKEN}",
            f"everstep-arena-{TOKEN}",
            "stored",
            f"everstep-arena-{TOKEN}",
        ]
    )
    assert found.sockets == [3]
    assert found.arenas == {TOKEN: StoredPair(arena=5, state=4)}
    assert found.unknown == [("stored", 6), (f"everstep-arena-{TOKEN}", 7)]
    assert sort_inherited(["everstep.socket", "everstep-arena-xyz"]).unknown == [("everstep-arena-xyz", 4)]


def test_names_may_be_fewer_than_descriptors() -> None:
    assert names_of("2", "one") == ["one", "unknown"]
    assert names_of("1", "") == ["unknown"]
    for count in ("x", "-1", "70000"):
        with pytest.raises(ValueError, match=r"LISTEN_FDS|invalid"):
            names_of(count, "")
