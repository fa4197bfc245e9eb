"""Puts a feed together: who prepares, with what, and which samples are in which batch."""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext

from ..batch_maker import BatchMaker, Ticket
from ..sample_seed import worker_seed
from ..workers.batches import Pinner
from ..workers.cargo import WorkerJob
from ..workers.pool import PoolSpec, QuarantinedSample
from .feed import Feed
from .preparers import OwnProcess, Preparer, Workers
from .supply import SupplySpec
from .walk_plan import BatchIds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTerms:
    """How batches are prepared beside training; with a `count` of 0 they are not."""

    count: int
    prefetch: int
    """Batches on their way for each worker."""
    context: BaseContext
    init: Callable[[int], None] | None
    timeout_s: float


def make_feed(
    maker: BatchMaker,
    ids: BatchIds,
    workers: WorkerTerms,
    *,
    quarantined: list[QuarantinedSample],
    pinner: Pinner | None,
) -> Feed:
    """Return a feed, whose workers start now. What they quarantine is added to the list."""
    preparer: Preparer = OwnProcess(maker, quarantined)
    if workers.count:
        preparer = Workers(_pool_spec(maker, ids.seed, workers), quarantined)

    def ticket(g: int) -> Ticket:
        epoch, begin, sample_ids = ids.of(g)
        return Ticket(ids.seed, epoch, begin, sample_ids)

    spec = SupplySpec(ticket=ticket, quarantined=quarantined, pinner=pinner, is_threaded=workers.count > 0)
    return Feed(preparer, spec, timeout_s=workers.timeout_s)


def _pool_spec(maker: BatchMaker, seed: int, workers: WorkerTerms) -> PoolSpec:
    init, count, base_seed = workers.init, workers.count, worker_seed(seed, 0, 0) >> 1
    return PoolSpec(
        context=workers.context,
        worker_count=count,
        prefetch=workers.prefetch,
        timeout_s=0,  # the feed knows what it waits for
        is_fixed=False,
        job=lambda worker: WorkerJob(maker, init, worker, count, base_seed),
    )
