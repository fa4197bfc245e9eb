"""Committed shards for who may read them and cannot open the files, which belong to the daemon's user (ADR 0077).

Only a run's own segments are lent, for reading. What was deleted meanwhile is not written over while somebody has it
open (checkpoint/sole_holder.py), and a file that is written over stays its user's (checkpoint/segment_pool.py).
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...checkpoint.run_store import RunStore
from ...core.errors import NotFoundError, StorageError
from ...core.ids import CheckpointId
from ...proto import frames
from ..blocking import in_thread
from ..control import store_views

if TYPE_CHECKING:
    from ..node import Node


async def read_manifest(node: "Node", uid: int, frame: frames.ReadManifest) -> frames.ManifestBytes:
    """Return the manifest of a shard of a run that this user may see; see RunStore.manifest_content."""
    run, checkpoint = _found(node, uid, frame.run), CheckpointId(frame.attempt, frame.step)
    content = await in_thread(run.manifest_content, checkpoint, frame.rank)
    return frames.ManifestBytes(re=frame.request_id, manifest=content)


@asynccontextmanager
async def opened_segment(node: "Node", uid: int, frame: frames.OpenSegment) -> AsyncGenerator[int]:
    """Give a descriptor of a segment's file while the block runs.

    Raises:
        NotFoundError: this user has no such run, checkpoint, rank or segment.
        IncompleteError: its device is missing.
        StorageError: it cannot be opened.
    """
    run, checkpoint = _found(node, uid, frame.run), CheckpointId(frame.attempt, frame.step)
    fd = await in_thread(_open, run, checkpoint, frame.rank, frame.segment)
    try:
        yield fd
    finally:
        os.close(fd)


def _found(node: "Node", uid: int, text: str) -> RunStore:
    return store_views.find_run([opened.store for opened in node.stores.stores], text, uid or None)


def _open(run: RunStore, checkpoint: CheckpointId, rank: int, segment: int) -> int:
    with run.reading(checkpoint):
        refs = [each for each in run.shard(checkpoint, rank).segments if each.segment == segment]
        if len(refs) != 1:
            raise NotFoundError(f"rank {rank} of checkpoint {checkpoint} has no segment {segment}")
        path = run.segment_path(refs[0])
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"segment {segment} of rank {rank} cannot be opened: {error.strerror}",
                hint="`everstep verify` says what is damaged",
            ) from error
