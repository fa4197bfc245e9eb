"""The arena of a cache: a header, one word for each sample, then records. Pure; both sides know it from here.

    0        header: 8 words
    64       index: one word for each sample id: 0, or the offset of its record
    64 + 8n  records, back to back: length, XXH3-64, the bytes, zeros up to a multiple of 8

All words are 8 bytes, aligned, in the machine's order: the arena never leaves the machine. Offsets are from the begin
of the arena.

**Publication.** The daemon alone writes. It copies a record, checks it, and last of all stores the record's offset in
the index: one aligned store of 8 bytes. A reader loads that word once, and reaches length and bytes only through it. So
it sees no record or a whole one: on x86 stores and loads stay in order; on ARM the reader's loads depend on the
address that it loaded first, and the daemon's thread hands the copy to the thread that stores the word through a lock,
whose release and acquire order copy before word for all (ARMv8 is multi-copy atomic). What is published never changes.

**Budget.** Every byte up to the end of the last record counts: header, index, and for each record its 16 bytes of
length and digest and the padding to 8. Nothing is ever admitted that would end beyond the budget.
"""

from dataclasses import dataclass

WORD_BYTES = 8
HEADER_BYTES = 64
RECORD_HEAD_BYTES = 16
MAGIC = int.from_bytes(b"EVSTEPC1", "little")

MAGIC_WORD, COUNT_WORD, CAPACITY_WORD, FREE_WORD, USED_WORD, PUBLISHED_WORD = range(6)
"""Header: magic and version, samples of the dataset, bytes for records in all, the largest record that is taken now,
bytes used from the begin of the arena, samples published."""

INDEX_WORD = HEADER_BYTES // WORD_BYTES
"""Where the index begins, in words."""


def base_bytes(sample_count: int) -> int:
    """Return the bytes of header and index: where the first record begins."""
    return HEADER_BYTES + WORD_BYTES * sample_count


def record_bytes(length: int) -> int:
    """Return what a sample of `length` bytes takes of the budget, besides its word in the index."""
    return RECORD_HEAD_BYTES + -(-length // WORD_BYTES) * WORD_BYTES


def budget_for(lengths: "list[int]") -> int:
    """Return the budget that holds exactly these samples, which are all of the dataset."""
    return base_bytes(len(lengths)) + sum(record_bytes(length) for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an arena says of itself."""

    sample_count: int
    capacity_bytes: int
    """The budget less header and index."""
    free_bytes: int
    used_bytes: int
    published_count: int


def read_header(words: memoryview) -> Header:
    """Return the header of an arena, whose words these are.

    Raises:
        ValueError: it is no arena of this format.
    """
    if len(words) < INDEX_WORD or words[MAGIC_WORD] != MAGIC or len(words) < INDEX_WORD + words[COUNT_WORD]:
        raise ValueError("this is no cache arena, or one of another format")
    return Header(
        sample_count=words[COUNT_WORD],
        capacity_bytes=words[CAPACITY_WORD],
        free_bytes=words[FREE_WORD],
        used_bytes=words[USED_WORD],
        published_count=words[PUBLISHED_WORD],
    )


def write_header(words: memoryview, header: Header) -> None:
    """Write it; each word is for itself, and nobody relies on two of them together."""
    words[COUNT_WORD] = header.sample_count
    words[CAPACITY_WORD] = header.capacity_bytes
    words[FREE_WORD] = header.free_bytes
    words[USED_WORD] = header.used_bytes
    words[PUBLISHED_WORD] = header.published_count
    words[MAGIC_WORD] = MAGIC
