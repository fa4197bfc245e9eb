"""safetensors files as Hugging Face shards them, written as a stream: names and values as `everstep show` has them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.dtype_format import itemsize_bytes, safetensors_dtype
from ..checkpoint.whole_plan import WholeTensor
from .export_source import ExportSource

SHARD_SIZE_BYTES = 5_000_000_000
"""Hugging Face's default."""
ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HEADER_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """How a tensor stands in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def stored_as(tensor: WholeTensor) -> StoredAs:
    """Return dtype and shape in the file.

    A dtype that safetensors lacks is U8 with the last dimension times its item size, so that `.view(dtype)` of what
    was loaded is the tensor (a scalar becomes one element).
    """
    item_bytes, dtype = itemsize_bytes(tensor.dtype), safetensors_dtype(tensor.dtype)
    size_bytes = item_bytes
    for size in tensor.shape:
        size_bytes *= size
    if dtype is not None:
        return StoredAs(dtype=dtype, shape=tensor.shape, size_bytes=size_bytes)
    *others, last = tensor.shape or (1,)
    return StoredAs(dtype="U8", shape=(*others, last * item_bytes), size_bytes=size_bytes)


def write_safetensors(folder: Path, source: ExportSource, *, shard_size_bytes: int) -> None:
    """Write all tensors into the folder: one file where they fit, else several and the index of their names.

    Raises:
        CorruptDataError, StorageError: a tensor could not be read.
        OSError: a file could not be written.
    """
    shards = deal(source.whole.tensors, shard_size_bytes)
    names = [ONE_FILE]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
    manifest = source.manifest
    metadata = {
        "format": "pt",
        "everstep_run": manifest.run_name,
        "everstep_checkpoint": str(manifest.checkpoint),
    }
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, source, shard, metadata)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(stored_as(each).size_bytes for each in source.whole.tensors)},
            "weight_map": {
                tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            },
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def deal(tensors: Iterable[WholeTensor], shard_size_bytes: int) -> list[list[WholeTensor]]:
    """Return the tensors in shards of at most so many bytes, in their order; a larger one has a shard of its own."""
    shards: list[list[WholeTensor]] = [[]]
    room = shard_size_bytes
    for tensor in tensors:
        size = stored_as(tensor).size_bytes
        if size > room and shards[-1]:
            shards.append([])
            room = shard_size_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _write_file(
    path: Path, source: ExportSource, tensors: list[WholeTensor], metadata: dict[str, str]
) -> None:
    """By falling item size, so that each tensor is aligned to its own."""
    ordered = sorted(tensors, key=lambda tensor: -itemsize_bytes(tensor.dtype))
    document: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for tensor in ordered:
        found = stored_as(tensor)
        begin, end = end, end + found.size_bytes
        document[tensor.name] = {"dtype": found.dtype, "shape": found.shape, "data_offsets": (begin, end)}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _HEADER_ALIGNMENT_BYTES) * _HEADER_ALIGNMENT_BYTES)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for chunk in source.logical_bytes(tensor):
                file.write(chunk)
