"""Arenas: memfds made, sized and sealed by the daemon, filled by one trainer, read by the engines."""

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..checkpoint import linux
from ..checkpoint.storage_ops import ArenaRange
from ..core.errors import MemoryRefusedError
from ..core.huge_pages import take_huge_pages
from ..core.mapping import map_shared
from .admission_plan import ALLOCATION_STEP_BYTES, Grant, admit
from .blocking import in_thread
from .fd_store.fd_store import StoredArena
from .node_memory import read_memory_bounds
from .slot_machine import SlotMachine


@dataclass(slots=True, kw_only=True)
class Arena:
    """One memfd divided in equal slots. The daemon keeps its mapping for as long as any slot may be read."""

    number: int
    fd: int
    view: memoryview
    slot_size_bytes: int
    layout_digest: str
    allocation_s: float
    machine: SlotMachine
    is_ring: bool = False
    """Its one slot is smaller than a snapshot, whose segments take turns in it: what it holds can never be restored."""
    reason: str = ""
    """Why it is less than what was asked for; empty: it is not."""
    shared_with_dead: bool = field(default=False)
    """Another trainer than the rank's own has it mapped, and may live: nobody else is given it."""
    stored: StoredArena | None = None
    """Its place in the service manager's FD store; None: it has none, and ends with this process."""

    @property
    def may_serve(self) -> bool:
        """Tell whether what it holds can be given back: now, or once whoever else has it mapped is dead."""
        return not self.shared_with_dead or self.stored is not None

    def look_for_mappers(self) -> None:
        """Let it serve again, if all that have it mapped are known, and dead."""
        if self.shared_with_dead and self.stored is not None:
            self.shared_with_dead = self.stored.state.may_be_mapped

    @property
    def size_bytes(self) -> int:
        """Bytes of the memfd."""
        return self.slot_size_bytes * len(self.machine.slots)

    def slot_offset_bytes(self, slot: int) -> int:
        """Return where a slot begins."""
        return slot * self.slot_size_bytes

    def slot_range(self, slot: int) -> ArenaRange:
        """Return a slot for the writers; release its map when they are done."""
        return ArenaRange(
            fd=self.fd,
            map=memoryview(self.view),
            slot_offset_bytes=self.slot_offset_bytes(slot),
            slot_size_bytes=self.slot_size_bytes,
        )

    def seal(self, slot: int) -> None:
        """What is in a slot must not be lost from now on: a daemon after this one writes it."""
        if self.stored is not None:
            self.stored.state.seal(slot)

    def forget(self, slot: int) -> None:
        """What is in a slot is on the devices, or of no use."""
        if self.stored is not None:
            self.stored.state.clear(slot)

    def close(self) -> None:
        """Give the memory back (once every client has unmapped it, too). Takes 0.16 s a GiB: for a thread."""
        _close(self.fd, self.view)


async def make_arena(
    number: int,
    granted: Grant,
    *,
    layout_digest: str,
    reserve_bytes: int,
    on_touched: Callable[[int], object],
) -> Arena:
    """Return a new arena, allocated and touched, without ever driving the node out of memory.

    `on_touched` hears how many bytes are touched so far. Cancelling frees what was allocated.

    Raises:
        MemoryRefusedError: it does not fit any more, at once or after a part was allocated.
    """
    size_bytes, slot_size_bytes, slot_count = granted.size_bytes, granted.slot_size_bytes, granted.slot_count
    what = f"an arena of {slot_count} slots of {slot_size_bytes / 2**20:.0f} MiB"
    what = f"a ring of {slot_size_bytes / 2**20:.0f} MiB" if granted.is_ring else what
    began_s = time.monotonic()
    fd = os.memfd_create("everstep-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(b"")
    try:
        view = map_shared(fd, size_bytes, is_writable=True, is_inherited=False)
        await _allocate(fd, view, reserve_bytes, what, on_touched)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        await in_thread(_close, fd, view)
        raise
    return Arena(
        number=number,
        fd=fd,
        view=view,
        slot_size_bytes=slot_size_bytes,
        layout_digest=layout_digest,
        allocation_s=time.monotonic() - began_s,
        machine=SlotMachine(slot_count),
        is_ring=granted.is_ring,
        reason=granted.reason,
    )


def _close(fd: int, view: memoryview) -> None:
    os.close(fd)
    view.release()  # where it is still being verified, it is unmapped when the last view goes


async def _allocate(
    fd: int, view: memoryview, reserve_bytes: int, what: str, on_touched: Callable[[int], object]
) -> None:
    """Touch the pages in steps (0.1 to 5 s a GiB), asking before each whether the rest still fits."""
    size_bytes, done = view.nbytes, 0
    while done < size_bytes:
        admit(size_bytes - done, await read_memory_bounds(), reserve_bytes=reserve_bytes, what=what)
        step = min(ALLOCATION_STEP_BYTES, size_bytes - done)
        try:
            await in_thread(_extend, fd, view, done, done + step)
        except OSError as error:
            raise MemoryRefusedError(f"{what} could not be allocated: {error}", hint="free memory") from error
        done += step
        on_touched(done)


def _extend(fd: int, view: memoryview, begin_bytes: int, end_bytes: int) -> None:
    """Let a memfd that ends at `begin_bytes` have all pages up to `end_bytes`, huge ones where they can be had."""
    linux.fallocate(fd, 1, offset_bytes=end_bytes - 1)  # so far it goes from now on; it never becomes shorter
    take_huge_pages(fd, view, begin_bytes, end_bytes)
    linux.fallocate(fd, end_bytes - begin_bytes, offset_bytes=begin_bytes)
