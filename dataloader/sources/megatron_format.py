"""The `.idx` file of Megatron's tokenised datasets: where each sequence lies in the `.bin` file.

offset    size
0         9      "MMIDIDX" and two zero bytes
9         8      u64 version, 1
17        1      u8 code of the token type
18        8      u64 number of sequences n
26        8      u64 number of document bounds d: documents + 1
34        4 n    i32 length of each sequence in tokens
…         8 n    i64 where each sequence starts in the .bin file, in bytes
…         8 d    i64 number of the first sequence of each document, and n
…         n      i8 mode of each sequence; only in multimodal datasets
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import CorruptDataError, FormatVersionError, UsageError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {
    1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8), 6: ("float64", 8),
    7: ("float32", 4), 8: ("uint16", 2),
}  # fmt: skip
_CODES = {name: code for code, (name, _) in TOKEN_TYPES.items()}
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")
_TWO_I64 = struct.Struct("<qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronHeader:
    """What an .idx file says about itself; `file_bytes` is its whole size."""

    token_type: str
    token_bytes: int
    sequence_count: int
    bound_count: int
    file_bytes: int

    @property
    def lengths_at(self) -> int:
        """Offset of the lengths."""
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        """Offset of the positions in the .bin file."""
        return HEADER.size + 4 * self.sequence_count

    @property
    def bounds_at(self) -> int:
        """Offset of the bounds of documents."""
        return self.pointers_at + 8 * self.sequence_count

    @property
    def modes_at(self) -> int:
        """Offset of the modes, or of the end of the file."""
        return self.bounds_at + 8 * self.bound_count


def parse_megatron_header(head: bytes, file_bytes: int) -> MegatronHeader:
    """Return the header of an .idx file of `file_bytes`, of which `head` are the first bytes.

    Raises:
        UsageError: it is no .idx file.
        FormatVersionError: its version is not 1.
        CorruptDataError: it is cut off, or its counts do not fit its size.
    """
    if not head.startswith(MAGIC):
        raise UsageError(
            "the file is no Megatron index", hint="give the prefix of what Megatron's preprocess_data wrote"
        )
    if len(head) < HEADER.size:
        raise CorruptDataError(f"the index ends after {file_bytes} bytes")
    _, version, code, sequences, bounds = HEADER.unpack_from(head)
    if version != 1:
        raise FormatVersionError(f"the Megatron index has version {version}, known is 1")
    if code not in TOKEN_TYPES:
        raise CorruptDataError(f"the index has the code {code} for its token type")
    name, size = TOKEN_TYPES[code]
    header = MegatronHeader(
        token_type=name,
        token_bytes=size,
        sequence_count=sequences,
        bound_count=bounds,
        file_bytes=file_bytes,
    )
    if file_bytes not in {header.modes_at, header.modes_at + sequences}:
        raise CorruptDataError(
            f"an index of {sequences} sequences and {bounds} bounds has {header.modes_at} bytes, this one {file_bytes}"
        )
    return header


class MegatronIndex:
    """An .idx file, read by position; what an entry says is checked when it is used."""

    def __init__(self, read: Callable[[int, int], bytes], file_bytes: int, bin_bytes: int) -> None:
        """`read(offset, size)` returns less only at the end of the file; `bin_bytes` is the size of the .bin file.

        CorruptDataError where the first or last entries do not fit.
        """
        self._read = read
        self._bin_bytes = bin_bytes
        self.header = parse_megatron_header(read(0, HEADER.size), file_bytes)
        count = self.header.sequence_count
        end = sum(self.sequence(count - 1)) if count else 0
        if end != bin_bytes or (count and self.sequence(0)[0] != 0):
            raise CorruptDataError(f"the last sequence ends at {end}, the .bin file has {bin_bytes} bytes")
        bounds = self.header.bound_count
        if bounds and (self._bound(0), self._bound(bounds - 1)) != (0, count):
            raise CorruptDataError(
                f"the documents are the sequences {self._bound(0)} to {self._bound(bounds - 1)} of {count}"
            )

    def sequence(self, number: int) -> tuple[int, int]:
        """Return (offset, size in bytes) of a sequence in the .bin file."""
        assert 0 <= number < self.header.sequence_count
        length = self._entry(_I32, self.header.lengths_at + 4 * number)[0]
        offset = self._entry(_I64, self.header.pointers_at + 8 * number)[0]
        size = length * self.header.token_bytes
        if length < 0 or offset < 0 or offset + size > self._bin_bytes:
            raise CorruptDataError(
                f"sequence {number} lies at [{offset}, {offset + size}), the .bin file has {self._bin_bytes} bytes"
            )
        return offset, size

    def document(self, number: int) -> tuple[int, int]:
        """Return (offset, size in bytes) of a document: its sequences, which follow each other."""
        assert 0 <= number < self.header.bound_count - 1
        first, stop = self._entry(_TWO_I64, self.header.bounds_at + 8 * number)
        if not 0 <= first <= stop <= self.header.sequence_count:
            raise CorruptDataError(f"document {number} is the sequences [{first}, {stop})")
        if first == stop:
            return 0, 0
        offset = self.sequence(first)[0]
        end = sum(self.sequence(stop - 1))
        if end < offset:
            raise CorruptDataError(f"document {number} lies at [{offset}, {end})")
        return offset, end - offset

    def _bound(self, number: int) -> int:
        return self._entry(_I64, self.header.bounds_at + 8 * number)[0]

    def _entry(self, form: struct.Struct, offset: int) -> tuple[int, ...]:
        data = self._read(offset, form.size)
        if len(data) != form.size:
            raise CorruptDataError(f"the index ends at {offset + len(data)}, within an entry")
        return form.unpack(data)


def encode_megatron_index(token_type: str, lengths: list[int], bounds: list[int]) -> bytes:
    """Return an .idx file; `bounds` are the first sequence of each document, and the number of sequences."""
    code = _CODES[token_type]
    size = TOKEN_TYPES[code][1]
    pointers = [0]
    for length in lengths:
        pointers.append(pointers[-1] + length * size)
    n, d = len(lengths), len(bounds)
    head = HEADER.pack(MAGIC, 1, code, n, d)
    return head + struct.pack(f"<{n}i{n}q{d}q", *lengths, *pointers[:n], *bounds)
