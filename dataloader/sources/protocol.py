"""What every source offers, and what the cache, the loader and the analysis ask of one."""

import operator
from collections.abc import Iterator, Sequence
from typing import Protocol, SupportsIndex, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """A fixed number of samples, each some bytes, read in any order by any number of threads and processes."""

    def __len__(self) -> int:
        """Return the number of samples; it never changes."""
        ...

    def get_bytes(self, index: int) -> bytes | bytearray | memoryview:
        """Return the bytes of sample `index`, 0 <= index < len(self): as stored, neither decoded nor augmented.

        Raises:
            IndexError: there is no such sample; a negative index is none.
            SourceChangedError: a file is gone, or no longer the one that was indexed.
            CorruptDataError: a file does not hold what its format promises.
            OSError: the storage failed.
        """
        ...

    def fingerprint(self) -> str:
        """Return what tells this content from any other: equal exactly while every sample's bytes are.

        Cheap (at most a few pages of the samples are read), the same on every node and at every start, printable
        ASCII of at most 128 characters. What a source cannot see of a change its class says.
        """
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A source whose samples lie in local files. Optional: the stall analysis drops them from the page cache."""

    def files(self) -> Iterator[str]:
        """Yield the absolute path of every file that get_bytes reads, once each; there may be millions."""
        ...


@runtime_checkable
class ReadsBlocks(Protocol):
    """A source of which neighbouring samples are cheap together (a tar shard, a row group). Optional: block shuffle."""

    def block_sizes(self) -> Sequence[int]:
        """Return the number of samples of each block, in the order of the samples; their sum is len(self)."""
        ...


def checked_index(index: SupportsIndex, count: int, source: object) -> int:
    """Return `index` as an int if 0 <= index < count. Counting from the end would hide a caller's off-by-one."""
    number = operator.index(index)
    if not 0 <= number < count:
        raise IndexError(f"{type(source).__name__} has samples 0 to {count - 1}, not {number}")
    return number
