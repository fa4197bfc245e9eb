"""One file for `torch.load(..., weights_only=True)`, written as a stream: no tensor is ever whole in memory.

`torch.save` needs every tensor in memory at once, and its `skip_data` would write the file twice and leave wrong CRCs.
The format is a zip archive without compression: `data.pkl` (protocol 2) describes the objects and refers to storages,
which are records `data/<key>`, aligned to 64 bytes so that `mmap=True` can use them where they lie. A stored leaf is a
storage as it lay in memory, strides included; what shared memory shares a storage.
"""

import io
import pickle  # only ever written here; tests/test_layers.py knows
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from ..checkpoint.leaf import contiguous_strides
from ..checkpoint.whole_plan import WholeTensor
from .export_source import ExportSource
from .state_tree import SparseRef, TensorRef
from .tensor_bytes import pinned, torch_dtype

FILE_NAME = "checkpoint.pt"
_ARCHIVE = "checkpoint"
_ALIGNMENT_BYTES = 64
_ZIP64_FROM_BYTES = 1 << 30
_LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES, _EXTRA_HEAD_BYTES = 30, 20, 4

# What torch's own reduction of a tensor names; `weights_only` lets exactly these through.
_utils = import_module("torch._utils")
_REBUILD_TENSOR = cast(Callable[..., object], _utils._rebuild_tensor_v3)
_REBUILD_SPARSE = cast(Callable[..., object], _utils._rebuild_sparse_tensor)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A record to be written: its key, its size, and where its bytes come from."""

    key: str
    size_bytes: int
    chunks: Callable[[], Iterable[memoryview]]


class _Pickler(pickle.Pickler):
    """Writes references as torch writes tensors; collects the storages that they need."""

    def __init__(self, file: io.BytesIO, source: ExportSource) -> None:
        super().__init__(file, protocol=2)
        self._source = source
        self.storages: dict[object, _Storage] = {}

    def persistent_id(self, obj: object) -> object:
        """Return what torch's loader finds a storage by."""
        if isinstance(obj, _Storage):
            return ("storage", torch.storage.UntypedStorage, obj.key, "cpu", obj.size_bytes)
        return None

    def reducer_override(self, obj: object) -> Any:  # a reduce value, or NotImplemented
        """Return how a stored tensor is made again."""
        if isinstance(obj, TensorRef):
            return self._stored(obj)
        if isinstance(obj, SparseRef):
            last = (obj.is_coalesced,) if obj.layout is torch.sparse_coo else ()
            return _REBUILD_SPARSE, (obj.layout, (*obj.parts, torch.Size(obj.size), *last))
        if isinstance(obj, torch.Tensor):
            return self._in_memory(obj)
        return NotImplemented

    def _stored(self, ref: TensorRef) -> Any:
        tensor = self._source.find(ref.name)
        storage, offset, strides = self._place(tensor)
        shape = tensor.shape if ref.rows is None else (ref.rows, *tensor.shape[1:])
        return _rebuild(storage, offset, shape, strides, torch_dtype(tensor.dtype))

    def _place(self, tensor: WholeTensor) -> tuple[_Storage, int, tuple[int, ...]]:
        """Return the storage of a tensor, and its offset there and strides in elements."""
        part, item_bytes = tensor.only_part, torch_dtype(tensor.dtype).itemsize
        if part is None or part.offset_bytes % item_bytes:
            made = self._storage(
                ("whole", tensor.name),
                item_bytes * _count(tensor.shape),
                lambda: self._source.logical_bytes(tensor),
            )
            return made, 0, contiguous_strides(tensor.shape)
        size = self._source.holder_size_bytes(part)
        made = self._storage((part.rank, part.holder), size, lambda: self._source.holder_bytes(part))
        return made, part.offset_bytes // item_bytes, part.spec.strides

    def _in_memory(self, tensor: torch.Tensor) -> Any:
        """A small tensor that was made of a numpy array."""
        plain = tensor.contiguous()

        def chunks() -> Iterable[memoryview]:
            with pinned(plain) as view:
                yield view

        storage = self._storage(id(plain), plain.numel() * plain.element_size(), chunks)
        return _rebuild(storage, 0, tuple(plain.shape), plain.stride(), plain.dtype)

    def _storage(self, key: object, size_bytes: int, chunks: Callable[[], Iterable[memoryview]]) -> _Storage:
        if key not in self.storages:
            self.storages[key] = _Storage(str(len(self.storages)), size_bytes, chunks)
        return self.storages[key]


def write_torch(folder: Path, source: ExportSource, state: dict[str, object]) -> None:
    """Write the state into the folder; `torch.load` gives it back as it is, with tensors for references.

    Raises:
        CorruptDataError, StorageError: a tensor could not be read.
        OSError: the file could not be written.
    """
    description = io.BytesIO()
    pickler = _Pickler(description, source)
    pickler.dump(state)
    with (folder / FILE_NAME).open("xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_record(archive, "data.pkl", description.tell(), [description.getbuffer()])
        _write_record(archive, "byteorder", len(sys.byteorder), [memoryview(sys.byteorder.encode())])
        for storage in pickler.storages.values():
            _write_record(archive, f"data/{storage.key}", storage.size_bytes, storage.chunks())
        _write_record(archive, "version", 2, [memoryview(b"3\n")])


def _rebuild(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Any:
    hooks: OrderedDict[str, object] = OrderedDict()  # an alias's instance would be pickled with its type
    return _REBUILD_TENSOR, (storage, offset, shape, strides, False, hooks, dtype)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _write_record(archive: zipfile.ZipFile, name: str, size_bytes: int, chunks: Iterable[memoryview]) -> None:
    """Write a record whose content begins at a multiple of 64 bytes of the file, as torch's own writer does."""
    info = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
    info.file_size = size_bytes
    is_large = size_bytes >= _ZIP64_FROM_BYTES
    before = cast(io.BufferedWriter, archive.fp).tell() + _LOCAL_HEADER_BYTES + len(info.filename)
    before += (_ZIP64_EXTRA_BYTES if is_large else 0) + _EXTRA_HEAD_BYTES
    padding = -before % _ALIGNMENT_BYTES
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=is_large) as record:
        for chunk in chunks:
            record.write(chunk)
