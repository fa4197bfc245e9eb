"""A folder for `torch.distributed.checkpoint.load`, written by DCP's own `save`, one tensor at a time in memory.

DCP plans with tensors that have no memory (on the meta device); its planner asks for each one's data when it is
written, and gets it from the devices then.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ..core.errors import StateTypeError
from .export_source import ExportSource
from .state_tree import SparseRef, TensorRef
from .tensor_bytes import torch_dtype

_save = cast(Callable[..., object], vars(state_dict_saver)["save"])  # its own annotations are partly unknown


class _Planner(DefaultSavePlanner):
    """Reads a tensor when DCP is about to write it."""

    def __init__(self, source: ExportSource, refs: dict[int, TensorRef]) -> None:
        super().__init__()
        self._source = source
        self._refs = refs
        """Id of each tensor without memory -> what it stands for; the caller keeps the tensors."""
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: Any) -> Any:
        """Return what an item of the plan stands for. One thread writes one after the other.

        DCP keeps each tensor that it has written until the file is closed, so its memory is taken back here.
        """
        found: object = super().lookup_object(index)
        ref = self._refs.get(id(found))
        if ref is None:
            return found
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        made = self._source.tensor(self._source.find(ref.name)).contiguous()
        self._written = made if ref.rows is None else made[: ref.rows].clone()
        return self._written


def write_dcp(folder: Path, source: ExportSource, state: dict[str, object]) -> None:
    """Write the state into the folder; nested dicts become dotted names as DCP makes them.

    Raises:
        StateTypeError: a sparse tensor, which DCP cannot hold.
        CorruptDataError, StorageError: a tensor could not be read.
    """
    standins: list[torch.Tensor] = []
    refs: dict[int, TensorRef] = {}

    def standin(value: object) -> object:
        if isinstance(value, SparseRef):
            raise StateTypeError("DCP cannot hold sparse tensors", hint="export --to torch")
        if isinstance(value, TensorRef):
            tensor = source.find(value.name)
            shape = tensor.shape if value.rows is None else (value.rows, *tensor.shape[1:])
            made = torch.empty(shape, dtype=torch_dtype(tensor.dtype), device="meta")
            standins.append(made)
            refs[id(made)] = value
            return made
        if isinstance(value, dict):
            return {key: standin(item) for key, item in cast(dict[object, object], value).items()}
        if isinstance(value, list):
            return [standin(item) for item in cast(list[object], value)]
        if isinstance(value, tuple):  # DCP looks for tensors in lists alone
            before, items = len(standins), [standin(item) for item in cast(tuple[object, ...], value)]
            return items if len(standins) > before else cast(object, value)
        return value

    planned = cast(dict[str, Any], standin(state))
    writer = FileSystemWriter(
        folder,
        single_file_per_rank=True,
        sync_files=True,
        thread_count=1,
        per_thread_copy_ahead=0,  # where CUDA is, too, a tensor is written before the next one is asked for
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists is meant
        _save(planned, storage_writer=writer, planner=_Planner(source, refs), no_dist=True)
