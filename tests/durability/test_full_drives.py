"""Drives that really fill, under a daemon that saves: what it says is there, what it refuses leaves nothing behind."""

import random

import pytest
from full_drives import fill_drives
from loop_disk import SIZES_MIB, skip_without

pytestmark = pytest.mark.usefixtures("quiet")
CYCLES = 6


@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_what_is_persisted_is_there_and_what_is_refused_is_not(kind: str) -> None:
    skip_without(kind)
    found = fill_drives(kind, cycles=CYCLES, seed=random.randrange(1 << 32))
    found.check()
    assert found.count == CYCLES
    assert found.counted["persisted"] > 0
    assert found.counted["times a drive was filled"] > 0
