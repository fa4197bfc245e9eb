"""What the daemon adds to a segment in its slot, so that the slot holds the very bytes of the file."""

from .manifest_types import Draft, SegmentPlan
from .segment_format import SegmentStamp, align_up, build_header
from .storage_ops import ArenaRange


def seal_header(arena: ArenaRange, plan: SegmentPlan, draft: Draft, *, run_id: str, generation: str) -> None:
    """Write a segment's header into the slot, and zeros behind its end: direct I/O writes whole blocks."""
    stamp = SegmentStamp(
        generation=generation,
        run_id=run_id,
        checkpoint=draft.checkpoint,
        rank=draft.rank,
        segment=plan.segment,
    )
    header = build_header(plan.entries, stamp)
    arena.view(plan.slot_offset_bytes, len(header))[:] = header
    padding_bytes = align_up(plan.file_size_bytes) - plan.file_size_bytes
    tail_offset = plan.slot_offset_bytes + plan.file_size_bytes
    arena.view(tail_offset, padding_bytes)[:] = bytes(padding_bytes)
