"""The arena that snapshots go to: asked of the daemon, mapped, pinned where CUDA is in use, given up for another."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from ..checkpoint.layout_plan import Layout
from ..core.sizes import size_text
from ..proto import frames
from . import cuda_pinning
from .client import Answer, close_descriptor
from .cuda_copy import CudaCopies
from .link import Link
from .mapped_arena import MappedArena
from .report import CostBook
from .structure_machine import StructureMachine

logger = logging.getLogger(__name__)


class ArenaKeeper:
    """Owns the arena's mapping. For the training thread; any may call `slot_free` and read `is_busy`."""

    def __init__(
        self,
        link: Link,
        cuda: CudaCopies,
        costs: CostBook,
        *,
        slot_count: int,
        is_copying: Callable[[], bool],
        on_slots: Callable[[int], None],
    ) -> None:
        """Have none. While `is_copying` none is unmapped; `on_slots` hears how many slots a new one has."""
        self._link, self._cuda, self._costs = link, cuda, costs
        self._slot_count, self._is_copying, self._on_slots = slot_count, is_copying, on_slots
        self._lock = threading.Lock()
        self._arena: MappedArena | None = None
        self._asked: tuple[Layout, Future[Answer]] | None = None
        self._stale: list[MappedArena] = []
        self._freed_early: set[tuple[int, int]] = set()
        """Slots that were freed while there was no arena: of one that is being restored from, and comes to stay."""
        self._structure = StructureMachine()

    @property
    def is_busy(self) -> bool:
        """Tell whether one is being allocated or pinned."""
        with self._lock:
            is_pinning = self._arena is not None and self._cuda.is_pinning(self._arena)
            return is_pinning or (self._asked is not None and not self._asked[1].done())

    # -- which one

    def adopt(self, arena: MappedArena) -> None:
        """Use another arena from now on, such as one that came with a restore from memory, if snapshots fit into it."""
        with self._lock:
            self._retire_present(arena)
            for number, slot in self._freed_early:
                if number == arena.number:
                    arena.give(slot)
            self._freed_early.clear()
        self._on_slots(arena.slot_count)
        self._cuda.register(arena)

    def find(
        self, layout: Layout, *, ring_size_bytes: Callable[[], int], planned_in: MappedArena | None
    ) -> MappedArena | None:
        """Return the arena for snapshots of this layout, or None after asking for one.

        `ring_size_bytes` returns the least size of a ring that they stream through; it is not asked of the arena that
        these very snapshots are planned in.

        Raises:
            EverstepError: the one that was asked for was refused. The next call asks again.
        """
        if (found := self._fitting(layout, ring_size_bytes, planned_in)) is not None:
            return found
        self._collect_answer()
        if (found := self._fitting(layout, ring_size_bytes, planned_in)) is not None:
            return found
        with self._lock:
            if self._asked is None:
                # What does not fit is of no use any more, and the daemon may need its memory for the new one.
                self._retire_present()
                self._asked = (layout, self._ask(layout, ring_size_bytes()))
        return None

    def _fitting(
        self, layout: Layout, ring_size_bytes: Callable[[], int], planned_in: MappedArena | None
    ) -> MappedArena | None:
        with self._lock:
            arena = self._arena
        if arena is None or not arena.fits(layout) or self._structure.is_wasteful:
            return None
        if arena.is_ring and arena is not planned_in and arena.slot_size_bytes < ring_size_bytes():
            return None  # more has to be copied at boundaries than before
        return arena

    def _ask(self, layout: Layout, ring_size_bytes: int) -> "Future[Answer]":
        logger.info("arena_asked slots=%d slot_size_bytes=%d", self._slot_count, layout.slot_size_bytes)
        spare_size_bytes = self._structure.asking(layout)
        return self._link.client.ask(
            lambda number: frames.MakeArena(
                request_id=number,
                layout_digest=layout.digest,
                slot_size_bytes=layout.slot_size_bytes,
                slot_count=self._slot_count,
                ring_size_bytes=ring_size_bytes if ring_size_bytes < layout.slot_size_bytes else 0,
                files_size_bytes=sum(segment.file_size_bytes for segment in layout.segments),
                spare_size_bytes=spare_size_bytes,
            )
        )

    def _collect_answer(self) -> None:
        """Map the arena that was asked for, when it has come. A refusal is raised once; the next call asks again."""
        with self._lock:
            if self._asked is None or not self._asked[1].done():
                return
            layout, future = self._asked
            self._asked = None
        ready, fd = future.result()
        assert isinstance(ready, frames.ArenaReady)
        assert fd is not None
        self.adopt(
            MappedArena(
                ready.arena,
                fd,
                ready.slot_size_bytes,
                ready.slot_count,
                stands_for_bytes=layout.slot_size_bytes if ready.is_ring else None,
            )
        )
        logger.info("arena_ready number=%d allocation_s=%.3f", ready.arena, ready.allocation_s)
        if ready.reason:
            self._say_less(ready, layout)

    def _say_less(self, ready: frames.ArenaReady, layout: Layout) -> None:
        """Say that memory is short: once for each arena, so seldom more than once."""
        note = f"{ready.slot_count} of {self._slot_count} snapshots fit in memory"
        if ready.is_ring:
            ring, state = size_text(ready.slot_size_bytes), size_text(layout.state_size_bytes)
            note = f"snapshots of {state} stream through a ring of {ring}: optimizers wait until nearly all is written"
        elif ready.slot_count == 1:
            note += ", and it is given up when the next one is begun"
        logger.warning("memory_short %s; %s", note, ready.reason)
        self._costs.notes.append(f"{note}; {ready.reason}")

    def skipped(self) -> str:
        """A checkpoint is skipped for want of an arena: return what to say besides, often nothing."""
        return self._structure.skipped()

    def taken(self, layout: Layout, arena: MappedArena) -> None:
        """A snapshot was begun in it; say so once where each changes the structure."""
        if warning := self._structure.taken(layout, arena.stands_for_bytes):
            logger.warning("structure_changes %s", warning)
            self._costs.notes.append(warning)

    # -- its slots

    def next_free(self, arena: MappedArena) -> int | None:
        """Return a free slot, which stays free until it is taken; None: there is none."""
        with self._lock:
            return arena.next_free()

    def give(self, arena: MappedArena, slot: int) -> None:
        """A slot that was taken is free again, and the daemon knows nothing of it."""
        with self._lock:
            arena.give(slot)

    def slot_free(self, number: int, slot: int) -> None:
        """The daemon has freed a slot of the arena of this number."""
        with self._lock:
            if self._arena is None:
                self._freed_early.add((number, slot))
            elif self._arena.number == number:
                self._arena.give(slot)

    # -- its end

    def settle(self, deadline_s: float) -> bool:
        """Wait until the one that was asked for is there or refused, and pinned where CUDA is in use; tell if so."""
        until_s = time.monotonic() + deadline_s
        with self._lock:
            asked = self._asked
        if asked is not None:
            wait([asked[1]], deadline_s)
            if not asked[1].done():
                return False
            if cuda_pinning.is_in_use() and asked[1].exception() is None:
                self._collect_answer()
        with self._lock:
            arena = self._arena
        if arena is None:
            return True
        self._cuda.wait_pinned(arena, max(0.0, until_s - time.monotonic()))
        return not self._cuda.is_pinning(arena)

    def lost(self) -> None:
        """The daemon that owned the arena is gone, or the run: nothing of it can be sealed any more."""
        with self._lock:
            self._retire_present()
            self._freed_early.clear()  # the next daemon counts its arenas anew
            if self._asked is not None:  # nobody will map it
                self._asked[1].add_done_callback(close_descriptor)
                self._asked = None

    def _retire_present(self, successor: MappedArena | None = None) -> None:
        """Use another arena, or none, from now on; the present one is unmapped now, or when the copy has ended.

        In this order, so that nobody who is interrupted (Ctrl-C) uses what is unmapped, or keeps it for ever.
        """
        former, self._arena = self._arena, successor
        if former is not None:
            self._stale.append(former)
        while self._stale and not self._is_copying():
            self._cuda.unregister(self._stale[-1])
            self._stale[-1].close()
            self._stale.pop()
