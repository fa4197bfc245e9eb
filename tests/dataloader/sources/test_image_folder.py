"""Image folders: torchvision's order and labels, an index that is trusted only while it is true."""

import contextlib
import gc
import os
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from source_checks import LONG_AGO_S, check_in_workers, check_source, contents, settle

from everstep.core.errors import CorruptDataError, FormatVersionError, SourceChangedError, UsageError
from everstep.dataloader.sources import ImageFolderSource, ReadsFiles, image_scan
from everstep.dataloader.sources.image_index_format import ImageIndexBuilder, image_at
from everstep.dataloader.sources.index_format import Index

INDEX = ".everstep-index"
FILES = {
    "cat/b.jpg": b"1",
    "cat/a.JPG": b"22",
    "cat/sub/c.jpeg": b"333",
    "cat/sub-x/d.jpg": b"4444",
    "cat/empty.png": b"",
    "dog/é.webp": b"55555",
    "dog/x.txt": b"no image",
    "Ape/1.jpg": b"666666",
}


def make_tree(root: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    settle(root)
    return root


def more_folders(root: Path) -> None:
    (root / "cat/sub/deep/er").mkdir(parents=True)
    (root / "cat/sub/deep/er/1.jpg").write_bytes(b"z")


def like_torchvision(root: Path) -> list[tuple[str, int]]:
    """Return torchvision's samples: what `make_dataset` of its folder.py does, in a few lines."""
    endings = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
    samples: list[tuple[str, int]] = []
    for label, name in enumerate(sorted(path.name for path in root.iterdir() if path.is_dir())):
        for folder, _, names in sorted(os.walk(root / name, followlinks=True)):
            samples += [
                (str(Path(folder) / each), label) for each in sorted(names) if each.lower().endswith(endings)
            ]
    return samples


def test_samples_labels_and_order_are_torchvisions(tmp_path: Path) -> None:
    source = ImageFolderSource(make_tree(tmp_path))
    samples = like_torchvision(tmp_path)
    assert [(source.path(i), source.label(i)) for i in range(len(source))] == samples
    assert source.classes == ["Ape", "cat", "dog"]
    assert source.class_to_idx == {"Ape": 0, "cat": 1, "dog": 2}
    check_source(source, [Path(path).read_bytes() for path, _ in samples])
    assert isinstance(source, ReadsFiles)
    assert list(source.files()) == [path for path, _ in samples]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    source = ImageFolderSource(make_tree(tmp_path))
    check_in_workers(source, [Path(path).read_bytes() for path, _ in like_torchvision(tmp_path)], method)


def test_many_names_are_sorted_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_scan, "NAMES_AT_ONCE", 7)
    names = [f"{number * 7919 % 1000:03d}{'x' * (number % 5)}.jpg" for number in range(100)]
    make_tree(tmp_path, {f"only/{name}": name.encode() for name in names})
    source = ImageFolderSource(tmp_path)
    assert contents(source) == sorted(name.encode() for name in names)


def test_memory_is_a_mapping_not_a_list_of_names(tmp_path: Path) -> None:
    """100,000 entries: a list of their names takes over 10 MB, an opened source next to nothing."""
    make_tree(tmp_path, {"a/0.jpg": b"x"})
    builder = ImageIndexBuilder()
    builder.add_class(b"a", ((b"%049d.jpg" % number, 1) for number in range(100_000)))
    stamps = ImageFolderSource(tmp_path)._handle.get().stamps()
    (tmp_path / INDEX).write_bytes(b"".join(builder.encode(stamps)))
    tracemalloc.start()
    try:
        source = ImageFolderSource(tmp_path)
        assert len(source) == 100_000
        assert source.path(99_999).endswith("99999.jpg")
        gc.collect()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_index_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path)
    first = ImageFolderSource(tmp_path)
    monkeypatch.setattr(image_scan, "sorted_names", None)
    again = ImageFolderSource(tmp_path)
    assert contents(again) == contents(first)
    assert again.fingerprint() == first.fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [INDEX]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda root: (root / "cat/new.jpg").write_bytes(b"n"), id="added"),
        pytest.param(lambda root: (root / "cat/b.jpg").unlink(), id="removed"),
        pytest.param(lambda root: (root / "cat/b.jpg").rename(root / "cat/0.jpg"), id="renamed"),
        pytest.param(lambda root: make_tree(root, {"zebra/1.jpg": b"z"}), id="a class more"),
        pytest.param(lambda root: (root / "cat").rename(root / "cow"), id="a class renamed"),
        pytest.param(more_folders, id="a folder more"),
    ],
)
def test_a_changed_tree_is_indexed_again(tmp_path: Path, change: object) -> None:
    make_tree(tmp_path)
    before = ImageFolderSource(tmp_path).fingerprint()
    assert callable(change)
    change(tmp_path)
    source = ImageFolderSource(tmp_path)
    assert source.fingerprint() != before
    assert [source.path(i) for i in range(len(source))] == [path for path, _ in like_torchvision(tmp_path)]


def test_a_tree_that_may_still_change_is_looked_at_again(tmp_path: Path) -> None:
    """Its folders were changed in the second in which they were read: their times alone prove nothing."""
    make_tree(tmp_path)
    soon_s = time.time() + 60  # by a clock ahead of ours: it stays so
    os.utime(tmp_path / "cat", (soon_s, soon_s))
    stamp = (tmp_path / "cat").stat().st_mtime_ns
    before = ImageFolderSource(tmp_path)
    (tmp_path / "cat/new.jpg").write_bytes(b"n")
    os.utime(tmp_path / "cat", ns=(stamp, stamp))
    assert len(ImageFolderSource(tmp_path)) == len(before) + 1


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one"), make_tree(tmp_path / "two")
    for path in (two / "cat", two / "dog/é.webp"):
        os.utime(path, (LONG_AGO_S + 5, LONG_AGO_S + 5))
    assert ImageFolderSource(one).fingerprint() == ImageFolderSource(two).fingerprint()
    assert ImageFolderSource(one).fingerprint() == "image-folder-1:81d0ee41e07d005c6ae5d41cdeb069f3"


def test_index_in_another_directory(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    source = ImageFolderSource(root, index=tmp_path / "cache" / "new")
    assert not (root / INDEX).exists()
    assert len(list((tmp_path / "cache/new").iterdir())) == 1
    assert contents(ImageFolderSource(root, index=tmp_path / "cache/new")) == contents(source)


def test_other_extensions_have_an_index_of_their_own(tmp_path: Path) -> None:
    make_tree(tmp_path)
    usual = ImageFolderSource(tmp_path)
    every = ImageFolderSource(tmp_path, extensions=())
    assert len(every) == len(usual) + 1
    assert every.fingerprint() != usual.fingerprint()
    assert contents(usual) == contents(ImageFolderSource(tmp_path))


def as_nobody(
    tmp_path: Path, root: Path, code: str, closed: Sequence[Path] = (), index: Path | None = None
) -> str:
    """Open the tree in a child that may read it, but for `closed`, and write nowhere in it; return what it said."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in closed:
        path.chmod(0)
    if index is not None:
        index.mkdir()
        index.chmod(0o777)
    said = tmp_path / "said"
    said.write_text("")
    said.chmod(0o666)
    for above in tmp_path.parents:
        if above.stat().st_uid == os.getuid() and not above.stat().st_mode & 0o1:
            above.chmod(above.stat().st_mode | 0o1)
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                source = ImageFolderSource(root, index=index)
                said.write_text(f"{code} {len(source)}")
            except Exception as exc:  # noqa: BLE001  its kind is what is looked at
                said.write_text(f"{'' if isinstance(exc, UsageError) else type(exc)}{exc}")
        os._exit(0)
    os.waitpid(pid, 0)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return said.read_text()


def test_data_that_cannot_be_written_to(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    assert "no index can be written to" in (refused := as_nobody(tmp_path, root, "opened"))
    assert "index=" in refused
    ImageFolderSource(root)
    assert as_nobody(tmp_path, root, "opened") == f"opened {len(like_torchvision(root))}"


def test_read_only_index_of_uncertain_age_is_compared(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    soon_s = time.time() + 60
    os.utime(root / "cat", (soon_s, soon_s))
    ImageFolderSource(root)
    assert as_nobody(tmp_path, root, "opened") == f"opened {len(like_torchvision(root))}"
    (root / "cat/new.jpg").write_bytes(b"n")
    assert "is out of date and cannot be replaced" in as_nobody(tmp_path, root, "opened")


@pytest.mark.parametrize("cut", [0, 5, 70, -1])
def test_a_damaged_index_is_built_again(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    make_tree(tmp_path)
    source = ImageFolderSource(tmp_path)
    whole = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).write_bytes(whole[:cut])
    assert contents(ImageFolderSource(tmp_path)) == contents(source)
    assert "index_damaged" in caplog.text
    assert (tmp_path / INDEX).read_bytes() == whole


def test_every_flipped_bit_of_an_index_is_found(tmp_path: Path) -> None:
    make_tree(tmp_path)
    expected = contents(ImageFolderSource(tmp_path))
    whole = (tmp_path / INDEX).read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (tmp_path / INDEX).unlink()
        (tmp_path / INDEX).write_bytes(damaged)
        try:
            assert contents(ImageFolderSource(tmp_path)) == expected, place
        except (UsageError, FormatVersionError):  # no longer an index of ours, as far as anybody can tell
            assert place < 32
            assert (tmp_path / INDEX).read_bytes() == damaged


@pytest.mark.parametrize("foreign", [b"a file of somebody else's", b"x", b"EVSTINDY" + bytes(200)])
def test_a_foreign_file_is_refused_and_kept(tmp_path: Path, foreign: bytes) -> None:
    make_tree(tmp_path)
    (tmp_path / INDEX).write_bytes(foreign)
    with pytest.raises(
        UsageError, match=r"\.everstep-index: the file is no index of everstep .move that file away"
    ):
        ImageFolderSource(tmp_path)
    assert (tmp_path / INDEX).read_bytes() == foreign


def test_an_index_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    make_tree(tmp_path)
    ImageFolderSource(tmp_path)
    newer = bytearray((tmp_path / INDEX).read_bytes())
    newer[8] = 2
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).write_bytes(newer)
    with pytest.raises(FormatVersionError, match="version 2"):
        ImageFolderSource(tmp_path)
    assert (tmp_path / INDEX).read_bytes() == newer


def test_files_that_changed_under_the_index(tmp_path: Path) -> None:
    make_tree(tmp_path)
    source = ImageFolderSource(tmp_path)
    places = {Path(source.path(i)).name: i for i in range(len(source))}
    (tmp_path / "cat/b.jpg").write_bytes(b"longer")
    (tmp_path / "cat/a.JPG").write_bytes(b"s")
    (tmp_path / "cat/sub/c.jpeg").unlink()
    (tmp_path / "dog/é.webp").unlink()
    os.mkfifo(tmp_path / "dog/é.webp")
    for name, message in {
        "b.jpg": "b.jpg has 6 bytes, 1 when it was indexed",
        "a.JPG": "a.JPG has 1 bytes, 2 when it was indexed",
        "c.jpeg": "c.jpeg is gone",
        "é.webp": "is not a regular file",
    }.items():
        with pytest.raises(SourceChangedError, match=message):
            source.get_bytes(places[name])
    assert source.get_bytes(places["d.jpg"]) == b"4444"
    with pytest.raises(SourceChangedError, match=rf"sample {places['b.jpg']}\b"):
        source.get_bytes(places["b.jpg"])


def test_an_index_that_was_replaced_is_no_longer_used(tmp_path: Path) -> None:
    """A worker that is started later must not read samples of other numbers."""
    import pickle

    make_tree(tmp_path)
    travelling = pickle.dumps(ImageFolderSource(tmp_path))
    (tmp_path / "cat/0.jpg").write_bytes(b"n")
    ImageFolderSource(tmp_path)
    with pytest.raises(SourceChangedError, match="was built anew while it was used"):
        pickle.loads(travelling).get_bytes(0)
    (tmp_path / INDEX).unlink()
    with pytest.raises(SourceChangedError, match="was removed or damaged while it was used"):
        pickle.loads(travelling).get_bytes(0)


def test_paths_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/0.jpg": b"x"})
    stamps = ImageFolderSource(tmp_path)._handle.get().stamps()
    builder = ImageIndexBuilder()
    builder.add_class(b"a", [(b"../../etc/passwd", 1), (b"/etc/passwd", 1), (b"", 1), (b"x\0", 1)])
    (tmp_path / INDEX).write_bytes(b"".join(builder.encode(stamps)))
    source = ImageFolderSource(tmp_path)
    for sample in range(4):
        with pytest.raises(CorruptDataError, match=f"for sample {sample}"):
            source.get_bytes(sample)


def test_classes_that_lead_out_of_the_folder_are_refused() -> None:
    builder = ImageIndexBuilder()
    names = (b"a/../..", b"..", b".", b"/etc", b"a\0")
    for name in names:
        builder.add_class(name, [(b"passwd", 1)])
    index = Index(b"".join(builder.encode([])), kind="image-folder")
    for sample in range(len(names)):
        with pytest.raises(CorruptDataError, match=f"for sample {sample}"):
            image_at(index, sample)


def test_a_file_overwritten_in_place_needs_a_refresh(tmp_path: Path) -> None:
    """No directory has changed: the index is taken for current, and the error says what to do."""
    make_tree(tmp_path)
    before = ImageFolderSource(tmp_path).fingerprint()
    with (tmp_path / "Ape/1.jpg").open("ab") as file:
        file.write(b"more")
    source = ImageFolderSource(tmp_path)
    with pytest.raises(SourceChangedError, match=r"1\.jpg has 10 bytes, 6 when .*refresh=True"):
        source.get_bytes(0)
    fresh = ImageFolderSource(tmp_path, refresh=True)
    assert fresh.get_bytes(0) == b"666666more"
    assert fresh.fingerprint() != before
    assert ImageFolderSource(tmp_path).fingerprint() == fresh.fingerprint()


def test_folders_deeper_than_any_recursion(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/0.jpg": b"zero"})
    folders = [f"{tmp_path}/a{'/d' * depth}" for depth in range(1, 1200)]
    for folder in folders:
        os.mkdir(folder)  # noqa: PTH102  pathlib's own way recurses
    deepest = f"{folders[-1]}/1.jpg"
    with open(deepest, "wb") as file:  # noqa: PTH123
        file.write(b"one")
    try:
        assert contents(ImageFolderSource(tmp_path)) == [b"zero", b"one"]
    finally:
        os.unlink(deepest)  # noqa: PTH108
        for folder in reversed(folders):
            os.rmdir(folder)  # noqa: PTH106


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/0.jpg": b"zero"})
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "a/self").symlink_to(tmp_path / "a/self")
    assert contents(ImageFolderSource(tmp_path)) == [b"zero"]
    (tmp_path / "a/self.jpg").symlink_to(tmp_path / "a/self.jpg")
    with pytest.raises(UsageError, match=r"self\.jpg is Too many levels of symbolic links"):
        ImageFolderSource(tmp_path)


def test_what_another_user_keeps_to_himself_is_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    ImageFolderSource(root)
    said = as_nobody(tmp_path, root, "opened", closed=(root / INDEX,))
    assert f"the index {root / INDEX} cannot be read: Permission denied" in said
    assert "index=" in said
    (root / INDEX).unlink()
    said = as_nobody(tmp_path, root, "opened", closed=(root / "cat/sub",), index=tmp_path / "index")
    assert f"{root / 'cat/sub'} could not be read for the index of {root}: Permission denied" in said


def test_what_is_no_image_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        ImageFolderSource(tmp_path / "none")
    with pytest.raises(UsageError, match="has no class folders"):
        ImageFolderSource(tmp_path)
    make_tree(tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="class folders bare of"):
        ImageFolderSource(tmp_path)
    (tmp_path / "bare").rmdir()
    (tmp_path / "cat/loop").symlink_to(tmp_path / "cat")
    with pytest.raises(UsageError, match="is a link to a folder above it"):
        ImageFolderSource(tmp_path)
    (tmp_path / "cat/loop").unlink()
    (tmp_path / "cat/void.jpg").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"void\.jpg is a link to nothing"):
        ImageFolderSource(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_links_are_followed(tmp_path: Path) -> None:
    make_tree(tmp_path / "elsewhere", {"x/1.jpg": b"one"})
    make_tree(tmp_path / "data", {"a/0.jpg": b"zero"})
    (tmp_path / "data/a/below").symlink_to(tmp_path / "elsewhere/x")
    (tmp_path / "data/b").symlink_to(tmp_path / "elsewhere/x")
    assert contents(ImageFolderSource(tmp_path / "data")) == [b"zero", b"one", b"one"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/0.jpg": b"zero"})
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff\n.jpg"))).write_bytes(b"odd")
    source = ImageFolderSource(tmp_path)
    assert contents(source) == [b"zero", b"odd"]
    check_source(source, [b"zero", b"odd"])
