"""Tar headers: what Python's tarfile reads we read, in three dialects; what is damaged ends in a declared error."""

import io
import tarfile
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tars import archive

from everstep.core.errors import CorruptDataError, UsageError
from everstep.dataloader.sources.tar_format import EXTENDED_BYTES_MAX, Member, parse_pax, scan_members

Read = Callable[[int, int], bytes]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LETTERS = st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"])
NAMES = st.text(LETTERS, min_size=1, max_size=40)


def reader(data: bytes) -> Read:
    return lambda offset, size: data[offset : offset + size]


def padded_reader(data: bytes) -> Read:
    return lambda offset, size: (data[offset : offset + size] + bytes(size))[:size]


def members_of(data: bytes) -> list[Member]:
    return list(scan_members(reader(data), len(data)))


@given(
    st.sampled_from(["gnu", "pax"]),
    st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=8).map("/".join), st.binary(max_size=1500))),
)
def test_names_and_data_are_those_of_tarfile(form: str, entries: list[tuple[str, bytes]]) -> None:
    data = archive(entries, FORMATS[form])
    found = [
        (member.name, data[member.offset : member.offset + member.size_bytes]) for member in members_of(data)
    ]
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        read = [(info.name.encode(), tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    assert [(name.strip(b"/"), content) for name, content in found] == [
        (name.strip(b"/"), content) for name, content in read
    ]
    assert [content for _, content in found] == [content for _, content in entries]


def test_ustar_prefix_and_what_is_no_file() -> None:
    buffer = io.BytesIO()
    long = "folder/" * 20 + "a.jpg"
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for kind, name in [
            (tarfile.DIRTYPE, "folder"),
            (tarfile.REGTYPE, long),
            (tarfile.SYMTYPE, "link.jpg"),
            (tarfile.LNKTYPE, "hard.jpg"),
            (tarfile.FIFOTYPE, "fifo.jpg"),
            (tarfile.CHRTYPE, "null.jpg"),
            (tarfile.AREGTYPE, "old.jpg"),
            (tarfile.CONTTYPE, "contiguous.jpg"),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "x", 3 if name.endswith(("a.jpg", "old.jpg")) else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    data = buffer.getvalue()
    names = [member.name for member in members_of(data)]
    assert names == [long.encode(), b"old.jpg", b"contiguous.jpg"]


def test_sizes_beyond_eleven_digits() -> None:
    info = tarfile.TarInfo("big.bin")
    info.size = 1 << 40
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = info.tobuf(form)
        members = list(scan_members(padded_reader(head), (1 << 40) + 4096))
        assert [(member.name, member.size_bytes) for member in members] == [(b"big.bin", 1 << 40)]
        with pytest.raises(CorruptDataError, match="it was cut off"):
            list(scan_members(padded_reader(head), 1 << 40))


def test_an_archive_that_was_cut_off() -> None:
    data = archive([("a.jpg", b"x" * 700), ("b.jpg", b"y" * 700)])
    for size in range(1, 2048 + 700):
        if 512 + 700 <= size <= 3 * 512:  # padding may be missing: nothing of the data is
            assert [member.name for member in members_of(data[:size])] == [b"a.jpg"]
        else:
            with pytest.raises(CorruptDataError, match=r"cut off|ends amid"):
                members_of(data[:size])
    with pytest.raises(CorruptDataError, match="no tar header at 0"):
        members_of(b"1" * 1000)
    assert members_of(b"") == []


@pytest.mark.parametrize("start", [b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"])
def test_compressed_archives_are_refused(start: bytes) -> None:
    with pytest.raises(UsageError, match="compressed by"):
        members_of(start + bytes(1000))


def test_sparse_members_are_refused() -> None:
    info = tarfile.TarInfo("a.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(UsageError, match="sparse"):
        members_of(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    info = tarfile.TarInfo("b.bin")
    info.pax_headers = {"GNU.sparse.major": "1"}
    with pytest.raises(UsageError, match="sparse"):
        members_of(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_extended_headers_that_are_too_long_are_not_read(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, EXTENDED_BYTES_MAX + 1
    data = info.tobuf(tarfile.USTAR_FORMAT) + bytes(2 * EXTENDED_BYTES_MAX)
    with pytest.raises(
        CorruptDataError, match=f"the extended header at 512 has {EXTENDED_BYTES_MAX + 1} bytes"
    ):
        members_of(data)


@pytest.mark.parametrize(
    "data",
    [b"5 a=b", b"x path=a\n", b"0 =\n", b"99 a=b\n", b"6 ab\n", b"-6 a=b\n", b"1" * 30 + b" a=b\n", b" a=\n"],
)
def test_bad_pax_records(data: bytes) -> None:
    with pytest.raises(CorruptDataError, match="bad record at 0"):
        parse_pax(data, 512)


GOOD = archive([("a" * 150 + ".jpg", b"1" * 600), ("b.jpg", b"2"), ("b.cls", b"3")], tarfile.GNU_FORMAT) + b""
PAX = archive([("é" * 150 + ".jpg", b"1" * 600), ("b.jpg", b"2")], tarfile.PAX_FORMAT)


CHANGES = st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=6)


@given(st.sampled_from([GOOD, PAX]), CHANGES, st.booleans())
def test_damaged_archives_end_in_declared_errors(
    data: bytes, changes: list[tuple[int, int]], mend: bool
) -> None:
    """Where `mend`, the checksums of all headers are made right again, so that what is behind them is reached."""
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    if mend:
        for block in range(0, len(damaged) - 511, 512):
            if damaged.startswith(b"ustar", block + 257):
                total = sum(damaged[block : block + 148]) + sum(damaged[block + 156 : block + 512]) + 256
                damaged[block + 148 : block + 156] = b"%06o\0 " % total
    tracemalloc.start()
    try:
        for member in members_of(bytes(damaged)):
            assert 512 <= member.offset <= member.offset + member.size_bytes <= len(damaged)
    except (CorruptDataError, UsageError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
