"""Boundaries are counted as they were passed: who trains until `run.steps` has a value trains just so often."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process


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
