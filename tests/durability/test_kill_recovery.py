"""What was acknowledged is there after any number of kill -9 of daemons that recover."""

import random

from kill_recovery import kill_recovery

DURATION_S = 18.0


def test_nothing_is_lost_and_the_last_daemon_ends_well() -> None:
    found = kill_recovery(duration_s=DURATION_S, seed=random.randrange(1 << 32))
    found.check()
    assert found.count >= 10
