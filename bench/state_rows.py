"""What a state at every step costs: everstep's loader and torchdata's StatefulDataLoader at the same work."""

import importlib
from typing import Any

import torch.utils.data
from loader_cpu import Cost, cpu_s, epoch, ratio, rounds, wall_s
from paired import Row, row

from everstep.dataloader import DataLoader

OURS, THEIRS = "everstep", "StatefulDataLoader"


class TorchdataError(Exception):
    """torchdata is not installed."""


def state_rows(
    data: torch.utils.data.Dataset[Any], *, batch_size: int, workers: int, pairs: int
) -> list[Row]:
    """Return the table: with a state at every step and without, both loaders.

    Ours without a state runs twice in each round: what these two differ by is what cannot be told apart.

    Raises:
        TorchdataError: it is not installed.
    """
    try:
        stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        raise TorchdataError(f"{error}: pip install torchdata") from error
    common: dict[str, Any] = {
        "batch_size": batch_size, "num_workers": workers, "persistent_workers": True, "shuffle": True,
    }  # fmt: skip
    ours, theirs = DataLoader(data, **common), stateful(data, **common)
    found = rounds(
        {
            "plain": lambda: epoch(ours),
            "state": lambda: epoch(ours, ours.state_dict),
            "plain again": lambda: epoch(ours),
            "their plain": lambda: epoch(theirs),
            "their state": lambda: epoch(theirs, theirs.state_dict),
        },
        pairs,
    )
    again = row(
        f"A/A: {OURS} without / {OURS} without, time",
        ratio(found["plain again"], found["plain"], wall_s),
        goal=None,
    )
    return [
        row(
            f"{OURS}, state at every step / without, time",
            ratio(found["state"], found["plain"], wall_s),
            goal=1.0 + max(abs(again.low - 1.0), abs(again.high - 1.0)),
            at_most=True,
        ),
        again,
        row(f"{OURS}, state at every step / without, CPU", ratio(found["state"], found["plain"], cpu_s), goal=None),
        *(
            row(f"{THEIRS}, state at every step / without, {name}", samples, goal=None)
            for name, samples in _both(found["their state"], found["their plain"])
        ),
        *(
            row(f"{OURS} / {THEIRS}, state at every step, {name}", samples, goal=None)
            for name, samples in _both(found["state"], found["their state"])
        ),
        *(
            row(f"{name}, samples per second", [batch_size / cost.wall_s for cost in found[side]], goal=None, unit="/s")
            for name, side in (
                (f"{OURS}, without", "plain"), (f"{OURS}, state at every step", "state"),
                (f"{THEIRS}, without", "their plain"), (f"{THEIRS}, state at every step", "their state"),
            )
        ),
    ]  # fmt: skip


def _both(left: list[Cost], right: list[Cost]) -> list[tuple[str, list[float]]]:
    return [("time", ratio(left, right, wall_s)), ("CPU", ratio(left, right, cpu_s))]
