"""What every source offers, and what the cache, the loader and the analysis ask of one."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """A fixed number of samples, each some bytes, read in any order by any number of threads and processes."""

    def __len__(self) -> int:
        """Return the number of samples; it never changes."""
        ...

    def get_bytes(self, index: int) -> bytes | bytearray | memoryview:
        """Return the bytes of sample `index`, 0 <= index < len(self): as stored, neither decoded nor augmented.

        Raises:
            IndexError: there is no such sample.
            OSError: the storage failed.
        """
        ...

    def fingerprint(self) -> str:
        """Return what tells this content from any other: equal exactly while every sample's bytes are.

        Cheap (no sample is read), the same on every node and at every start, printable ASCII of at most 128
        characters.
        """
        ...
