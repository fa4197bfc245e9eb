"""Who makes a loader's batches: the trainer itself, or a pool of workers, kept where workers are persistent."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext

import torch

from ..core.errors import UsageError
from .batch_maker import AnyTicket, MadeBatch, Maker
from .workers.batches import Batches, DrawnTickets, PinnedBatches, PoolBatches, TrainerBatches, pinner_for
from .workers.cargo import WorkerJob
from .workers.pool import PoolSpec, QuarantinedSample, WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All the batches of one iterator."""

    tickets: Iterator[AnyTicket]
    maker: Callable[[int], Maker]
    """What the worker of this number makes them with; number 0 in the trainer. Raises WorkerError where a worker died
    whose place nobody can take."""

    came: Callable[[MadeBatch], None] | None = None
    """Told of each batch as soon as it is made, which may be before its turn."""

    is_drawn_here: bool = False
    """Only the loop's own thread may take tickets: a user's sampler is behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """What a loader's arguments say of workers."""

    worker_count: int
    context: BaseContext | None
    prefetch: int | None
    timeout_s: float
    init: Callable[[int], None] | None
    seed: int
    """Of the generator that draws the workers' base seed."""

    is_fixed: bool
    """Ticket k is made by worker k modulo their number."""

    is_persistent: bool
    pins: bool
    pin_device: str


class BatchSupply:
    """Starts, keeps and ends the workers of one loader, iterator by iterator."""

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        """The workers that are kept."""

        self.quarantined: list[QuarantinedSample] = []
        self._kept: Batches | None = None
        self._now = _Now()

    def batches(self, work: Work, arguments: WorkerArguments) -> Batches:
        """Return what makes the batches of `work`; workers start here. UsageError for arguments that cannot be."""
        pinner = pinner_for(arguments.pins, arguments.pin_device)
        if arguments.worker_count == 0:
            if arguments.timeout_s:
                raise UsageError(
                    f"timeout={arguments.timeout_s} needs num_workers > 0", hint="nobody could interrupt it"
                )
            return TrainerBatches(work.maker(0), work.tickets, pinner, work.came)
        if self._kept is not None:
            self._kept.close()  # of an iterator that somebody still holds
        self._now.work = work
        pool = self.pool if arguments.is_persistent else None
        if pool is None or not pool.is_open:
            pool = WorkerPool(_pool_spec(self._now, work, arguments), self.quarantined)
        drawn = DrawnTickets(work.tickets) if work.is_drawn_here and pinner is not None else None
        of_pool = PoolBatches(pool, drawn or work.tickets, is_kept=arguments.is_persistent)
        batches = of_pool if pinner is None else PinnedBatches(of_pool, pinner, drawn)
        if arguments.is_persistent:
            self.pool, self._kept = pool, batches
        return batches


class _Now:
    """What the workers are at: a pool that is kept goes from one iterator to the next."""

    work: Work

    def came(self, made: MadeBatch) -> None:
        if self.work.came is not None:
            self.work.came(made)


def _pool_spec(now: _Now, work: Work, arguments: WorkerArguments) -> PoolSpec:
    """Return what a new pool is made of. It holds neither loader nor supply, which hold the pool: that were a cycle."""
    if not arguments.prefetch:
        raise UsageError(f"prefetch_factor={arguments.prefetch}", hint="give 1 or more, or leave it out")
    generator = torch.Generator().manual_seed(arguments.seed)
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    init, count = arguments.init, arguments.worker_count
    return PoolSpec(
        context=arguments.context or multiprocessing.get_context(),
        worker_count=count,
        prefetch=arguments.prefetch,
        timeout_s=arguments.timeout_s,
        is_fixed=arguments.is_fixed,
        job=lambda worker: WorkerJob(now.work.maker(worker), init, worker, count, base_seed),
        came=None if work.came is None else now.came,
    )
