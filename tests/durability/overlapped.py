"""A snapshot that is written while it is copied, one call after the other: for the explorer."""

from collections.abc import Callable

from workloads import Overlap

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.copy_gate import CopyGate
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import State, each_engine, memory_arena
from everstep.core.ids import CheckpointId

_BEFORE = b"\xa5"
"""What a slot holds that nothing was copied into: whoever does not wait reads that."""


class PlayedGate(CopyGate):
    """Copies a segment as late as it may be: when somebody waits for it. So it seals, or gives up."""

    def __init__(
        self, copy: Callable[[int], object], *, given_up_after: int | None, on_seal: Callable[[], object]
    ) -> None:
        super().__init__()
        self._copy, self._given_up_after, self._on_seal = copy, given_up_after, on_seal
        self._there: set[int] = set()

    def wait_copied(self, segment: int, is_over: Callable[[], bool]) -> bool:
        """See CopyGate."""
        if segment not in self._there and len(self._there) == self._given_up_after:
            self.abandon()
        elif segment not in self._there:
            self._copy(segment)
            self._there.add(segment)
            self.copied(segment)
        return super().wait_copied(segment, is_over)

    def wait_sealed(self) -> None:
        """See CopyGate."""
        if self._given_up_after is None:
            self._on_seal()
            self.seal()
        else:
            self.abandon()
        super().wait_sealed()


def save_overlapped(
    run: RunStore,
    state: State,
    checkpoint: CheckpointId,
    overlap: Overlap,
    *,
    rank: int,
    world_size: int,
    on_seal: Callable[[], object],
) -> PersistResult:
    """Persist a state that is copied meanwhile; `on_seal` is called when it is sealed.

    Raises:
        CopyAbandonedError: it was given up, as the data say.
    """
    draft = state.draft(checkpoint, rank=rank, world_size=world_size)
    size = state.layout.slot_size_bytes
    with memory_arena(size) as arena, each_engine(run.store) as engines:
        arena.view(0, size)[:] = _BEFORE * size
        gate = PlayedGate(
            lambda segment: state.copy_into(arena, segment),
            given_up_after=overlap.given_up_after,
            on_seal=on_seal,
        )
        return persist_shard(run, draft, arena, engines=engines, gate=gate)
