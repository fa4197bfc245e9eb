import errno
import threading

import pytest

from everstep.checkpoint.engine import Engine, Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_lanes import LanedEngine

TRANSFER = Transfer(
    kind=TransferKind.READ, arena_fd=3, arena_offset_bytes=0, file_fd=4, file_offset_bytes=0, length_bytes=1
)


class Lane:
    """Each transfer waits until as many are under way as were asked for."""

    name = "lane"

    def __init__(self, meeting: threading.Barrier, log: list[str]) -> None:
        self._meeting, self._log = meeting, log

    def run(self, transfer: Transfer) -> TransferDone:
        self._meeting.wait(10)
        self._log.append("run")
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=0.0)

    def forget(self, arena_fd: int) -> None:
        self._log.append(f"forget {arena_fd}")

    def close(self) -> None:
        self._log.append("close")


def lanes(count: int) -> tuple[LanedEngine, list[str]]:
    log: list[str] = []
    meeting = threading.Barrier(count)

    def make() -> Engine:
        return Lane(meeting, log)

    return LanedEngine(make, count), log


def test_as_many_transfers_are_under_way_as_there_are_lanes() -> None:
    """With one lane fewer the barrier would never open."""
    engine, log = lanes(2)
    threads = [threading.Thread(target=engine.run, args=(TRANSFER,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert log == ["run"] * 8


def test_every_lane_forgets_and_closes() -> None:
    engine, log = lanes(3)
    engine.forget(7)
    assert log == ["forget 7"] * 3
    engine.close()
    assert log[3:] == ["close"] * 3


def test_several_that_need_every_lane_do_not_wait_for_each_other() -> None:
    engine, log = lanes(2)
    threads = [threading.Thread(target=engine.forget, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(log) == sorted(f"forget {number}" for number in range(16) for _ in range(2))


def test_a_lane_whose_transfer_failed_is_free_again() -> None:
    class Failing(Lane):
        def run(self, transfer: Transfer) -> TransferDone:
            raise OSError(5, f"no {transfer.length_bytes}")

    engine = LanedEngine(lambda: Failing(threading.Barrier(1), []), 1)
    for _ in range(3):
        with pytest.raises(OSError, match="no 1"):
            engine.run(TRANSFER)


def test_a_lane_that_cannot_be_made_closes_those_that_were() -> None:
    log: list[str] = []

    def make() -> Engine:
        if len(log) == 2:
            raise OSError(errno.EAGAIN, "no more")
        log.append("made")
        return Lane(threading.Barrier(1), closed)

    closed: list[str] = []
    with pytest.raises(OSError, match="no more"):
        LanedEngine(make, 4)
    assert closed == ["close"] * 2
