"""The files that `everstep import` reads, by path: each input is put into a folder of its own."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from everstep.hook.import_components import exported_components
from everstep.hook.import_files import Foreign, read_foreign

_TENSORS = {
    "model.weight": torch.arange(6.0).reshape(2, 3),
    "model.bias": torch.zeros(3, dtype=torch.bfloat16),
}
SAFETENSORS = save(_TENSORS, metadata={"format": "pt"})
INDEX = json.dumps(
    {"metadata": {"total_size": 30}, "weight_map": dict.fromkeys(_TENSORS, "model-1.safetensors")}
).encode()
SIDE_DOCUMENT = json.dumps(
    {
        "format": "everstep-export-v1",
        "kind": "safetensors",
        "tensors": {
            name: {
                "dtype": str(each.dtype).removeprefix("torch."),
                "shape": list(each.shape),
                "alias_of": None,
            }
            for name, each in _TENSORS.items()
        },
        "values": {"model": {"$modulestate": []}, "everstep": {"step": 3, "epoch": 1, "finished": False}},
    }
).encode()


def _read(content: bytes, name: str, beside: Mapping[str, bytes]) -> Foreign:
    with tempfile.TemporaryDirectory() as folder:
        for file, other in {**beside, name: content}.items():
            (Path(folder) / file).write_bytes(other)
        return read_foreign(Path(folder))


def parse_safetensors(content: bytes) -> object:
    return _read(content, "model.safetensors", {})


def parse_index(content: bytes) -> object:
    return _read(content, "model.safetensors.index.json", {"model-1.safetensors": SAFETENSORS})


def parse_side_document(content: bytes) -> object:
    found = _read(content, "everstep.json", {"model.safetensors": SAFETENSORS})
    return None if found.side is None else exported_components(found.side, found.tree)
