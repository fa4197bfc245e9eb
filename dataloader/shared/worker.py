"""What runs in a worker process of a SharedLoader: tickets in, encoded batches out."""

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.utils.data._utils.worker as torch_worker

from ..batch_maker import BatchMaker, MadeBatch, Ticket
from .batch_tree import EncodedBatch, named_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What all workers of a loader are told."""

    worker_count: int
    seed: int
    init: Callable[[int], None] | None


def make_batch(maker: BatchMaker, ticket: Ticket) -> MadeBatch:
    """Return the batch of a ticket."""
    return maker.make(ticket)


def worker_main(  # noqa: PLR0917  what a process is started with
    channel: Connection,
    parents_end: Connection | None,
    maker: BatchMaker,
    settings: WorkerSettings,
    number: int,
    parent: int,
) -> None:
    """Prepare until the trainer closes the channel or dies."""
    if parents_end is not None:
        parents_end.close()  # inherited by a fork; the trainer's death would not be seen through it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _tell_torch(maker, settings, number)
    try:
        life = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if settings.init is not None:
        settings.init(number)
    while life not in wait([channel, life]):
        try:
            task = cast(tuple[int, Ticket] | None, channel.recv())
        except EOFError:
            return
        if task is None:
            return
        batch, ticket = task
        try:
            _answer(channel, maker, batch, ticket)
        except (BrokenPipeError, ConnectionResetError):
            return


def _answer(channel: Connection, maker: BatchMaker, batch: int, ticket: Ticket) -> None:
    try:
        made = make_batch(maker, ticket)
        encoded = EncodedBatch(made.ids, made.data).to_bytes()
        classes = named_classes(made.data)
    except Exception as error:  # noqa: BLE001  it is raised in the trainer
        channel.send((batch, {}, _portable(error)))
        return
    channel.send((batch, classes, None))
    channel.send_bytes(encoded)


def _portable(error: Exception) -> BaseException:
    """Return the error with its traceback as a note; a RuntimeError where it survives no pickling."""
    text = traceback.format_exc()
    error.add_note(f"in a worker process:\n{text}")
    try:
        pickler = cast(Any, ForkingPickler)
        back: object = pickler.loads(pickler.dumps(error))
    except Exception:  # noqa: BLE001  whatever its class does when it is pickled
        return RuntimeError(f"in a worker process:\n{text}")
    return error if isinstance(back, BaseException) else RuntimeError(text)


def _tell_torch(maker: BatchMaker, settings: WorkerSettings, number: int) -> None:
    """Make `torch.utils.data.get_worker_info()` say in the dataset's code what it says under torch's loader."""
    info = cast(Any, torch_worker).WorkerInfo(
        id=number, num_workers=settings.worker_count, seed=settings.seed + number, dataset=maker.dataset
    )
    torch_worker._worker_info = info  # pyright: ignore[reportPrivateUsage]
