"""The rows of `make bench-storage` about reading: restore(), from the call to the last verified byte in the tensors."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from meter import Meter
from node import hook_daemon
from paired import Row, interleaved, ratios, row
from persist_rows import best_fio, memory_row, scratch
from recovery_time import drop_caches
from rig import fio
from rivals import state_of

import everstep


class Holder(torch.nn.Module):
    """Parameters of a size together."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(state_of(size_bytes).values())


def restore_rows(name: str, mounts: Sequence[Path], size_bytes: int, *, goal: float, pairs: int) -> list[Row]:
    """Compare restore() with the fastest of fio's ways to read as many bytes from the same drives; caches cold."""
    meter, model = Meter(), Holder(size_bytes)
    size_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    stores = [mount / "everstep" for mount in mounts]
    for store in stores:
        store.mkdir()

    def restore() -> float:
        _drop_caches()
        with (
            scratch() as folder,
            hook_daemon(folder) as pid,
            meter.over(pid),
            everstep.attach("bench", model=model, storage=stores) as run,
        ):
            restored = run.restore()
            assert restored is not None
            assert restored.source == "disk"
            return size_bytes / restored.restore_s

    _save_once(model, stores)
    fio(mounts, size_bytes=size_bytes // len(mounts), keep=True)
    options = best_fio(mounts, size_bytes // len(mounts) // 4, way="read")

    def read() -> float:
        _drop_caches()
        return fio(mounts, size_bytes=size_bytes // len(mounts), way="read", keep=True, options=options)

    found = interleaved(restore, read, pairs)
    for mount in mounts:
        (mount / "fio.tmp").unlink()
        shutil.rmtree(mount / "everstep")
    return [
        row(f"{name}: restore / fio read", ratios(found), goal=goal),
        memory_row(f"{name}: restore", meter),
    ]


def _save_once(model: Holder, stores: Sequence[Path]) -> None:
    """One checkpoint: drives of memory have no room for two; what leaving the run would add is not taken."""
    with contextlib.suppress(KeyboardInterrupt), scratch() as folder, hook_daemon(folder):  # noqa: SIM117
        with everstep.attach("bench", model=model, storage=stores) as run:
            run.step()
            run.wait()  # the arena is there
            run.checkpoint()
            run.step()
            run.wait()
            assert run.report().last_complete, run.report()
            raise KeyboardInterrupt


def _drop_caches() -> None:
    with contextlib.suppress(PermissionError):  # direct reads do not need it
        drop_caches()
