"""Snapshots: at a boundary the eager part is copied at once, the rest by the copy thread, then the slot is sealed."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from ..checkpoint.draft_format import DraftEncoder
from ..checkpoint.layout_plan import Layout, plan_layout, segment_count_for
from ..checkpoint.manifest_types import Draft
from ..checkpoint.value_format import dump_values
from ..core.errors import EverstepError
from ..core.ids import CheckpointId
from ..proto import frames
from .capture import StateCapture, capture_state
from .client import Answer
from .copier import Copier, CopyJob
from .cuda_copy import CudaCopies
from .debug_check import SlotCheck
from .gather import copy
from .link import Link
from .mapped_arena import MappedArena
from .report import CostBook
from .slot_places import Places
from .slot_sealing import SlotSealing
from .state_protocol import Captured

logger = logging.getLogger(__name__)

NO_ARENA = "the arena is being allocated"
NO_SLOT = "no free slot: the devices are slower than the interval"
STILL_COPYING = "the previous snapshot is still being copied"
NO_DAEMON = "no daemon"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """What a snapshot is called, and what `everstep show` tells of it."""

    checkpoint: CheckpointId
    parent: CheckpointId | None
    notes: dict[str, str]


class Snapshotter:
    """Owns the arena's mapping and the copy thread. `begin`, `guard` and `close` run on the training thread."""

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        link: Link,
        components: Sequence[Captured],
        *,
        rank: int,
        world_size: int,
        slot_count: int,
        replicated: bool,
        debug: bool,
        costs: CostBook,
        on_sealed: Callable[[CheckpointId], None],
        on_failed: Callable[[CheckpointId, str], None],
    ) -> None:
        self._link, self._components, self._costs = link, components, costs
        self._rank, self._world_size, self._slot_count = rank, world_size, slot_count
        self._replicated = replicated and world_size > 1
        self._debug = debug
        self._on_sealed, self._on_failed = on_sealed, on_failed
        self._lock = threading.Lock()
        self._arena: MappedArena | None = None
        self._asked: tuple[str, Future[Answer]] | None = None
        self._last: StateCapture | None = None
        self._layout: Layout | None = None
        self._layout_of_what: object = None
        self._places: Places | None = None
        self._encoder = DraftEncoder()
        self._copier = Copier()
        self._cuda = CudaCopies()
        self._stale: list[MappedArena] = []

    @property
    def busy(self) -> bool:
        """Tell whether a snapshot is being copied or sealed, or the daemon allocates an arena."""
        with self._lock:
            return self._copier.busy or (self._asked is not None and not self._asked[1].done())

    @property
    def copying(self) -> bool:
        """Tell whether a snapshot is being copied or sealed."""
        return self._copier.busy

    # -- arena

    def adopt(self, arena: MappedArena) -> None:
        """Use an arena that came with a restore from memory, if the layout turns out to be the same."""
        self._replace_arena(arena)

    def slot_free(self, arena: int, slot: int) -> None:
        """The daemon has freed a slot; called on the reader thread."""
        with self._lock:
            if self._arena is not None and self._arena.number == arena:
                self._arena.give(slot)

    def daemon_lost(self) -> None:
        """The daemon that owned the arena is gone: nothing of it can be sealed any more."""
        with self._lock:
            self._retire(self._arena)
            self._arena = None
            self._forget_asked()

    def prepare(self) -> None:
        """Ask for the arena that the present structure needs, ahead of the first checkpoint."""
        layout = self._layout_of(self._capture(), 0)
        self._find_arena(layout)

    def _capture(self) -> StateCapture:
        """Return the state by reference; the last capture's description spares most of the work."""
        self._last = capture_state(self._components, previous=self._last)
        return self._last

    def _find_arena(self, layout: Layout) -> MappedArena | None:
        """Return the arena of `layout`, or None after asking for one."""
        with self._lock:
            if self._arena is not None and self._arena.fits(layout):
                return self._arena
        self._collect_answer()
        with self._lock:
            if self._arena is not None and self._arena.fits(layout):
                return self._arena
            if self._asked is None:
                self._asked = (layout.digest, self._ask_arena(layout))
        return None

    def _ask_arena(self, layout: Layout) -> "Future[Answer]":
        logger.info("arena_asked slots=%d slot_size_bytes=%d", self._slot_count, layout.slot_size_bytes)
        return self._link.client.ask(
            lambda number: frames.MakeArena(
                request_id=number,
                layout_digest=layout.digest,
                slot_size_bytes=layout.slot_size_bytes,
                slot_count=self._slot_count,
            )
        )

    def _collect_answer(self) -> None:
        """Map the arena that was asked for, when it has come. A refusal is raised once; the next call asks again."""
        with self._lock:
            if self._asked is None or not self._asked[1].done():
                return
            digest, future = self._asked
            self._asked = None
        ready, fd = future.result()
        assert isinstance(ready, frames.ArenaReady)
        assert fd is not None
        self._replace_arena(MappedArena(ready.arena, fd, ready.slot_size_bytes, ready.slot_count, digest))
        logger.info("arena_ready number=%d allocation_s=%.3f", ready.arena, ready.allocation_s)

    def _forget_asked(self) -> None:
        """Nobody will map the arena that was asked for: its descriptor is closed when it comes, or has come."""
        if self._asked is not None:
            self._asked[1].add_done_callback(_close_descriptor)
            self._asked = None

    def _replace_arena(self, arena: MappedArena) -> None:
        with self._lock:
            self._retire(self._arena)
            self._arena = arena
        self._cuda.register(arena)

    def _retire(self, arena: MappedArena | None) -> None:
        """Unmap now, or when the running copy has ended."""
        if arena is not None:
            self._stale.append(arena)
        if not self._copier.busy:
            while self._stale:
                stale = self._stale.pop()
                self._cuda.unregister(stale)
                stale.close()

    # -- snapshots

    def begin(self, facts: SnapshotFacts) -> str | None:
        """Take the snapshot of this boundary; return the reason when it had to be skipped.

        Raises:
            StateTypeError: something in the state cannot be saved: the path says what.
        """
        began_s = time.perf_counter()
        try:
            return self._begin(facts)
        finally:
            self._costs.eager_s += time.perf_counter() - began_s

    def _begin(self, facts: SnapshotFacts) -> str | None:
        if self._copier.busy:
            return STILL_COPYING
        if self._link.broken:
            return NO_DAEMON
        capture = self._capture()
        values = dump_values(capture.values)
        layout = self._layout_of(capture, len(values))
        try:
            arena = self._find_arena(layout)
        except EverstepError as error:
            return error.message
        if arena is None:
            return NO_ARENA
        with self._lock:
            slot = arena.take()
        if slot is None:
            return NO_SLOT
        try:
            self._link.client.send(
                frames.BeginSnapshot(
                    arena=arena.number,
                    slot=slot,
                    attempt=facts.checkpoint.attempt,
                    step=facts.checkpoint.step,
                )
            )
        except EverstepError:
            return NO_DAEMON
        try:
            self._copy(capture, layout, arena, slot, facts=facts, values=values)
        except EverstepError as error:
            self._link.tell(frames.Abandon(arena=arena.number, slot=slot, reason=error.message[:500]))
            return error.message
        return None

    def guard(self) -> float:
        """Wait until the lazy part may change again; return the seconds that the host stood still."""
        self._cuda.guard()
        return self._copier.guard()

    def drain(self, deadline_s: float) -> bool:
        """Wait until the running copy is sealed or dropped."""
        return self._copier.drain(deadline_s)

    def settle(self, deadline_s: float) -> bool:
        """Wait, besides, until the arena that was asked for is there or refused."""
        until_s = time.monotonic() + deadline_s
        with self._lock:
            asked = self._asked
        if asked is not None:
            wait([asked[1]], deadline_s)
        return self.drain(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """End the copy thread and unmap."""
        self._copier.close()
        with self._lock:
            self._retire(self._arena)
            self._arena = None
            self._forget_asked()

    def _layout_of(self, capture: StateCapture, values_size_bytes: int) -> Layout:
        """Return the layout of this structure; computed anew only when the structure or the values' room changes."""
        devices = len(self._link.devices)
        what, known = (capture.specs, capture.aliases, devices), self._layout
        if known is not None and what == self._layout_of_what and known.has_room_for(values_size_bytes):
            return known
        specs = capture.specs
        leaves = [replace(spec, replicas=self._world_size) for spec in specs] if self._replicated else specs
        layout = plan_layout(
            leaves,
            capture.aliases,
            segment_count=segment_count_for(specs, devices),
            values_size_bytes=values_size_bytes,
        )
        self._layout, self._layout_of_what, self._encoder = layout, what, DraftEncoder()
        return layout

    def _places_for(self, layout: Layout, capture: StateCapture) -> Places:
        if self._places is None or not self._places.serve(layout, capture):
            self._places = Places(layout, capture)
        return self._places

    def _copy(
        self,
        capture: StateCapture,
        layout: Layout,
        arena: MappedArena,
        slot: int,
        *,
        facts: SnapshotFacts,
        values: bytes,
    ) -> None:
        base, leaves, places = arena.slot_address(slot), capture.leaves, self._places_for(layout, capture)
        for place, eager in places.cuda:
            target = arena.view(base - arena.address + place.slot_offset_bytes, place.size_bytes)
            tensor = leaves[place.leaf].tensor
            self._cuda.copy(target, tensor, place.offset_in_leaf_bytes, eager=eager)
        for moves in places.eager.at(capture.addresses, base):
            copy(moves)
        sealing = SlotSealing(
            link=self._link,
            arena=arena,
            slot=slot,
            layout=layout,
            encoder=self._encoder,
            make_draft=lambda: self._draft(layout, facts, values),
        )
        sealing.plan(
            places.lazy.segments, places.lazy.size_bytes, {place.segment for place, _ in places.cuda}
        )
        check = SlotCheck(leaves, places.all_lazy) if self._debug else None
        wait_cuda = self._cuda.record()
        self._costs.eager_bytes = places.eager_bytes
        self._costs.largest_eager_leaf = places.largest_eager_leaf
        job = CopyJob(
            moves=places.lazy.at(capture.addresses, base),
            unchanged=places.unchanged(capture),
            keep_alive=places.memory(capture),
            begin=sealing.begin,
            copied=sealing.copied,
            wait_cuda=wait_cuda,
            finish=lambda: self._seal(job, sealing, facts.checkpoint, check),
            fail=lambda error: self._drop(arena, slot, facts.checkpoint, error),
        )
        self._copier.submit(job)

    # -- on the copy thread

    def _seal(
        self, job: CopyJob, sealing: SlotSealing, checkpoint: CheckpointId, check: SlotCheck | None
    ) -> None:
        self._costs.copy_s += job.copy_s
        if check is not None:
            check.compare(sealing.view)
        sealing.seal()
        self._costs.sealed += 1
        self._on_sealed(checkpoint)

    def _draft(self, layout: Layout, facts: SnapshotFacts, values: bytes) -> Draft:
        return Draft(
            checkpoint=facts.checkpoint,
            rank=self._rank,
            world_size=self._world_size,
            parent=facts.parent,
            layout_digest=layout.digest,
            leaves=layout.leaves,
            aliases=layout.aliases,
            pieces=layout.pieces,
            segments=layout.segments,
            values=values,
            notes=facts.notes,
        )

    def _drop(self, arena: MappedArena, slot: int, checkpoint: CheckpointId, error: EverstepError) -> None:
        logger.warning("snapshot_dropped checkpoint=%s reason=%s", checkpoint, error)
        self._link.tell(frames.Abandon(arena=arena.number, slot=slot, reason=error.message[:500]))
        self._on_failed(checkpoint, str(error))


def _close_descriptor(asked: "Future[Answer]") -> None:
    if asked.exception() is None and (fd := asked.result()[1]) is not None:
        os.close(fd)
