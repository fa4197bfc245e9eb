"""What to do about the stalls, in one sentence. Words only; the numbers come from the model."""

from dataclasses import dataclass
from enum import Enum

from ...core.sizes import size_text
from .stall_plan import Stalls
from .what_if_plan import (
    ENOUGH,
    Costs,
    Limit,
    Setting,
    cache_for_storage,
    cache_needed,
    limits,
    predict,
    workers_needed,
)

NOTABLE = 0.05
"""Share of a step from which on a stall is worth a word: below, the runs differ by as much from one to the next."""


class Bound(Enum):
    """What most of the time went to, with nothing in memory."""

    COMPUTE = "compute"
    PREPARATION = "preparation"
    FETCH = "fetch"
    BOTH = "fetch and preparation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would remove the stalls."""

    bound: Bound
    cached: float | None
    """Share of the dataset to hold in memory, 0 to 1; None where there is no fetch stall."""
    workers: int | None
    """The number of workers to have; None where the present ones do."""
    lacking_cores: bool
    """More workers do not help, since all cores are busy."""
    samples_per_s: float
    """Predicted, once it is done."""
    sentence: str


def advise(stalls: Stalls, costs: Costs, now: Setting, *, dataset_bytes: float | None) -> Advice:
    """Return what removes the stalls; `now` is the present setting, with nothing cached."""
    has_fetch, has_preparation = stalls.fetch_share >= NOTABLE, stalls.preparation_share >= NOTABLE
    workers = now.workers
    lacking_cores = False
    if has_preparation:
        share = cache_for_storage(costs, cores=now.cores) if has_fetch else 1.0
        workers = max(now.workers, workers_needed(costs, cores=now.cores, cached=share))
        lacking_cores = _cores_bound(costs, _setting(now, cached=1.0, workers=workers))
    cached = cache_needed(costs, _setting(now, cached=0.0, workers=workers)) if has_fetch else None
    after = _setting(now, cached=cached or 0.0, workers=workers)
    parts = [
        *(_cache_words(costs, after, dataset_bytes, alone=not has_preparation) if cached is not None else ()),
        *(_worker_words(costs, now, after, lacking_cores=lacking_cores) if has_preparation else ()),
    ]
    return Advice(
        bound=_bound(has_fetch=has_fetch, has_preparation=has_preparation),
        cached=cached,
        workers=workers if workers != now.workers else None,
        lacking_cores=lacking_cores,
        samples_per_s=predict(costs, after).samples_per_s,
        sentence=_sentence(parts, stalls),
    )


def _bound(*, has_fetch: bool, has_preparation: bool) -> Bound:
    if has_fetch:
        return Bound.BOTH if has_preparation else Bound.FETCH
    return Bound.PREPARATION if has_preparation else Bound.COMPUTE


def _cores_bound(costs: Costs, setting: Setting) -> bool:
    """Return whether cores keep the trainer waiting however many workers there are."""
    found = limits(costs, setting)
    return found[Limit.CORES] < ENOUGH * found[Limit.COMPUTE]


def _cache_words(costs: Costs, after: Setting, dataset_bytes: float | None, *, alone: bool) -> list[str]:
    """Return what the cache does; with `alone` also which workers would do, where storage is fast enough."""
    if after.cached == 0.0:  # more workers do it
        return []
    size = "" if dataset_bytes is None else f" ({size_text(after.cached * dataset_bytes)})"
    said = f"{100 * after.cached:.0f} % of the dataset{size} in the cache removes the fetch stall"
    if alone and after.workers and cache_for_storage(costs, cores=after.cores) == 0.0:
        more = workers_needed(costs, cores=after.cores, cached=0.0) - after.workers
        if more > 0:
            said += f", and so {'does' if more == 1 else 'do'} {_count(more, after.workers)}"
    return [said]


def _worker_words(costs: Costs, now: Setting, after: Setting, *, lacking_cores: bool) -> list[str]:
    more = after.workers - now.workers
    if not lacking_cores:
        if not more:
            return [
                "the trainer is slow to take batches that are ready: larger or fewer of them, or none pinned"
            ]
        verb = "removes" if more == 1 else "remove"
        return [f"{_count(more, now.workers)} {verb} the preparation stall"]
    gain = predict(costs, _setting(after, cached=1.0)).samples_per_s
    gain /= predict(costs, _setting(now, cached=1.0)).samples_per_s
    cores = "the one core is" if now.cores == 1.0 else f"all {now.cores:g} cores are"
    if more and gain > 1.0 + NOTABLE:
        verb = "makes" if more == 1 else "make"
        return [
            (
                f"{_count(more, now.workers)} {verb} preparation {gain:.1f} times as fast, then {cores} busy:"
                " only cheaper or shared preparation, or more cores, removes the rest of the stall"
            )
        ]
    return [
        (
            f"more workers do not help, since {cores} busy: only cheaper or shared preparation, or more cores,"
            " removes the preparation stall"
        )
    ]


def _count(more: int, present: int) -> str:
    noun = "worker" if more == 1 else "workers"
    return f"{more} {noun} more" if present else f"{more} {noun}"


def _sentence(parts: list[str], stalls: Stalls) -> str:
    if not parts:
        whole_s = stalls.compute_s + stalls.preparation_stall_s + stalls.fetch_stall_s
        share = f"{100 * stalls.compute_s / whole_s:.0f}" if whole_s > 0.0 else "100"
        return f"Nothing stalls: computing takes {share} % of each step even with no file in memory"
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def _setting(base: Setting, *, cached: float, workers: int | None = None) -> Setting:
    return Setting(
        cached=cached,
        workers=base.workers if workers is None else workers,
        cores=base.cores,
        storage_bytes_per_s=base.storage_bytes_per_s,
        peers=base.peers,
    )
