"""Keys and the 64-bit mixer under order, ledger and augmentation seeds, in plain Python.

Three things are derived from (seed, epoch): the order, the ledger's hashes and the seeds of random augmentation.
Each has its own purpose string, so that none can be computed from another, and keys come from BLAKE2b over the
decimal text: `seed + epoch` would make epoch 1 of seed 0 equal to epoch 0 of seed 1.

hash_vector.py holds the same functions over numpy arrays. Changing a constant or a purpose changes every order and
every ledger on disk: it is a new format.
"""

import hashlib
from functools import lru_cache

MASK64 = (1 << 64) - 1
# Stafford's "Mix13", the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
SEED_MAX = MASK64


@lru_cache(maxsize=64)
def derive_keys(purpose: str, seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """Return `count` independent 64-bit keys for one use of one epoch."""
    digest = b""
    for block in range((count + 7) // 8):
        text = f"everstep-{purpose}-1\0{seed}\0{epoch}\0{block}"
        digest += hashlib.blake2b(text.encode(), digest_size=64).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count))


def mix64(value: int) -> int:
    """Return a bijective scrambling of a 64-bit value; every input bit flips each output bit half of the time."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK64
    return value ^ (value >> 31)


def mix64_twice(value: int, key_1: int, key_2: int) -> int:
    """Return the scrambling of `value` under two keys, for inputs as regular as 0, 1, 2, …"""
    return mix64(mix64(value + key_1) ^ key_2)
