"""Any map-style dataset as a source, and a source as a dataset for the loader."""

import pytest
from map_items import Items, upper
from source_checks import check_in_workers, check_source

from everstep.core.errors import SourceChangedError, UsageError
from everstep.dataloader import DataLoader
from everstep.dataloader.sources import MapSource, Source, SourceDataset


def encoded(item: object) -> bytes:
    return str(item).encode()


def test_bytes_as_they_are() -> None:
    check_source(MapSource(Items([b"a", bytearray(b"b"), memoryview(b"c").tobytes()])), [b"a", b"b", b"c"])
    assert MapSource(Items([memoryview(b"c")])).get_bytes(0) == b"c"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(method: str) -> None:
    check_in_workers(MapSource(Items([b"a", b"bb"])), [b"a", b"bb"], method)


@pytest.mark.parametrize("item", ["text", 5, None, ("x", 1), [b"a"]])
def test_what_is_not_bytes_is_refused(item: object) -> None:
    name = type(item).__name__
    with pytest.raises(
        UsageError, match=rf"item 0 of Items is {name}, not bytes \(return the stored bytes.*encode="
    ):
        MapSource(Items([item])).get_bytes(0)
    assert MapSource(Items([item]), encode=encoded).get_bytes(0) == str(item).encode()


def test_errors_of_the_dataset_name_the_sample() -> None:
    source = MapSource(Items([b"a", ValueError("bad jpeg"), OSError(5, "no disk"), IndexError("inside")]))
    with pytest.raises(ValueError, match="bad jpeg") as raised:
        source.get_bytes(1)
    assert raised.value.__notes__ == ["sample 1 of Items"]
    with pytest.raises(OSError, match="no disk"):
        source.get_bytes(2)
    with pytest.raises(SourceChangedError, match="Items had 4 items and raised IndexError for 3: inside"):
        source.get_bytes(3)


def test_a_dataset_that_shrinks() -> None:
    items = [b"a", b"b", b"c"]
    source = MapSource(Items(items))
    items.pop()
    assert len(source) == 3
    with pytest.raises(SourceChangedError, match="had 3 items"):
        source.get_bytes(2)
    with pytest.raises(IndexError):
        source.get_bytes(3)


def test_fingerprints() -> None:
    assert MapSource(Items([b"a"])).fingerprint() == "items-1"
    assert MapSource(Items([b"a"]), fingerprint="mine").fingerprint() == "mine"
    assert MapSource(Items([b"a"], b"\1\2")).fingerprint() == "0102"
    for bad in (None, "", "x" * 129, "é", 5, "a\n"):
        with pytest.raises(UsageError, match=r"Items has no fingerprint.*give fingerprint="):
            MapSource(Items([b"a"], bad)).fingerprint()
    plain = MapSource([b"a"])
    with pytest.raises(UsageError, match="list has no fingerprint"):
        plain.fingerprint()


def test_what_is_no_map_style_dataset() -> None:
    class Stream:
        def __iter__(self) -> object:
            return iter(())

    class Bare:
        def __len__(self) -> int:
            return 1

    with pytest.raises(UsageError, match="Stream has no length"):
        MapSource(Stream())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Bare has no __getitem__"):
        MapSource(Bare())  # type: ignore[arg-type]


def test_source_dataset() -> None:
    source = MapSource(Items([b"a", b"b", b"c"]))
    plain: SourceDataset[bytes] = SourceDataset(source)
    decoded: SourceDataset[str] = SourceDataset(source, decode=upper)
    labelled: SourceDataset[tuple[str, int]] = SourceDataset(
        source, decode=upper, label=lambda index: index * 10
    )
    assert [plain[i] for i in range(3)] == [b"a", b"b", b"c"]
    assert [decoded[i] for i in range(3)] == ["A", "B", "C"]
    assert [labelled[i] for i in range(3)] == [("A", 0), ("B", 10), ("C", 20)]
    assert decoded.fingerprint() == source.fingerprint()
    assert decoded.block_sizes is None
    for bad in (-1, 3):
        with pytest.raises(IndexError):
            decoded[bad]
    with pytest.raises(UsageError, match="list is no source"):
        SourceDataset([b"a"])  # type: ignore[arg-type]


def test_straight_into_the_loader() -> None:
    source: Source = MapSource(Items([b"%d" % i for i in range(10)]))
    dataset: SourceDataset[str] = SourceDataset(source, decode=upper)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    seen = [item for batch in loader for item in batch]
    assert sorted(seen) == [str(i) for i in range(10)]
    assert loader.state_dict()["dataset"] == {"fingerprint": "items-1", "n": 10}
