"""Reading what others saved: safetensors, torch.save's files, DCP's folders. Nothing is executed, nothing believed.

Tensors of safetensors and torch files stay in the mapped file until somebody reads them; those of DCP are in memory.
"""

import io
import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from ..checkpoint.whole_plan import fill
from ..core.converter import Converter
from ..core.errors import CorruptDataError, EverstepError, NotFoundError
from .dcp_metadata import FILE_NAME as DCP_METADATA
from .dcp_metadata import StoredObject, StoredTensor, read_metadata
from .export import SIDE_FILE, SIDE_FORMAT
from .export_safetensors import INDEX_FILE, ONE_FILE
from .export_torch import FILE_NAME as TORCH_FILE
from .tensor_bytes import copy_bits, torch_dtype

HEADER_BYTES_MAX = 100_000_000
_TORCH_BEGINNINGS = (b"PK", b"\x80")
"""Of a zip file, and of a pickle, which is what torch before 1.6 wrote."""
_ASKED_FOR = re.compile(r"Unsupported (?:global|class).*?([\w]+(?:\.[\w]+)+)")
_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What a source holds."""

    kind: str
    """safetensors, torch or dcp."""
    tree: dict[str, object]
    """As it was saved: nested, or flat names."""
    side: Mapping[str, object] | None = None
    """The document that an export of everstep has beside safetensors."""


def read_foreign(source: Path) -> Foreign:
    """Return what a file or folder holds.

    Raises:
        NotFoundError: there is nothing of these kinds.
        CorruptDataError: it is damaged, or holds what is not allowed; the message names it.
    """
    if source.is_dir():
        for name in (INDEX_FILE, ONE_FILE, TORCH_FILE):
            if (source / name).is_file():
                return read_foreign(source / name)
        if (source / DCP_METADATA).is_file():
            return Foreign(kind="dcp", tree=_read_dcp(source))
        raise NotFoundError(
            f"{source} holds neither {ONE_FILE}, {INDEX_FILE}, {TORCH_FILE} nor {DCP_METADATA}",
            hint="name the file itself",
        )
    if not source.is_file():
        raise NotFoundError(f"there is no {source}", hint="check the path")
    if source.name.endswith((".safetensors", ".safetensors.index.json")):
        return Foreign(kind="safetensors", tree=_read_safetensors(source), side=_side_document(source))
    return Foreign(kind="torch", tree=_as_tree(source, _load_torch(source, mapped=True)))


def _side_document(source: Path) -> Mapping[str, object] | None:
    path = source.parent / SIDE_FILE
    if not path.is_file():
        return None
    try:
        document: object = msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        return None
    fields = cast(dict[str, object], document)
    return fields if (fields.get("format"), fields.get("kind")) == (SIDE_FORMAT, "safetensors") else None


# --- safetensors ------------------------------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)
_ENTRY = Converter(_Entry)


def _read_safetensors(source: Path) -> dict[str, object]:
    if not source.name.endswith(".json"):
        return _read_file(source)
    try:
        index = _INDEX.decode(source.read_bytes())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{source} is no index of safetensors: {error}") from error
    found: dict[str, object] = {}
    for name in sorted(set(index.weight_map.values())):
        found |= _read_file(_beside(source.parent, name))
    missing = index.weight_map.keys() - found.keys()
    if missing:
        raise CorruptDataError(f"{source} names {min(missing)!r}, which no file holds")
    return {name: found[name] for name in index.weight_map}


def _beside(folder: Path, name: str) -> Path:
    """Return a file of the folder. Raises CorruptDataError for a name that leads out of it."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise CorruptDataError(f"{name!r} is no name of a file in {folder}")
    return folder / name


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header_bytes = int.from_bytes(content[:8], "little")
        if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, len(content) - 8):
            raise CorruptDataError(
                f"{path} is no safetensors file: its first 8 bytes name a header of {header_bytes} bytes"
            )
        document: object = json.loads(content[8 : 8 + header_bytes])
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(document, dict):
        raise CorruptDataError(f"the header of {path} is no object")
    entries = cast(dict[str, object], document)
    entries.pop("__metadata__", None)
    begin = 8 + header_bytes
    return {name: _tensor(path, name, entry, content, begin) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: object, content: mmap.mmap, begin: int) -> torch.Tensor:
    try:
        found = _ENTRY.convert(entry)
    except msgspec.ValidationError as error:
        raise CorruptDataError(f"{path}: the entry {name!r}: {error}") from error
    if found.dtype not in _NAMES:
        raise CorruptDataError(f"{path}: {name!r} has the dtype {found.dtype!r}", hint="convert it first")
    dtype = torch_dtype(_NAMES[found.dtype])
    first, last = found.data_offsets
    size_bytes = _count(found.shape, len(content)) * dtype.itemsize
    if min(found.shape, default=0) < 0 or not 0 <= first <= last <= len(content) - begin:
        raise CorruptDataError(f"{path}: {name!r} reaches out of the file")
    if last - first != size_bytes:
        raise CorruptDataError(f"{path}: {name!r} has {last - first} bytes, its shape takes {size_bytes}")
    if not size_bytes:
        return torch.empty(found.shape, dtype=dtype)
    flat = torch.frombuffer(content, dtype=torch.uint8, count=size_bytes, offset=begin + first)
    if (begin + first) % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(found.shape)


def _count(shape: tuple[int, ...], most: int) -> int:
    """Return the product, or any number above `most`: a header may name thousands of dimensions."""
    count = 1
    for size in (0,) if 0 in shape else shape:
        count *= size
        if abs(count) > most:
            break
    return count


# --- torch.save -------------------------------------------------------------------------------------------------------


def _load_torch(source: Any, *, mapped: bool, name: object = None) -> object:
    """Return what `torch.save` saved, only of the types that weights_only allows."""
    try:
        return cast(object, torch.load(source, map_location="cpu", weights_only=True, mmap=mapped))
    except EverstepError:
        raise
    except Exception as error:
        if mapped and "mmap" in str(error):  # a file of torch before 1.6 has no records to map
            return _load_torch(source, mapped=False)
        raise _not_loaded(source, name or source, str(error).strip() or type(error).__name__) from error


def _not_loaded(source: Any, name: object, said: str) -> CorruptDataError:
    """Return why a file is refused, by what torch said of it."""
    if isinstance(source, Path) and not _begins_like_torch(source):
        return CorruptDataError(f"{name} is no file of torch.save", hint="name the file itself")
    asked = _ASKED_FOR.search(said)
    if asked is not None:
        return CorruptDataError(
            f"{name} cannot be loaded with weights_only: it holds an object of {asked[1]}, and a file makes none here",
            hint="save model.state_dict() instead, and of others tensors, numbers, text, lists and dicts only",
        )
    return CorruptDataError(
        f"{name} cannot be loaded with weights_only: {said.splitlines()[0][:300]}",
        hint="save tensors, numbers, text, lists and dicts only",
    )


def _begins_like_torch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2).startswith(_TORCH_BEGINNINGS)


def _as_tree(source: Path, loaded: object) -> dict[str, object]:
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) for key in cast(dict[object, object], loaded)
    ):
        raise CorruptDataError(f"{source} holds no dict with names as keys", hint="save a state dict")
    return cast(dict[str, object], loaded)


# --- DCP --------------------------------------------------------------------------------------------------------------


def _read_dcp(folder: Path) -> dict[str, object]:
    metadata = read_metadata(folder)
    tree: dict[str, object] = {}
    for tensor in metadata.tensors:
        _put(tree, metadata.paths.get(tensor.name, (tensor.name,)), _dcp_tensor(folder, tensor))
    for stored in metadata.objects:
        _put(tree, metadata.paths.get(stored.name, (stored.name,)), _dcp_item(folder, stored, stored.name))
    return cast(dict[str, object], _with_lists(tree))


def _dcp_tensor(folder: Path, stored: StoredTensor) -> torch.Tensor:
    dtype, most = torch_dtype(stored.dtype), sum(chunk.length for chunk in stored.chunks)
    whole = fill(stored.size, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks])
    if not whole or _count(stored.size, most) * dtype.itemsize > most:
        raise CorruptDataError(f"{folder}: the parts of {stored.name!r} do not make {list(stored.size)}")
    made = torch.empty(stored.size, dtype=dtype)
    for chunk in stored.chunks:
        item = StoredObject(stored.name, chunk.file, chunk.offset, chunk.length)
        part = _dcp_item(folder, item, stored.name)
        if not isinstance(part, torch.Tensor) or (part.shape, part.dtype) != (chunk.sizes, dtype):
            raise CorruptDataError(f"{folder}: a part of {stored.name!r} is not what the metadata say")
        target = made
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, begin, size)
        copy_bits(part, to=target)
    return made


def _dcp_item(folder: Path, stored: StoredObject, name: str) -> object:
    path = _beside(folder, stored.file)
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            content = file.read(min(stored.length, path.stat().st_size))
    except OSError as error:
        raise CorruptDataError(f"{path}: {error.strerror or error}") from error
    if len(content) != stored.length:
        raise CorruptDataError(f"{path} ends before the {stored.length} bytes of {name!r}")
    return _load_torch(io.BytesIO(content), mapped=False, name=f"{name!r} in {path}")


def _put(tree: dict[str, object], path: tuple[str | int, ...], value: object) -> None:
    """Put a value at its path, with dicts on the way; list indices are keys until `_with_lists`."""
    if not path or type(path[0]) is not str:
        raise CorruptDataError(f"{path!r} is no path of names")
    place = cast(dict[object, object], tree)
    for key in path[:-1]:
        found = place.setdefault(key, {})
        if not isinstance(found, dict):
            raise CorruptDataError(f"{path!r} leads through a value")
        place = cast(dict[object, object], found)
    place[path[-1]] = value


def _with_lists(value: object) -> object:
    """Return the tree with dicts whose keys are 0, 1, 2, … as numbers made lists."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(item) for key, item in cast(dict[object, object], value).items()}
    if found and all(type(key) is int for key in found):
        return [found[key] for key in sorted(cast(dict[int, object], found))]
    return found
