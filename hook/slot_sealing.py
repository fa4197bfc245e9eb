"""What the daemon hears of one snapshot: announced early where that pays, then segment by segment, and sealed."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..checkpoint.draft_format import DraftEncoder
from ..checkpoint.layout_plan import Layout
from ..checkpoint.manifest_types import Draft
from ..core.errors import EverstepError, StateTypeError
from ..proto import frames
from .client import DaemonClient
from .debug_check import SlotCheck
from .mapped_arena import MappedArena
from .window_gate import WindowGate

ANNOUNCE_BYTES_MIN = 128 * 1024 * 1024
"""Left to be copied: 30 ms at 5 GB/s. Below, the draft, which must be encoded first, would cost more than it gains."""


@dataclass(slots=True, kw_only=True)
class SlotSealing:
    """One snapshot in its slot. Used by the copy thread, but for `plan`."""

    client: DaemonClient
    """Of the daemon whose arena it is: to the next one both numbers mean something else, or nothing."""
    arena: MappedArena
    slot: int
    layout: Layout
    encoder: DraftEncoder
    make_draft: Callable[[], Draft]
    check: SlotCheck | None = None
    """The debug mode's."""
    gate: WindowGate | None = None
    """Of a ring."""
    _at_once: list[int] = field(default_factory=list[int])
    """Segments without a move: whole from the start."""
    _at_end: Collection[int] = ()
    """Segments that others copy into, too."""
    _pays: bool = False
    _draft: tuple[Draft, int, str] | None = None
    """With its size and digest, once it lies in the slot."""
    _is_announced: bool = False

    def plan(self, moved: Collection[int], size_bytes: int, elsewhere: Collection[int]) -> None:
        """Take the segments moved into, by how many bytes, and those (`elsewhere`) that are whole only at the end.

        Through a ring all are moved into, and it is always announced.
        """
        numbers = {segment.segment for segment in self.layout.segments}
        self._at_end = () if self.gate is not None else elsewhere
        self._at_once = sorted(numbers - set(moved) - set(elsewhere))
        self._pays = self.gate is not None or (len(moved) > 1 and size_bytes >= ANNOUNCE_BYTES_MIN)

    def begin(self) -> None:
        """Before the first move: announce the snapshot.

        Raises:
            StateTypeError: the manifest is too large for its place.
        """
        if not self._pays:
            return
        draft, size_bytes, digest = self._written()
        self._is_announced = self.client.tell(
            frames.Announce(
                arena=self.arena.number,
                slot=self.slot,
                attempt=draft.checkpoint.attempt,
                step=draft.checkpoint.step,
                draft_offset_bytes=self.layout.draft_offset_bytes,
                draft_size_bytes=size_bytes,
                draft_sha256=digest,
            )
        )
        for segment in self._at_once:
            self.copied(segment)

    def before(self, segment: int) -> None:
        """Before the first move into a segment: in a ring, its window must be free.

        Raises:
            EverstepError: it never will be.
        """
        windows = self.layout.windows
        if self.gate is not None and windows is not None and segment >= windows.count:
            self.gate.wait(segment - windows.count)

    def copied(self, segment: int) -> None:
        """The last move into a segment has been made."""
        if self.gate is not None and self.check is not None:  # later its window holds another
            self.check.compare(self.view, segment)
        if self._is_announced and segment not in self._at_end:
            self.client.tell(frames.Copied(arena=self.arena.number, slot=self.slot, segment=segment))

    def seal(self) -> None:
        """Everything is in the slot, and holds.

        Raises:
            UsageError: in the debug mode, somebody wrote to what was being copied.
            StateTypeError: the manifest is too large for its place.
            DaemonUnavailableError: the daemon is gone, whether or not another one has come.
            EverstepError: it has given up what streamed through a ring.
        """
        if self.gate is not None:
            self.gate.end()
        elif self.check is not None:
            self.check.compare(self.view)
        draft, size_bytes, digest = self._written()
        self.client.send(
            frames.Seal(
                arena=self.arena.number,
                slot=self.slot,
                attempt=draft.checkpoint.attempt,
                step=draft.checkpoint.step,
                draft_offset_bytes=self.layout.draft_offset_bytes,
                draft_size_bytes=size_bytes,
                draft_sha256=digest,
            )
        )

    def abandon(self, reason: str) -> None:
        """Nothing more is written to the slot: the daemon may give it back."""
        self.client.tell(frames.Abandon(arena=self.arena.number, slot=self.slot, reason=reason[:500]))

    # -- through a ring

    @property
    def waited_s(self) -> float:
        """How long the copy has waited for windows."""
        return 0.0 if self.gate is None else self.gate.waited_s

    def is_in(self, arena: int, slot: int) -> bool:
        """Tell whether the snapshot is in that slot."""
        return (self.arena.number, self.slot) == (arena, slot)

    def written(self, segment: int) -> None:
        """The daemon has written a segment."""
        if self.gate is not None:
            self.gate.written(segment)

    def given_up(self, error: EverstepError) -> bool:
        """The daemon will not write it. Tell whether that ends its copy."""
        return self.gate is not None and self.gate.fail(error)

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return so many bytes of the slot."""
        begin = self.arena.slot_address(self.slot) - self.arena.address
        return self.arena.view(begin + offset_bytes, size_bytes)

    def _written(self) -> tuple[Draft, int, str]:
        """Return the draft, which now lies in the slot, with its size and digest."""
        if self._draft is None:
            draft = self.make_draft()
            content = self.encoder.encode(draft)
            if len(content) > self.layout.draft_capacity_bytes:
                raise StateTypeError(
                    f"the manifest takes {len(content)} bytes, more than {self.layout.draft_capacity_bytes}"
                )
            self.view(self.layout.draft_offset_bytes, len(content))[:] = content
            self._draft = (draft, len(content), hashlib.sha256(content).hexdigest())
        return self._draft
