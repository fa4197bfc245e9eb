"""The examples of docs/sources.md, run one after the other over data of the kinds that they name."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from source_data import write_megatron, write_saved_dataset
from tars import archive

DOCS = Path(__file__).parents[3] / "docs" / "sources.md"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg"):
        path = tmp_path / "photos/train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "shards").mkdir()
    for number in range(2):
        entries = [(f"{number}.jpg", b"image"), (f"{number}.cls", b"1")]
        (tmp_path / f"shards/train-00{number}.tar").write_bytes(archive(entries))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in ("one", "two")))
    write_megatron(tmp_path / "corpus", "gpt")
    table = pa.Table.from_pylist([{"text": each, "label": i} for i, each in enumerate("abc")])
    pq.write_table(table, tmp_path / "table.parquet")
    write_saved_dataset(tmp_path / "saved", table)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_run(data: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(examples) == 8
    names: dict[str, Any] = {"decode": len, "folder": data}
    for number, text in enumerate(examples):
        exec(compile(text, f"{DOCS.name}, example {number + 1}", "exec"), names)
    assert names["lines"] is not None
    inputs, targets = next(iter(names["loader"]))
    assert inputs[:, 1:].tolist() == targets[:, :-1].tolist()
    assert inputs.shape[1:] == (4,)
    stored = io.BytesIO()
    Image.new("RGB", (300, 200), "red").save(stored, "jpeg")
    assert names["decode_jpeg"](stored.getvalue()).shape == (3, 224, 224)


def test_what_a_source_does_not_need_is_not_imported() -> None:
    names = "ArrowSource, ImageFolderSource, JsonlSource, MapSource, MegatronSource, ObjectSource"
    code = f"import sys; from everstep.dataloader.sources import {names}, ParquetSource, TarSource; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "pyarrow", "fsspec", "pickle"}


def test_every_source_is_named() -> None:
    from everstep.dataloader import sources

    text = DOCS.read_text()
    assert [
        name for name in sources.__all__ if name not in text and not name.startswith(("Reads", "Source"))
    ] == []
    assert all(getattr(sources, name) is not None for name in sources.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sources.nothing  # noqa: B018
