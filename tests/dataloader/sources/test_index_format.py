"""Index files: what was put in comes out, and no bytes whatever lead beyond a section or to an undeclared error."""

import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import CorruptDataError, DataError, UsageError
from everstep.dataloader.sources.image_index_format import (
    ImageIndexBuilder,
    check_image_index,
    class_names,
    image_at,
)
from everstep.dataloader.sources.index_format import Index, Stamp, encode_index, pack_names
from everstep.dataloader.sources.line_format import LineScanner, check_line_index, line_at
from everstep.dataloader.sources.object_index_format import (
    StoredObject,
    check_object_index,
    encode_object_index,
    object_at,
)
from everstep.dataloader.sources.tar_format import Member
from everstep.dataloader.sources.tar_index_format import check_tar_index, encode_tar_index, key_at, parts_at

STAMPS = st.lists(
    st.builds(Stamp, path=st.binary(max_size=9), mtime_s=st.integers(-1, 1 << 62), size_bytes=st.integers(0, 1 << 63)),
    max_size=4,
)  # fmt: skip


@given(st.lists(st.binary(max_size=30), max_size=8), STAMPS, st.integers(0, 1 << 60))
def test_round_trip(sections: list[bytes], stamps: list[Stamp], count: int) -> None:
    index = Index(b"".join(encode_index("some-kind", count, sections, stamps)), kind="some-kind")
    assert index.count == count
    assert index.stamps() == stamps
    assert [index.piece(i + 1, 0, index.length(i + 1)) for i in range(index.section_count() - 1)] == sections


@given(st.lists(st.binary(max_size=30)))
def test_names_round_trip(names: list[bytes]) -> None:
    index = Index(b"".join(encode_index("k", 0, pack_names(names), [])), kind="k")
    assert [index.name(1, i) for i in range(index.name_count(1))] == names


def test_the_digest_leaves_out_stamps_and_nothing_else() -> None:
    def digest(kind: str, count: int, sections: list[bytes], stamps: list[Stamp]) -> str:
        return Index(b"".join(encode_index(kind, count, sections, stamps)), kind=kind).digest

    stamp = Stamp(path=b"", mtime_s=1, size_bytes=2)
    base = digest("k", 1, [b"ab", b"c"], [])
    assert digest("k", 1, [b"ab", b"c"], [stamp]) == base
    others = [
        ("l", 1, [b"ab", b"c"]),
        ("k", 2, [b"ab", b"c"]),
        ("k", 1, [b"a", b"bc"]),
        ("k", 1, [b"ab", b"c", b""]),
    ]
    assert base not in {digest(*each, []) for each in others}
    assert base == "62a241ad5d1443bc23d680c575afd541"


def image_index() -> bytes:
    builder = ImageIndexBuilder()
    builder.add_class(b"a", [(b"1.jpg", 5), (b"2.jpg", 6)])
    builder.add_class(b"b", [(b"3.jpg", 7)])
    return b"".join(builder.encode([Stamp(path=b"a", mtime_s=1, size_bytes=0)]))


def line_index() -> bytes:
    scanner = LineScanner()
    scanner.feed(b"one\ntwo\n\nthree")
    return b"".join(scanner.encode([Stamp(path=b"", mtime_s=1, size_bytes=13)]))


def tar_index() -> bytes:
    members = [Member(name, 512 * i + 512, i, i) for i, name in enumerate([b"a.jpg", b"a.txt", b"b.jpg"])]
    return b"".join(encode_tar_index(members, [Stamp(path=b"", mtime_s=1, size_bytes=13)]))


def object_index() -> bytes:
    return b"".join(encode_object_index([StoredObject("a/b", 3, "tag"), StoredObject("c", None, "")]))


def use_image(index: Index) -> None:
    check_image_index(index)
    for i in range(min(index.count, 9)):
        image_at(index, i)
    class_names(index)


def use_line(index: Index) -> None:
    check_line_index(index)
    for i in range(min(index.count, 9)):
        line_at(index, i)


def use_tar(index: Index) -> None:
    check_tar_index(index)
    for i in range(min(index.count, 9)):
        parts_at(index, i)
        key_at(index, i)


def use_object(index: Index) -> None:
    check_object_index(index)
    for i in range(min(index.count, 9)):
        object_at(index, i)


KINDS = {
    "image-folder": (image_index(), use_image),
    "jsonl": (line_index(), use_line),
    "tar": (tar_index(), use_tar),
    "objects": (object_index(), use_object),
}


def sealed(data: bytearray) -> bytes:
    """Make size, digest and checksum right again, as far as the table lets us: only the contents are wrong then."""
    if len(data) < 64:
        return bytes(data)
    count = struct.unpack_from("<I", data, 12)[0]
    head = 64 + 16 * count + 8
    if not 1 <= count <= 32 or len(data) < head:
        return bytes(data)
    struct.pack_into("<Q", data, 32, len(data))
    table = list(struct.iter_unpack("<QQ", data[64 : head - 8]))
    kind = bytes(data[16:32]).rstrip(b"\0")
    digest = xxhash.xxh3_128(kind + data[40:48])
    for offset, length in table[1:]:
        digest.update(struct.pack("<Q", min(length, len(data))))
        digest.update(bytes(data[offset : offset + length]))
    data[48:64] = digest.digest()
    check = xxhash.xxh3_64(bytes(data[: head - 8]))
    check.update(bytes(data[table[0][0] : table[0][0] + table[0][1]]))
    struct.pack_into("<Q", data, head - 8, check.intdigest())
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seal_of_the_fuzzer_is_the_real_one(kind: str) -> None:
    whole, use = KINDS[kind]
    assert sealed(bytearray(whole)) == whole
    use(Index(whole, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_fuzzed_indices_end_in_declared_errors(kind: str, data: st.DataObject) -> None:
    whole, use = KINDS[kind]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 5))):
        place = data.draw(st.integers(0, len(whole) - 8))
        change = data.draw(
            st.sampled_from([0, 1, 7, 1 << 31, 1 << 63, (1 << 64) - 1, len(whole)])
            | st.integers(0, (1 << 64) - 1)
        )
        width = data.draw(st.sampled_from([1, 4, 8]))
        damaged[place : place + width] = change.to_bytes(8, "little")[:width]
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    given_ = sealed(damaged) if data.draw(st.booleans()) else bytes(damaged)
    tracemalloc.start()
    try:
        use(Index(given_, kind=kind))
    except (DataError, UsageError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_told_apart(kind: str) -> None:
    for other, (whole, _) in KINDS.items():
        if other != kind:
            with pytest.raises(UsageError, match=f"of kind '{other}', expected '{kind}'"):
                Index(whole, kind=kind)


def test_sections_that_do_not_follow_each_other() -> None:
    """Each starts where the one before it ends: eight bytes later, or reaching beyond the end, is damage."""
    whole = image_index()
    offset, length = struct.unpack_from("<QQ", whole, 64 + 16)
    for moved in ((offset + 8, length - 8), (offset, length + (1 << 40)), (offset - 8, length + 8)):
        damaged = bytearray(whole)
        struct.pack_into("<QQ", damaged, 64 + 16, *moved)
        with pytest.raises(CorruptDataError, match=r"section [12] of the index lies at"):
            Index(sealed(damaged), kind="image-folder")


def test_access_outside_a_section() -> None:
    index = Index(image_index(), kind="image-folder")
    for bad in (
        lambda: index.u64(6, 3),
        lambda: index.u32(6, -1),
        lambda: index.piece(5, 4, 2),
        lambda: index.name(2, 9),
    ):
        with pytest.raises(CorruptDataError):
            bad()
