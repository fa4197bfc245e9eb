"""What runs in a worker process: takes tickets from its channel, makes batches, sends them back; ends with its trainer.

A worker belongs to its trainer alone. It ignores SIGINT, which a terminal sends to the trainer, too, and takes SIGTERM
as the kernel means it, whatever handler the trainer had when it forked. When the trainer is gone the kernel kills the
worker at once where it can tell (PR_SET_PDEATHSIG follows the thread that forked, so only for the main thread); else
the worker notices before its next sample, or by its channel.
"""

import ctypes
import errno
import os
import random
import signal
import socket
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import WorkerInfo

from ..batch_maker import AnyTicket, MadeBatch
from .cargo import Cargo, WorkerJob
from .channel import Ended, Kind, receive, send
from .packing import Packed, place_collated, unpack
from .phase import Phase
from .worker_page import WorkerPage

_TORCH_WORKER = cast(Any, torch_worker)
"""Where `torch.utils.data.get_worker_info` looks."""

_PR_SET_PDEATHSIG = 1
_FEW_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS}


class Void(Exception):  # noqa: N818  not an error: nobody waits for this ticket any more
    """The ticket that is being made is void."""


def run_worker(sock: socket.socket, cargo: Cargo, dies_with_parent: bool) -> None:
    """Serve one trainer until its end of the channel closes. The target of the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if dies_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        page = _receive_page(sock)
        try:
            worker = _Worker(sock, page, cargo.open())
        except Exception:  # noqa: BLE001  it is the trainer that raises it
            send(
                sock,
                Kind.FAILED_START,
                0,
                _packed(ExceptionWrapper(where="while a DataLoader worker started")).body,
            )
            return
        worker.serve()
    except Ended:
        pass


class _Worker:
    """One worker after its start: seeded, with the user's worker_init_fn run."""

    def __init__(self, sock: socket.socket, page: WorkerPage, job: WorkerJob) -> None:
        self._sock = sock
        self._page = page
        self._maker = job.maker
        self._number = -1
        self._parent_pid = os.getppid()
        self._where = f"in DataLoader worker process {job.worker}"
        torch.set_num_threads(1)
        place_collated(is_shared=job.maker.is_sent_as_collated)
        seed = job.base_seed + job.worker
        _seed_generators(job.base_seed, job.worker)
        _TORCH_WORKER._worker_info = WorkerInfo(
            id=job.worker,
            num_workers=job.worker_count,
            seed=seed,
            dataset=job.maker.dataset,
        )
        job.maker.report_to(self._at_place)
        self._init_error: ExceptionWrapper | None = None
        try:
            if job.init is not None:
                job.init(job.worker)
        except Exception:  # noqa: BLE001  as in torch it comes in the place of the first batch
            self._init_error = ExceptionWrapper(where=self._where)

    def serve(self) -> None:
        """Answer each ticket once, in their order; Ended when nobody is left to answer."""
        self._page.at(-1, Phase.IDLE)
        send(self._sock, Kind.READY, 0, b"")
        while True:
            message = receive(self._sock)
            self._number = message.number
            ticket = unpack(message.body, message.fds)
            try:
                made = self._make(ticket, is_solo=message.kind is Kind.SOLO_TICKET)
                self._check()
            except Void:
                continue
            self._page.at_place(Phase.SEND)
            self._answer(made)
            del made
            self._page.at(-1, Phase.IDLE)

    def _make(self, ticket: AnyTicket, *, is_solo: bool) -> MadeBatch | ExceptionWrapper:
        self._page.at(self._number, Phase.IDLE)
        self._check()
        if self._init_error is not None:
            return self._init_error
        try:
            return self._maker.make(ticket, is_solo=is_solo)
        except (Void, Ended):
            raise
        except Exception:  # noqa: BLE001  the trainer raises it again
            return ExceptionWrapper(where=self._where)

    def _at_place(self, place: int) -> None:
        """Say which sample comes next, so that the trainer knows whom to blame."""
        self._check()
        self._page.at_place(place)

    def _check(self) -> None:
        if self._number < self._page.floor:
            raise Void
        if os.getppid() != self._parent_pid:
            raise Ended

    def _answer(self, made: MadeBatch | ExceptionWrapper) -> None:
        """Send what was made; where descriptors are short without any, where it cannot be pickled the error."""
        try:
            try:
                self._send(_packed(made))
            except OSError as exc:
                if exc.errno not in _FEW_DESCRIPTORS:
                    raise
                self._send(Packed(made, fds_max=0))
        except Ended:
            raise
        except Exception:  # noqa: BLE001  the dataset's error, which the trainer raises
            self._send(_packed(ExceptionWrapper(where=f"{self._where}, which could not send its batch")))

    def _send(self, packed: Packed) -> None:
        try:
            send(self._sock, Kind.MADE, self._number, packed.body, packed.fds)
        finally:
            packed.close()


def _packed(value: object) -> Packed:
    """Return a value packed; an error of a class that cannot be pickled becomes a RuntimeError with the same text."""
    if not isinstance(value, ExceptionWrapper):
        return Packed(value)
    try:
        return Packed(value)
    except Exception:  # noqa: BLE001  its class is local to a function, say
        value.exc_type = RuntimeError
        return Packed(value)


def _receive_page(sock: socket.socket) -> WorkerPage:
    message = receive(sock)
    assert message.kind is Kind.PAGE, message
    try:
        return WorkerPage(message.fds[0])
    finally:
        message.close()


def _seed_generators(base_seed: int, worker: int) -> None:
    """Seed the global generators as torch does in its workers, but for those of CUDA, which stays untouched."""
    random.seed(base_seed + worker)
    torch.default_generator.manual_seed(base_seed + worker)
    np.random.seed(_TORCH_WORKER._generate_state(base_seed, worker))
