import json
import math
import random

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.manifest_types import SegmentEntry
from everstep.checkpoint.segment_format import (
    SegmentStamp,
    align_up,
    build_header,
    header_size_bytes,
    item_size_bytes,
    parse_header,
    read_stamp,
    slot_offsets,
)
from everstep.core.errors import CorruptDataError, DataError, FormatVersionError, StateTypeError
from everstep.core.ids import CheckpointId

STAMP = SegmentStamp(
    generation="0123456789abcdef" * 2,
    run_id="fedcba9876543210" * 2,
    checkpoint=CheckpointId(3, 1234),
    rank=2,
    segment=1,
)
ALL_DTYPES = (
    *("F64", "I64", "U64", "F32", "I32", "U32", "BF16", "F16", "I16", "U16", "F8_E4M3", "F8_E5M2"),
    *("BOOL", "I8", "U8"),
)


def place(items: list[tuple[str, str, tuple[int, ...]]]) -> tuple[SegmentEntry, ...]:
    entries: list[SegmentEntry] = []
    begin = 0
    for key, dtype, shape in items:
        size = math.prod(shape) * item_size_bytes(dtype)
        entries.append(SegmentEntry(key=key, dtype=dtype, shape=shape, begin=begin, end=begin + size))
        begin += size
    return tuple(entries)


ENTRIES = place([("w@0:4", "F32", (4, 3)), ("é ünï", "BF16", (5,)), ("", "BOOL", ()), ("none", "I8", (0, 7))])

keys = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda key: key != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
items = st.lists(
    st.tuples(keys, st.sampled_from(ALL_DTYPES), shapes), max_size=8, unique_by=lambda item: item[0]
)


@given(items, st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_header_reads_back_and_its_size_depends_on_the_entries_alone(
    found: list[tuple[str, str, tuple[int, ...]]], attempt: int, step: int
) -> None:
    entries = place(found)
    stamp = SegmentStamp(
        generation=STAMP.generation,
        run_id=STAMP.run_id,
        checkpoint=CheckpointId(attempt, step),
        rank=0,
        segment=0,
    )
    header = build_header(entries, stamp)
    file_size = len(header) + (entries[-1].end if entries else 0)
    assert len(header) == header_size_bytes(entries) == len(build_header(entries, STAMP))
    assert len(header) % 4096 == 0
    assert parse_header(header, file_size) == (stamp, entries)
    assert read_stamp(header[:512]) == stamp


def test_the_safetensors_library_opens_the_file_and_finds_every_dtype() -> None:
    entries = place([(f"t.{dtype}", dtype, (3, 2)) for dtype in ALL_DTYPES])
    data = random.Random(1).randbytes(entries[-1].end)
    found = dict(safetensors.deserialize(build_header(entries, STAMP) + data))
    assert sorted(found) == sorted(entry.key for entry in entries)
    for entry in entries:
        tensor = found[entry.key]
        assert (tensor["dtype"], tuple(tensor["shape"])) == (entry.dtype, entry.shape)
        assert bytes(tensor["data"]) == data[entry.begin : entry.end]


def with_text(text: str, data_bytes: int = 0) -> tuple[bytes, int]:
    raw = text.encode("utf-8", "surrogateescape")
    size = align_up(8 + len(raw))
    return (size - 8).to_bytes(8, "little") + raw.ljust(size - 8), size + data_bytes


METADATA = json.dumps(json.loads(build_header((), STAMP)[8:])["__metadata__"], separators=(",", ":"))


@pytest.mark.parametrize(
    ("entries", "data_bytes", "reason"),
    [
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', 7, "entries end at"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', 9, "entries end at"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}', 12, "expected to begin at 0"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}', 4, "does not fill"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}', 8, "expected to begin at 0"),
        ('"a":{"dtype":"Q3","shape":[2],"data_offsets":[0,8]}', 8, "unknown dtype"),
        ('"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}', 8, "`int` >= 0"),
        ('"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}', 4, "Expected `int`"),
        ('"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}', 8, "Expected `int`"),
        ('"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}', 8, "out of range|`int`"),
        ('"a":{"dtype":"F32","shape":[2]}', 8, "required field `data_offsets`"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}', 8, "unknown field `x`"),
        ('"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}', 8, "Expected `array`"),
        ('"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}', 8, "Expected `array` of length 2"),
        ('"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}', 8, "Expected `str`"),
        ('"a":3', 0, "Expected `object`"),
        (
            '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 2
            + '"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
            0,
            "stands twice",
        ),
        ('"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}', 0, "laid out otherwise"),
        ('"a":{"shape":[0],"dtype":"U8","data_offsets":[0,0]}', 0, "laid out otherwise"),
        ('"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}', 0, "stands twice"),
        ('"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}{', 0, "does not list entries"),
        ('"a":NaN', 0, "malformed"),
        ('"a":' + "[" * 3000, 0, "does not list entries"),
        ('"\udcff":{}', 0, "does not list entries"),
        ('"a":', 0, "does not list entries"),
    ],
)
def test_a_wrong_header_is_refused_with_its_reason(entries: str, data_bytes: int, reason: str) -> None:
    prefix, size = with_text(f'{{"__metadata__":{METADATA},{entries}}}', data_bytes)
    with pytest.raises(CorruptDataError, match=reason):
        parse_header(prefix, size)


@pytest.mark.parametrize(
    "behind", [",}", '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', ",,}", "} }", "}\n"]
)
def test_what_follows_the_stamp_is_refused_unless_it_is_a_header(behind: str) -> None:
    with pytest.raises(CorruptDataError):
        parse_header(*with_text(f'{{"__metadata__":{METADATA}{behind}'))


@pytest.mark.parametrize(
    "prefix", [b"", b"\1\0\0", b"\0" * 8, b"\xff" * 600, b"\xf8\x0f" + b"\0" * 6 + b"x" * 4088]
)
def test_bytes_without_a_header_are_refused(prefix: bytes) -> None:
    with pytest.raises(CorruptDataError):
        parse_header(prefix, len(prefix))


def test_a_foreign_safetensors_file_is_refused() -> None:
    prefix, size = with_text('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')
    with pytest.raises(CorruptDataError, match="stamp"):
        parse_header(prefix, size)


def test_a_newer_version_is_told_from_damage() -> None:
    header = build_header(ENTRIES, STAMP).replace(b"segment-v1", b"segment-v2")
    with pytest.raises(FormatVersionError, match="version 2"):
        parse_header(header, len(header) + ENTRIES[-1].end)


@given(st.integers(0, 8 * 1200), st.integers(1, 7))
def test_any_bit_flip_of_the_header_is_found_or_harmless(bit: int, more: int) -> None:
    """A header is covered by block checksums too; here: only declared errors, and never another stamp unnoticed."""
    header = bytearray(build_header(ENTRIES, STAMP))
    for flip in range(more):
        header[(bit // 8 + flip * 97) % len(header)] ^= 1 << bit % 8
    try:
        stamp, entries = parse_header(bytes(header), len(header) + ENTRIES[-1].end)
    except DataError:
        return
    assert len(entries) == len(ENTRIES)
    assert isinstance(stamp, SegmentStamp)


def test_keys_that_cannot_be_written_are_refused() -> None:
    twice = place([("a", "U8", (1,)), ("a", "U8", (1,))])
    with pytest.raises(ValueError, match="stands twice"):
        build_header(twice, STAMP)
    with pytest.raises(ValueError, match="reserved"):
        build_header(place([("__metadata__", "U8", ())]), STAMP)
    with pytest.raises(UnicodeEncodeError):
        build_header(place([("\ud800", "U8", ())]), STAMP)
    with pytest.raises(StateTypeError):
        item_size_bytes("F4")


@pytest.mark.parametrize(
    "change", [{"generation": "x"}, {"run_id": "0" * 31 + "\n"}, {"rank": -1}, {"segment": 2**63}]
)
def test_a_stamp_out_of_range_cannot_be_made(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "generation": STAMP.generation,
        "run_id": STAMP.run_id,
        "checkpoint": STAMP.checkpoint,
        "rank": 0,
        "segment": 0,
    }
    with pytest.raises(ValueError, match=r"hex digits|out of range"):
        SegmentStamp(**(fields | change))  # pyright: ignore[reportArgumentType]


@given(st.lists(st.integers(0, 10**9), max_size=6))
def test_slots_hold_segments_in_order_without_overlap(sizes: list[int]) -> None:
    offsets, total = slot_offsets(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % 4096 == 0 for offset in (*offsets, total))
    assert all(end <= begin for end, begin in zip(ends, (*offsets, total)[1:], strict=True))
