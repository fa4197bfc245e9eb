"""Batches as bytes and descriptors: tensors and large arrays travel as memfds that the trainer maps.

Python's pickle as `multiprocessing` uses it between a process and its own children, with two changes. A tensor's
storage goes as a descriptor beside the message, so that the trainer maps it with a few system calls; torch's own way
asks a thread of the worker for each descriptor over a new connection. And storages lie in memfds, which the size of
/dev/shm does not bound. What is small is copied: that is cheaper than mapping it.

`unpack` runs in the trainer on what its own workers sent, and on nothing else.
"""

import copyreg
import io
import mmap
import os
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.multiprocessing import reductions  # registers how tensors are pickled between processes

from .channel import FDS_MAX, close_all, few_descriptors, memfd

STORAGE_INLINE_MAX = 8 << 10
"""Bytes. Copying them twice costs about what mapping a memfd, touching and unmapping it does."""

ARRAY_INLINE_MAX = 64 << 10

WHOLE_STORAGE_MAX = 1 << 20
"""Bytes. A storage up to this size travels whole, so that views of it in one batch share it there, too."""

_UNTYPED = cast(Any, torch.UntypedStorage)
"""Its ways to share memory are torch's own; torch.multiprocessing uses them."""

Reduced = tuple[Any, ...]
Reducer = Callable[[Any], Reduced]


class _Arriving(threading.local):
    """The descriptors of the message that this thread unpacks now."""

    fds: tuple[int, ...] = ()


_arriving = _Arriving()


class Packed:
    """A value as `body`, and as `fds` that live until `close`."""

    def __init__(self, value: object, fds_max: int = FDS_MAX) -> None:
        """Pack a value with at most so many descriptors; whatever pickle raises comes through."""
        self.fds: list[int] = []
        self._own_fds: list[int] = []
        self._alive: list[torch.UntypedStorage] = []
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        """By address and length: arrays that view one memory to different ends are storages of their own."""
        self._fds_max = fds_max
        stream = io.BytesIO()
        try:
            _Pickler(stream, self._reducers()).dump(value)
        except BaseException:
            self.close()
            raise
        self.body = stream.getvalue()

    def close(self) -> None:
        """Let go of what was sent; the receiver's part of it lives on."""
        close_all(self._own_fds)
        self._own_fds, self._alive, self._storages = [], [], {}

    def _reducers(self) -> dict[type, Reducer]:
        return {
            torch.Tensor: self._reduce_tensor,
            torch.UntypedStorage: self._reduce_storage,
            np.ndarray: self._reduce_array,
        }

    def _reduce_tensor(self, tensor: torch.Tensor) -> Reduced:
        """Return a plain dense tensor as (storage, form); torch's own way for all others."""
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
            return cast(Any, reductions).reduce_tensor(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() > max(2 * tensor.nbytes, WHOLE_STORAGE_MAX) and not storage.is_shared():
            # A small view: the rest of its storage, maybe the whole dataset, stays here.
            tensor = tensor.clone()
            storage = tensor.untyped_storage()
        # One Python object for each storage: by it pickle knows tensors that share one.
        storage = self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        return _tensor, (
            storage,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.size()),
            tensor.stride(),
        )

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Reduced:
        """Return a storage as a descriptor, or as bytes where it is small or descriptors are few."""
        if storage.device.type != "cpu":
            return cast(Any, reductions).reduce_storage(storage)
        size, is_shared = storage.nbytes(), storage.is_shared()
        if (size <= STORAGE_INLINE_MAX and not is_shared) or len(self.fds) >= self._fds_max:
            return _inline_storage, (bytearray(_as_array(storage).data),)
        fd = _fd_of(storage) if is_shared else -1
        if fd < 0:
            shared = new_shared_storage(size)
            _ = shared.copy_(storage)
            storage, fd = shared, _fd_of(shared)
        self._alive.append(storage)
        return _mapped_storage, (self._place_of(fd), size)

    def _reduce_array(self, array: "np.ndarray[Any, Any]") -> Reduced:
        """Return a large array as a descriptor; numpy's own way for others."""
        is_plain = array.flags.c_contiguous and not array.dtype.hasobject and array.dtype.names is None
        if not is_plain or array.nbytes <= ARRAY_INLINE_MAX or len(self.fds) >= self._fds_max:
            return cast(Reduced, array.__reduce_ex__(5))
        fd = memfd(array.nbytes)
        self._own_fds.append(fd)
        with mmap.mmap(fd, array.nbytes) as area:
            np.copyto(np.frombuffer(area, array.dtype).reshape(array.shape), array)
        return _mapped_array, (self._place_of(fd), array.dtype, array.shape)

    def _place_of(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


class _Pickler(ForkingPickler):
    def __init__(self, stream: io.BytesIO, reducers: Mapping[type, Reducer]) -> None:
        super().__init__(stream, 5)
        registered = cast(dict[type, Any], getattr(ForkingPickler, "_extra_reducers"))  # noqa: B009
        others = cast(dict[type, Any], copyreg.dispatch_table)
        self.dispatch_table = cast(dict[type, Any], ChainMap(dict(reducers), registered, others))


def unpack(body: bytes, fds: list[int]) -> Any:
    """Return what was packed, and close the descriptors whatever happens."""
    _arriving.fds = tuple(fds)
    try:
        return cast(Any, ForkingPickler).loads(body)
    finally:
        _arriving.fds = ()
        close_all(fds)


def new_shared_storage(size_bytes: int) -> torch.UntypedStorage:
    """Return a storage in a new memfd, which lives as long as the storage."""
    fd = memfd(size_bytes)
    try:
        return _UNTYPED._new_shared_fd_cpu(fd, size_bytes)
    finally:
        os.close(fd)


def place_collated(*, is_shared: bool) -> None:
    """In a worker: say where `default_collate` writes batches to, where torch would take /dev/shm.

    Straight into memfds (`is_shared`), which the trainer maps; or into memory that the next batch has again.
    """

    def new_shared(_cls: type, size: int, *, device: object = "cpu") -> torch.UntypedStorage:
        assert torch.device(cast(str, device)).type == "cpu", device
        is_large = size > STORAGE_INLINE_MAX
        return new_shared_storage(size) if is_shared and is_large else torch.UntypedStorage(size)

    _UNTYPED._new_shared = classmethod(new_shared)


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    return cast(Any, torch.empty(0, dtype=dtype)).set_(storage, offset, size, stride)


def _inline_storage(data: bytearray) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _mapped_storage(place: int, size_bytes: int) -> torch.UntypedStorage:
    fd = _arriving.fds[place]
    try:
        return _UNTYPED._new_shared_fd_cpu(fd, size_bytes)  # keeps a duplicate as long as the storage lives
    except RuntimeError as exc:
        if "duplicate" not in str(exc):
            raise
        raise few_descriptors() from exc


def _mapped_array(place: int, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    fd = _arriving.fds[place]
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype).reshape(shape)


def _as_array(storage: torch.UntypedStorage) -> "np.ndarray[Any, Any]":
    return cast(Any, torch.empty(0, dtype=torch.uint8)).set_(storage).numpy()


def _fd_of(storage: torch.UntypedStorage) -> int:
    """Return the descriptor of a shared storage, which keeps it; -1 where it has none."""
    return cast(Any, storage)._share_fd_cpu_()[0]
