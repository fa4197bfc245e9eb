"""Who copies through a ring waits for its windows, and learns when there will be none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.core.errors import DaemonUnavailableError, DeadlineError, StorageError
from everstep.hook.window_gate import WindowGate


def test_a_window_is_free_when_its_segment_is_written() -> None:
    gate = WindowGate(lambda: False)
    gate.written(3)
    gate.wait(3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.wait, 4)
        gate.written(5)
        assert not waiting.done()
        gate.written(4)
        waiting.result(10)
    assert gate.waited_s > 0
    gate.end()


def test_who_waits_learns_that_the_daemon_has_given_up() -> None:
    gate = WindowGate(lambda: False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.wait, 0)
        assert gate.fail(StorageError("it broke"))
        with pytest.raises(StorageError, match="it broke"):
            waiting.result(10)
    with pytest.raises(StorageError):
        gate.end()


def test_at_the_end_at_the_latest() -> None:
    gate = WindowGate(lambda: False)
    assert gate.fail(StorageError("it broke"))
    with pytest.raises(StorageError):
        gate.end()


def test_after_the_end_it_is_too_late() -> None:
    gate = WindowGate(lambda: False)
    gate.end()
    assert not gate.fail(StorageError("it broke"))


def test_a_daemon_that_writes_nothing_more_holds_nobody_for_ever() -> None:
    gate = WindowGate(lambda: False, silence_s=0.2)
    gate.written(3)
    with pytest.raises(DeadlineError, match=r"segment 4 was not written: .* none for 0 s"):
        gate.wait(4)


def test_each_window_that_is_written_prolongs_the_wait() -> None:
    gate, progress = WindowGate(lambda: False, silence_s=3.0), threading.Event()

    def write() -> None:
        for segment in range(12):  # slower altogether than the silence allowed
            progress.wait(0.3)
            gate.written(segment)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write)
        gate.wait(11)
    assert gate.waited_s > 3.0


def test_a_daemon_that_is_gone_is_noticed() -> None:
    with pytest.raises(DaemonUnavailableError):
        WindowGate(lambda: True).wait(0)
    with pytest.raises(DaemonUnavailableError):
        WindowGate(lambda: True).end()
