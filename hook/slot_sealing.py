"""What the daemon hears of one snapshot: announced early where that pays, then segment by segment, and sealed."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..checkpoint.draft_format import DraftEncoder
from ..checkpoint.layout_plan import Layout
from ..checkpoint.manifest_types import Draft
from ..core.errors import StateTypeError
from ..proto import frames
from .link import Link
from .mapped_arena import MappedArena

ANNOUNCE_BYTES_MIN = 128 * 1024 * 1024
"""Left to be copied: 30 ms at 5 GB/s. Below, the draft, which must be encoded first, would cost more than it gains."""


@dataclass(slots=True, kw_only=True)
class SlotSealing:
    """One snapshot in its slot. Used by the copy thread, but for `plan`."""

    link: Link
    arena: MappedArena
    slot: int
    layout: Layout
    encoder: DraftEncoder
    make_draft: Callable[[], Draft]
    _at_once: list[int] = field(default_factory=list[int])
    """Segments without a move: whole from the start."""
    _at_end: Collection[int] = ()
    """Segments that others copy into, too."""
    _pays: bool = False
    _draft: tuple[Draft, int, str] | None = None
    """With its size and digest, once it lies in the slot."""
    _is_announced: bool = False

    def plan(self, moved: Collection[int], size_bytes: int, elsewhere: Collection[int]) -> None:
        """Take the segments moved into, by how many bytes, and those (`elsewhere`) that are whole only at the end."""
        numbers = {segment.segment for segment in self.layout.segments}
        self._at_end = elsewhere
        self._at_once = sorted(numbers - set(moved) - set(elsewhere))
        self._pays = len(moved) > 1 and size_bytes >= ANNOUNCE_BYTES_MIN

    def begin(self) -> None:
        """Before the first move: announce the snapshot.

        Raises:
            StateTypeError: the manifest is too large for its place.
        """
        if not self._pays:
            return
        draft, size_bytes, digest = self._written()
        self._is_announced = self.link.tell(
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

    def copied(self, segment: int) -> None:
        """The last move into a segment has been made."""
        if self._is_announced and segment not in self._at_end:
            self.link.tell(frames.Copied(arena=self.arena.number, slot=self.slot, segment=segment))

    def seal(self) -> None:
        """Everything is in the slot, and holds.

        Raises:
            StateTypeError: the manifest is too large for its place.
            DaemonUnavailableError: the daemon is gone.
        """
        draft, size_bytes, digest = self._written()
        self.link.client.send(
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
