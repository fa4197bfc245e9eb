"""Which checkpoints may go: the keep rules, as pure functions.

Each rule names what it keeps, and what none names may go; so another rule never lets more go, and planning again
after a collection lets nothing more go.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ..core.ids import CheckpointId
from .catalogue import CheckpointInfo, CheckpointState
from .keep import Keep


def plan_collection(
    checkpoints: Sequence[CheckpointInfo],
    *,
    floor: CheckpointId | None,
    keep: Keep,
    pinned: Collection[CheckpointId] = (),
    given_up: Collection[CheckpointId] = (),
    origin: CheckpointId | None = None,
) -> tuple[CheckpointId, ...]:
    """Return the checkpoints to remove, the oldest first.

    Kept are, besides what `keep` says: the floor (the newest known complete on all ranks, as the trainer told or
    as this store sees by itself) with everything newer than it; the complete one before the floor, or the newest
    intact one before it where none is known complete; what has a tag; and what is being read or written. Without any
    complete checkpoint nothing goes. Damaged and incomplete ones older than all that go too. One that could not be read
    takes no place among those that are kept, and goes only if it would if it were well: a drive that fails for a moment
    must not cost what lies on it.

    What a run has left behind takes no place among those. The `origin` of the newest attempt stays, which may be old.

    What was given up, because some rank has no shard of it and never will, goes however new it is, unless it is known
    complete all the same, has a tag, or is being read or written.
    """
    halves = {
        info.checkpoint
        for info in checkpoints
        if info.checkpoint in given_up
        and info.state is not CheckpointState.COMPLETE
        and not info.tags
        and info.checkpoint not in pinned
    }
    needed = {*pinned, *([origin] if origin is not None else [])}
    outdated = _outdated(checkpoints, floor, keep, needed)
    if any(info.unread_state is not None for info in checkpoints):
        outdated &= _outdated([_if_well(info) for info in checkpoints], floor, keep, needed)
    return tuple(sorted(halves | outdated))


def _if_well(info: CheckpointInfo) -> CheckpointInfo:
    return info if info.unread_state is None else replace(info, state=info.unread_state)


def _outdated(
    checkpoints: Sequence[CheckpointInfo],
    floor: CheckpointId | None,
    keep: Keep,
    needed: Collection[CheckpointId],
) -> set[CheckpointId]:
    # What the run has left behind counts as older than all that it would go on from.
    newest_first = sorted(
        checkpoints, key=lambda info: (not info.is_set_aside, info.checkpoint), reverse=True
    )
    complete = [info.checkpoint for info in newest_first if info.state is CheckpointState.COMPLETE]
    if floor is None and not complete:
        return set()
    base = floor if floor is not None else max(complete)
    kept = {
        base,
        *complete[: keep.last],
        *needed,
        *(info.checkpoint for info in newest_first if info.tags),
        *_one_before(newest_first, base),
        *_spaced(newest_first, keep),
    }
    return {
        info.checkpoint for info in newest_first if info.checkpoint < base and info.checkpoint not in kept
    }


def _one_before(newest_first: Sequence[CheckpointInfo], base: CheckpointId) -> list[CheckpointId]:
    before = [info for info in newest_first if info.checkpoint < base]
    before = [info for info in before if not info.is_set_aside] or before
    complete = [info.checkpoint for info in before if info.state is CheckpointState.COMPLETE]
    intact = [info.checkpoint for info in before if info.state is not CheckpointState.DAMAGED]
    return (complete or intact)[:1]


def _spaced(checkpoints: Iterable[CheckpointInfo], keep: Keep) -> set[CheckpointId]:
    """Return what the rules of steps and of time keep."""
    offered = [info for info in checkpoints if info.is_offered]
    kept: set[CheckpointId] = set()
    if keep.every_steps is not None:
        steps = keep.every_steps
        kept |= _first_of_each(offered, lambda info: info.checkpoint.step // steps)
    if keep.every_s is not None:
        seconds = keep.every_s
        kept |= _first_of_each(offered, lambda info: int(info.created_unix_s // seconds))
    return kept


def _first_of_each(
    checkpoints: Iterable[CheckpointInfo], stretch: Callable[[CheckpointInfo], int]
) -> set[CheckpointId]:
    """Return one checkpoint of each stretch: of those known complete, if any is; of the newest attempt; the first.

    The first and not the last, so that what was kept once stays: nothing older ever comes. A newer attempt that passes
    a stretch again replaces the abandoned branch there.
    """
    best: dict[int, CheckpointInfo] = {}
    for info in checkpoints:
        number = stretch(info)
        if number not in best or _rank(info) < _rank(best[number]):
            best[number] = info
    return {info.checkpoint for info in best.values()}


def _rank(info: CheckpointInfo) -> tuple[bool, int, int]:
    return info.state is not CheckpointState.COMPLETE, -info.checkpoint.attempt, info.checkpoint.step
