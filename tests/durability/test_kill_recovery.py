"""What was acknowledged is there after any number of kill -9 of daemons that recover."""

import random

import pytest
from kill_recovery import kill_recovery

pytestmark = pytest.mark.usefixtures("quiet")
STORES = 60


def test_nothing_is_lost_and_the_last_daemon_ends_well() -> None:
    found = kill_recovery(cycles=STORES, seed=random.randrange(1 << 32))
    found.check()
    assert found.count >= STORES
