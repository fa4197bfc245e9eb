"""Every bit of a segment and of a manifest counts: a single one that flips is found, and nothing crashes over it."""

import random

import pytest
from bit_flips import flip_bits

pytestmark = pytest.mark.usefixtures("quiet")
COUNT = 10_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_flipped_bit_is_found() -> None:
    found = flip_bits(count=COUNT, seed=random.randrange(1 << 32))
    found.check()
    assert found.count == COUNT
