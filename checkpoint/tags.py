"""Tags: names that a person gives to checkpoints, and that keep them from being collected.

A tag is one small file on every device, never changed. It is taken in memory before the first device hears of it, so
that no collection can slip in between.
"""

import logging

from ..core.errors import NotFoundError, StorageError, UsageError
from ..core.ids import CheckpointId
from .collect import store_refusal, tag_places, unlink_from_all
from .device import Device
from .device_round import on_each
from .device_set import DeviceState
from .durable import make_directories, publish_new
from .run_store import TAGS_NAME, RunStore
from .store_format import Tag, encode_tag

_log = logging.getLogger(__name__)


def add_tag(run: RunStore, name: str, checkpoint: CheckpointId) -> None:
    """Return when the tag is durable on all present devices, but for one that is late; again is nothing.

    After a StorageError the checkpoint is kept while this process lives; what is on the devices is seen when the store
    is opened again.

    Raises:
        UsageError: the name is not allowed, or is another checkpoint's.
        NotFoundError: the checkpoint is not here.
        StorageError: a device failed.
    """
    tag = _tag(name, checkpoint)
    if run.store.is_read_only:
        raise StorageError(f"tag {name!r} cannot be made: the store is open for reading only")
    with run.tagging:
        run.take_tag(tag)

        def put(device: Device) -> None:
            if not put_tag(run, device, tag):
                _check_durable(run, device)

        for each in on_each(run.store, run.store.answering, put, what=f"writing tag {name!r}").values():
            each.result()
    _log.info("tag_added run=%s checkpoint=%s", run.run_id, checkpoint)


def put_tag(run: RunStore, device: Device, tag: Tag) -> bool:
    """Make a tag durable on one device; False where it stands there already.

    Raises:
        StorageError: the device failed.
    """
    run.complete_directories(device)
    directory = make_directories(run.store.ops, run.path_on(device), TAGS_NAME)
    return publish_new(run.store.ops, directory / tag.file_name, encode_tag(tag))


def remove_tag(run: RunStore, name: str) -> CheckpointId:
    """Return the checkpoint that had the tag, when the tag is gone durably from all devices.

    Raises:
        NotFoundError: there is no such tag.
        StorageError: a device is missing or failed: what is not removed everywhere would come back.
    """
    with run.tagging:
        checkpoint = run.tags().get(name)
        if checkpoint is None:
            raise NotFoundError(f"run {run.name!r} has no tag {name!r}", hint="`everstep ls` shows the tags")
        reason = store_refusal(run.store)
        if reason:
            raise StorageError(f"tag {name!r} of run {run.name!r} cannot be removed: {reason}")
        with run.store.deleting():
            unlink_from_all(run, tag_places(run), [_tag(name, checkpoint).file_name])
            run.drop_tag(name)
    _log.info("tag_removed run=%s checkpoint=%s", run.run_id, checkpoint)
    return checkpoint


def _check_durable(run: RunStore, device: Device) -> None:
    """Return if a file that stood already is durable: a sync that failed is never repeated by the same process."""
    state, reason = run.store.device_state(device.device_id)
    if state is DeviceState.SUSPECT:
        raise StorageError(
            f"whether the tag is durable on {device.path} is not known: {reason}",
            hint="`everstep device readmit` it when it is well",
        )


def _tag(name: str, checkpoint: CheckpointId) -> Tag:
    tag = Tag(name=name, checkpoint=checkpoint)
    try:
        _ = tag.file_name
    except ValueError as exc:
        raise UsageError(str(exc), hint="choose another name") from exc
    return tag
