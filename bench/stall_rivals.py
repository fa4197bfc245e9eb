"""How long others stop training for a checkpoint of the same state: until the state may change again.

Each returns that time in seconds, and then waits until its checkpoint is written: only stalls are compared.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Job
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.utils._pytree import tree_map

State = dict[str, object]
Stall = Callable[[], float]


def state_of(job: Job) -> State:
    """Return what a training script would save."""
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}


def torch_save(job: Job, folder: Path) -> Stall:
    """torch.save in the training loop."""

    def stall() -> float:
        job.synchronize()
        began_s = time.perf_counter()
        torch.save(state_of(job), folder / "state.pt")
        return time.perf_counter() - began_s

    return stall


def clone_then_thread(job: Job, folder: Path) -> Stall:
    """Clone every tensor, and let a thread save the clones."""

    def stall() -> float:
        job.synchronize()
        began_s = time.perf_counter()
        cloned = tree_map(_clone, state_of(job))
        job.synchronize()
        thread = threading.Thread(target=torch.save, args=(cloned, folder / "state.pt"))
        thread.start()
        stall_s = time.perf_counter() - began_s
        thread.join()
        return stall_s

    return stall


def _clone(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _KeptStager(DefaultStager):
    """Staging memory that is made once: torch 2.11 closes a stager after each save, also one that it was given."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._state_dict_stager.close = self.close  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Keep it."""


def dcp_async(job: Job, folder: Path, kind: AsyncCheckpointerType, *, shared: bool) -> Stall:
    """torch.distributed.checkpoint's async_save; `shared`: staged into shared memory. Pinned memory needs CUDA."""
    cuda = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=cuda,
        use_shared_memory=shared,
        use_async_staging=cuda,
        use_non_blocking_copy=cuda,
    )
    stager = _KeptStager(options)

    def stall() -> float:
        target = Path(tempfile.mkdtemp(dir=folder))
        job.synchronize()
        began_s = time.perf_counter()
        saving = dcp.async_save(
            state_of(job), checkpoint_id=str(target), async_checkpointer_type=kind, async_stager=stager
        )
        if isinstance(saving, AsyncSaveResponse):
            saving.staging_completion.result()
            upload = saving.upload_completion
        else:
            upload = saving
        stall_s = time.perf_counter() - began_s
        upload.result()
        shutil.rmtree(target)
        return stall_s

    return stall


@contextmanager
def rivals(job: Job, folder: Path) -> Generator[dict[str, Stall]]:
    """Give those that can be called here, by name."""
    with one_rank(folder):
        yield {
            "torch.save": torch_save(job, folder),
            "clone, then a thread": clone_then_thread(job, folder),
            "DCP async_save, thread": dcp_async(job, folder, AsyncCheckpointerType.THREAD, shared=False),
            "DCP async_save, process, shared": dcp_async(
                job, folder, AsyncCheckpointerType.PROCESS, shared=True
            ),
        }


@contextmanager
def one_rank(folder: Path) -> Generator[None]:
    """A process group of this process alone, which DCP asks for."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
