"""A cache arena as a reader has it: mapped for reading, hits without a message or a system call."""

import os

from ...core.mapping import map_shared
from .arena_format import (
    CAPACITY_WORD,
    FREE_WORD,
    INDEX_WORD,
    WORD_BYTES,
    Header,
    base_bytes,
    read_header,
)


class ArenaView:
    """A mapping that cannot be written to. Any thread may read; unmapped when nobody refers to it any more.

    The hit path lies in `CachedDataset.get_bytes`, which uses `places`, `words` and `octets` itself: a call costs as
    much as the rest of it.
    """

    __slots__ = ("octets", "places", "words")

    def __init__(self, fd: int, size_bytes: int, sample_count: int) -> None:
        """Map the arena, as far as it may grow, and close `fd`.

        Raises:
            ValueError: it is no arena of this format, or of another number of samples.
            OSError: it cannot be mapped.
        """
        try:
            if os.fstat(fd).st_size < base_bytes(sample_count) or size_bytes % WORD_BYTES:
                raise ValueError("this is no cache arena of so many samples")
            self.octets = map_shared(fd, size_bytes)
        finally:
            os.close(fd)
        self.words = self.octets.cast("Q")
        """All of it as aligned words of 8 bytes: reading one is one load."""
        if self.header().sample_count != sample_count:
            raise ValueError(f"the arena is of {self.header().sample_count} samples, not {sample_count}")
        self.places = self.words[INDEX_WORD : INDEX_WORD + sample_count]
        """The index: for each sample 0, or the offset of its record."""

    def header(self) -> Header:
        """Return what the arena says of itself now."""
        return read_header(self.words)

    def takes(self, needed_bytes: int) -> bool:
        """Tell whether a record of so many bytes might be admitted now."""
        return needed_bytes <= self.words[FREE_WORD]

    def could_ever_take(self, needed_bytes: int) -> bool:
        """Tell whether it would be admitted into an empty cache."""
        return needed_bytes <= self.words[CAPACITY_WORD]
