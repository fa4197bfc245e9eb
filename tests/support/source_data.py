"""Small datasets in the forms that sources read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc

from everstep.dataloader.sources.megatron_format import encode_megatron_index

LENGTHS = [3, 0, 4, 1]
BOUNDS = [0, 2, 2, 4]
TOKENS = np.arange(100, 108, dtype="<u2")


def write_megatron(folder: Path, name: str = "data") -> Path:
    """Write four sequences in three documents; return the path without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.idx").write_bytes(encode_megatron_index("uint16", LENGTHS, BOUNDS))
    (folder / f"{name}.bin").write_bytes(TOKENS.tobytes())
    return folder / name


def write_stream(path: Path, table: Any, rows: int = 3) -> Path:
    """Write an Arrow IPC stream of batches of so many rows."""
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_saved_dataset(folder: Path, table: Any) -> Path:
    """Write what `Dataset.save_to_disk` of datasets 2 to 5 does in two shards, as far as it matters for reading."""
    folder.mkdir(parents=True)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {}})})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    middle = table.num_rows * 3 // 5
    write_stream(folder / names[0], table.slice(0, middle), 2)
    write_stream(folder / names[1], table.slice(middle), 2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "9f0c1a5ad4b7e5a1",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    (folder / "dataset_info.json").write_text("{}")
    return folder
