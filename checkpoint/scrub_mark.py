"""How far the scheduled scrub of a store is: a small file on every device, so that the next process goes on there.

Nothing depends on it but what is read next: a copy that cannot be read counts as none, and one that cannot be written
is said in the log.
"""

import logging

from ..core.errors import DataError, StorageError
from .device import Device
from .device_set import DeviceSet
from .durable import publish_over
from .store_format import SMALL_FILE_BYTES_MAX, ScrubMark, decode_scrub_mark, encode_scrub_mark

_log = logging.getLogger(__name__)

SCRUB_NAME = "scrub.json"


def read_scrub_mark(store: DeviceSet) -> ScrubMark | None:
    """Return what the newest copy says; None when no device has one of this store."""
    marks = [mark for device in store.trusted if (mark := _read(store, device)) is not None]
    return max(marks, key=_age, default=None)


def write_scrub_mark(store: DeviceSet, mark: ScrubMark) -> None:
    """Return when the mark is durable on each trusted device that takes it: a full one keeps the old one."""
    content = encode_scrub_mark(mark)
    for device in store.trusted:
        try:
            with store.watching(device.device_id):
                publish_over(store.ops, device.path / SCRUB_NAME, content)
        except StorageError as exc:
            _log.warning("scrub_mark_not_kept device=%s reason=%s", device.path, exc)


def _age(mark: ScrubMark) -> tuple[float, bool, int]:
    return mark.started_unix_s, mark.ended_unix_s is not None, mark.checkpoint_count


def _read(store: DeviceSet, device: Device) -> ScrubMark | None:
    path = device.path / SCRUB_NAME
    try:
        content = store.ops.read_small(path, SMALL_FILE_BYTES_MAX, owner_uid=store.uid)
        mark = None if content is None else decode_scrub_mark(content, str(path))
    except (StorageError, DataError) as exc:
        _log.warning("scrub_mark_not_read path=%s reason=%s", path, exc)
        return None
    # A directory that was taken over from another store may still have the mark of that one.
    return mark if mark is not None and mark.store_id == store.store_id else None
