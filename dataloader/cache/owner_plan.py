"""Who owns a sample among several nodes: rendezvous hashing. Pure; readers and daemons of all nodes agree by it.

Each member has a key, made of the dataset's fingerprint and its name. A sample belongs to the member with the highest
mix of its key and the sample's number. So nobody keeps a table: the cost is one mix for each member, whatever the size
of the dataset, and a member that leaves or joins moves its own samples only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

WORD_MASK: Final = (1 << 64) - 1
STRIDE: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: neighbours' numbers are far apart before they are mixed (splitmix64)."""
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB


def mix(word: int) -> int:
    """Return a word of 64 bits in which each bit depends on all of `word` (splitmix64, Steele et al., OOPSLA'14)."""
    word = ((word ^ (word >> 30)) * MIX_1) & WORD_MASK
    word = ((word ^ (word >> 27)) * MIX_2) & WORD_MASK
    return word ^ (word >> 31)


@dataclass(frozen=True, slots=True)
class Owners:
    """A pure function of (sample, members), for one dataset."""

    fingerprint: str
    members: tuple[str, ...]
    """Their names, sorted, each once."""
    keys: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        assert list(self.members) == sorted(set(self.members)), self.members
        assert self.members, "nobody could own anything"
        keys = tuple(
            xxhash.xxh3_64_intdigest(f"{self.fingerprint}\0{each}".encode()) for each in self.members
        )
        object.__setattr__(self, "keys", keys)

    def owner(self, sample: int) -> str:
        """Return the name of the member that keeps this sample."""
        word = sample * STRIDE
        best = max(range(len(self.keys)), key=lambda place: mix((word + self.keys[place]) & WORD_MASK))
        return self.members[best]


def members_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the members that are named, in the order that all nodes use."""
    return tuple(sorted(set(names)))


def members_digest(members: Sequence[str]) -> int:
    """Return what tells one list of members from another."""
    return xxhash.xxh3_64_intdigest("\0".join(members).encode())
