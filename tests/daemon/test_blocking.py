"""Blocking work from the event loop: what it held is free when it has ended, however it ended."""

import asyncio
import gc
import threading
import weakref

import pytest

from everstep.core.errors import LimitError
from everstep.daemon.blocking import in_thread, started_threads


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


@pytest.mark.parametrize("started", range(4))
def test_threads_that_cannot_all_be_started_are_none(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    start, left, before = threading.Thread.start, [started], threading.active_count()

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(
        LimitError, match=r"4 threads some cannot be started: can't start new thread \(raise pids"
    ):
        started_threads(4, "some")
    assert threading.active_count() == before


def test_what_started_threads_take_needs_no_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started_threads(4, "some")

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    assert [each.result() for each in [made.submit(int, number) for number in range(20)]] == list(range(20))
    made.shutdown()
