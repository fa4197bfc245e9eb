"""Committed shards that a daemon of another user lends: the files are that user's, what is in them is ours."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.engine import Engine, Transfer, TransferKind
from ..checkpoint.manifest_format import decode_manifest
from ..checkpoint.manifest_types import Manifest, SegmentRecord
from ..checkpoint.storage_ops import ArenaRange, SegmentHandle, storage_error
from ..core.errors import CorruptDataError
from ..core.ids import CheckpointId
from ..core.version import VERSION
from ..proto import frames
from ..proto.frames import Reply, Role
from .client import DaemonClient


class LentSegments:
    """The segments of one checkpoint, each asked for once; a SegmentFiles."""

    def __init__(self, client: DaemonClient, run: str, checkpoint: CheckpointId) -> None:
        self._client, self._run, self._checkpoint = client, run, checkpoint

    def manifest(self, rank: int) -> Manifest:
        """Return a shard's manifest; NotFoundError where there is none."""
        reply, _ = self._client.request(
            lambda number: frames.ReadManifest(
                request_id=number,
                run=self._run,
                attempt=self._checkpoint.attempt,
                step=self._checkpoint.step,
                rank=rank,
            )
        )
        assert isinstance(reply, frames.ManifestBytes), reply
        return decode_manifest(reply.manifest)

    def open(self, manifest: Manifest, record: SegmentRecord) -> SegmentHandle:
        """See SegmentFiles. Its stamp is in the first block, which is verified as it is read."""
        _, fd = self._client.request(
            lambda number: frames.OpenSegment(
                request_id=number,
                run=self._run,
                attempt=self._checkpoint.attempt,
                step=self._checkpoint.step,
                rank=manifest.rank,
                segment=record.segment,
            )
        )
        assert fd is not None, "the frame announces one"
        path = Path(f"segment {record.segment} of rank {manifest.rank}")
        size_bytes = os.fstat(fd).st_size
        if size_bytes != record.file_size_bytes:
            os.close(fd)
            raise CorruptDataError(f"{path} has {size_bytes} bytes, expected {record.file_size_bytes}")
        return SegmentHandle(path=path, fd=fd, is_direct=False, alignment_bytes=0)

    def read(
        self,
        handle: SegmentHandle,
        arena: ArenaRange,
        offset_bytes: int,
        size_bytes: int,
        engine: Engine,
        *,
        file_offset_bytes: int,
    ) -> None:
        """See SegmentFiles."""
        transfer = Transfer(
            kind=TransferKind.READ,
            arena_fd=arena.fd,
            arena_offset_bytes=arena.offset_in_arena(offset_bytes, size_bytes),
            file_fd=handle.fd,
            file_offset_bytes=file_offset_bytes,
            length_bytes=size_bytes,
        )
        try:
            engine.run(transfer)
        except OSError as error:
            raise storage_error(error, handle.path, "reading") from error

    def close(self, handle: SegmentHandle) -> None:
        """See SegmentFiles."""
        os.close(handle.fd)

    def report(self, manifest: Manifest, error: CorruptDataError) -> None:
        """See SegmentFiles: the error says it all to whoever exports; the daemon verifies for itself."""


@contextmanager
def lent_segments(
    socket_path: Path, run: str, checkpoint: CheckpointId, ranks: Sequence[int]
) -> Generator[tuple[LentSegments, dict[int, Manifest]]]:
    """Give the segments and manifests of a checkpoint, lent by the daemon on this socket.

    Raises:
        DaemonUnavailableError: nobody answers there.
        NotFoundError: this user has no such checkpoint.
        CorruptDataError, StorageError: a manifest cannot be read.
    """
    client = DaemonClient(socket_path, Role.CONTROL, VERSION, _ignore)
    try:
        lent = LentSegments(client, run, checkpoint)
        yield lent, {rank: lent.manifest(rank) for rank in ranks}
    finally:
        client.close()


def _ignore(_: Reply) -> None:
    """Nothing is told to whoever only reads."""
