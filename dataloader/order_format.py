"""The order of an epoch in plain Python: what `everstep verify --ledger` can compute without numpy.

An order is a pure function of (seed, epoch, n). Two constructions, chosen by n alone:

* n <= 65,536: the ids sorted by a keyed 64-bit hash (ties, one chance in 2^33 at this size, go by id). That is a
  uniform shuffle as far as the hash is random. Feistel networks are weak on small domains, and a table of this size
  is at most 128 KiB and a few milliseconds per epoch.
* larger n: a Feistel network over `(n - 1).bit_length()` bits with cycle walking. O(1) memory, any position on its
  own, invertible. Cycle walking: a result >= n is encrypted again; the domain is less than 2 n, so that this takes
  fewer than two rounds on average. The network is unbalanced where the number of bits is odd: the two parts are
  changed in turn and never swapped, which makes the inverse the same rounds backwards.

`ceil(log2(n))` instead of the bit length is wrong near powers of two by rounding (seen in a widely used loader).

Two more kinds are made of it. A block shuffle (block_format.py) permutes blocks, then the samples inside each window
of blocks, each by a permutation with a purpose, hence keys, of its own. A continued order numbers the samples of all
epochs through, e n + p: that is how a `Mixture` goes on with each of its datasets where the epoch before left it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from .block_format import BlockSpec
from .hash_format import derive_keys, mix64, mix64_twice

TABLE_COUNT_MAX = 1 << 16
# Four rounds of a Feistel network are enough in theory (Luby and Rackoff) when parts are long; ours are 8 bits at
# least, and twelve cost no more than the collation of one number.
ROUND_COUNT = 12


class OrderKind(Enum):
    """How positions of an epoch map to sample ids; the value is what a loader's state holds."""

    PERMUTED = "permuted-1"
    SEQUENTIAL = "sequential-1"
    BLOCKS = "blocks-1"
    CONTINUED = "continued-1"
    SAMPLER = "sampler-1"
    """The user's own sampler or batch_sampler decides."""
    STREAM = "stream-1"
    """An IterableDataset decides."""

    @property
    def is_numbered(self) -> bool:
        """Whether the order is everstep's own, a function of position: else only the user's objects know it."""
        return self not in {OrderKind.SAMPLER, OrderKind.STREAM}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """Everything that decides the order of every epoch, beside the number of samples."""

    kind: OrderKind
    seed: int
    blocks: BlockSpec | None = None

    def __post_init__(self) -> None:
        assert (self.kind is OrderKind.BLOCKS) == (self.blocks is not None), self


@dataclass(frozen=True, slots=True)
class FeistelShape:
    """The two parts of the domain and the round keys; even rounds change the low part, odd ones the high part."""

    low_bits: int
    high_bits: int
    keys: tuple[int, ...]


def table_keys(seed: int, epoch: int, purpose: str = "order") -> tuple[int, int]:
    """Return the two keys of the sorted order."""
    key_1, key_2 = derive_keys(f"{purpose}-table", seed, epoch, 2)
    return key_1, key_2


def feistel_shape(seed: int, epoch: int, n: int, purpose: str = "order") -> FeistelShape:
    """Return the network that permutes [0, 2^bits), the smallest such domain with room for n (at least two bits)."""
    bits = max(2, (n - 1).bit_length())
    keys = derive_keys(f"{purpose}-feistel", seed, epoch, ROUND_COUNT)
    return FeistelShape(bits - bits // 2, bits // 2, keys)


def window_purpose(window_index: int) -> str:
    """Return the purpose of the permutation inside one window of a block shuffle."""
    return f"order-window-{window_index}"


BLOCKS_PURPOSE = "order-blocks"


def feistel_once(shape: FeistelShape, value: int) -> int:
    """Return the image of one value under the network, without cycle walking."""
    low_mask, high_mask = (1 << shape.low_bits) - 1, (1 << shape.high_bits) - 1
    low, high = value & low_mask, value >> shape.low_bits
    for index, key in enumerate(shape.keys):
        if index % 2 == 0:
            low ^= mix64(high + key) & low_mask
        else:
            high ^= mix64(low + key) & high_mask
    return (high << shape.low_bits) | low


def permutation(seed: int, epoch: int, n: int, purpose: str = "order") -> Callable[[int], int]:
    """Return position -> value of the keyed permutation of [0, n); a table of n numbers up to 65,536."""
    if n <= TABLE_COUNT_MAX:
        key_1, key_2 = table_keys(seed, epoch, purpose)
        return sorted(range(n), key=lambda i: mix64_twice(i, key_1, key_2)).__getitem__
    shape = feistel_shape(seed, epoch, n, purpose)

    def walk(position: int) -> int:
        value = feistel_once(shape, position)
        while value >= n:
            value = feistel_once(shape, value)
        return value

    return walk


def ids_between(spec: OrderSpec, epoch: int, n: int, span: tuple[int, int]) -> Iterator[int]:
    """Yield the sample ids at positions span[0] <= p < span[1] of an epoch: the twin of `order_plan.order`.

    About 10 µs per id above 65,536 samples, and per block of a block shuffle.
    """
    positions = range(max(0, span[0]), max(0, min(n, span[1])))
    match spec.kind:
        case OrderKind.SEQUENTIAL:
            yield from positions
        case OrderKind.CONTINUED:
            yield from (epoch * n + position for position in positions)
        case OrderKind.PERMUTED:
            if positions:
                yield from map(permutation(spec.seed, epoch, n), positions)
        case OrderKind.BLOCKS:
            assert spec.blocks is not None
            yield from _block_ids(spec.seed, epoch, spec.blocks, positions)
        case OrderKind.SAMPLER | OrderKind.STREAM:
            raise AssertionError(spec)


def _block_ids(seed: int, epoch: int, blocks: BlockSpec, positions: range) -> Iterator[int]:
    """Yield the ids at these positions, window after window."""
    sizes = list(blocks.sizes())
    first_ids = [0]
    for size in sizes:
        first_ids.append(first_ids[-1] + size)
    in_order = map(permutation(seed, epoch, blocks.count, BLOCKS_PURPOSE), range(blocks.count))
    window_index = window_start = 0
    while window := list(islice(in_order, blocks.window)):
        length = sum(sizes[block] for block in window)
        inside = range(max(positions.start - window_start, 0), min(positions.stop - window_start, length))
        if inside:
            ids = [first_ids[block] + offset for block in window for offset in range(sizes[block])]
            shuffle = permutation(seed, epoch, length, window_purpose(window_index))
            yield from (ids[shuffle(position)] for position in inside)
        window_index, window_start = window_index + 1, window_start + length
        if window_start >= positions.stop:
            return
