"""Boundaries are counted as they were passed: who trains until `run.steps` has a value trains just so often."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.core.errors import DaemonUnavailableError
from everstep.daemon.control.client import connected
from everstep.daemon.testing import daemon_process
from everstep.hook.arena_keeper import ArenaKeeper


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        yield [tmp_path]


@pytest.mark.parametrize("every", [1, 7, 10**6])
def test_sessions_that_end_by_themselves_train_as_often_as_they_say(devices: list[Path], every: int) -> None:
    trained = 0
    for session in range(1, 5):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.attach(
            "counted", model=model, optimizer=optimizer, storage=devices, every=every
        ) as run:
            restored = run.restore()
            assert (0 if restored is None else restored.step) == run.steps == trained
            while run.steps < 10 * session:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                run.log(trained=trained)
                run.step()
                trained += 1
        assert trained == run.steps == 10 * session
        assert run.history("trained") == [(step, float(step)) for step in range(trained)]


def test_what_a_step_takes_is_told_without_the_pause_before_it(devices: list[Path]) -> None:
    with everstep.attach("paused", model=nn.Linear(2, 2), storage=devices, every=10**6) as run:
        for _ in range(30):
            run.step()
        time.sleep(1.0)  # an evaluation
        run._costs_at_s = 0.0  # the next boundary tells
        run.step()
        with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
            while (view := client.controllers("paused")[0]).step < 31:
                time.sleep(0.01)
    assert 0 < view.step_s < 0.5


def test_what_is_done_first_at_a_boundary_is_a_part_of_it(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with everstep.attach("long", model=nn.Linear(2, 2), storage=devices, every=10**6) as run:
        run.step()
        before_s = run.report().boundary_s
        monkeypatch.setattr(run, "_start", lambda: time.sleep(0.2))
        run.step()
        assert run.report().boundary_s - before_s > 0.2


def test_of_one_rank_nobody_waits_for_others(devices: list[Path]) -> None:
    with everstep.attach("alone", model=nn.Linear(2, 2), storage=devices, every=2) as run:
        for _ in range(10):
            run.step()
        assert run.report().wait_s == 0.0


def test_a_daemon_that_goes_while_memory_is_asked_for_refuses_no_last_boundary(
    devices: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor is waited for, as where it was known to be gone before."""
    find, lost = ArenaKeeper.find, [DaemonUnavailableError("the connection to the daemon was lost")]

    def find_or_lose(self: ArenaKeeper, *args: Any, **kwargs: Any) -> object:
        if lost:
            raise lost.pop()
        return find(self, *args, **kwargs)

    run = everstep.attach("asked", model=nn.Linear(2, 2), storage=devices, every=10**6)
    run.step()
    monkeypatch.setattr(ArenaKeeper, "find", find_or_lose)
    run.close()
    assert not lost
    assert (run.report().last_complete, run.report().failures) == ("1.2", ())
