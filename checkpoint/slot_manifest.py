"""The manifest of a sealed slot that could not be written: it still describes what memory holds, with checksums."""

from .checksum import block_checksums
from .commit import head_of
from .manifest_types import Draft, ManifestHead, SegmentPlan, SegmentRecord
from .run_store import RunStore
from .slot_header import seal_header
from .storage_ops import ArenaRange

NO_GENERATION = NO_DEVICE = "0" * 32
"""No file was written, so no generation and no device has this id."""


def slot_manifest(run: RunStore, draft: Draft, arena: ArenaRange) -> ManifestHead:
    """Return what a restore from memory needs, which are headers in the slot, too, and checksums of its bytes.

    Nobody may read from the slot meanwhile: what writing it has left of headers is replaced.
    """
    for plan in draft.segments:
        seal_header(arena, plan, draft, run_id=run.run_id, generation=NO_GENERATION)
    return head_of(run, draft, NO_GENERATION, tuple(_record(plan, arena) for plan in draft.segments))


def _record(plan: SegmentPlan, arena: ArenaRange) -> SegmentRecord:
    with arena.view(plan.slot_offset_bytes, plan.file_size_bytes) as view:
        checksums = block_checksums(view, plan.file_size_bytes)
    return SegmentRecord(
        segment=plan.segment,
        device_id=NO_DEVICE,
        generation=NO_GENERATION,
        file_size_bytes=plan.file_size_bytes,
        header_size_bytes=plan.header_size_bytes,
        dio_alignment_bytes=0,
        block_checksums=checksums,
    )
