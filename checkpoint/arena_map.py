"""An engine's own mappings of the arenas that it moves bytes from and to."""

import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable

from ..core.advice import address_of
from ..core.mapping import map_shared
from .linux import SEALS_FIXED_SIZE

ARENA_MAPS_MAX = 8
"""Arenas kept mapped by one engine: an old and a new structure of a few ranks; the least recently used goes."""


class ArenaMap:
    """One arena, mapped shared and whole; `address` and `view` are valid until `close`."""

    def __init__(self, arena_fd: int, *, size_bytes: int, writable: bool) -> None:
        self.view = map_shared(arena_fd, size_bytes, is_writable=writable, is_inherited=False)
        self.size_bytes = size_bytes
        self.writable = writable
        self.is_sealed = _is_sealed(arena_fd)
        """Its size can never change."""
        self.address = address_of(self.view)

    def close(self) -> None:
        """Unmap; the caller knows that no transfer uses it."""
        self.view.release()  # the last view: unmaps


class ArenaMaps:
    """At most eight mapped arenas, keyed by the arena itself (device and inode), not by the fd's number.

    A mapping keeps the arena's memory alive, and no descriptor: `forget` an arena before its last fd is closed. Used
    by one thread.
    """

    def __init__(self, *, on_unmap: Callable[[ArenaMap], None] = lambda _: None) -> None:
        """Call `on_unmap` before an arena is unmapped, whatever the reason."""
        self._on_unmap = on_unmap
        self._maps: OrderedDict[tuple[int, int], ArenaMap] = OrderedDict()

    def get(self, arena_fd: int, *, writable: bool) -> ArenaMap:
        """Return the arena's mapping, made now if need be or if the arena's size has changed.

        Raises:
            PermissionError: `writable` was asked of an arena that is sealed or opened read-only.
        """
        stat = os.fstat(arena_fd)
        key = (stat.st_dev, stat.st_ino)
        found = self._maps.get(key)
        if found is not None and found.size_bytes == stat.st_size and (found.writable or not writable):
            self._maps.move_to_end(key)
            return found
        made = _map_arena(arena_fd, size_bytes=stat.st_size, writable=writable)
        self._drop(key)
        self._maps[key] = made
        if len(self._maps) > ARENA_MAPS_MAX:
            self._drop(next(iter(self._maps)))
        return made

    def forget(self, arena_fd: int) -> None:
        """Unmap the arena if it is mapped."""
        stat = os.fstat(arena_fd)
        self._drop((stat.st_dev, stat.st_ino))

    def close(self) -> None:
        """Unmap all."""
        while self._maps:
            self._drop(next(iter(self._maps)))

    def _drop(self, key: tuple[int, int]) -> None:
        dropped = self._maps.pop(key, None)
        if dropped is not None:
            self._on_unmap(dropped)
            dropped.close()


def _is_sealed(arena_fd: int) -> bool:
    try:
        return fcntl.fcntl(arena_fd, fcntl.F_GET_SEALS) & SEALS_FIXED_SIZE == SEALS_FIXED_SIZE
    except OSError:  # not a memfd
        return False


def _map_arena(arena_fd: int, *, size_bytes: int, writable: bool) -> ArenaMap:
    try:
        return ArenaMap(arena_fd, size_bytes=size_bytes, writable=True)
    except PermissionError:
        if writable:
            raise
        return ArenaMap(arena_fd, size_bytes=size_bytes, writable=False)
