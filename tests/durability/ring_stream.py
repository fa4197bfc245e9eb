"""A shard that streams through a slot which is too small for it."""

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from msgspec import structs

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.copy_gate import CopyGate
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.storage_ops import ArenaRange
from everstep.checkpoint.testing import State, each_engine, memory_arena
from everstep.core.ids import CheckpointId

SEGMENT_COUNT = 6
_WAIT_S = 20.0
_ENDED = -1


def ring_state(state: State, window_count: int) -> State:
    """Return the state in segments that take turns in so many windows; smaller ones than a real ring has."""
    layout = plan_layout(state.layout.leaves, (), segment_count=SEGMENT_COUNT)
    assert len(layout.segments) > window_count, "so few segments need no ring"
    size = max(align_up(plan.file_size_bytes) for plan in layout.segments)
    plans = tuple(
        structs.replace(plan, slot_offset_bytes=plan.segment % window_count * size)
        for plan in layout.segments
    )
    return State(replace(layout, segments=plans), state.content)


def stream(run: RunStore, state: State, checkpoint: CheckpointId, *, window_count: int) -> PersistResult:
    """Persist a state, each of whose segments is copied when the one before it in its window was written."""
    ring = ring_state(state, window_count)
    written: queue.SimpleQueue[int] = queue.SimpleQueue()
    gate = CopyGate(written.put)
    with (
        memory_arena(ring.layout.slot_size_bytes) as arena,
        each_engine(run.store) as engines,
        ThreadPoolExecutor(1) as pool,
    ):
        writing = pool.submit(persist_shard, run, ring.draft(checkpoint), arena, engines=engines, gate=gate)
        writing.add_done_callback(lambda _: written.put(_ENDED))
        try:
            if _copy_all(ring, arena, gate, written, window_count):
                gate.seal()
            return writing.result(_WAIT_S)
        finally:
            gate.abandon()


def _copy_all(
    ring: State, arena: ArenaRange, gate: CopyGate, written: "queue.SimpleQueue[int]", window_count: int
) -> bool:
    """Copy segment after segment, as a trainer does; False where the writing has ended meanwhile."""
    heard: set[int] = set()
    for plan in ring.layout.segments:
        before = plan.segment - window_count
        while before >= 0 and not heard & {before, _ENDED}:
            heard.add(written.get(timeout=_WAIT_S))
        if _ENDED in heard:
            return False
        ring.copy_into(arena, plan.segment)
        gate.copied(plan.segment)
    return True
