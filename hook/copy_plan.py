"""What goes where in a slot, planned once per layout: each boundary fills in the addresses (pure)."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import cast

GATHER_BYTES_MAX = 128 * 1024
"""Smaller pieces are gathered, IOVECS_MAX in one call. Where the kernel has to (gather.py), that takes 0.3 to 25 µs
each; a memmove of a larger one takes longer than the call, and is a quarter faster than the kernel's copy."""

IOVECS_MAX = 1024
"""The kernel's limit (UIO_MAXIOV)."""

SLOTS_KNOWN_MAX = 128
"""Twice as many as an arena has at most."""

WORD = "Q"


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece's place: bytes [offset_in_leaf, +size) of leaf number `leaf` go to `slot_offset`, in a segment."""

    leaf: int
    offset_in_leaf_bytes: int
    size_bytes: int
    slot_offset_bytes: int
    segment: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `size_bytes` from address to address."""

    target: int
    source: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy bytes from many places to few: struct iovec arrays, pairs of address and length, of equal total length."""

    targets: "array[int]"
    sources: "array[int]"
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Moves:
    """All that is copied into one segment."""

    segment: int
    gathers: tuple[Gather, ...]
    large: tuple[Move, ...]


class Picker:
    """Picks the addresses of some leaves, at each boundary, in a time that is next to nothing for each."""

    def __init__(self, leaves: Sequence[int]) -> None:
        """Say which; at least one."""
        self._get = itemgetter(*leaves)
        self._last: tuple[object, tuple[int, ...]] = None, ()
        """The newest addresses of all leaves, and what was picked of them: set together, whoever interrupts."""

    def __call__(self, addresses: tuple[int, ...]) -> tuple[int, ...]:
        """Return them: the very same tuple as before while none has changed."""
        of, picked = self._last
        if addresses is not of:
            found = cast("int | tuple[int, ...]", self._get(addresses))
            now = (found,) if isinstance(found, int) else found
            picked = picked if now == picked else now
            self._last = addresses, picked
        return picked


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (offset, size) of the same bytes in the same order: of what follows another directly one is made."""
    found: list[tuple[int, int]] = []
    for offset, size in extents:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((offset, size))
    return found


class _GatherPlan:
    """At most IOVECS_MAX small pieces, whole leaves, in the order of their places."""

    def __init__(self, pieces: Sequence[Placed]) -> None:
        self._pick = Picker([piece.leaf for piece in pieces])
        self._picked: tuple[int, ...] = ()
        self._sources = array(WORD, [word for piece in pieces for word in (0, piece.size_bytes)])
        self._runs = merged((piece.slot_offset_bytes, piece.size_bytes) for piece in pieces)
        self._targets: dict[int, array[int]] = {}
        self._size_bytes = sum(piece.size_bytes for piece in pieces)

    def at(self, addresses: tuple[int, ...], base: int) -> Gather:
        picked = self._pick(addresses)
        if picked is not self._picked:
            sources = self._sources[:]  # an earlier copy may still use the old ones
            sources[0::2] = array(WORD, picked)
            self._picked, self._sources = picked, sources
        return Gather(self._targets_at(base), self._sources, self._size_bytes)

    def _targets_at(self, base: int) -> "array[int]":
        """The same slots come again and again; those of an arena that is gone are forgotten some time."""
        if base not in self._targets:
            if len(self._targets) == SLOTS_KNOWN_MAX:
                self._targets.clear()
            words = [word for offset, size in self._runs for word in (base + offset, size)]
            self._targets[base] = array(WORD, words)
        return self._targets[base]


class _LargePlan:
    """Pieces that are moved one by one."""

    def __init__(self, pieces: Sequence[Placed]) -> None:
        self._pieces = pieces
        self._pick = Picker([piece.leaf for piece in pieces])
        self._picked: tuple[int, ...] = ()
        self._moves: dict[int, tuple[Move, ...]] = {}

    def at(self, addresses: tuple[int, ...], base: int) -> tuple[Move, ...]:
        picked = self._pick(addresses)
        if picked is not self._picked or len(self._moves) == SLOTS_KNOWN_MAX:
            self._moves.clear()
            self._picked = picked
        if base not in self._moves:
            self._moves[base] = tuple(
                Move(
                    base + piece.slot_offset_bytes,
                    addresses[piece.leaf] + piece.offset_in_leaf_bytes,
                    piece.size_bytes,
                )
                for piece in self._pieces
            )
        return self._moves[base]


class _SegmentPlan:
    def __init__(self, segment: int, pieces: Sequence[Placed]) -> None:
        self._segment = segment
        small = [piece for piece in pieces if _is_small(piece)]
        self._gathers = [
            _GatherPlan(small[begin : begin + IOVECS_MAX]) for begin in range(0, len(small), IOVECS_MAX)
        ]
        large = [piece for piece in pieces if not _is_small(piece)]
        self._large = _LargePlan(large) if large else None

    def at(self, addresses: tuple[int, ...], base: int) -> Moves:
        gathers = tuple(plan.at(addresses, base) for plan in self._gathers)
        return Moves(self._segment, gathers, self._large.at(addresses, base) if self._large else ())


class CopyPlan:
    """Moves of some pieces, by segment."""

    def __init__(self, pieces: Iterable[Placed]) -> None:
        """Plan the copies of these pieces; empty ones need none."""
        wanted = sorted(
            (piece for piece in pieces if piece.size_bytes),
            key=lambda piece: (piece.segment, piece.slot_offset_bytes),
        )
        self._segments = [
            _SegmentPlan(segment, list(found))
            for segment, found in groupby(wanted, lambda piece: piece.segment)
        ]
        self.size_bytes = sum(piece.size_bytes for piece in wanted)

    def at(self, addresses: tuple[int, ...], base: int) -> tuple[Moves, ...]:
        """Return the moves for leaves at these addresses into the slot at `base`, in the order of the segments."""
        return tuple(plan.at(addresses, base) for plan in self._segments)


def _is_small(piece: Placed) -> bool:
    return piece.size_bytes < GATHER_BYTES_MAX and piece.offset_in_leaf_bytes == 0
