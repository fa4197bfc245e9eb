"""Reads the `.metadata` of torch.distributed.checkpoint, which is a pickle, where it can do no harm.

A script, never imported: `python -I -S dcp_metadata_child.py SIZE`, with the pickle on standard input and JSON on
standard output. Before it reads a byte it gives up every privilege it can: no new privileges, nobody instead of root,
no files, no processes, bounded memory and time. Then an unpickler that knows exactly the classes of DCP's metadata
makes stand-ins of them: torch is neither imported nor importable (-S), and every other name is refused. The answer is
`{"tensors": […], "objects": […], "paths": {…}}`, or `{"refused": why}`.
"""

import ctypes
import io
import json
import os
import pickle
import resource
import sys
from collections.abc import Iterator
from typing import Any, cast

NOBODY = 65534
MEMORY_BYTES = 512 * 1024 * 1024
MEMORY_PER_INPUT_BYTE = 24
CPU_S = 20
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4


class RefusedError(Exception):
    """What was read is no metadata that we know."""


class Record:
    """Stands for an object of DCP: what it was made with and what it was given. It does nothing."""

    __slots__ = ("arguments", "state")

    def __new__(cls, *arguments: object) -> "Record":
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class Metadata(Record):
    __slots__ = ()


class TensorEntry(Record):
    __slots__ = ()


class BytesEntry(Record):
    __slots__ = ()


class Chunk(Record):
    __slots__ = ()


class Properties(Record):
    __slots__ = ()


class Index(Record):
    __slots__ = ()


class StorageInfo(Record):
    __slots__ = ()


class Size(tuple[object, ...]):
    __slots__ = ()


class Dtype(str):
    __slots__ = ()


_DTYPES = (
    "bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 int16"
    " uint16 float16 bfloat16 int32 uint32 float32 complex32 int64 uint64 float64 complex64 complex128"
)
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ALLOWED: dict[tuple[str, str], object] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "StorageMeta"): Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Record,
    (_FILES, "_StorageInfo"): StorageInfo,
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): Record,
    ("pathlib", "PosixPath"): Record,
    ("pathlib._local", "PosixPath"): Record,  # Python 3.13
    **{("torch", name): Dtype(name) for name in _DTYPES.split()},
}


class Unpickler(pickle.Unpickler):
    """Knows the names of `ALLOWED` and no other."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a stand-in. Raises RefusedError naming what was asked for."""
        found = ALLOWED.get((module_name, global_name))
        if found is None:
            raise RefusedError(f"it asks for {module_name}.{global_name}")
        return found


def give_up_privileges(size_bytes: int) -> None:
    """Bound what this process can do; whatever of it fails ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    memory_bytes = MEMORY_BYTES + MEMORY_PER_INPUT_BYTE * size_bytes
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def answer(content: bytes) -> dict[str, object]:
    """Return what the metadata say, or why they were refused."""
    try:
        metadata = Unpickler(io.BytesIO(content)).load()
        return _described(metadata)
    except RefusedError as error:
        return {"refused": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"refused": f"reading it takes too much ({type(error).__name__})"}
    except Exception as error:  # noqa: BLE001  whatever a hostile pickle provokes is reported
        return {"refused": f"it is no metadata of DCP: {type(error).__name__}: {error}"[:500]}


def _described(metadata: object) -> dict[str, object]:
    fields = _fields(metadata, Metadata)
    storage: dict[tuple[str, tuple[int, ...]], dict[str, object]] = {}
    for index, info in _dict(fields.get("storage_data")).items():
        own = _fields(index, Index)
        storage[_text(own.get("fqn")), _numbers(own.get("offset") or ())] = _place(info)
    tensors: list[dict[str, object]] = []
    objects: list[dict[str, object]] = []
    for name, entry in _dict(fields.get("state_dict_metadata")).items():
        if isinstance(entry, BytesEntry):
            objects.append({"name": _text(name), **_stored(storage, _text(name), ())})
        else:
            tensors.append(_tensor(_text(name), _fields(entry, TensorEntry), storage))
    planned = fields.get("planner_data")
    paths = {_text(name): _path(path) for name, path in _dict(planned or {}).items()}
    return {"tensors": tensors, "objects": objects, "paths": paths}


_Storage = dict[tuple[str, tuple[int, ...]], dict[str, object]]


def _tensor(name: str, fields: dict[str, object], storage: _Storage) -> dict[str, object]:
    properties = fields.get("properties")
    if not isinstance(properties, Properties) or not isinstance(properties.state, tuple):
        raise RefusedError(f"{name!r} has no properties")
    dtype = next(
        (item for item in cast(tuple[object, ...], properties.state) if isinstance(item, Dtype)), None
    )
    if dtype is None:
        raise RefusedError(f"{name!r} has no dtype that is known")
    chunks: list[dict[str, object]] = []
    for chunk in _list(fields.get("chunks")):
        own = _fields(chunk, Chunk)
        offsets = _numbers(own.get("offsets"))
        chunks.append(
            {"offsets": offsets, "sizes": _numbers(own.get("sizes")), **_stored(storage, name, offsets)}
        )
    return {"name": name, "dtype": str(dtype), "size": _numbers(fields.get("size")), "chunks": chunks}


def _stored(storage: _Storage, name: str, offsets: tuple[int, ...]) -> dict[str, object]:
    found = storage.get((name, offsets))
    if found is None:
        raise RefusedError(f"nothing says where {name!r} lies")
    return found


def _place(info: object) -> dict[str, object]:
    fields = _fields(info, StorageInfo)
    if fields.get("transform_descriptors"):
        raise RefusedError("its files are compressed or encrypted by an extension")
    offset, length = _numbers((fields.get("offset"), fields.get("length")))
    return {"file": _text(fields.get("relative_path")), "offset": offset, "length": length}


def _path(path: object) -> list[object]:
    if not isinstance(path, tuple):
        raise RefusedError("a path in it is no tuple")
    return [part if type(part) is int else _text(part) for part in cast(tuple[object, ...], path)]


def _fields(record: object, kind: type[Record]) -> dict[str, object]:
    if type(record) is not kind or not isinstance(record.state, dict):
        raise RefusedError(f"it has no {kind.__name__} where one belongs")
    return cast(dict[str, object], record.state)


def _dict(value: object) -> dict[object, object]:
    if type(value) is not dict:
        raise RefusedError("it has no dict where one belongs")
    return cast(dict[object, object], value)


def _list(value: object) -> list[object]:
    if type(value) is not list:
        raise RefusedError("it has no list where one belongs")
    return cast(list[object], value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise RefusedError("it has no text where some belongs")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(_each_number(value))


def _each_number(value: object) -> Iterator[int]:
    if not isinstance(value, tuple):
        raise RefusedError("it has no numbers where some belong")
    # torch.Size pickles as Size((1, 2)): a tuple in a tuple.
    items = cast(tuple[object, ...], value)
    for item in items:
        if type(item) is not int or not 0 <= item < 2**63:
            raise RefusedError("it has a number that is none")
        yield item


def main() -> None:
    """Answer once."""
    size_bytes = int(sys.argv[1])
    give_up_privileges(size_bytes)
    found = answer(sys.stdin.buffer.read(size_bytes))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
