"""What a checkpoint costs the interpreter does not grow with the number of tensors: counted, not timed."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.copier import CopyJob
from everstep.hook.copy_plan import GATHER_BYTES_MAX
from everstep.hook.snapshot import Snapshotter

CHECKPOINTS = 8
"""With two slots the last three surely go into slots that are known."""

LEAVES_PER_PARAMETER = 4
"""With AdamW: the parameter, two moments and `step`."""


class Counter:
    """Counts the instructions that the interpreter executes, by what was measured, each time."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}

    @contextmanager
    def counting(self, what: str) -> Generator[None]:
        counted = self.counts.setdefault(what, [])
        counted.append(0)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            del argument
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            counted[-1] += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def around(self, what: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            with self.counting(what):
                return call(*arguments, **options)

        return counted


def small(parameters: int) -> nn.Module:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)) for _ in range(parameters // 2)
    )


def large(parameters: int) -> nn.Module:
    return nn.ParameterList(torch.zeros(GATHER_BYTES_MAX // 4) for _ in range(parameters))


def instructions(folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a checkpoint of a known structure takes, into a slot that was used before (a tick may come along)."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    counter = Counter()
    folder.mkdir()
    with (
        monkeypatch.context() as patch,
        everstep.attach("cost", model=model, optimizer=optimizer, storage=folder, every=10**6) as run,
    ):
        patch.setattr(Snapshotter, "begin", counter.around("boundary", Snapshotter.begin))
        patch.setattr(CopyJob, "run", counter.around("copy", CopyJob.run))
        while run.report().checkpoints_complete < CHECKPOINTS:
            optimizer.step()
            run.checkpoint()
            run.step()
            assert run.wait(60)
        assert run.report().failures == ()
        return {what: min(counts[-3:]) for what, counts in counter.counts.items()}


@pytest.mark.parametrize(
    ("make", "few", "many", "where"),
    [(small, 30, 170, {"boundary", "copy"}), (large, 5, 35, {"boundary"})],
    ids=["small", "large"],
)
def test_instructions_do_not_grow_with_the_number_of_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    make: Callable[[int], nn.Module],
    few: int,
    many: int,
    where: set[str],
) -> None:
    """Where leaves are large the copy thread makes a call for each: it takes longer than the instructions."""
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        least = instructions(tmp_path / "few", make(few), monkeypatch)
        most = instructions(tmp_path / "many", make(many), monkeypatch)
    assert least.keys() == most.keys() == {"boundary", "copy"}
    leaves_between = LEAVES_PER_PARAMETER * (many - few)
    for what in where:
        assert most[what] - least[what] < leaves_between / 5, (what, least, most)
