"""What a device has missed of a run while it was late and nobody waited for it, written to it from memory.

Segments are not: what it did not write another device has. Nor is an older manifest of a shard that was written again
replaced: that is right, too, and the next recovery knows which is newer.
"""

from ..core.errors import DataError, NotFoundError, StorageError
from .device import Device
from .durable import publish_new, publish_over
from .manifest_format import manifest_name
from .run_store import ATTEMPTS_NAME, FLOOR_NAME, RunStore
from .store_format import Tag, encode_attempt, encode_floor
from .tags import put_tag


def catch_up_run(run: RunStore, device: Device) -> None:
    """Return when the device has the run's directories, attempts, floor, tags and manifests; nothing is removed here.

    Raises:
        StorageError: it cannot take them.
    """
    with run.changing:
        run.complete_directories(device)
        for attempt in run.attempts():
            path = run.path_on(device) / ATTEMPTS_NAME / str(attempt.attempt)
            publish_new(run.store.ops, path, encode_attempt(attempt))
        floor = run.floor()
        if floor is not None:
            publish_over(run.store.ops, run.path_on(device) / FLOOR_NAME, encode_floor(floor))
        for name, checkpoint in run.tags().items():
            put_tag(run, device, Tag(name=name, checkpoint=checkpoint))
    for shard in run.shards():
        path = run.commits_path(device) / manifest_name(shard.checkpoint, shard.rank)
        if run.store.ops.stat(path) is not None:
            continue
        try:
            content = run.manifest_content(shard.checkpoint, shard.rank)
        except (DataError, NotFoundError, StorageError):
            continue  # no other device gives it, which is not this one's fault; who reads the shard hears of it
        publish_new(run.store.ops, path, content)
