"""What a daemon has reported as persisted is there after kill -9 of it, whatever it was doing."""

import random

import pytest
from kill_daemon import kill_daemon

CYCLES = 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_persisted_is_lost() -> None:
    found = kill_daemon(cycles=CYCLES, seed=random.randrange(1 << 32))
    found.check()
    assert found.count == CYCLES
