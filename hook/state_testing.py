"""A state's whole way without a daemon: capture, layout, segments in memory, manifest, restore.

For tests, everstep's own and those of users who want to see that their objects come back bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.checksum import block_checksums
from ..checkpoint.layout_plan import Layout, plan_layout
from ..checkpoint.manifest_format import decode_manifest
from ..checkpoint.manifest_types import Draft, Manifest, SegmentPlan, SegmentRecord
from ..checkpoint.segment_format import SegmentStamp, build_header
from ..checkpoint.shard_rules_plan import check_draft
from ..checkpoint.testing import encode_manifest, written_pieces
from ..checkpoint.value_format import dump_values
from ..core.ids import CheckpointId, run_id_of
from .capture import StateCapture, capture_state
from .component import Component, check_components, make_components
from .shard_memory import ShardMemory
from .stored_state import StoredState
from .tensor_bytes import BufferPin, byte_range, copy_bytes

_RUN_NAME = "testing"
_GENERATION = "5" * 32
_CHECKPOINT = CheckpointId(1, 7)
"""Any: one run, one generation, one checkpoint."""


def transfer(
    saved: Mapping[str, object], fresh: Mapping[str, object], *, device_count: int = 2, world_size: int = 1
) -> StoredState:
    """Save the attached objects of one process and restore them into those of another; return what lay between.

    Raises:
        UsageError: as attach() and restore() would.
    """
    stored = store(make_components(saved, world_size=world_size), device_count=device_count)
    components = make_components(fresh, world_size=world_size)
    check_components(components, stored, lambda names: None)
    for component in components:
        component.apply(stored)
    return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFiles:
    """One shard as it would lie on the devices."""

    manifest: Manifest
    slot: memoryview
    """All segments as in memory."""
    offsets: Mapping[int, int]
    """Of the segments, in the slot."""

    @property
    def content(self) -> dict[int, bytes]:
        """The bytes of each segment file."""
        return {
            record.segment: bytes(self.slot[self.offsets[record.segment] :][: record.file_size_bytes])
            for record in self.manifest.segments
        }

    @property
    def headers(self) -> dict[int, bytes]:
        """The header of each segment file."""
        sizes = {record.segment: record.header_size_bytes for record in self.manifest.segments}
        return {segment: content[: sizes[segment]] for segment, content in self.content.items()}


def store(components: Sequence[Component], *, device_count: int = 2) -> StoredState:
    """Return the components' state as it would come back from that many devices."""
    files = store_files(components, device_count=device_count)
    memory = ShardMemory(files.manifest, files.slot, files.offsets, ahead=False)
    memory.receive()
    return StoredState(files.manifest, memory)


def store_files(components: Sequence[Component], *, device_count: int = 2) -> StoredFiles:
    """Return the components' state as it would lie on that many devices."""
    capture = capture_state(components)
    values = dump_values(capture.values)
    layout = plan_layout([leaf.spec for leaf in capture.leaves], capture.aliases, segment_count=device_count)
    slot = bytearray(layout.slot_size_bytes)
    _fill(slot, capture, layout)
    draft = _draft(layout, values)
    check_draft(draft, layout.slot_size_bytes)
    manifest = decode_manifest(encode_manifest(_manifest(layout, draft, slot)))
    offsets = {plan.segment: plan.slot_offset_bytes for plan in layout.segments}
    return StoredFiles(manifest=manifest, slot=memoryview(slot).toreadonly(), offsets=offsets)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order, as bytes: equal bytes are equal bits, NaN or not."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    made = bytearray(plain.numel() * plain.element_size())
    if made:
        pin = BufferPin(memoryview(made))
        copy_bytes(pin.address, *byte_range(plain))
        pin.release()
    return bytes(made)


def _fill(slot: bytearray, capture: StateCapture, layout: Layout) -> None:
    """Copy headers and pieces to their places, as daemon and hook do."""
    for plan in layout.segments:
        header = build_header(plan.entries, _stamp(plan))
        slot[plan.slot_offset_bytes : plan.slot_offset_bytes + len(header)] = header
    tensors = {leaf.spec.name: leaf.tensor for leaf in capture.leaves}
    plans = {plan.segment: plan for plan in layout.segments}
    pin = BufferPin(memoryview(slot))
    for piece in layout.pieces:
        plan = plans[piece.segment]
        begin = next(entry.begin for entry in plan.entries if entry.key == piece.key)
        target = pin.address + plan.slot_offset_bytes + plan.header_size_bytes + begin
        source = tensors[piece.leaf].data_ptr() + piece.offset_in_leaf_bytes
        copy_bytes(target, source, piece.size_bytes)
    pin.release()


def _stamp(plan: SegmentPlan) -> SegmentStamp:
    return SegmentStamp(
        generation=_GENERATION,
        run_id=run_id_of(_RUN_NAME),
        checkpoint=_CHECKPOINT,
        rank=0,
        segment=plan.segment,
    )


def _draft(layout: Layout, values: bytes) -> Draft:
    return Draft(
        checkpoint=_CHECKPOINT,
        rank=0,
        world_size=1,
        parent=None,
        layout_digest=layout.digest,
        leaves=layout.leaves,
        aliases=layout.aliases,
        pieces=layout.pieces,
        segments=layout.segments,
        values=values,
    )


def _manifest(layout: Layout, draft: Draft, slot: bytearray) -> Manifest:
    records = tuple(_record(plan, slot) for plan in layout.segments)
    return Manifest(
        run_id=run_id_of(_RUN_NAME),
        run_name=_RUN_NAME,
        owner_uid=0,
        checkpoint=_CHECKPOINT,
        rank=0,
        world_size=1,
        parent=None,
        generation=_GENERATION,
        created_unix_s=0.0,
        layout_digest=layout.digest,
        leaves=layout.leaves,
        aliases=layout.aliases,
        pieces=written_pieces(draft, records),
        segments=records,
        values=draft.values,
        notes={},
    )


def _record(plan: SegmentPlan, slot: bytearray) -> SegmentRecord:
    file = memoryview(slot)[plan.slot_offset_bytes : plan.slot_offset_bytes + plan.file_size_bytes]
    return SegmentRecord(
        segment=plan.segment,
        device_id=f"{plan.segment:032x}",
        generation=_GENERATION,
        file_size_bytes=plan.file_size_bytes,
        header_size_bytes=plan.header_size_bytes,
        dio_alignment_bytes=0,
        block_checksums=block_checksums(file, plan.file_size_bytes),
    )
