"""Arenas registered with a ring: the kernel pins their pages once, not for each block."""

import logging
import resource

from .arena_map import ArenaMap
from .uring_abi import register_no_buffers, update_buffer

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024 * 1024
"""Registered at a time, when a transfer first touches it. The kernel takes at most 1 GiB and spends 16 bytes on
each page: with several devices, each writing its part of a slot, larger chunks would pin much of an arena for all."""

_PLACE_COUNT = 4096  # 1 TiB; the kernel allows 16,384


class RegisteredBuffers:
    """Which parts of which arenas a ring has pinned. One thread uses it at a time.

    Only arenas of sealed size: where a file can be cut and grown again, the pages that were pinned are no longer
    those that hold its bytes. An arena that cannot be registered is used unregistered, and the log says so.
    """

    def __init__(self, ring_fd: int) -> None:
        """Make an empty table; nothing is registered before `cover`."""
        self._ring_fd = ring_fd
        self._places: dict[
            int, dict[int, int]
        ] = {}  # address of the arena -> chunk -> place in the ring's table
        self._refused: set[int] = set()
        self._base = 0
        self._chunks: dict[int, int] = {}
        self._free: list[int] = []
        try:
            register_no_buffers(ring_fd, _PLACE_COUNT)
        except OSError as exc:
            _log.warning("buffers_not_registered error=%s", exc)
        else:
            self._free = list(reversed(range(_PLACE_COUNT)))

    def cover(self, arena: ArenaMap, begin_bytes: int, end_bytes: int) -> None:
        """Register what a transfer over this range of the arena needs, and look addresses up there from now on."""
        self._base = arena.address
        self._chunks = self._places.setdefault(arena.address, {})
        if not (arena.is_sealed and arena.writable) or arena.address in self._refused:
            return
        for chunk in range(begin_bytes // CHUNK_BYTES, -(-end_bytes // CHUNK_BYTES)):
            if chunk not in self._chunks and not self._register(arena, chunk):
                return

    def find(self, address: int, length_bytes: int) -> int | None:
        """Return the place under which a block of the covered arena is registered, None if it is not."""
        offset_bytes = address - self._base
        chunk = offset_bytes // CHUNK_BYTES
        if (offset_bytes + length_bytes - 1) // CHUNK_BYTES != chunk:
            return None
        return self._chunks.get(chunk)

    def release(self, arena: ArenaMap) -> None:
        """Unpin an arena; call it before it is unmapped, since its address may be another arena's next."""
        chunks = self._places.pop(arena.address, {})
        for place in chunks.values():
            update_buffer(self._ring_fd, place, 0, 0)
            self._free.append(place)
        chunks.clear()
        self._refused.discard(arena.address)

    def _register(self, arena: ArenaMap, chunk: int) -> bool:
        if not self._free:
            return False
        begin_bytes = chunk * CHUNK_BYTES
        length_bytes = min(CHUNK_BYTES, arena.size_bytes - begin_bytes)
        try:
            update_buffer(self._ring_fd, self._free[-1], arena.address + begin_bytes, length_bytes)
        except OSError as exc:
            self._refused.add(arena.address)
            _log.warning(
                "buffers_not_registered size_bytes=%d memlock_bytes=%d error=%s",
                length_bytes,
                resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
                exc,
            )
            return False
        self._chunks[chunk] = self._free.pop()
        return True
