"""Files that were written by the tools whose formats are read: golden/README.md says which and how."""

from itertools import chain, pairwise
from pathlib import Path

from source_checks import contents

from everstep.dataloader.sources import (
    ArrowSource,
    MegatronSource,
    TarSource,
    TokenWindows,
    read_parts,
    read_row,
)

GOLDEN = Path(__file__).parent / "golden"


def test_a_dataset_of_hugging_face() -> None:
    source = ArrowSource(GOLDEN / "saved_splits", split="train")
    assert [read_row(source.get_bytes(i)) for i in range(len(source))] == [
        {"n": i, "text": f"é{i}", "label": i % 2} for i in range(5)
    ]
    assert contents(ArrowSource(GOLDEN / "saved_splits", split="test", column="text")) == [
        "é0".encode(),
        "é1".encode(),
    ]


def test_a_shard_of_webdataset(tmp_path: Path) -> None:
    source = TarSource(GOLDEN / "webdataset.tar", index=tmp_path)
    found = [
        {name: bytes(data).decode() for name, data in read_parts(part).items()} for part in contents(source)
    ]
    assert found == [
        {"__key__": "s/000", "x.cls": "0", "x.jpg": "j0", "x.json": '{"a": 0}'},
        {"__key__": "s/001", "cls": "1", "jpg": "j1", "json": '{"a": 1}'},
        {"__key__": "s/002", "cls": "2", "jpg": "j2", "json": '{"a": 2}'},
    ]


def test_a_dataset_of_megatron() -> None:
    source = MegatronSource(GOLDEN / "mega")
    tokens = [source.tokens(data).tolist() for data in contents(source)]
    assert tokens[:2] == [[269, 307, 40, 75, 16, 175, 813], [649, 912, 503, 606, 970, 729]]
    assert len(tokens) == 21
    documents = MegatronSource(GOLDEN / "mega", unit="document")
    joined = [list(chain(*tokens[start:stop])) for start, stop in pairwise(range(0, 22, 3))]
    assert [documents.tokens(data).tolist() for data in contents(documents)] == joined
    stream = list(chain(*tokens))
    windows = TokenWindows(source, length=8)
    assert [windows.tokens(data).tolist() for data in contents(windows)] == [
        stream[8 * i : 8 * i + 9] for i in range((len(stream) - 1) // 8)
    ]
