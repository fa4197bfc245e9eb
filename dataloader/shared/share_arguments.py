"""What the arguments of a SharedLoader may be."""

import multiprocessing
import os
import warnings
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import cast

import torch
from torch.utils.data import IterableDataset

from ...core.errors import UsageError
from ...core.sizes import parse_size
from ..arguments import hint_for
from ..hash_format import SEED_MAX
from ..order_format import OrderKind

JOINS = ("private", "rotate")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """How a job takes part in a group."""

    group: str
    join: str
    jobs: int
    gather_s: float
    budget_bytes: int
    lease_s: float

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= len(self.group) <= 128:
            raise UsageError(f"group={self.group!r}", hint="a name of 1 to 128 characters")
        if self.join not in JOINS:
            raise UsageError(f"join is 'private' or 'rotate', got {self.join!r}")
        if not 1 <= self.jobs <= 4096:
            raise UsageError(f"jobs={self.jobs}", hint="how many jobs are expected: 1 to 4096")
        if not (0 <= self.gather_s <= 86400 and 0 < self.lease_s <= 86400):
            raise UsageError(
                f"gather_s={self.gather_s}, lease_s={self.lease_s}", hint="seconds, at most a day"
            )


def parse_budget(budget: int | str) -> int:
    """Return a budget in bytes; UsageError where it is none."""
    try:
        return parse_size(budget) if isinstance(budget, str) else max(0, budget)
    except ValueError as error:
        raise UsageError(f"budget={budget!r}", hint=str(error)) from error


def parse_context(context: str | BaseContext | None) -> BaseContext:
    """Return how workers are started; UsageError for a way that there is not."""
    if isinstance(context, BaseContext):
        return context
    try:
        return multiprocessing.get_context(context)
    except ValueError as error:
        raise UsageError(
            f"multiprocessing_context={context!r}", hint='"fork", "spawn" or "forkserver"'
        ) from error


def check_data(dataset: object, batch_size: int | None, *, drop_last: bool, seed: int) -> None:
    """Return if the data can be cut into batches; UsageError says why not."""
    if isinstance(dataset, cast(type, IterableDataset)) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise UsageError(f"{type(dataset).__name__} has no random access", hint=hint_for(dataset))
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"batch_size={batch_size!r}", hint="a whole number from 1, or None")
    if batch_size is None and drop_last:
        raise UsageError("drop_last=True with batch_size=None", hint="samples are not batched: leave it out")
    if not 0 <= seed <= SEED_MAX:
        raise UsageError(f"seed is a whole number from 0 to 2^64 - 1, got {seed}")


def check_order(dataset: object, shuffle: object) -> None:
    """Return if it is the one order that is shared; any other would silently not be what was asked for."""
    if not isinstance(shuffle, bool | None):
        raise UsageError(
            f"shuffle={shuffle!r}: a SharedLoader shuffles all samples or none", hint="shuffle=True or False"
        )
    if getattr(dataset, "order_kind", None) is OrderKind.CONTINUED:
        raise UsageError(
            f"a {type(dataset).__name__} goes on from epoch to epoch, which a SharedLoader cannot share",
            hint="give it to everstep.DataLoader",
        )


def check_ranks() -> None:
    """Return if this job is one rank; UsageError where torch.distributed says otherwise, a warning where it may yet.

    Each rank would get the whole epoch: a training on several ranks would see every sample on each of them, unnoticed.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size()
        if count > 1:
            raise UsageError(
                f"a SharedLoader in a job of {count} ranks (torch.distributed): each of them would get the whole epoch",
                hint="everstep.DataLoader splits an epoch over ranks; a SharedLoader is for jobs of one rank each",
            )
    elif os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: a SharedLoader gives each of these processes the whole epoch. "
            "Right where each is a job of its own; a training on several ranks takes everstep.DataLoader",
            stacklevel=4,
        )


def check_workers(num_workers: int, prefetch_factor: int, timeout: float) -> None:
    """Return if so many workers can prepare; UsageError says why not."""
    if num_workers < 0:
        raise UsageError(f"num_workers={num_workers}", hint="0: this process prepares")
    if prefetch_factor < 1:
        raise UsageError(f"prefetch_factor={prefetch_factor}", hint="give 1 or more, or leave it out")
    if timeout < 0 or (timeout and not num_workers):
        raise UsageError(f"timeout={timeout} needs num_workers > 0", hint="nobody could interrupt it")
