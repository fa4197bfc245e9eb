"""Blocking work from the event loop: what it held is free when it has ended, however it ended."""

import asyncio
import gc
import weakref

import pytest

from everstep.daemon.blocking import in_thread


class Held:
    """What the work has in hand."""


def test_what_failing_work_had_in_hand_goes_at_once_and_not_with_the_next_collection() -> None:
    held = list[weakref.ref[Held]]()

    def fail() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        raise OSError("no")

    async def main() -> None:
        with pytest.raises(OSError, match="no"):
            await in_thread(fail)

    gc.disable()
    try:
        asyncio.run(main())
        assert [each() for each in held] == [None]
    finally:
        gc.enable()
