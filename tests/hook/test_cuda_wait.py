"""What CUDA devices wait for copies, and hosts that are ahead of them. The device is a stub: no GPU is needed."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook import capture as capture_module
from everstep.hook import copier as copier_module
from everstep.hook import cuda_device
from everstep.hook.copy_plan import Moves
from everstep.hook.cuda_copy import CudaCopies
from everstep.hook.cuda_device import Passage
from everstep.hook.device_first_machine import CopyTimes, Way
from everstep.hook.gather import copy
from everstep.hook.report import CostBook
from everstep.hook.run import Run
from everstep.hook.skip_reasons import STILL_COPYING
from everstep.proto.frames import SkipReason


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        yield process


class StubEvent:
    """An event of a device that there is not, at a time that the test says; None: it has not happened yet."""

    def __init__(self, at_s: float | None) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return self.at_s is not None

    def elapsed_time(self, other: "StubEvent") -> float:
        assert self.at_s is not None
        assert other.at_s is not None
        return 1000 * (other.at_s - self.at_s)


class StubPassage:
    """A copy on such a device that ends half a second after training would have written."""

    DEVICE = torch.device("cuda", 0)
    reason = ""

    def __init__(self, copies: CudaCopies, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended, self.waits = StubEvent(None), list[object]()
        monkeypatch.setattr(cuda_device, "event", lambda _: StubEvent(1.0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)
        monkeypatch.setattr(copies, "_devices", {self.DEVICE: self})
        stubs: Any = {"boundary": StubEvent(0.0), "copied": self.ended, "ended": self.ended}
        copies._passages = {self.DEVICE: Passage(way=Way.HOST, **stubs)}

    def wait_event(self, event: StubEvent) -> None:
        self.waits.append(event)

    def learn(self, passage: Passage) -> None:
        assert passage.times == CopyTimes(copy_s=1.5, window_s=1.0)


class TestWait:
    """What a device waited for a copy is a cost like the guard's, though the host goes on."""

    def test_is_told_once_when_it_is_over_and_nobody_waits_for_that(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        costs = CostBook()
        copies = CudaCopies(costs)
        passage = StubPassage(copies, monkeypatch)
        copies.guard()
        assert passage.waits == [passage.ended]
        assert copies.take_wait_s() == 0.0
        passage.ended.at_s = 1.5
        assert copies.take_wait_s() == pytest.approx(0.5)
        assert copies.take_wait_s() == 0.0
        assert costs.cuda_wait_s == pytest.approx(0.5)

    def test_is_not_waited_for_where_enqueuing_has_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copies = CudaCopies(CostBook())
        passage = StubPassage(copies, monkeypatch)
        copies._passages[passage.DEVICE].copied = copies._passages[passage.DEVICE].ended = None
        copies.guard()
        assert (passage.waits, list(copies._unread)) == ([], [])

    def test_is_told_of_each_snapshot_though_the_host_was_ahead_of_two(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second begins while the device has not come to the first one's guard."""
        costs = CostBook()
        copies = CudaCopies(costs)
        stub = StubPassage(copies, monkeypatch)
        events: list[StubEvent] = []
        monkeypatch.setattr(cuda_device, "event", lambda _: events.append(StubEvent(None)) or events[-1])
        windows: list[CopyTimes] = []
        monkeypatch.setattr(stub, "learn", lambda passage: windows.append(passage.times))
        begins = [StubEvent(0.0), StubEvent(1.0)]
        ends = [StubEvent(None), StubEvent(None)]
        for begin, end in zip(begins, ends, strict=True):
            copies.copy(eager=(), lazy=())
            stubs: Any = {"boundary": begin, "copied": end, "ended": end}
            copies._passages = {stub.DEVICE: Passage(way=Way.HOST, **stubs)}
            copies.guard()
            copies.guard()  # of a second optimizer
            assert copies.take_wait_s() == 0.0
        events[0].at_s, ends[0].at_s = 0.5, 0.25
        events[1].at_s, ends[1].at_s = 1.5, 1.75
        assert copies.take_wait_s() == pytest.approx(0.25)
        assert costs.cuda_wait_s == pytest.approx(0.25)
        assert windows == [CopyTimes(copy_s=0.25, window_s=0.5), CopyTimes(copy_s=0.75, window_s=0.5)]

    @pytest.mark.usefixtures("daemon")
    def test_is_what_the_checkpoint_stalled_for_the_controller_the_report_and_the_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "d").mkdir()
        model = nn.Linear(8, 8)
        with everstep.attach("waits", model=model, storage=tmp_path / "d") as run:
            run.step()
            assert run.wait(20)
            run.checkpoint()
            run.step()
            assert run.wait(20)
            copies = run._snapshotter._cuda
            passage = StubPassage(copies, monkeypatch)
            copies.guard()
            passage.ended.at_s = 1.5
            run.step()
            report, stall = run.report(), run._pace.figures.stall
            assert report.cuda_wait_s == pytest.approx(0.5)
            assert report.stall_s == pytest.approx(report.boundary_s + report.guard_s + 0.5)
            assert stall is not None
            assert (stall.count, report.checkpoints_complete) == (1, 1)
            assert stall.mean >= 0.5
            run.step()
            assert run.report().cuda_wait_s == report.cuda_wait_s


class Guarded:
    """The event before an optimizer's step on such a device. Each query is heard, so that tests need no clock."""

    def __init__(self, hear: Callable[[int], bool]) -> None:
        self._hear, self.asked = hear, 0

    def query(self) -> bool:
        self.asked += 1
        return self._hear(self.asked)


class Left(Exception):  # noqa: N818
    """What a run without a last boundary is left by."""


class TestAhead:
    """A host comes to the next boundary while the copy goes on that its device makes beside a step."""

    @pytest.fixture(autouse=True)
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """Hold the copy back while it is not set."""
        gate = threading.Event()

        def held(moves: Moves) -> None:
            assert gate.wait(20)
            copy(moves)

        monkeypatch.setattr(copier_module, "copy", held)
        monkeypatch.setattr(capture_module, "AT_ONCE_BYTES_MAX", 0)
        yield gate
        gate.set()

    @contextmanager
    def being_copied(self, tmp_path: Path, gate: threading.Event, guarded: Guarded) -> Generator[Run]:
        """A run whose newest snapshot is held back, from a device that says of its step what the test wants."""
        (tmp_path / "d").mkdir()
        gate.set()
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters())
        with (
            contextlib.suppress(Left),
            everstep.attach(
                "ahead", model=model, optimizer=optimizer, storage=tmp_path / "d", every=10**6
            ) as run,
        ):
            run.step()
            assert run.wait(20)
            gate.clear()
            run.checkpoint()
            run.step()
            stubs: Any = {"boundary": StubEvent(0.0), "guarded": guarded}
            run._snapshotter._cuda._passages = {StubPassage.DEVICE: Passage(way=Way.HOST, **stubs)}
            yield run
            gate.set()
            raise Left

    @pytest.mark.usefixtures("daemon")
    def test_is_held_back_while_the_device_has_work_and_the_checkpoint_is_taken_at_no_cost(
        self, tmp_path: Path, gate: threading.Event
    ) -> None:
        def at_work(asked: int) -> bool:
            if asked == 3:
                time.sleep(0.1)
                gate.set()
            return False

        with self.being_copied(tmp_path, gate, Guarded(at_work)) as run:
            before = run.report()
            began_s = time.perf_counter()
            run.checkpoint()
            run.step()
            took_s = time.perf_counter() - began_s
            after = run.report()
            assert after.skipped == before.skipped
            assert after.ahead_s >= 0.1
            assert 0 < after.eager_s - before.eager_s <= after.boundary_s - before.boundary_s
            assert after.boundary_s - before.boundary_s + after.ahead_s <= took_s
            assert "the host was ahead, and waited" in str(after)
            assert run.wait(20)
            assert run.report().checkpoints_complete == 2
            run.step()
            assert run._pace.step_s >= after.ahead_s

    @pytest.mark.usefixtures("daemon")
    @pytest.mark.parametrize("asked_until", [1, 5])
    def test_goes_on_without_a_checkpoint_as_soon_as_the_device_stands_still_for_the_copy(
        self, tmp_path: Path, gate: threading.Event, asked_until: int
    ) -> None:
        guarded = Guarded(lambda asked: asked >= asked_until)
        with self.being_copied(tmp_path, gate, guarded) as run:
            run.checkpoint()
            run.step()
            assert (run.report().ahead_s > 0) == (asked_until > 1)
            skipped = run.report().skipped[SkipReason.COPYING]
            assert (guarded.asked, skipped.count, skipped.example) == (asked_until, 1, STILL_COPYING)

    @pytest.mark.usefixtures("daemon")
    def test_the_last_checkpoint_waits_no_longer_than_it_may(
        self, tmp_path: Path, gate: threading.Event
    ) -> None:
        with self.being_copied(tmp_path, gate, Guarded(lambda _: False)) as run:
            until_s = time.monotonic() + 0.05
            assert not run._checkpoints.take_last(until_s)
            assert run.report().skipped[SkipReason.COPYING].count == 1
            assert run.report().ahead_s > 0

    @pytest.mark.usefixtures("daemon")
    def test_does_not_wait_for_ever_for_a_device_that_hangs(
        self, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("everstep.hook.snapshot.AHEAD_MAX_S", 0.05)
        with self.being_copied(tmp_path, gate, Guarded(lambda _: False)) as run:
            run.checkpoint()
            run.step()
            assert run.report().skipped[SkipReason.COPYING].count == 1
            assert run.report().ahead_s >= 0.05
