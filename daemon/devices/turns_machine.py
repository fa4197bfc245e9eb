"""Whose transfer a device serves next: in turns by bytes, restores ahead of the rest but never alone. Pure."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

PIECE_BYTES = 128 * 1024 * 1024
"""A transfer is cut into pieces of this size, and who comes anew waits for one of them to end. Smaller ones leave the
drive idle while another thread holds the GIL (ADR 0034)."""

RESTORE_WEIGHT = 3
"""Bytes of restores for each byte of the rest while both wait: a job that comes back is waited for by all its ranks."""

_T = TypeVar("_T")


class Urgency(Enum):
    """What waits for a transfer."""

    RESTORE = "restore"
    """A trainer that cannot go on before."""
    OTHER = "other"
    """A persist, or reading in the background."""


@dataclass(frozen=True, slots=True)
class _Wanted(Generic[_T]):
    size_bytes: int
    item: _T


class _Round(Generic[_T]):
    """Owners in turns: deficit round robin (Shreedhar and Varghese, SIGCOMM '95), with a piece as the quantum."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[_Wanted[_T]]] = {}
        self._order = deque[int]()
        self._left_bytes: dict[int, int] = {}
        """What each owner may still have moved in its turn."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, owner: int, wanted: _Wanted[_T]) -> None:
        """Let a piece wait behind those of its owner."""
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            self._left_bytes[owner] = 0
            self._order.append(owner)
        self._waiting[owner].append(wanted)

    def take(self) -> _Wanted[_T]:
        """Return the piece whose turn it is."""
        while (first := self._waiting[self._order[0]][0]).size_bytes > self._left_bytes[self._order[0]]:
            self._order.rotate(-1)
            self._left_bytes[self._order[0]] += PIECE_BYTES
        owner = self._order[0]
        self._left_bytes[owner] -= first.size_bytes
        self._waiting[owner].popleft()
        if not self._waiting[owner]:
            del self._waiting[owner], self._left_bytes[owner]
            self._order.popleft()
        return first


class Turns(Generic[_T]):
    """The pieces that wait for one device.

    Owners that wait for long get the same bytes, up to two pieces. While restores and others wait, the others get one
    byte for each `RESTORE_WEIGHT` of the restores, up to two pieces.
    """

    def __init__(self) -> None:
        self._restores = _Round[_T]()
        self._others = _Round[_T]()
        self._ahead_bytes = 0
        """What restores have had beyond `RESTORE_WEIGHT` times the others, since both wait."""

    def __bool__(self) -> bool:
        return bool(self._restores or self._others)

    def add(self, owner: int, urgency: Urgency, size_bytes: int, item: _T) -> None:
        """Let a piece wait."""
        assert 0 <= size_bytes <= PIECE_BYTES
        of = self._restores if urgency is Urgency.RESTORE else self._others
        of.add(owner, _Wanted(size_bytes, item))

    def take(self) -> _T:
        """Return the piece that is served next; one must wait."""
        if not (self._restores and self._others):
            self._ahead_bytes = 0
            return (self._restores or self._others).take().item
        if self._ahead_bytes >= RESTORE_WEIGHT * PIECE_BYTES:
            taken = self._others.take()
            self._ahead_bytes -= RESTORE_WEIGHT * taken.size_bytes
        else:
            taken = self._restores.take()
            self._ahead_bytes += taken.size_bytes
        return taken.item


def cut(length_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return offset and length of each piece of a transfer; one of nothing is one piece."""
    return tuple(
        (offset, min(PIECE_BYTES, length_bytes - offset))
        for offset in range(0, max(length_bytes, 1), PIECE_BYTES)
    )
