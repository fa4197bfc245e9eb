"""Which checkpoints a run goes on from: an attempt that starts anew or goes back sets others aside. Pure."""

from collections.abc import Iterable

from ..core.ids import CheckpointId
from .store_format import Attempt


def is_set_aside(checkpoint: CheckpointId, attempts: Iterable[Attempt]) -> bool:
    """Tell whether a checkpoint is on a branch that the run has left.

    Looking back from the newest attempt: one that started anew leaves all before it, one that went back leaves what
    is newer than where it went. Before that the run is what it was then, whatever attempts set aside in between.
    """
    bound: CheckpointId | None = None
    for each in _turns(attempts):
        if bound is not None and each.attempt > bound.attempt:
            continue
        if checkpoint.attempt >= each.attempt:
            return False
        if each.back_to is None or checkpoint > each.back_to:
            return True
        bound = each.back_to
    return False


def went_back_to(attempts: Iterable[Attempt]) -> CheckpointId | None:
    """Return where the run went back to last; None: nowhere, or it has started anew since."""
    return next((each.back_to for each in _turns(attempts)), None)


def _turns(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts that did not go on from the newest checkpoint, the newest of them first."""
    found = [each for each in attempts if each.fresh or each.back_to is not None]
    return sorted(found, key=lambda each: each.attempt, reverse=True)
