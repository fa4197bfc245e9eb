"""The life of an arena's slots: free -> copying -> sealed -> persisting -> kept -> free. Pure.

A large snapshot is written while it is still being copied: copying -> streaming -> persisting, or, when it is given up,
streaming -> abandoned -> free, since what reads from the slot must come to its end first.

A kept snapshot may be overwritten only when a newer one is sealed on all ranks: until then it is the newest state
that every rank can give back from memory; or when another rank has none of the same step, or all have restored another
one, so that it is of no use (if they went back to that, it may be of use until something newer is sealed).
An arena that had room for one slot only could take no second snapshot by that rule: there the trainer may overwrite
what is kept at any time.

A slot may be held besides: a device that nobody waits for any more may still read from it. It goes on as any other, but
is not used again before it is let go.
"""

from dataclasses import dataclass
from enum import Enum

from ..core.errors import UsageError
from ..core.ids import CheckpointId


class Drop(Enum):
    """Why a snapshot was dropped before it was sealed."""

    GIVEN_UP = "given_up"
    """By its trainer, whose log and report say why."""
    TRAINER_GONE = "trainer_gone"
    """In the middle of the copy."""
    DRAFT = "draft"
    """What the trainer sealed was refused."""
    NOT_WRITTEN = "not_written"
    """It streamed through a ring, and writing it failed."""


class SlotState(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    COPYING = "copying"
    STREAMING = "streaming"
    """Being copied, and written as far as it is."""
    ABANDONED = "abandoned"
    """Given up while it was streaming: free when nobody writes it any more."""
    SEALED = "sealed"
    PERSISTING = "persisting"
    KEPT = "kept"
    LOST = "lost"
    """A device hangs and may still read from it: not used again while the daemon lives."""


@dataclass(slots=True)
class Slot:
    """One slot; `checkpoint` is None exactly while it is free."""

    state: SlotState = SlotState.FREE
    checkpoint: CheckpointId | None = None
    world_size: int = 1
    """Of the attempt that took the checkpoint: so many parts it has."""
    is_offered: bool = True
    """The trainer knows that it may use it; not while it does."""
    held_count: int = 0
    """Writes under way that nobody waits for."""


class SlotMachine:
    """Slots of one arena. Every method is an event; those that may free slots return the indices freed."""

    def __init__(self, slot_count: int) -> None:
        if slot_count < 1:
            raise ValueError(f"an arena has at least one slot, got {slot_count}")
        self.slots = [Slot() for _ in range(slot_count)]
        self._sealed_everywhere: CheckpointId | None = None
        self._given_up: set[CheckpointId] = set()

    def begin(self, slot: int, checkpoint: CheckpointId, *, world_size: int = 1) -> None:
        """The trainer, one of `world_size`, starts to copy `checkpoint` into a slot that it may use."""
        found = self._at(slot)
        # What it was told once holds, also where another slot was let go meanwhile.
        if slot in self.usable_slots or (found.is_offered and found.state is SlotState.KEPT):
            found.state = SlotState.FREE
        taken = self._take(slot, SlotState.FREE, SlotState.COPYING)
        taken.checkpoint, taken.world_size, taken.is_offered = checkpoint, world_size, False

    def stream(self, slot: int, checkpoint: CheckpointId) -> None:
        """The daemon starts to write a snapshot that is still being copied."""
        if self._at(slot).checkpoint != checkpoint:
            raise UsageError(f"slot {slot} holds {self._at(slot).checkpoint}, not {checkpoint}")
        self._take(slot, SlotState.COPYING, SlotState.STREAMING)

    def stream_failed(self, slot: int) -> None:
        """Writing it ended before the copy did: it is written whole, once it is sealed."""
        self._take(slot, SlotState.STREAMING, SlotState.COPYING)

    def seal_streaming(self, slot: int, checkpoint: CheckpointId) -> None:
        """The copy of a snapshot that is being written is finished; its draft was accepted."""
        if self._at(slot).checkpoint != checkpoint:
            raise UsageError(f"slot {slot} holds {self._at(slot).checkpoint}, not {checkpoint}")
        self._take(slot, SlotState.STREAMING, SlotState.PERSISTING)

    def abandoned_written(self, slot: int) -> list[int]:
        """Nobody reads from an abandoned slot any more."""
        self._take(slot, SlotState.ABANDONED, SlotState.FREE).checkpoint = None
        return [slot]

    def seal(self, slot: int, checkpoint: CheckpointId) -> None:
        """The copy is finished; its draft is yet to be checked."""
        if self._at(slot).checkpoint != checkpoint:
            raise UsageError(f"slot {slot} holds {self._at(slot).checkpoint}, not {checkpoint}")
        self._take(slot, SlotState.COPYING, SlotState.SEALED)

    def drop(self, slot: int) -> list[int]:
        """It is of no use to anybody: its draft was refused, it failed in an unexpected way, or it was a ring."""
        held = self._at(slot)
        if held.state in (SlotState.FREE, SlotState.COPYING, SlotState.KEPT, SlotState.LOST):
            return []
        held.state, held.checkpoint = SlotState.FREE, None
        return [slot]

    def persist(self, slot: int) -> None:
        """Its draft is accepted, the daemon starts to write the snapshot."""
        self._take(slot, SlotState.SEALED, SlotState.PERSISTING)

    def persist_again(self, slot: int) -> None:
        """A device of a kept snapshot was lost: the daemon writes it again."""
        self._take(slot, SlotState.KEPT, SlotState.PERSISTING)

    def settle(self, slot: int) -> list[int]:
        """Writing ended, well or not; the bytes stay until a newer snapshot is sealed everywhere."""
        self._take(slot, SlotState.PERSISTING, SlotState.KEPT)
        return self._free_outdated()

    def lose(self, slot: int) -> None:
        """Writing did not end: a device hangs in the kernel with this memory."""
        held = self._at(slot)
        if held.state not in (SlotState.STREAMING, SlotState.ABANDONED):
            self._take(slot, SlotState.PERSISTING, SlotState.LOST)
        held.state = SlotState.LOST

    def hold(self, slot: int) -> None:
        """Its write has ended, or is given up, without a device that may still read from it."""
        self._at(slot).held_count += 1

    def let_go(self, slot: int) -> list[int]:
        """That device does so no more."""
        held = self._at(slot)
        held.held_count -= 1
        return [slot] if held.state is SlotState.FREE else self._free_outdated()

    def keep(self, slot: int, checkpoint: CheckpointId) -> None:
        """A free slot was filled from the devices."""
        self._take(slot, SlotState.FREE, SlotState.KEPT).checkpoint = checkpoint

    def adopt(self, slot: int, checkpoint: CheckpointId, *, world_size: int = 1) -> None:
        """A daemon before this one had sealed it, and has not written it."""
        taken = self._take(slot, SlotState.FREE, SlotState.SEALED)
        taken.checkpoint, taken.world_size = checkpoint, world_size

    def abandon(self, slot: int) -> list[int]:
        """The trainer gives its copy up; one that is being written is free only later, and a lost slot never."""
        if self._at(slot).state is SlotState.LOST:
            return []
        if self._at(slot).state is SlotState.STREAMING:
            self._take(slot, SlotState.STREAMING, SlotState.ABANDONED)
            return []
        self._take(slot, SlotState.COPYING, SlotState.FREE).checkpoint = None
        return [slot]

    def trainer_gone(self) -> list[int]:
        """The trainer died or left: what it was copying is dropped, the rest stands."""
        moving = (SlotState.COPYING, SlotState.STREAMING)
        copying = [index for index, slot in enumerate(self.slots) if slot.state in moving]
        return [freed for index in copying for freed in self.abandon(index)]

    def sealed_everywhere(self, checkpoint: CheckpointId) -> list[int]:
        """All ranks have sealed `checkpoint`."""
        if self._sealed_everywhere is None or checkpoint > self._sealed_everywhere:
            self._sealed_everywhere = checkpoint
        return self._free_outdated()

    def give_up(self, checkpoint: CheckpointId) -> list[int]:
        """Another rank has no snapshot of `checkpoint`, so that nobody can restore it."""
        held = {slot.checkpoint for slot in self.slots}
        self._given_up = {each for each in (*self._given_up, checkpoint) if each in held}
        return self._free_outdated()

    def restored(
        self, checkpoint: CheckpointId, *, besides: frozenset[CheckpointId] = frozenset()
    ) -> list[int]:
        """All ranks have restored `checkpoint`: no other one is given back any more, and the trainer needs the room.

        `besides`: those that may be, should nothing follow.
        """
        held = {slot.checkpoint for slot in self.slots if slot.checkpoint is not None}
        self._given_up |= held - besides - {checkpoint}
        return self._free_outdated()

    @property
    def busy(self) -> bool:
        """Tell whether a slot is being copied or not yet written."""
        still = (SlotState.FREE, SlotState.KEPT, SlotState.LOST)
        return any(slot.state not in still for slot in self.slots)

    @property
    def free_slots(self) -> list[int]:
        """Indices of free slots."""
        return [
            index
            for index, slot in enumerate(self.slots)
            if slot.state is SlotState.FREE and not slot.held_count
        ]

    @property
    def is_settled(self) -> bool:
        """Tell whether nobody writes to a slot or reads from one."""
        return all(
            slot.state in (SlotState.FREE, SlotState.KEPT) and not slot.held_count for slot in self.slots
        )

    @property
    def is_alone(self) -> bool:
        """Tell whether there is one slot only, but for those that are held."""
        return sum(not slot.held_count for slot in self.slots) == 1

    @property
    def usable_slots(self) -> list[int]:
        """Indices of slots that a snapshot may be copied into: the free ones; the only one when it is kept, too."""
        alone = [index for index, slot in enumerate(self.slots) if not slot.held_count]
        if self.is_alone and self.slots[alone[0]].state is SlotState.KEPT:
            return alone
        return self.free_slots

    def offer(self) -> list[int]:
        """Return the usable slots that the trainer does not know of; now it does."""
        new = [slot for slot in self.usable_slots if not self.slots[slot].is_offered]
        for slot in new:
            self.slots[slot].is_offered = True
        return new

    def offer_anew(self) -> list[int]:
        """Return all usable slots, for a trainer that knows of none yet."""
        usable = self.usable_slots
        for index, slot in enumerate(self.slots):
            slot.is_offered = index in usable
        return usable

    def may_be_taken(self, slot: int) -> bool:
        """Tell whether a trainer may begin a snapshot there at any moment: it was told so once, or will be."""
        return self.is_alone or self.slots[slot].is_offered

    def is_free(self) -> bool:
        """Tell whether every slot is free."""
        return len(self.free_slots) == len(self.slots)

    def _free_outdated(self) -> list[int]:
        newest = self._sealed_everywhere
        freed: list[int] = []
        for index, slot in enumerate(self.slots):
            held = slot.checkpoint if slot.state is SlotState.KEPT else None
            if held is None or slot.held_count:
                continue
            if held in self._given_up or (newest is not None and held < newest):
                slot.state, slot.checkpoint = SlotState.FREE, None
                freed.append(index)
        return freed

    def _at(self, slot: int) -> Slot:
        if not 0 <= slot < len(self.slots):
            raise UsageError(f"there is no slot {slot}; the arena has {len(self.slots)}")
        return self.slots[slot]

    def _take(self, slot: int, expected: SlotState, target: SlotState) -> Slot:
        held = self._at(slot)
        if held.state is not expected:
            raise UsageError(f"slot {slot} is {held.state.value}, expected {expected.value}")
        held.state = target
        return held
