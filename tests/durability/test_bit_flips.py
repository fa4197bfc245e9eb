"""Every bit of a segment and of a manifest counts: a single one that flips is found, and nothing crashes over it."""

import random

import pytest
from bit_flips import flip_bits

COUNT = 10_000


@pytest.mark.slow
def test_every_flipped_bit_is_found() -> None:
    found = flip_bits(count=COUNT, duration_s=60.0, seed=random.randrange(1 << 32))
    found.check()
    assert found.count >= COUNT // 10
