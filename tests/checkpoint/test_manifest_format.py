import contextlib
import hashlib
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.checkpoint.draft_format import DraftEncoder, DraftReader, decode_draft, encode_draft
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import Alias, LeafSpec, whole_leaf
from everstep.checkpoint.manifest_format import (
    ManifestEncoder,
    ManifestName,
    decode_manifest,
    decode_manifest_head,
    decode_manifest_overview,
    manifest_name,
    parse_manifest_name,
)
from everstep.checkpoint.manifest_parts_format import MANIFEST_SIZE_BYTES_MAX
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES, Draft, Manifest, SegmentRecord
from everstep.checkpoint.shard_rules_plan import check_draft
from everstep.checkpoint.testing import encode_manifest, written_pieces
from everstep.core.errors import CorruptDataError, DataError, FormatVersionError, StateTypeError
from everstep.core.ids import CheckpointId, run_id_of

DEVICES = ("a" * 32, "b" * 32)
GENERATION = "c" * 32
FRAME_BYTES = 56

LEAVES = (
    whole_leaf("model.weight", "float32", (600, 1024)),
    LeafSpec(
        name="channels_last",
        dtype="bfloat16",
        shape=(2, 3, 4, 5),
        strides=(60, 1, 15, 3),
        global_shape=(2, 3, 4, 5),
        global_offset=(0, 0, 0, 0),
    ),
    whole_leaf("fp8", "float8_e4m3fnuz", (7,)),
    whole_leaf("scalar", "float64", (), replicas=2),
    whole_leaf("empty", "int64", (0, 4)),
)
ALIASES = (
    Alias(
        name="tied", of="model.weight", offset_bytes=0, dtype="float32", shape=(600, 1024), strides=(1024, 1)
    ),
)


def make_draft(
    leaves: tuple[LeafSpec, ...] = LEAVES, values: bytes = b'{"lr":0.1,"big":123456789012345678901}'
) -> Draft:
    layout = plan_layout(leaves, ALIASES if leaves is LEAVES else (), segment_count=len(DEVICES))
    return Draft(
        checkpoint=CheckpointId(2, 40),
        rank=1,
        world_size=2,
        parent=CheckpointId(1, 30),
        layout_digest=layout.digest,
        leaves=layout.leaves,
        aliases=layout.aliases,
        pieces=layout.pieces,
        segments=layout.segments,
        values=values,
        notes={"epoch": "3", "torch": "2.13.0"},
    )


def make_manifest(draft: Draft | None = None) -> Manifest:
    draft = draft or make_draft()
    records = tuple(
        SegmentRecord(
            segment=plan.segment,
            device_id=DEVICES[plan.segment],
            generation=GENERATION,
            file_size_bytes=plan.file_size_bytes,
            header_size_bytes=plan.header_size_bytes,
            dio_alignment_bytes=512,
            block_checksums=tuple(
                2**64 - 1 - block for block in range(-(-plan.file_size_bytes // BLOCK_SIZE_BYTES))
            ),
        )
        for plan in draft.segments
    )
    return Manifest(
        run_id=run_id_of("demo"),
        run_name="demo",
        owner_uid=1000,
        checkpoint=draft.checkpoint,
        rank=draft.rank,
        world_size=draft.world_size,
        parent=draft.parent,
        generation=GENERATION,
        created_unix_s=1_700_000_000.25,
        layout_digest=draft.layout_digest,
        leaves=draft.leaves,
        aliases=draft.aliases,
        pieces=written_pieces(draft, records),
        segments=records,
        values=draft.values,
        notes=draft.notes,
    )


def by_leaf(draft: Draft, pieces: tuple[Any, ...]) -> tuple[Any, ...]:
    order = {leaf.name: place for place, leaf in enumerate(draft.leaves)}
    return tuple(sorted(pieces, key=lambda piece: (order[piece.leaf], piece.offset_in_leaf_bytes)))


def signed(payload: bytes, *, version: int = 1, reserved: int = 0) -> bytes:
    return (
        struct.pack(
            "<8sIIQ32s", b"EVSTEPMF", version, reserved, len(payload), hashlib.sha256(payload).digest()
        )
        + payload
    )


def test_manifest_reads_back() -> None:
    manifest = make_manifest()
    content = encode_manifest(manifest)
    assert decode_manifest(content) == manifest
    assert len({piece.segment for piece in manifest.pieces if piece.leaf == "model.weight"}) == 2


def test_head_is_the_manifest_without_its_leaves() -> None:
    manifest = make_manifest()
    head = decode_manifest_head(encode_manifest(manifest))
    for name in ("run_id", "checkpoint", "rank", "world_size", "parent", "generation", "segments", "notes"):
        assert getattr(head, name) == getattr(manifest, name)


def test_overview_is_the_manifest_with_its_first_leaves() -> None:
    manifest = make_manifest()
    content = encode_manifest(manifest)
    assert manifest.aliases
    for count_max in range(len(manifest.leaves) + 2):
        overview = decode_manifest_overview(content, count_max)
        assert overview.leaves == manifest.leaves[:count_max]
        assert overview.leaf_count == len(manifest.leaves)
        assert (overview.aliases, overview.segments) == (manifest.aliases, manifest.segments)
        assert (overview.run_id, overview.checkpoint) == (manifest.run_id, manifest.checkpoint)


def test_one_encoder_for_the_drafts_of_a_layout_gives_each_its_own_facts() -> None:
    first, encoder = make_draft(), DraftEncoder()
    second = replace(
        first, checkpoint=CheckpointId(8, 9), parent=None, values=b'{"more":[1]}', notes={"a": "b"}
    )
    assert [encoder.encode(draft) for draft in (first, second, first)] == [
        encode_draft(draft) for draft in (first, second, first)
    ]
    assert decode_draft(encoder.encode(second)).checkpoint == CheckpointId(8, 9)
    with pytest.raises(AssertionError):
        encoder.encode(make_draft())


def test_draft_reads_back_and_holds_together() -> None:
    draft = make_draft()
    found = decode_draft(encode_draft(draft))
    assert found == replace(draft, pieces=by_leaf(draft, draft.pieces))
    check_draft(found, 1 << 30)


def test_a_layout_that_is_over_is_not_kept_beside_the_next_one() -> None:
    """Each takes a dozen times its bytes; a daemon has a reader for each rank."""
    layouts = [tuple(whole_leaf(f"{name}.{n}", "float32", (4,)) for n in range(3000)) for name in ("a", "b")]
    drafts, reader, peaks = (
        [encode_draft(make_draft(leaves)) for leaves in layouts],
        DraftReader(),
        list[int](),
    )
    tracemalloc.start()
    try:
        for draft in drafts:
            tracemalloc.reset_peak()
            assert len(reader.read(draft, 1 << 30).leaves) == 3000
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_a_draft_names_no_device_and_no_generation() -> None:
    document = json.loads(encode_draft(make_draft()))
    assert set(document["leaves"][0]["pieces"][0]) == {"segment", "key", "offset_in_leaf", "size"}
    assert set(document["segments"][0]) == {"segment", "slot_offset", "header_size", "data_size", "entries"}
    document["segments"][0]["device_id"] = "a" * 32
    with pytest.raises(CorruptDataError, match="unknown field"):
        decode_draft(json.dumps(document).encode())


def test_payload_is_the_json_that_the_design_names() -> None:
    document = json.loads(encode_manifest(make_manifest())[FRAME_BYTES:])
    leaf = document["leaves"][0]
    assert set(leaf) == {
        "name", "dtype", "shape", "strides", "global_shape", "global_offset", "replicas", "pieces",
    }  # fmt: skip
    assert set(leaf["pieces"][0]) == {"device_id", "generation", "segment", "key", "offset_in_leaf", "size"}
    assert document["values"] == {"lr": 0.1, "big": 123456789012345678901}
    assert document["segments"][0]["xxh3"].startswith("f" * 16)


def encoded_with(encoder: ManifestEncoder, draft: Draft) -> Manifest:
    """What a draft's manifest says when it is read again."""
    return decode_manifest(encoder.encode(make_manifest(draft), draft))


def test_what_an_encoder_knows_of_a_layout_serves_other_checkpoints_values_and_files() -> None:
    draft, encoder = make_draft(), ManifestEncoder()
    assert encoded_with(encoder, draft) == make_manifest(draft)
    later = replace(draft, checkpoint=CheckpointId(2, 41), values=b'{"lr":0.2}', notes={"epoch": "4"})
    assert encoded_with(encoder, later) == make_manifest(later)
    segments = tuple(
        replace(record, generation=f"{number:032x}", device_id=f"{9 - number:032x}")
        for number, record in enumerate(make_manifest(later).segments)
    )
    elsewhere = replace(make_manifest(later), segments=segments, pieces=written_pieces(later, segments))
    assert decode_manifest(encoder.encode(elsewhere, later)) == elsewhere


def test_an_encoder_takes_another_layout() -> None:
    encoder = ManifestEncoder()
    for leaves in (LEAVES, LEAVES[1:], (), LEAVES):
        draft = make_draft(leaves)
        assert encoded_with(encoder, draft) == make_manifest(draft)


def test_names_that_look_like_what_is_filled_in_are_names() -> None:
    names = ("%", "%%", "%(device 0)b", "100 % %s", '"generation":"%(generation 1)b"', "\\", "ä%")
    draft = make_draft(tuple(whole_leaf(name, "float32", (7,)) for name in names))
    manifest = encoded_with(ManifestEncoder(), draft)
    assert sorted(leaf.name for leaf in manifest.leaves) == sorted(names)
    assert manifest == make_manifest(draft)


@pytest.mark.parametrize("change", ["segment", "header_size_bytes", "file_size_bytes", "none of them"])
def test_a_head_of_other_segments_than_the_drafts_is_refused(change: str) -> None:
    draft = make_draft()
    manifest = make_manifest(draft)
    first, *others = manifest.segments
    changed: dict[str, Any] = {
        "segment": {"segment": 77},
        "header_size_bytes": {"header_size_bytes": 4096 + first.header_size_bytes},
        "file_size_bytes": {"file_size_bytes": first.file_size_bytes - 1},
    }
    segments = (replace(first, **changed[change]), *others) if change in changed else tuple(others)
    with pytest.raises(
        CorruptDataError, match=r"the segments of checkpoint 2\.40 are not those of its draft"
    ):
        ManifestEncoder().encode(replace(manifest, segments=segments), draft)


def test_a_head_that_does_not_hold_together_is_refused() -> None:
    draft = make_draft()
    manifest = make_manifest(draft)
    with pytest.raises(CorruptDataError, match="world size"):
        ManifestEncoder().encode(replace(manifest, rank=2), draft)
    first, *others = manifest.segments
    with pytest.raises(CorruptDataError, match="block checksums"):
        ManifestEncoder().encode(
            replace(manifest, segments=(replace(first, block_checksums=()), *others)), draft
        )


def seconds_to_encode(leaves: int) -> float:
    draft = make_draft(tuple(whole_leaf(f"layer.{i}.weight", "float32", (4, 4)) for i in range(leaves)))
    manifest = make_manifest(draft)

    def once() -> float:
        began_s = time.thread_time()
        content = ManifestEncoder().encode(manifest, draft)
        took_s = time.thread_time() - began_s
        assert decode_manifest_head(content).checkpoint == manifest.checkpoint
        return took_s

    return min(once() for _ in range(5))


def test_time_grows_with_the_number_of_leaves_and_not_with_its_square() -> None:
    # Ten times the leaves take ten times as long; a square would take a hundred times.
    assert seconds_to_encode(10_000) < 30 * seconds_to_encode(1_000)


@given(st.data())
def test_any_change_of_a_manifest_is_found(data: st.DataObject) -> None:
    content = bytearray(CONTENT)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DataError):
        decode_manifest(bytes(content))
    with pytest.raises(DataError):
        decode_manifest_head(bytes(content))


@given(st.binary(max_size=200))
def test_no_bytes_are_a_manifest_by_chance(content: bytes) -> None:
    for candidate in (
        content,
        CONTENT[:FRAME_BYTES] + content,
        CONTENT + content + b"x",
        CONTENT[: len(content) * 3],
    ):
        with pytest.raises(DataError):
            decode_manifest(candidate)


@given(st.data())
def test_decoding_a_changed_but_signed_payload_raises_only_declared_errors(data: st.DataObject) -> None:
    payload = bytearray(CONTENT[FRAME_BYTES:])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                payload[place] = data.draw(st.sampled_from(list(b'0123456789abcf"{}[],:\\-.eE\xff\x00')))
            case 1:
                del payload[place : place + data.draw(st.integers(1, 40))]
            case _:
                payload[place:place] = data.draw(st.binary(max_size=12))
    for decode in (
        decode_manifest,
        decode_manifest_head,
        partial(decode_manifest_overview, leaf_count_max=2),
    ):
        with contextlib.suppress(DataError):
            assert decode(signed(bytes(payload))).world_size > 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), json_values)
def test_a_field_of_any_json_value_raises_only_declared_errors(data: st.DataObject, value: object) -> None:
    document: Any = json.loads(CONTENT[FRAME_BYTES:])
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = value
        break
    with contextlib.suppress(DataError):
        manifest = decode_manifest(signed(json.dumps(document).encode()))
        assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.data())
def test_decoding_any_draft_raises_only_declared_errors(data: st.DataObject) -> None:
    content = bytearray(DRAFT)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.sampled_from(list(b'0123456789abcf"{}[],:\\\xff')))
    with contextlib.suppress(CorruptDataError):
        draft = decode_draft(bytes(content))
        check_draft(draft, 1 << 30)
        assert decode_draft(encode_draft(draft)) == draft


def changed(change: Callable[[Any], None]) -> bytes:
    document = json.loads(CONTENT[FRAME_BYTES:])
    change(document)
    return signed(json.dumps(document).encode())


def set_field(name: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document[name] = value

    return change


def set_first(table: str, name: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document[table][0][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_field("run_name", "other"), "does not have the id"),
        (set_field("run_name", "a\nb"), "printable"),
        (set_field("rank", 2), "not below its world size"),
        (set_field("parent", [2, 40]), "not older"),
        (set_field("generation", "../../../etc/passwd" + "0" * 13), "regex"),
        (set_field("generation", "c" * 32 + "\n"), "regex"),
        (set_field("created_unix_s", -1), "created_unix_s"),
        (set_field("surprise", 1), "unknown field"),
        (set_field("leaves", []), "unknown leaf"),
        (set_field("segments", []), "does not list"),
        (set_first("segments", "xxh3", "00"), "regex"),
        (set_first("segments", "xxh3", ""), "block checksums"),
        (set_first("segments", "header_size", 100), "header of 100"),
        (set_first("segments", "file_size", 4095), "header of"),
        (set_first("segments", "segment", 1), "listed twice"),
        (set_first("segments", "device_id", "b" * 32), "does not list"),
        (set_first("leaves", "dtype", "float31"), "float31"),
        (set_first("leaves", "name", "fp8"), "fp8"),
        (set_first("leaves", "shape", [600, 1025]), "not dense"),
        (set_first("leaves", "strides", [1024]), "differ in length"),
        (set_first("leaves", "pieces", []), "its pieces have 0"),
        (set_first("aliases", "of", "nobody"), "unknown leaf"),
        (set_first("aliases", "offset", 4), "reaches byte"),
        (set_first("aliases", "name", "fp8"), "two leaves"),
        (set_first("aliases", "dtype", "object"), "object"),
    ],
)
def test_a_signed_manifest_that_does_not_hold_together_is_refused(
    change: Callable[[Any], None], reason: str
) -> None:
    with pytest.raises(CorruptDataError, match=reason):
        decode_manifest(changed(change))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "magic"),
        (signed(b"{}", reserved=7), "reserved 7"),
        (signed(b"{}", version=0), "version 0"),
        (signed(b"{}")[:-1], "length 2 for 1 bytes"),
        (signed(b"[" * 5000), "does not hold together"),
        (signed(b"\xff"), "does not hold together"),
        (signed(b""), "does not hold together"),
    ],
)
def test_a_wrong_frame_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(CorruptDataError, match=reason):
        decode_manifest(content)


def test_a_newer_version_is_told_from_damage() -> None:
    with pytest.raises(FormatVersionError, match="version 2"):
        decode_manifest(signed(b"whatever comes", version=2))


@pytest.mark.parametrize("values", [b"", b"{", b'{"a":NaN}', b'"\xff"', b"{} {}", b"[" * 3000 + b"]" * 3000])
def test_values_that_are_no_json_are_refused(values: bytes) -> None:
    with pytest.raises(CorruptDataError, match="not valid JSON"):
        encode_manifest(make_manifest(make_draft(values=values)))
    with pytest.raises(CorruptDataError, match="not valid JSON"):
        encode_draft(make_draft(values=values))


def test_a_state_of_too_many_values_is_refused() -> None:
    values = b'"' + b"x" * MANIFEST_SIZE_BYTES_MAX + b'"'
    with pytest.raises(StateTypeError, match="more than"):
        encode_draft(make_draft(values=values))
    with pytest.raises(CorruptDataError, match="limit"):
        decode_draft(values)
    with pytest.raises(CorruptDataError, match="limit"):
        decode_manifest(CONTENT + values)


def test_a_piece_of_an_unknown_leaf_cannot_be_encoded() -> None:
    draft = make_draft()
    with pytest.raises(CorruptDataError, match="not in the draft"):
        encode_draft(replace(draft, leaves=draft.leaves[1:]))


@given(st.integers(1, 2**63), st.integers(0, 2**63), st.integers(0, 10_000))
def test_manifest_names_read_back(attempt: int, step: int, rank: int) -> None:
    checkpoint = CheckpointId(attempt, step)
    assert parse_manifest_name(manifest_name(checkpoint, rank)) == ManifestName(checkpoint, rank)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".mf",
        "1.2.mf",
        "01.2.3.mf",
        "1.2.3",
        "1.2.+3.mf",
        "0.2.3.mf",
        "1.2.3.mf.mf",
        "1.2.3.4.mf",
        "1.2.٣.mf",
    ],
)
def test_other_names_are_no_manifests(name: str) -> None:
    assert parse_manifest_name(name) is None


CONTENT = encode_manifest(make_manifest())
DRAFT = encode_draft(make_draft())
