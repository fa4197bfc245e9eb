"""What CUDA devices wait for copies: told once, a part of the stall. The device is a stub, so that no GPU is needed."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook import cuda_device
from everstep.hook.cuda_copy import CudaCopies
from everstep.hook.cuda_device import Passage
from everstep.hook.device_first_machine import CopyTimes, Way
from everstep.hook.report import CostBook


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
        assert (passage.waits, copies._unread) == ([], {})

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
