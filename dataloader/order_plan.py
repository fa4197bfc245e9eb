"""The order of an epoch over numpy arrays: positions to sample ids and back, whatever the number of samples.

order_format.py says which construction is used when, and why; here are the same constructions, a few thousand
positions per call (0.2 µs each). Position p of (seed, epoch, n) is the p-th sample that the epoch hands out over all
ranks together; ranks and workers do not occur in it.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .block_format import BlockSpec
from .hash_vector import Words, mix64_array, mix64_twice_array
from .order_format import (
    BLOCKS_PURPOSE,
    TABLE_COUNT_MAX,
    FeistelShape,
    OrderKind,
    OrderSpec,
    feistel_shape,
    table_keys,
    window_purpose,
)

Ids = npt.NDArray[np.int64]


class Order(Protocol):
    """A bijection between the positions [0, n) of an epoch and its sample ids."""

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions; IndexError outside [0, n)."""
        ...

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids; IndexError for an id that is not in the epoch."""
        ...


def order(spec: OrderSpec, epoch: int, n: int) -> Order:
    """Return the order of one epoch of n samples; a pure function of its arguments."""
    match spec.kind:
        case OrderKind.SEQUENTIAL:
            return SequentialOrder(n)
        case OrderKind.CONTINUED:
            return ContinuedOrder(epoch * n, n)
        case OrderKind.PERMUTED:
            return permutation(spec.seed, epoch, n)
        case OrderKind.BLOCKS:
            assert spec.blocks is not None
            return BlockOrder(spec.seed, epoch, spec.blocks)
        case OrderKind.SAMPLER | OrderKind.STREAM:
            raise AssertionError(spec)


def permutation(seed: int, epoch: int, n: int, purpose: str = "order") -> Order:
    """Return the keyed permutation of [0, n); keys of different purposes have nothing to do with each other."""
    if n <= TABLE_COUNT_MAX:
        return TableOrder(seed, epoch, n, purpose)
    return FeistelOrder(seed, epoch, n, purpose)


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


class ContinuedOrder:
    """first, first + 1, …: ids that go on where the epoch before ended."""

    def __init__(self, first_id: int, n: int) -> None:
        self._first_id = first_id
        self._n = n

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions."""
        return _checked(positions, self._n).astype(np.int64) + self._first_id

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids."""
        return _checked(ids - self._first_id, self._n)


class TableOrder:
    """A shuffle held as a table of 2 bytes per sample: for at most 65,536 samples."""

    def __init__(self, seed: int, epoch: int, n: int, purpose: str = "order") -> None:
        assert n <= TABLE_COUNT_MAX, n
        self._n = n
        hashes = mix64_twice_array(np.arange(n, dtype=np.uint64), *table_keys(seed, epoch, purpose))
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

    def __init__(self, seed: int, epoch: int, n: int, purpose: str = "order") -> None:
        self._n = n
        self._shape = feistel_shape(seed, epoch, n, purpose)

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


class BlockOrder:
    """Blocks permuted, then shuffled inside windows; memory: the samples of a window, and the blocks unless equal."""

    def __init__(self, seed: int, epoch: int, blocks: BlockSpec) -> None:
        self._seed, self._epoch, self._window = seed, epoch, blocks.window
        self._n = blocks.sample_count
        self._blocks = permutation(seed, epoch, blocks.count, BLOCKS_PURPOSE)
        self._layout = _layout(blocks, self._blocks)
        self._shuffles: dict[int, Order] = {}

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at these positions."""
        layout, positions = self._layout, _checked(positions, self._n).astype(np.int64)
        places = layout.place_of(positions)
        stream = self._inside_windows(positions, places // self._window, is_inverse=False)
        places = layout.place_of(stream)
        return layout.first_id(self._blocks.at(places)) + (stream - layout.start(places))

    def position_of(self, ids: Ids) -> Ids:
        """Return the positions of these sample ids."""
        layout, ids = self._layout, _checked(ids, self._n).astype(np.int64)
        blocks = layout.block_of(ids)
        places = self._blocks.position_of(blocks)
        stream = layout.start(places) + (ids - layout.first_id(blocks))
        return self._inside_windows(stream, places // self._window, is_inverse=True)

    def _inside_windows(self, stream: Ids, windows: Ids, *, is_inverse: bool) -> Ids:
        """Return where each element of the stream goes inside its own window."""
        moved = np.empty_like(stream)
        for window in np.unique(windows).tolist():
            mine = np.flatnonzero(windows == window)
            start, stop = self._layout.start(np.array([window, window + 1]) * self._window).tolist()
            shuffle = self._shuffle(window, stop - start)
            turn = shuffle.position_of if is_inverse else shuffle.at
            moved[mine] = turn(stream[mine] - start) + start
        return moved

    def _shuffle(self, window: int, length: int) -> Order:
        found = self._shuffles.get(window)
        if found is None:
            found = permutation(self._seed, self._epoch, length, window_purpose(window))
            if len(self._shuffles) >= _SHUFFLES_KEPT:
                del self._shuffles[next(iter(self._shuffles))]
            self._shuffles[window] = found
        return found


_SHUFFLES_KEPT = 4


class _Layout(Protocol):
    """Where blocks lie: in the ids (block), and in the epoch's stream after the blocks were permuted (place)."""

    def start(self, places: Ids) -> Ids:
        """Return where in the stream these places begin; any place from the last on begins at the end."""
        ...

    def place_of(self, stream: Ids) -> Ids:
        """Return the place that holds each element of the stream."""
        ...

    def first_id(self, blocks: Ids) -> Ids:
        """Return the first id of these blocks."""
        ...

    def block_of(self, ids: Ids) -> Ids:
        """Return the block of each id."""
        ...


def _layout(blocks: BlockSpec, permuted: Order) -> _Layout:
    runs = blocks.known_runs()
    is_equal = len(runs) <= 1 or (len(runs) == 2 and runs[1][0] == 1 and 0 < runs[1][1] < runs[0][1])
    return (
        _EqualLayout(blocks, permuted) if runs and is_equal and runs[0][1] else _ListLayout(blocks, permuted)
    )


class _EqualLayout:
    """Equal blocks, the last one maybe shorter: arithmetic alone."""

    def __init__(self, blocks: BlockSpec, permuted: Order) -> None:
        self._count, self._n = blocks.count, blocks.sample_count
        self._size = blocks.known_runs()[0][1]
        self._missing = self._count * self._size - self._n
        """By how many samples the last block is shorter."""
        self._short_place = int(permuted.position_of(np.array([self._count - 1]))[0])

    def start(self, places: Ids) -> Ids:
        """Return where in the stream these places begin."""
        places = np.minimum(places, self._count)
        return places * self._size - self._missing * (places > self._short_place)

    def place_of(self, stream: Ids) -> Ids:
        """Return the place that holds each element of the stream."""
        is_behind = stream >= (self._short_place + 1) * self._size - self._missing
        return (stream + self._missing * is_behind) // self._size

    def first_id(self, blocks: Ids) -> Ids:
        """Return the first id of these blocks."""
        return blocks * self._size

    def block_of(self, ids: Ids) -> Ids:
        """Return the block of each id."""
        return ids // self._size


class _ListLayout:
    """Blocks of any sizes: two arrays of sums, 16 bytes per block."""

    def __init__(self, blocks: BlockSpec, permuted: Order) -> None:
        counts, of_each = np.array(blocks.known_runs(), dtype=np.int64).reshape(-1, 2).T
        sizes = np.repeat(of_each, counts)
        self._first_ids = _sums(sizes)
        self._starts = _sums(sizes[permuted.at(np.arange(sizes.size))])

    def start(self, places: Ids) -> Ids:
        """Return where in the stream these places begin."""
        return self._starts[np.minimum(places, self._starts.size - 1)]

    def place_of(self, stream: Ids) -> Ids:
        """Return the place that holds each element of the stream; never an empty block."""
        return np.searchsorted(self._starts, stream, side="right") - 1

    def first_id(self, blocks: Ids) -> Ids:
        """Return the first id of these blocks."""
        return self._first_ids[blocks]

    def block_of(self, ids: Ids) -> Ids:
        """Return the block of each id; never an empty block."""
        return np.searchsorted(self._first_ids, ids, side="right") - 1


def _sums(sizes: Ids) -> Ids:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


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
