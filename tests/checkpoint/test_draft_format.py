"""The reader of drafts: what it keeps from one to the next."""

import tracemalloc

from everstep.checkpoint.draft_format import DraftReader, encode_draft
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_types import Draft
from everstep.checkpoint.value_format import dump_values
from everstep.core.ids import CheckpointId

LEAVES = 3000


def encoded(name: str) -> tuple[bytes, int]:
    """Return a draft of many leaves, named after `name`, and the size of its slot."""
    values = dump_values({})
    leaves = [whole_leaf(f"{name}.{number}", "float32", (4,)) for number in range(LEAVES)]
    layout = plan_layout(leaves, (), segment_count=1, values_size_bytes=len(values))
    draft = Draft(
        checkpoint=CheckpointId(1, 1),
        rank=0,
        world_size=1,
        parent=None,
        layout_digest=layout.digest,
        leaves=layout.leaves,
        aliases=layout.aliases,
        pieces=layout.pieces,
        segments=layout.segments,
        values=values,
        notes={},
    )
    return encode_draft(draft), layout.slot_size_bytes


def test_a_layout_that_is_over_is_not_kept_beside_the_next_one() -> None:
    """Each takes a dozen times its bytes; a daemon has a reader for each rank."""
    drafts, reader = [encoded("one"), encoded("two")], DraftReader()
    peaks: list[int] = []
    tracemalloc.start()
    try:
        for draft, slot_size_bytes in drafts:
            tracemalloc.reset_peak()
            assert len(reader.read(draft, slot_size_bytes).leaves) == LEAVES
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
