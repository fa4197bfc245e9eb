"""What a daemon has reported as persisted is there after kill -9 of it, whatever it was doing."""

import random
from collections.abc import Callable

import pytest
from kill_daemon import HIT, HIT_UNSEALED, OVERLAPPED, RANK_COUNT, kill_daemon

CYCLES = 50
HITS_MIN = CYCLES // 10
"""Of 50 kills so many came while a shard was being written, or this was not the load that was meant."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_persisted_is_lost(tell: Callable[[str], None]) -> None:
    found = kill_daemon(cycles=CYCLES, seed=random.randrange(1 << 32))
    tell(str(found))
    found.check()
    assert found.count == CYCLES
    assert found.counted["persisted"] >= RANK_COUNT * CYCLES
    assert found.counted[HIT] >= HITS_MIN
    assert found.counted[OVERLAPPED] >= CYCLES // 2
    assert found.counted[HIT_UNSEALED] > 0
