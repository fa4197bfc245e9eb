"""What a device has missed of a run while it was late and nobody waited for it, written to it from memory.

Segments are not: what it did not write another device has. Nor is an older manifest of a shard that was written again
replaced: that is right, too, and the next recovery knows which is newer.
"""

from pathlib import Path

from ..core.errors import DataError, NotFoundError, StorageError
from .device import Device
from .durable import publish_new, publish_over
from .manifest_format import MANIFEST_FILE_BYTES_MAX, manifest_name
from .run_store import ATTEMPTS_NAME, DAMAGED_NAME, FLOOR_NAME, RunStore
from .store_format import Tag, encode_attempt, encode_damage, encode_floor
from .tags import put_tag


def catch_up_run(run: RunStore, device: Device) -> None:
    """Return when the device has what is known of the run now; nothing is removed here.

    Without the run's locks, since the device may hang again. What changes meanwhile is written where it changes, or by
    the next call; what is older by then the next recovery finds.

    Raises:
        StorageError: it cannot take it.
        DataError: it holds what it should not.
    """
    path = run.path_on(device)
    run.complete_directories(device)
    for attempt in run.attempts():
        publish_new(run.store.ops, path / ATTEMPTS_NAME / str(attempt.attempt), encode_attempt(attempt))
    floor = run.floor()
    if floor is not None:
        _publish(run, path / FLOOR_NAME, encode_floor(floor))
    if run.damage_change:
        _publish(run, path / DAMAGED_NAME, encode_damage(run.damage()))
    for name, checkpoint in run.tags().items():
        put_tag(run, device, Tag(name=name, checkpoint=checkpoint))
    for shard in run.shards():
        target = run.commits_path(device) / manifest_name(shard.checkpoint, shard.rank)
        if run.store.ops.stat(target) is not None:
            continue
        try:
            content = run.manifest_content(shard.checkpoint, shard.rank)
        except (DataError, NotFoundError, StorageError):
            continue  # no other device gives it, which is not this one's fault; who reads the shard hears of it
        publish_new(run.store.ops, target, content)


def _publish(run: RunStore, path: Path, content: bytes) -> None:
    if run.store.ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=run.store.uid) != content:
        publish_over(run.store.ops, path, content)
