"""The order of an epoch over numpy arrays: positions to sample ids and back, whatever the number of samples.

order_format.py says which construction is used when, and why; here are the same constructions, a few thousand
positions per call (0.2 µs each). Position p of (seed, epoch, n) is the p-th sample that the epoch hands out over all
ranks together; ranks and workers do not occur in it.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .hash_vector import Words, mix64_array, mix64_twice_array
from .order_format import TABLE_COUNT_MAX, FeistelShape, OrderKind, OrderSpec, feistel_shape, table_keys

Ids = npt.NDArray[np.int64]


class Order(Protocol):
    """A bijection of [0, n): position in the epoch <-> sample id."""

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions; IndexError outside [0, n)."""
        ...

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids; IndexError outside [0, n)."""
        ...


def order(spec: OrderSpec, epoch: int, n: int) -> Order:
    """Return the order of one epoch of n samples; a pure function of its arguments."""
    if spec.kind is OrderKind.SEQUENTIAL:
        return SequentialOrder(n)
    if n <= TABLE_COUNT_MAX:
        return TableOrder(spec.seed, epoch, n)
    return FeistelOrder(spec.seed, epoch, n)


class SequentialOrder:
    """0, 1, 2, …: what a loader without shuffling hands out."""

    def __init__(self, n: int) -> None:
        self._n = n

    def at(self, positions: Ids) -> Ids:
        """Return the positions themselves, checked."""
        return _checked(positions, self._n).astype(np.int64)

    def position_of(self, ids: Ids) -> Ids:
        """Return the ids themselves, checked."""
        return self.at(ids)


class TableOrder:
    """A shuffle held as a table of 2 bytes per sample: for at most 65,536 samples."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        assert n <= TABLE_COUNT_MAX, n
        self._n = n
        hashes = mix64_twice_array(np.arange(n, dtype=np.uint64), *table_keys(seed, epoch))
        self._table = np.argsort(hashes, kind="stable").astype(np.uint16)
        self._inverse: npt.NDArray[np.uint16] | None = None

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions."""
        return self._table[_checked(positions, self._n)].astype(np.int64)

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids; the inverse table is made at the first call."""
        if self._inverse is None:
            self._inverse = np.argsort(self._table, kind="stable").astype(np.uint16)
        return self._inverse[_checked(ids, self._n)].astype(np.int64)


class FeistelOrder:
    """A permutation computed per element, in O(1) memory; right for every n, used above 65,536 samples."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self._n = n
        self._shape = feistel_shape(seed, epoch, n)

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions."""
        return self._walk(positions, _encrypt)

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids: the same walk with the rounds backwards."""
        return self._walk(ids, _decrypt)

    def _walk(self, start: Ids, step: Callable[[FeistelShape, Words], Words]) -> Ids:
        values = step(self._shape, _checked(start, self._n).astype(np.uint64))
        limit = np.uint64(self._n)
        outside = np.flatnonzero(values >= limit)
        while outside.size:  # ends: the walk follows a cycle of a permutation that began inside
            values[outside] = step(self._shape, values[outside])
            outside = outside[values[outside] >= limit]
        return values.astype(np.int64)


def _checked(values: Ids, n: int) -> Ids:
    if values.size and (int(values.min()) < 0 or int(values.max()) >= n):
        raise IndexError(f"positions and ids are in [0, {n}), got {int(values.min())} … {int(values.max())}")
    return values


def _encrypt(shape: FeistelShape, values: Words) -> Words:
    low, high = _split(shape, values)
    for index, key in enumerate(shape.keys):
        _round(shape, low, high, (index, key))
    return (high << np.uint64(shape.low_bits)) | low


def _decrypt(shape: FeistelShape, values: Words) -> Words:
    low, high = _split(shape, values)
    for index, key in reversed(list(enumerate(shape.keys))):
        _round(shape, low, high, (index, key))
    return (high << np.uint64(shape.low_bits)) | low


def _split(shape: FeistelShape, values: Words) -> tuple[Words, Words]:
    return values & np.uint64((1 << shape.low_bits) - 1), values >> np.uint64(shape.low_bits)


def _round(shape: FeistelShape, low: Words, high: Words, numbered_key: tuple[int, int]) -> None:
    """Change one part in place by the other; doing it twice undoes it."""
    index, key = numbered_key
    if index % 2 == 0:
        low ^= mix64_array(high + np.uint64(key)) & np.uint64((1 << shape.low_bits) - 1)
    else:
        high ^= mix64_array(low + np.uint64(key)) & np.uint64((1 << shape.high_bits) - 1)
