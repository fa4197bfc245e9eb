"""WebDataset shards: samples by the naming rule, several shards, shards that change."""

import contextlib
import io
import logging
import os
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_checks import LONG_AGO_S, check_in_workers, check_source, contents, settle
from tars import archive

from everstep.core.errors import CorruptDataError, SourceChangedError, UsageError
from everstep.dataloader.sources import ReadsBlocks, SourceDataset, TarSource, read_parts, tar_source
from everstep.dataloader.sources.index_format import Index
from everstep.dataloader.sources.parts_format import encode_parts
from everstep.dataloader.sources.tar_format import Member
from everstep.dataloader.sources.tar_index_format import (
    KIND,
    encode_tar_index,
    key_and_part,
    key_at,
    parts_at,
)

SUFFIX = ".everstep-index"


def write_shards(folder: Path, shards: list[list[tuple[str, bytes]]]) -> list[Path]:
    paths = [folder / f"train-{number:03d}.tar" for number in range(len(shards))]
    for path, entries in zip(paths, shards, strict=True):
        path.write_bytes(archive(entries))
    settle(*paths)
    return paths


SHARDS = [
    [("n/1.jpg", b"one"), ("n/1.cls", b"1"), ("n/2.seg.PNG", b"mask"), ("n/2.jpg", b"two")],
    [],
    [
        ("3.jpg", b""),
        ("README", b"no sample"),
        (".hidden.jpg", b"none"),
        ("__meta__.json__", b"none"),
        ("4.jpg", b"four"),
    ],
]


def test_samples_of_several_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    source = TarSource(tmp_path)
    assert [source.key(i) for i in range(len(source))] == ["n/1", "n/2", "3", "4"]
    assert [source.part_names(i) for i in range(len(source))] == [
        ["jpg", "cls"],
        ["seg.png", "jpg"],
        ["jpg"],
        ["jpg"],
    ]
    assert source.get_parts(1) == {"seg.png": b"mask", "jpg": b"two"}
    assert read_parts(source.get_bytes(1)) == {"__key__": b"n/2", "seg.png": b"mask", "jpg": b"two"}
    assert isinstance(source, ReadsBlocks)
    assert source.block_sizes() == [2, 0, 2]
    sizes = SourceDataset[bytes](source).block_sizes
    assert sizes is not None
    assert sizes() == [2, 0, 2]
    assert list(source.files()) == [str(tmp_path / f"train-00{number}.tar") for number in range(3)]
    check_source(source, contents(source))
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            source.key(bad)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    write_shards(tmp_path, SHARDS)
    check_in_workers(TarSource(tmp_path, part="jpg"), [b"one", b"two", b"", b"four"], method)


def test_one_part(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    check_source(TarSource(tmp_path, part="jpg"), [b"one", b"two", b"", b"four"])
    assert TarSource(tmp_path, part=("seg.png", "jpg")).get_bytes(1) == b"mask"
    with pytest.raises(
        UsageError, match=r"sample 1 \('n/2' in .*000\.tar\) has no part cls, only seg\.png, jpg"
    ):
        TarSource(tmp_path, part="cls").get_bytes(1)


def test_paths_in_all_their_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, SHARDS)
    monkeypatch.chdir(tmp_path)
    expected = contents(TarSource(tmp_path))
    for given_ in (
        paths,
        [str(path) for path in paths],
        "train-{000..002}.tar",
        "train-*.tar",
        "train-00{0,1,2}.tar",
    ):
        source = TarSource(given_)
        monkeypatch.chdir("/")
        assert contents(source) == expected
        monkeypatch.chdir(tmp_path)
    assert contents(TarSource([paths[2], paths[0]])) == expected[2:] + expected[:2]
    (tmp_path / "brace{1}.tar").write_bytes(paths[0].read_bytes())
    assert len(TarSource("brace{1}.tar")) == 2
    bad_paths = ["train-{000..003}.tar", "none.tar", "*.zip", [], "train-{5..1}.tar", "train-{x}.tar"]
    for bad in (*bad_paths, tmp_path.parent / "none"):
        with pytest.raises(UsageError):
            TarSource(bad)


def test_fingerprint(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, SHARDS)
    source = TarSource(tmp_path)
    os.utime(paths[0], (5, 5))
    again = TarSource(tmp_path)
    assert source.fingerprint() == again.fingerprint() == "tar-1:34a6b7b796a5dd35fa1288a3ca107673"
    assert TarSource(tmp_path, part="jpg").fingerprint() != source.fingerprint()
    assert TarSource(paths[::-1]).fingerprint() != source.fingerprint()
    entries = [*SHARDS[0][:-1], ("n/2.jpg", b"2wo+")]
    paths[0].write_bytes(archive(entries))
    settle(paths[0], at_s=LONG_AGO_S + 9)
    assert TarSource(tmp_path).fingerprint() != source.fingerprint()


def test_the_index_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, SHARDS)
    first = TarSource(paths)
    expected, fingerprint = contents(first), first.fingerprint()

    def scan(*_: object) -> None:
        raise AssertionError("a shard was scanned again")

    monkeypatch.setattr(tar_source, "scan_members", scan)
    again = TarSource(paths)
    assert contents(again) == expected
    assert again.fingerprint() == fingerprint
    with pytest.raises(AssertionError, match="scanned again"):
        TarSource(paths, index=tmp_path / "elsewhere")


def test_index_elsewhere_and_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    paths = write_shards(tmp_path / "data", SHARDS)
    source = TarSource(paths, index=tmp_path / "cache")
    assert not list((tmp_path / "data").glob(f"*{SUFFIX}"))
    assert len(list((tmp_path / "cache").glob(f"*{SUFFIX}"))) == 3
    assert contents(TarSource(paths, index=tmp_path / "cache")) == contents(source)


def test_a_changed_shard_is_indexed_again(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, SHARDS[:1])
    assert len(TarSource(path)) == 2
    path.write_bytes(archive([("9.jpg", b"nine")]))
    settle(path, at_s=LONG_AGO_S + 9)
    assert contents(TarSource(path, part="jpg")) == [b"nine"]


def test_shards_that_change_under_the_index(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, SHARDS)
    source = TarSource(paths, part="jpg")
    fresh = pickle.dumps(source)
    assert source.get_bytes(0) == b"one"
    same_size = archive(
        [("n/8.jpg", b"one"), ("n/8.cls", b"1"), ("n/9.seg.PNG", b"mask"), ("n/9.jpg", b"two")]
    )
    assert len(same_size) == paths[0].stat().st_size
    paths[0].write_bytes(same_size)  # in place, beneath the open file
    with pytest.raises(SourceChangedError, match=r"000\.tar has another header before sample 1"):
        source.get_bytes(1)
    with paths[0].open("r+b") as file:
        file.truncate(600)
    with pytest.raises(SourceChangedError, match=r"000\.tar ends at 600, sample 1 lies at"):
        source.get_bytes(1)
    copy = pickle.loads(fresh)
    with pytest.raises(
        SourceChangedError, match=r"000\.tar has 600 bytes, \d+ when it was indexed \(sample 1\)"
    ):
        copy.get_bytes(1)
    paths[2].unlink()
    with pytest.raises(SourceChangedError, match=r"002\.tar is gone \(sample 3\)"):
        copy.get_bytes(3)


def test_bad_shards_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive(SHARDS[0])[:1100])
    with pytest.raises(
        CorruptDataError, match=r"cut\.tar: there is no|cut\.tar: .*cut off|cut\.tar: the archive ends"
    ):
        TarSource(cut)
    twice = tmp_path / "twice.tar"
    twice.write_bytes(archive([("a.jpg", b""), ("a.JPG", b"")]))
    with pytest.raises(CorruptDataError, match=r"twice\.tar: sample b'a' has the part b'jpg' twice"):
        TarSource(twice)
    (tmp_path / "c.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(UsageError, match=r"c\.tar: it is compressed by gzip"):
        TarSource(tmp_path / "c.tar")
    whole = archive([("a.jpg", b"x"), ("b.jpg", b"y")])
    (tmp_path / "end.tar").write_bytes(whole[:2048])
    with caplog.at_level(logging.WARNING):
        assert len(TarSource(tmp_path / "end.tar")) == 2
    assert "tar_without_end" in caplog.text
    assert not list(tmp_path.glob("*.tmp"))


def test_a_pattern_finds_no_index_at_the_second_start(tmp_path: Path) -> None:
    write_shards(tmp_path, [[("a.jpg", b"1")], [("b.jpg", b"2")]])
    first = TarSource(f"{tmp_path}/*")
    assert len(list(tmp_path.iterdir())) == 4
    for again in (TarSource(f"{tmp_path}/*"), TarSource(sorted(tmp_path.iterdir()))):
        assert contents(again) == contents(first)
        assert again.fingerprint() == first.fingerprint()
    with pytest.raises(UsageError, match="an index is none"):
        TarSource(next(tmp_path.glob("*index")))


def test_archives_put_one_after_the_other_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As tar and WebDataset have it, only the first is read; folders after the last file are no second one."""
    first, second = archive([("a.jpg", b"x")]), archive([("b.jpg", b"y")])
    (tmp_path / "both.tar").write_bytes(first + second)
    (tmp_path / "one.tar").write_bytes(first)
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as made:
        made.addfile(tarfile.TarInfo("a.jpg"), io.BytesIO())
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        made.addfile(folder)
    (tmp_path / "folder.tar").write_bytes(sink.getvalue())
    assert len(TarSource([tmp_path / "one.tar", tmp_path / "folder.tar"])) == 2
    assert "tar_goes_on" not in caplog.text
    assert len(TarSource(tmp_path / "both.tar")) == 1
    assert f"tar_goes_on path={tmp_path / 'both.tar'} offset={len(first)}" in caplog.text


def test_more_shards_than_descriptors(tmp_path: Path) -> None:
    """Neither indices nor files stay open beyond a limit."""
    paths = write_shards(tmp_path, [[(f"{number}.jpg", b"%d" % number)] for number in range(100)])
    source = TarSource(paths, part="jpg")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert contents(source) == [b"%d" % number for number in range(100)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"a.jpg", (b"a", b"jpg")),
        (b"x.y/a.b.JPG", (b"x.y/a", b"b.jpg")),
        (b"./a.jpg", (b"./a", b"jpg")),
        (b"a", None),
        (b"x.y/a", None),
        (b".a.jpg", None),
        (b"x/.a", None),
        (b"__x__", None),
        (b"a.", (b"a", b"")),
    ],
)
def test_naming_rule(name: bytes, expected: object) -> None:
    assert key_and_part(name) == expected


ENTRIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["jpg", "txt", "x.y"]), st.binary(max_size=9))
)


@given(ENTRIES)
def test_grouping_round_trip(entries: list[tuple[str, str, bytes]]) -> None:
    """Neighbours of one key are a sample; where a part comes twice the archive is refused."""
    groups: list[tuple[str, dict[str, bytes]]] = []
    is_double = False
    for key, part, data in entries:
        if not groups or groups[-1][0] != key:
            groups.append((key, {}))
        is_double = is_double or part in groups[-1][1]
        groups[-1][1][part] = data
    members = [
        Member(f"{key}.{part}".encode(), 512 * number + 512, len(data), number)
        for number, (key, part, data) in enumerate(entries)
    ]
    if is_double:
        with pytest.raises(CorruptDataError, match="twice"):
            encode_tar_index(members, [])
        return
    index = Index(b"".join(encode_tar_index(members, [])), kind=KIND)
    found = [
        (key_at(index, i), {part.name: entries[part.check][2] for part in parts_at(index, i)})
        for i in range(index.count)
    ]
    assert found == groups


PARTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.binary(max_size=40))


@given(PARTS)
def test_parts_round_trip(parts: dict[str, bytes]) -> None:
    assert read_parts(encode_parts(list(parts.items()))) == parts
    assert list(read_parts(memoryview(encode_parts(list(parts.items()))))) == list(parts)


@given(PARTS, st.data())
def test_damaged_parts_end_in_a_declared_error(parts: dict[str, bytes], data: st.DataObject) -> None:
    whole = bytearray(encode_parts(list(parts.items())))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(CorruptDataError):
        assert sum(len(each) for each in read_parts(damaged).values()) <= len(damaged)


def test_parts_that_are_cut_or_followed_by_more() -> None:
    whole = encode_parts([("jpg", b"12345"), ("cls", b"")])
    for bad in (whole + b"x", whole[:-1], whole[:9], whole[:3], b"ESP2" + whole[4:]):
        with pytest.raises(CorruptDataError):
            read_parts(bad)
    with pytest.raises(CorruptDataError, match="the same name"):
        read_parts(encode_parts([("jpg", b"1"), ("jpg", b"2")]))


def test_shards_of_the_tar_command(tmp_path: Path) -> None:
    """What GNU tar writes from a folder: folders among the members, `./` before the names."""
    for name, data in {"a.jpg": b"1", "a.txt": b"2", "b.jpg": b"3"}.items():
        (tmp_path / name).write_bytes(data)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(tmp_path, arcname=".", filter=lambda info: info)
    path = tmp_path.parent / f"{tmp_path.name}.tar"
    path.write_bytes(buffer.getvalue())
    assert sorted(TarSource(path).get_parts(i)["jpg"] for i in range(2)) == [b"1", b"3"]
