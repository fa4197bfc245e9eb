"""Lines of a text file as samples, found chunk by chunk, and the sections of their index.

A line ends at a line feed, or at the end of the file; a carriage return before that belongs to the ending, not to the
line. Lines of nothing but ASCII white space are no samples. A UTF-8 byte order mark at the start of the file belongs to
no line.

    1  u64[samples]  where each line starts
    2  u64[samples]  its length in bytes, without its ending
    3  u32[samples]  the low 32 bits of its XXH3-64
"""

from array import array
from collections.abc import Sequence

import xxhash

from .index_format import Buffer, Index, Stamp, encode_index, little_endian

KIND = "jsonl"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineScanner:
    """Takes a file in chunks, in order; 20 bytes are kept of each line, whatever its length."""

    def __init__(self) -> None:
        self._starts = array("Q")
        self._lengths = array("Q")
        self._checks = array("I")
        self._position = 0
        self._start = 0
        self._pending = 0
        self._is_blank = True
        self._ends_in_return = False
        self._hash = xxhash.xxh3_64()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; the first chunk holds three at least, if the file does."""
        begin = 0
        if self._position == 0 and chunk.startswith(BYTE_ORDER_MARK):
            begin = self._start = len(BYTE_ORDER_MARK)
        while (end := chunk.find(b"\n", begin)) >= 0:
            self._finish(chunk[begin:end], after_feed=self._position + end + 1)
            begin = end + 1
        self._carry(chunk[begin:])
        self._position += len(chunk)

    def encode(self, stamps: Sequence[Stamp]) -> list[Buffer]:
        """Take the end of the file as the end of the last line and return the index file in pieces."""
        self._finish(b"", after_feed=self._position)
        sections: list[Buffer] = [little_endian(each) for each in (self._starts, self._lengths, self._checks)]
        return encode_index(KIND, len(self._starts), sections, stamps)

    def _carry(self, piece: bytes) -> None:
        """Remember a piece of a line that goes on. A return at its end is held back: it may be half an ending."""
        if not piece:
            return
        if self._ends_in_return:
            self._hash.update(b"\r")
            self._pending += 1
        self._ends_in_return = piece.endswith(b"\r")
        if self._ends_in_return:
            piece = piece[:-1]
        self._is_blank = self._is_blank and (not piece or piece.isspace())
        self._hash.update(piece)
        self._pending += len(piece)

    def _finish(self, piece: bytes, after_feed: int) -> None:
        if self._pending or self._ends_in_return:
            self._carry(piece)
            length, check, is_blank = self._pending, self._hash.intdigest(), self._is_blank
            self._pending, self._is_blank, self._ends_in_return = 0, True, False
            self._hash.reset()
        else:
            line = piece.removesuffix(b"\r")
            length, check, is_blank = len(line), 0, not line or line.isspace()
            if not is_blank:
                check = xxhash.xxh3_64_intdigest(line)
        if not is_blank:
            self._starts.append(self._start)
            self._lengths.append(length)
            self._checks.append(check & 0xFFFFFFFF)
        self._start = after_feed


def check_line_index(index: Index) -> None:
    """Return if the sections fit the number of samples; CorruptDataError otherwise."""
    index.check_lengths([8 * index.count, 8 * index.count, 4 * index.count])


def line_at(index: Index, sample: int) -> tuple[int, int, int]:
    """Return (start, length, check) of a line."""
    return index.u64(1, sample), index.u64(2, sample), index.u32(3, sample)


def line_check(line: bytes) -> int:
    """Return what the index keeps of a line's contents."""
    return xxhash.xxh3_64_intdigest(line) & 0xFFFFFFFF
