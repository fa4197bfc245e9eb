"""What a run says in the log, at WARNING where a user must not miss it."""

import logging
import math
import warnings
from collections.abc import Sequence

import torch

from ..checkpoint.lineage_plan import Goal
from ..core.ids import CheckpointId
from .link import Link
from .report import Report
from .restore import Restored

logger = logging.getLogger(__name__)


def say_restored(
    name: str, restored: Restored, notes: dict[str, str], world_size: int, own_values: Sequence[str]
) -> None:
    """Say what was restored by how many ranks, and what was not; `notes` are the checkpoint's.

    `own_values` are the components of which each rank had its own values, where they are rank 0's now.
    """
    logger.warning(
        "restored run=%s checkpoint=%s from=%s epoch=%d restore_s=%.2f",
        name,
        restored.checkpoint,
        restored.source,
        restored.epoch,
        restored.restore_s,
    )
    if restored.left_as_given:
        logger.warning(
            "restored_in_part run=%s left_as_given=%s: the imported checkpoint has nothing of them",
            name,
            ",".join(restored.left_as_given),
        )
    if restored.not_attached:
        logger.warning(
            "restored_in_part run=%s not_attached=%s: the next checkpoint is without them",
            name,
            ",".join(restored.not_attached),
        )
    if "own_buffers" in notes and restored.world_size not in (1, world_size):
        logger.warning(
            "buffers_of_rank_0 run=%s buffers=%s: of %d ranks each had its own, since DistributedDataParallel had "
            "broadcast_buffers=False",
            name,
            notes["own_buffers"],
            restored.world_size,
        )
    if own_values:
        logger.warning(
            "values_of_rank_0 run=%s components=%s: of %d ranks each had its own, which are no tensors",
            name,
            ",".join(own_values),
            restored.world_size,
        )
    then, now = notes.get("torch_threads", ""), str(torch.get_num_threads())
    if then != now:
        warnings.warn(
            f"the checkpoint was taken with {then} intra-op threads, this process has {now}: the state is "
            "bit-identical, further training may not be",
            stacklevel=4,
        )


def say_went_back(name: str, goal: Goal) -> None:
    """Say that the run goes on from a checkpoint that was asked for."""
    logger.warning(
        "went_back run=%s to=%s: once one after it is complete, newer ones of earlier attempts are set aside",
        name,
        goal.text,
    )


def say_goes_on(name: str, goal: Goal, checkpoint: CheckpointId) -> None:
    """Say that it went there before."""
    logger.warning(
        "went_back_before run=%s to=%s: it goes on from %s, which came since; back_to='%s' goes there once more",
        name,
        goal.text,
        checkpoint,
        goal.once_more,
    )


def say_nothing_restored(name: str, link: Link) -> None:
    """Say why there is nothing to restore."""
    where = ", ".join(sorted(device.path for device in link.devices))
    event, why = (
        "nothing_to_restore",
        "this run has no checkpoint there; `everstep ls` names the runs that have",
    )
    if link.opened.new_store:
        event, why = "new_store", "nothing to restore, the directories were empty"
    elif link.fresh and link.opened.highest_attempt > 0:
        why = "fresh=True leaves the checkpoints of earlier attempts aside"
    elif link.opened.highest_attempt > 0:
        why = "earlier attempts left no complete checkpoint, or fresh=True has left theirs aside"
    logger.warning("%s run=%s at=%s: %s", event, name, where, why)


def say_steps_too_short(name: str, text: str) -> None:
    """Say that boundaries alone take more of each step than is fair."""
    logger.warning("steps_too_short run=%s: %s", name, text)


def say_not_closed(name: str, last_complete: str, unsaved_steps: int) -> None:
    """Say at the interpreter's end what a run loses that nobody has closed."""
    logger.warning(
        "run_not_closed run=%s last_complete=%s unsaved_steps=%d: these are trained again after a restart; "
        "`with everstep.attach(...) as run:` or run.close() saves the last one",
        name,
        last_complete or "none",
        unsaved_steps,
    )


def say_closed(name: str, step: int, report: Report) -> None:
    """Sum the attempt up."""
    logger.info(
        "run_closed run=%s step=%d complete=%d last_complete=%s stall_per_checkpoint_ms=%.2f slowdown_percent=%s "
        "boundaries_percent=%s busy_steps=%d quiet_steps=%d skipped=%d failed=%d interval=%d",
        name,
        step,
        report.checkpoints_complete,
        report.last_complete or "none",
        report.stall_per_checkpoint_s * 1000,
        _percent(report.slowdown),
        _percent(report.plain_share),
        report.busy_steps,
        report.quiet_steps,
        sum(each.count for each in report.skipped.values()),
        report.failed_count,
        report.decision.interval_steps,
    )


def _percent(share: float) -> str:
    return f"{share * 100:.2f}" if math.isfinite(share) else "unknown"
