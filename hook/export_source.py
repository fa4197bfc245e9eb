"""A committed checkpoint to export: its tensors from the devices, verified, and its documents."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from ..checkpoint.leaf_reader import LeafReader
from ..checkpoint.manifest_types import Manifest
from ..checkpoint.real_storage import RealStorage
from ..checkpoint.recovery import recover
from ..checkpoint.segment_files import StoredSegments
from ..checkpoint.store import open_store
from ..checkpoint.store_format import LockHolder
from ..checkpoint.value_format import load_values
from ..checkpoint.whole_plan import Part, WholeState, WholeTensor, put_together
from ..core.errors import CorruptDataError, NotFoundError
from ..core.ids import CheckpointId
from .lent_segments import lent_segments
from .tensor_bytes import BufferPin, byte_range, copy_bits, copy_bytes, pinned, torch_dtype


class ExportSource:
    """One checkpoint, from one rank's point of view. Open while `opened_source` runs; for one thread."""

    def __init__(self, reader: LeafReader, manifests: Mapping[int, Manifest], rank: int) -> None:
        self._reader = reader
        self.whole: WholeState = put_together(manifests, rank)
        self.manifest = manifests[rank]
        self.by_name = {tensor.name: tensor for tensor in self.whole.tensors}
        self._leaf_sizes = {
            (number, leaf.name): leaf.size_bytes
            for number, manifest in manifests.items()
            for leaf in manifest.leaves
        }
        documents = load_values(self.manifest.values)
        if not isinstance(documents, dict):
            raise CorruptDataError("the values of the checkpoint are not one document per component")
        self.documents = cast(dict[str, object], documents)

    def find(self, name: str) -> WholeTensor:
        """Return a tensor. Raises CorruptDataError when the documents name one that was not stored."""
        found = self.by_name.get(name)
        if found is None:
            raise CorruptDataError(f"the state refers to {name!r}, which the checkpoint does not have")
        return found

    def holder_size_bytes(self, part: Part) -> int:
        """Return the bytes of the leaf that a part lies in."""
        return self._leaf_sizes[part.rank, part.holder]

    def holder_bytes(self, part: Part) -> Iterator[memoryview]:
        """Yield all bytes of the leaf that a part lies in, in storage order."""
        return self._reader.read(part.rank, part.holder, 0, self.holder_size_bytes(part))

    def part_bytes(self, part: Part) -> Iterator[memoryview]:
        """Yield the bytes of a part in storage order; each view holds until the next one is asked for."""
        end = part.offset_bytes + part.spec.size_bytes
        return self._reader.read(part.rank, part.holder, part.offset_bytes, end)

    def logical_bytes(self, tensor: WholeTensor) -> Iterator[memoryview]:
        """Yield a tensor's elements in row-major order; streamed where they are stored so."""
        part = tensor.only_part
        if part is not None and part.spec.is_contiguous:
            yield from self.part_bytes(part)
            return
        with pinned(self.tensor(tensor).contiguous()) as view:
            yield view

    def tensor(self, tensor: WholeTensor) -> torch.Tensor:
        """Return a new CPU tensor, its parts put together; strided as it was where it is one part."""
        part = tensor.only_part
        if part is not None:
            return self._part(part)
        made = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        for part in tensor.parts:
            target = made
            places = zip(part.spec.global_offset, part.spec.shape, strict=True)
            for dim, (begin, size) in enumerate(places):
                target = target.narrow(dim, begin, size)
            copy_bits(self._part(part), to=target)
        return made

    def raw(self, name: str) -> bytes:
        """Return a tensor's bytes: for arrays and byte strings that were stored as leaves."""
        return b"".join(map(bytes, self.logical_bytes(self.find(name))))

    def _part(self, part: Part) -> torch.Tensor:
        spec = part.spec
        made = torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype))
        address, _ = byte_range(made)
        for view in self.part_bytes(part):
            pin = BufferPin(view)
            copy_bytes(address, pin.address, pin.size_bytes)
            address += pin.size_bytes
            pin.release()
        return made


@contextmanager
def opened_source(
    directories: list[Path], *, uid: int, run_id: str, owner_uid: int, checkpoint: CheckpointId, rank: int
) -> Generator[ExportSource]:
    """Give a checkpoint of the store in these directories, which is only read; a daemon may hold it.

    Raises:
        NotFoundError: no such run, checkpoint or rank.
        CorruptDataError, IncompleteError, StorageError: it cannot be read whole.
    """
    holder = LockHolder(pid=0, socket="", uid=uid, kind="everstep export")
    with open_store(directories, ops=RealStorage(), holder=holder, uid=uid, read_only=True) as store:
        recover(store)
        runs = [run for run in store.runs() if (run.run_id, run.owner_uid) == (run_id, owner_uid)]
        if not runs:
            raise NotFoundError(f"there is no run {run_id} of uid {owner_uid} any more")
        (run,) = runs
        manifests = {number: run.manifest(checkpoint, number) for number in run.info(checkpoint).ranks}
        with LeafReader(StoredSegments(run), manifests) as reader:
            yield ExportSource(reader, manifests, rank)


@contextmanager
def lent_source(
    socket_path: Path, *, run_id: str, checkpoint: CheckpointId, ranks: Sequence[int], rank: int
) -> Generator[ExportSource]:
    """Give a checkpoint whose files the daemon on this socket lends, as they belong to another user.

    Raises:
        NotFoundError, CorruptDataError, StorageError, DaemonUnavailableError: see lent_segments.
    """
    with (
        lent_segments(socket_path, run_id, checkpoint, ranks) as (files, manifests),
        LeafReader(files, manifests) as reader,
    ):
        yield ExportSource(reader, manifests, rank)
