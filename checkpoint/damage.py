"""What reading has shown to be damaged: one small file per run on every device, so that a restart knows it, too.

Recovery looks at sizes and stamps only, so it cannot find a block that rotted, and a scrub comes to each checkpoint
once a week. A shard that could not be reached is no matter of this file: who opens the store again sees that by itself.
"""

import logging

from ..core.errors import CorruptDataError, EverstepError, StorageError
from ..core.ids import CheckpointId
from .device import Device
from .device_round import on_each
from .durable import publish_over
from .run_store import DAMAGED_NAME, RunStore
from .store_format import encode_damage

_log = logging.getLogger(__name__)


def record_damage(
    run: RunStore, checkpoint: CheckpointId, rank: int, error: EverstepError, *, generation: str
) -> None:
    """Return when this process offers the shard no more, and, where its bytes are wrong, the next one neither.

    What a drive did not give may be well (`unread`). A device that does not take that keeps what it knew before.
    Nothing is written in a store that is open for reading only, and where another generation has taken the place of
    the one that was read.
    """
    if isinstance(error, StorageError):
        run.mark_unread(checkpoint, rank, str(error), generation=generation)
        return
    is_content = isinstance(error, CorruptDataError)
    if run.mark_damaged(checkpoint, rank, str(error), generation=generation, is_content=is_content):
        _write(run)


def clear_damage(run: RunStore, checkpoint: CheckpointId, rank: int, *, generation: str) -> None:
    """Every byte of a shard was read and is what was committed: what reading has shown before holds no more."""
    if run.mark_intact(checkpoint, rank, generation=generation):
        _log.warning(
            "damage_disproved run=%s checkpoint=%s rank=%d generation=%s",
            run.run_id,
            checkpoint,
            rank,
            generation,
        )
        _write(run)


def _write(run: RunStore) -> None:
    if run.store.is_read_only:
        return
    with run.changing:
        content = encode_damage(run.next_damage())

        def write(device: Device) -> None:
            run.complete_what_it_missed(device)
            publish_over(run.store.ops, run.path_on(device) / DAMAGED_NAME, content)

        ended = on_each(run.store, run.store.trusted, write, what="writing what is damaged")
        for device, each in ended.items():
            try:
                each.result()
            except StorageError as exc:
                _log.warning("damage_not_kept run=%s device=%s reason=%s", run.run_id, device.path, exc)
