"""What a job shows of its first batch: path, kind and digest of each leaf, so that a difference can be named."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import xxhash

from ..tensor_tree import octets_of
from ..tree_format import is_named_tuple

LEAVES_MAX = 4096
"""Compared one by one; what is beyond is compared as a whole."""


def leaf_digests(data: object, left_out: Sequence[int] = ()) -> list[tuple[str, str, str]]:
    """Return (path, kind, digest) of every leaf, in the order of the batch, some thousand at most.

    Samples of the batch that are `left_out`, because they kill workers, come first.
    """
    found: list[tuple[str, str, str]] = []
    if left_out:
        found.append((f"samples {sorted(left_out)} quarantined", "", ""))
    rest = xxhash.xxh3_128()
    for path, value in _walk(data, "batch"):
        kind, octets = _described(value)
        if len(found) < LEAVES_MAX:
            found.append((path, kind, xxhash.xxh3_128_hexdigest(octets)))
        else:
            rest.update(f"{path}\0{kind}\0".encode())
            rest.update(octets)
    return [*found, ("(all that follows)", "leaves", rest.hexdigest())]


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every container and leaf with its path."""
    yield path, value
    if type(value) is dict:
        for key, item in cast(dict[object, object], value).items():
            yield from _walk(item, f"{path}[{key!r}]")
    elif type(value) in {list, tuple} or is_named_tuple(type(value)):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _walk(item, f"{path}[{index}]")


def _described(value: object) -> tuple[str, bytes | memoryview]:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}", octets_of(value).data
    if isinstance(value, bytes):
        return f"bytes of length {len(value)}", value
    if type(value) is dict:
        return "dict", repr(list(cast(dict[object, object], value))).encode("utf-8", "surrogatepass")
    if isinstance(value, list | tuple):
        return type(cast(object, value)).__name__, str(len(cast("list[object]", value))).encode()
    return type(value).__name__, repr(value).encode("utf-8", "surrogatepass")
