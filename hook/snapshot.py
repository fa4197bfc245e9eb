"""Snapshots: at a boundary the eager part is copied at once, the rest by the copy thread, then the slot is sealed."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ..checkpoint.layout_plan import Layout, plan_layout, segment_count_for
from ..checkpoint.manifest_types import Draft
from ..checkpoint.succession_plan import SNAPSHOT_NOTE
from ..checkpoint.value_format import dump_values
from ..core.errors import DaemonUnavailableError, EverstepError, MemoryBusyError, MemoryRefusedError
from ..core.ids import CheckpointId, random_id
from ..proto import frames
from .arena_keeper import ArenaKeeper
from .capture import StateCapture, capture_state
from .copier import Copier, CopyJob
from .copies import COPIES
from .cuda_copy import CudaCopies, CudaWindows, is_capturing
from .debug_check import SlotCheck
from .gather import Scratch, copy
from .lazy_leaves import NONE
from .link import Link
from .mapped_arena import MappedArena
from .rank_protocol import DAEMON_LOST
from .report import CostBook
from .ring_places import RingPlaces, ring_size_bytes
from .skip_reasons import CAPTURING, NO_ARENA, NO_DAEMON, NO_ROOM_YET, NO_SLOT, PINNING, STILL_COPYING
from .slot_places import Places
from .slot_sealing import SlotSealing
from .state_protocol import Captured
from .window_gate import WindowGate

logger = logging.getLogger(__name__)

AHEAD_POLL_S = 0.001
AHEAD_MAX_S = 60.0
"""A device that has not come to the end of a step and of a copy by then hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """What a snapshot is called, and what `everstep show` tells of it."""

    checkpoint: CheckpointId
    parent: CheckpointId | None
    notes: dict[str, str]


class Snapshotter:
    """Owns the copy thread. `begin`, `guard` and `close` run on the training thread."""

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
        device_first: bool,
        costs: CostBook,
        on_sealed: Callable[[CheckpointId], None],
        on_failed: Callable[[CheckpointId, str], None],
        on_slots: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._link, self._components, self._costs = link, components, costs
        costs.world_size = world_size
        self._rank, self._world_size = rank, world_size
        self._replicated = replicated and world_size > 1
        self._debug = debug
        self._on_sealed, self._on_failed = on_sealed, on_failed
        self._last: StateCapture | None = None
        self._layout: Layout | None = None
        self._layout_of_what: object = None
        self._planned: tuple[MappedArena, Places] | None = None
        self._streaming: tuple[CheckpointId, SlotSealing] | None = None
        """The snapshot that was begun last."""
        self._through_ring: set[CheckpointId] = set()
        """Sealed, and held by no memory whole: they count as sealed once they are durable."""
        self._copier = Copier()
        self._scratch = Scratch() if COPIES is None else None
        self._cuda = CudaCopies(costs, device_first=device_first)
        self._arenas = ArenaKeeper(
            link,
            self._cuda,
            costs,
            slot_count=slot_count,
            is_copying=lambda: self._copier.busy,
            on_slots=on_slots,
        )

    @property
    def busy(self) -> bool:
        """Tell whether a snapshot is being copied or sealed, or an arena allocated or pinned."""
        return self._copier.busy or self._arenas.is_busy

    @property
    def copying(self) -> bool:
        """Tell whether a snapshot is being copied or sealed."""
        return self._copier.busy

    # -- arena

    def adopt(self, arena: MappedArena) -> None:
        """Use an arena that came with a restore from memory, if its slots turn out to be large enough."""
        self._arenas.adopt(arena)

    def slot_free(self, arena: int, slot: int) -> None:
        """The daemon has freed a slot; called on the reader thread."""
        self._arenas.slot_free(arena, slot)

    def segment_written(self, event: frames.SegmentWritten) -> None:
        """A window of a ring may be filled again; called on the reader thread."""
        streaming = self._streaming
        if streaming is not None and streaming[1].is_in(event.arena, event.slot):
            streaming[1].written(event.segment)

    def given_up(self, checkpoint: CheckpointId, error: EverstepError) -> bool:
        """The daemon could not write a snapshot. Tell whether that ends its copy, which then reports it.

        Called on the reader thread.
        """
        self._through_ring.discard(checkpoint)
        streaming = self._streaming
        return streaming is not None and streaming[0] == checkpoint and streaming[1].given_up(error)

    def durable(self, checkpoint: CheckpointId) -> None:
        """The daemon has committed a snapshot; called on the reader thread."""
        if checkpoint in self._through_ring:
            self._through_ring.discard(checkpoint)
            self._on_sealed(checkpoint)

    def daemon_lost(self) -> None:
        """The daemon that owned the arena is gone: nothing of it can be sealed any more."""
        self._arenas.lost()

    def prepare(self) -> None:
        """Ask for the arena that the present structure needs, ahead of the first checkpoint, which asks again."""
        if is_capturing():
            return
        try:
            capture = self._capture()
        except MemoryRefusedError as error:
            logger.warning("arena_not_prepared reason=%s", error)
            return
        try:
            self._find_arena(self._layout_of(capture, 0), capture)
        except EverstepError as error:
            logger.warning("arena_not_prepared reason=%s", error)

    def _capture(self) -> StateCapture:
        """Return the state by reference; the last capture's description spares most of the work."""
        capture = capture_state(self._components, previous=self._last)
        # Memory that a tensor gives up is not kept until the next one, nor what the objects made for this one alone.
        self._last = replace(capture, lazy=NONE, parts=())
        return capture

    def _find_arena(self, layout: Layout, capture: StateCapture) -> MappedArena | None:
        """Return the arena for a capture, or None after asking for one. Raises EverstepError: it was refused."""
        planned_in = None
        if self._planned is not None and self._planned[1].serve(layout, capture):
            planned_in = self._planned[0]
        return self._arenas.find(
            layout, ring_size_bytes=lambda: ring_size_bytes(layout, capture), planned_in=planned_in
        )

    # -- snapshots

    def begin(self, facts: SnapshotFacts, *, until_s: float = math.inf) -> str | None:
        """Take the snapshot of this boundary; return the reason when it had to be skipped.

        `until_s`, by the monotonic clock: so long at most a host that is ahead of its devices waits for the last one.

        Raises:
            StateTypeError: something in the state cannot be saved: the path says what.
        """
        began_s, before_s = time.perf_counter(), self._costs.ahead_s
        try:
            return self._begin(facts, until_s)
        finally:
            waited_s = self._costs.ahead_s - before_s
            self._costs.eager_s += time.perf_counter() - began_s - waited_s

    def _begin(self, facts: SnapshotFacts, until_s: float) -> str | None:
        if self._copier.busy and (self._link.broken or not self._caught_up(until_s)):
            return STILL_COPYING
        if self._link.broken:
            return NO_DAEMON
        if is_capturing():
            return CAPTURING
        try:
            capture = self._capture()
        except MemoryRefusedError as error:
            return str(error)
        values = dump_values(capture.values)
        layout = self._layout_of(capture, len(values))
        try:
            arena = self._find_arena(layout, capture)
        except DaemonUnavailableError:
            return NO_DAEMON
        except MemoryBusyError as error:
            return f"{NO_ROOM_YET}: {error}"
        except EverstepError as error:
            return str(error)
        if arena is None:
            why = self._arenas.skipped()
            return f"{NO_ARENA}: {why}" if why else NO_ARENA
        self._cuda.register(arena)  # CUDA may have come into use since it was mapped
        if self._cuda.is_pinning(arena):
            return PINNING
        slot = self._arenas.next_free(arena)
        if slot is None:
            return NO_SLOT
        return self._begin_in(arena, slot, layout, capture, facts=facts, values=values)

    def _caught_up(self, until_s: float) -> bool:
        """Wait for the copy while that costs nothing, and not beyond `until_s`; tell whether it has ended.

        A host may be a step ahead of its CUDA devices. Until they come to where training waits for the copy, they have
        work, and the next step is enqueued soon enough behind it.
        """
        began_s = now_s = time.monotonic()
        until_s = min(until_s, began_s + AHEAD_MAX_S)
        while self._copier.busy and now_s < until_s and self._cuda.has_work_before_guard():
            self._copier.drain(AHEAD_POLL_S)
            now_s = time.monotonic()
        if now_s > began_s:
            self._costs.was_ahead(now_s - began_s)
        return not self._copier.busy

    def _begin_in(
        self,
        arena: MappedArena,
        slot: int,
        layout: Layout,
        capture: StateCapture,
        *,
        facts: SnapshotFacts,
        values: bytes,
    ) -> str | None:
        """Take the slot; whatever fails or interrupts this before the copy thread has the job gives it back."""
        is_begun, job = False, None
        try:
            arena.take(slot)
            checkpoint = facts.checkpoint
            self._link.client.send(
                frames.BeginSnapshot(
                    arena=arena.number, slot=slot, attempt=checkpoint.attempt, step=checkpoint.step
                )
            )
            is_begun = True
            places = self._places_for(layout, capture, arena)
            job = self._job(capture, places, arena, slot, facts=facts, values=values)
            self._copier.submit(job)
        except BaseException as error:
            if job is not None and job.is_submitted:
                raise
            self._cuda.finish()  # nothing may write to a slot that is given up
            reason = error.message if isinstance(error, EverstepError) else repr(error)
            if is_begun:
                self._link.tell(frames.Abandon(arena=arena.number, slot=slot, reason=reason[:500]))
            elif isinstance(error, EverstepError):
                self._arenas.give(arena, slot)
            else:  # interrupted, maybe between two lines: nobody knows what the daemon was told of the slot
                self._link.client.break_off("a snapshot was interrupted as it began")
            if not isinstance(error, EverstepError):
                raise
            return reason if is_begun else NO_DAEMON
        self._arenas.taken(layout, arena)
        return None

    def guard(self) -> float:
        """Wait until the lazy part may change again; return the seconds that the host stood still.

        While a CUDA graph is captured nothing changes: whoever replays it comes by again (`run.mutating()`).
        """
        if is_capturing():
            return 0.0
        waited_s = self._copier.guard_enqueuing()
        self._cuda.guard()
        return waited_s + self._copier.guard()

    def take_cuda_wait_s(self) -> float:
        """Return how long CUDA devices have waited for copies, as far as that is known and was not told before.

        Of a copy that has ended it is known: a device that waited has come to its end.
        """
        return 0.0 if is_capturing() else self._cuda.take_wait_s()

    def drain(self, deadline_s: float) -> bool:
        """Wait until the running copy is sealed or dropped."""
        return self._copier.drain(deadline_s)

    def settle(self, deadline_s: float) -> bool:
        """Wait, besides, until the arena that was asked for is there or refused, and pinned where CUDA is in use."""
        until_s = time.monotonic() + deadline_s
        has_settled = self._arenas.settle(deadline_s)
        return self.drain(max(0.0, until_s - time.monotonic())) and has_settled

    def close(self) -> None:
        """End the copy thread and unmap."""
        self._copier.close()
        if self._scratch is not None:
            self._scratch.close()
        self._arenas.lost()

    def _layout_of(self, capture: StateCapture, values_size_bytes: int) -> Layout:
        """Return the layout of this structure; computed anew only when the structure or the values' room changes."""
        devices = len(self._link.devices)
        what, known = (capture.specs, capture.aliases, devices), self._layout
        if known is not None and what == self._layout_of_what and known.has_room_for(values_size_bytes):
            return known
        specs = capture.specs
        leaves = (
            [structs.replace(spec, replicas=self._world_size) for spec in specs]
            if self._replicated
            else specs
        )
        layout = plan_layout(
            leaves,
            capture.aliases,
            segment_count=segment_count_for(specs, devices),
            values_size_bytes=values_size_bytes,
        )
        self._layout, self._layout_of_what = layout, what
        return layout

    def _places_for(self, layout: Layout, capture: StateCapture, arena: MappedArena) -> Places:
        """Return where everything goes in a slot of the arena.

        Raises:
            MemoryRefusedError: the ring is too small for a state that changed.
        """
        if self._planned is not None and self._planned[0] is arena:  # windows lie elsewhere in another ring
            places = self._planned[1]
            if places.serve(layout, capture):
                return places
        if arena.is_ring:
            size_bytes, devices = arena.slot_size_bytes, len(self._link.devices)
            places = RingPlaces(layout, capture, slot_size_bytes=size_bytes, device_count=devices)
        else:
            places = Places(layout, capture)
        self._planned = arena, places
        return places

    def _job(
        self,
        capture: StateCapture,
        places: Places,
        arena: MappedArena,
        slot: int,
        *,
        facts: SnapshotFacts,
        values: bytes,
    ) -> CopyJob:
        """Copy what may change at once; return what the copy thread does."""
        base, layout = arena.slot_address(slot), places.layout
        cuda = self._cuda.copy(
            eager=places.cuda_eager.at(capture.addresses, base),
            lazy=places.cuda_lazy.at(capture.addresses, base),
        )
        for moves in places.eager.at(capture.addresses, base):
            copy(moves, self._scratch)
        client = self._link.client
        sealing = SlotSealing(
            client=client,
            arena=arena,
            slot=slot,
            layout=layout,
            encoder=places.encoder,
            make_draft=lambda: self._draft(layout, facts, values),
            check=SlotCheck(capture.leaves, places.all_lazy) if self._debug else None,
            gate=WindowGate(lambda: client.broken is not None) if arena.is_ring else None,
        )
        self._streaming = (facts.checkpoint, sealing)
        moves = places.lazy_moves(capture.addresses, base)
        sealing.plan(
            {each.segment for each in moves},
            places.lazy.size_bytes,
            places.cuda_segments,
        )
        before = sealing.before
        if isinstance(places, RingPlaces) and any(device >= 0 for device in capture.devices):
            windows = self._cuda.windows(capture.devices)
            before = _before_on_cuda(sealing, places, capture, windows, cuda.wait)
        self._costs.eager_bytes = places.eager_bytes
        self._costs.largest_eager_leaf = places.largest_eager_leaf
        return CopyJob(
            moves=moves,
            lazy=capture.lazy,
            keep_alive=[capture.parts],
            enqueue=cuda.enqueue,
            begin=sealing.begin,
            before=before,
            copied=sealing.copied,
            wait_cuda=cuda.wait,
            finish=lambda copy_s: self._seal(copy_s, sealing, facts.checkpoint),
            fail=lambda error: self._drop(sealing, facts.checkpoint, error),
        )

    # -- on the copy thread

    def _seal(self, copy_s: float, sealing: SlotSealing, checkpoint: CheckpointId) -> None:
        self._costs.copy_s += copy_s - sealing.waited_s
        began_s = time.perf_counter()
        if sealing.arena.is_ring:
            self._through_ring.add(checkpoint)  # before the daemon can have said what became of it
        sealing.seal()
        self._costs.seal_s += time.perf_counter() - began_s
        self._costs.sealed += 1
        if not sealing.arena.is_ring:
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
            notes=facts.notes | {SNAPSHOT_NOTE: random_id()},
        )

    def _drop(self, sealing: SlotSealing, checkpoint: CheckpointId, error: EverstepError) -> None:
        self._through_ring.discard(checkpoint)
        logger.warning("snapshot_dropped checkpoint=%s reason=%s", checkpoint, error)
        sealing.abandon(error.message)
        is_lost = isinstance(error, DaemonUnavailableError)
        self._on_failed(checkpoint, f"{DAEMON_LOST}: {error}" if is_lost else str(error))


def _before_on_cuda(
    sealing: SlotSealing,
    places: RingPlaces,
    capture: StateCapture,
    windows: CudaWindows,
    wait_staged: Callable[[], None],
) -> Callable[[int], None]:
    """Return what a copy thread does before it moves into a window of a ring, where there are CUDA tensors."""
    base = sealing.arena.slot_address(sealing.slot)

    def before(segment: int) -> None:
        sealing.before(segment)
        if segment == 0:
            wait_staged()
        if (plan := places.cuda_windows.get(segment)) is not None:
            windows.copy(plan.at(capture.addresses, base))

    return before
