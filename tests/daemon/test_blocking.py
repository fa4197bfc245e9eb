"""Blocking work from the event loop: what it held is free when it has ended, however it ended."""

import asyncio
import gc
import threading
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


def test_who_is_cancelled_again_and_again_still_waits_for_the_work_to_end() -> None:
    go, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        assert go.wait(20)
        has_ended.set()

    async def main() -> None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.05)
            assert not done
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_ended.is_set()

    asyncio.run(main())
