"""Taking the chunks of a shard out of the daemon's ring as they come, several at once."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ..core.errors import DaemonUnavailableError, DeadlineError, error_from_code
from ..proto import frames
from .link import Link
from .mapped_arena import MappedArena
from .received_leaves import ReceivedLeaves, copy_thread_count

StreamEvents = SimpleQueue[frames.Chunk | frames.StreamEnd]
"""What the link's reader thread puts in."""

SILENCE_S = 600.0
"""A device may retry for minutes; a daemon that has announced nothing for so long will not."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStream:
    """One shard on its way from the devices."""

    link: Link
    arena: MappedArena
    leaves: ReceivedLeaves
    events: StreamEvents

    def receive(self, components: Sequence[str] | None = None) -> None:
        """Return when the leaves of these components, or all that are left, are in their places.

        Raises:
            CorruptDataError, StorageError, …: what ended the reading; some bytes are in their places.
            DaemonUnavailableError, DeadlineError: the daemon is gone, or announces nothing.
        """
        ranges = self.leaves.expect(components)
        if components is None or ranges:
            self._receive([] if components is None else ranges)
        self.leaves.check_received()

    def _receive(self, ranges: list[tuple[int, int, int]]) -> None:
        """Ask for these parts of the files, or for all, and copy what comes."""
        self.link.tell(frames.Stream(arena=self.arena.number, ranges=ranges))
        copies: list[Future[None]] = []
        with ThreadPoolExecutor(copy_thread_count(), thread_name_prefix="everstep-receive") as pool:
            while isinstance(event := self._next(copies), frames.Chunk):
                copies.append(pool.submit(self._copy, event))
        if event.code:
            raise error_from_code(event.code, event.message, event.hint)
        for copy in copies:
            copy.result()

    def _copy(self, chunk: frames.Chunk) -> None:
        source = self.arena.slot_address(chunk.slot)
        self.leaves.receive(chunk.segment, chunk.file_offset_bytes, source, chunk.size_bytes)
        self.link.tell(frames.ChunkTaken(arena=self.arena.number, slot=chunk.slot))

    def _next(self, copies: Sequence[Future[None]]) -> frames.Chunk | frames.StreamEnd:
        """Return the next event of this stream; those of one that was given up are passed over.

        Raises what a copy has raised: its slot is not given back, so that the daemon may bring nothing more.
        """
        deadline_s = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline_s:
            try:
                event = self.events.get(timeout=_LOOK_S)
            except Empty:
                for copy in copies:
                    if copy.done():
                        copy.result()
                if self.link.broken:
                    raise DaemonUnavailableError(
                        "the daemon went away while the checkpoint was read"
                    ) from None
                continue
            if event.arena == self.arena.number:
                return event
        raise DeadlineError(
            f"the daemon has brought nothing of the checkpoint for {SILENCE_S:.0f} s",
            hint="look at its log, beside its socket, and at the drives",
        )
