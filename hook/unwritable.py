"""Tensors whose memory cannot be written to: of a file that was mapped for reading, as by numpy's `mmap_mode="r"`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .memory_ranges import Ranges


def unwritable(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of those tensors in host memory."""
    lent = [tensor for tensor in tensors if _is_lent(tensor)]
    if not lent:
        return set()
    closed = Ranges(_read_only())
    return {id(tensor) for tensor in lent if closed.touch(_memory_of(tensor))}


def _is_lent(tensor: torch.Tensor) -> bool:
    """Tell whether somebody else than torch's allocator has made its memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return not tensor.untyped_storage().resizable()


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _read_only() -> Iterator[tuple[int, int]]:
    """Yield what of this process's memory can be read and not written: proc(5), maps."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("r-"):
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)
