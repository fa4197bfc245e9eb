"""Which checkpoints may go: the keep rule, as a pure function."""

from collections.abc import Collection, Sequence

from ..core.ids import CheckpointId
from .catalogue import CheckpointInfo, CheckpointState


def plan_collection(
    checkpoints: Sequence[CheckpointInfo],
    *,
    floor: CheckpointId | None,
    keep_last: int,
    pinned: Collection[CheckpointId] = (),
) -> tuple[CheckpointId, ...]:
    """Return the checkpoints to remove, the oldest first.

    Kept are: the `keep_last` newest complete ones; the floor (the newest known complete on all ranks, as the trainer
    told or as this store sees by itself) with everything newer than it; the complete one before the floor, or the
    newest intact one before it where none is known complete; and what is being read or written. Without any complete
    checkpoint nothing goes. Damaged and incomplete ones older than all that go too.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    newest_first = sorted(checkpoints, key=lambda info: info.checkpoint, reverse=True)
    complete = [info.checkpoint for info in newest_first if info.state is CheckpointState.COMPLETE]
    if floor is None and not complete:
        return ()
    base = floor if floor is not None else complete[0]
    intact = [info.checkpoint for info in newest_first if info.state is not CheckpointState.DAMAGED]
    kept = {base, *complete[:keep_last], *pinned}
    before = [checkpoint for checkpoint in complete if checkpoint < base]
    kept.update((before or [checkpoint for checkpoint in intact if checkpoint < base])[:1])
    return tuple(
        info.checkpoint
        for info in reversed(newest_first)
        if info.checkpoint < base and info.checkpoint not in kept
    )
