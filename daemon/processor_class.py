"""How the daemon's threads get a processor: who only decides waits for its turn, who keeps a drive busy does not."""

import contextlib
import os


def wait_for_turn() -> None:
    """Let this thread, and those that it starts, push no other one off a processor by waking up.

    Whoever is woken may by default take the processor of whoever runs there: of the training thread that has just sent
    the message, in the middle of its boundary. The share of the time that it gets stays the same
    (docs/adr/0086-the-event-loop-waits-for-its-turn.md). An idle or real-time class that an operator has chosen stays.
    """
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def take_turn_at_once() -> None:
    """Take `wait_for_turn` back for this thread: a drive that waits for it stands still."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _change(before: int, after: int) -> None:
    with contextlib.suppress(PermissionError):  # a sandbox forbids it: then it stays as it is
        if os.sched_getscheduler(0) == before:
            os.sched_setscheduler(0, after, os.sched_param(0))
