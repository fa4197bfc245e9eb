"""What a user would call instead: each writes the same tensors durably and returns bytes per second.

Imported only by benchmarks: torch and safetensors are there.
"""

import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

State = Mapping[str, torch.Tensor]


def state_of(size_bytes: int, leaf_bytes: int = 64 * 2**20) -> dict[str, torch.Tensor]:
    """Return random tensors of that size together."""
    torch.manual_seed(0)
    return {f"m.{index}": torch.rand(leaf_bytes // 4) for index in range(max(1, size_bytes // leaf_bytes))}


def torch_save(state: State, folder: Path) -> None:
    """torch.save, and fsync."""
    with (folder / "state.pt").open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def safetensors_save(state: State, folder: Path) -> None:
    """safetensors' save_file, and fsync."""
    path = folder / "state.safetensors"
    save_file(dict(state), path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def dcp_save(state: State, folder: Path) -> None:
    """torch.distributed.checkpoint in its default form, which syncs its files."""
    dcp.save(dict(state), checkpoint_id=str(folder / "dcp"), no_dist=True)


DEEPSPEED = "DeepSpeed aio_handle + fsync"
Save = Callable[[State, Path], None]


class AbsentError(Exception):
    """A rival cannot be called here; the text says why."""


def rivals() -> tuple[dict[str, Save], dict[str, str]]:
    """Return those that can be called here, and why the others cannot, by name."""
    found: dict[str, Save] = {
        "torch.save + fsync": torch_save,
        "DCP save": dcp_save,
        "safetensors + fsync": safetensors_save,
    }
    try:
        found[DEEPSPEED] = deepspeed_save()
    except AbsentError as error:
        return found, {DEEPSPEED: str(error)}
    return found, {}


def deepspeed_save() -> Save:
    """Return a save by DeepSpeed's asynchronous I/O.

    Raises:
        AbsentError: it is not installed, or what it builds its asynchronous I/O with is not.
    """
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    except ImportError:
        raise AbsentError("not installed") from None
    if not builder.is_compatible():
        raise AbsentError("installed, and cannot build its asynchronous I/O (libaio-dev, a compiler, ninja)")
    handle = builder.load().aio_handle(2**20, 32, False, True, 1)

    def save(state: State, folder: Path) -> None:
        for name, tensor in state.items():
            handle.sync_pwrite(tensor, str(folder / name))
        for name in state:
            fd = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    return save


def speed(save: Callable[[State, Path], None], state: State, place: Path) -> float:
    """Return bytes per second of one save into a new folder, which is removed afterwards."""
    folder = place / "rival"
    folder.mkdir()
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    began_s = time.perf_counter()
    save(state, folder)
    took_s = time.perf_counter() - began_s
    shutil.rmtree(folder)
    os.sync()
    return size_bytes / took_s
