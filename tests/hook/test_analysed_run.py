"""The run of a script under `everstep analyze`: a loop that works, and nothing outside of it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import everstep
from everstep.core.analysed import ANALYSIS_VARIABLE
from everstep.core.errors import StateTypeError, UsageError


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ANALYSIS_VARIABLE, "1")
    return tmp_path


def test_the_loop_of_a_run_goes_on_without_it(storage: Path) -> None:
    model = torch.nn.Linear(1, 1)
    loader = everstep.DataLoader(TensorDataset(torch.arange(6.0)[:, None]), batch_size=2)
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loader": loader,
    }
    with everstep.attach("analysed", **objects, storage=[storage], every=1) as run:
        assert isinstance(run, everstep.Run)
        assert run.restore() is None
        for epoch in run.epochs(2):
            for batch in loader:
                with run.mutating():
                    model(batch[0]).sum().backward()
                run.log(loss=float(epoch))
                run.checkpoint()
                run.lease(60.0)
                run.step()
    assert (run.steps, run.epoch, run.finished, run.rank, run.world_size) == (6, 2, True, 0, 1)
    assert run.history("loss") == [(step, float(step // 3)) for step in range(6)]
    assert run.wait()
    assert run.report().checkpoints_sealed == 0
    assert "0 complete" in str(run.report())
    with pytest.raises(UsageError, match="is closed"):
        run.step()
    assert list(storage.iterdir()) == []
    assert not Path(os.environ["EVERSTEP_SOCKET"]).exists(), "no daemon was started"


def test_what_a_run_would_refuse_is_refused(storage: Path) -> None:
    with pytest.raises(StateTypeError, match="thing"):
        everstep.attach("analysed", thing=object(), storage=[storage])
    with pytest.raises(UsageError, match="every=0"):
        everstep.attach("analysed", model=torch.nn.Linear(1, 1), storage=[storage], every=0)


def test_every_method_of_a_run_is_thought_of() -> None:
    """What a run's own methods need (a link, a daemon) an analysed one does not have."""
    from everstep.hook.analysed_run import AnalysedRun

    inherited = {"steps", "epoch", "finished", "epochs", "log", "history", "close", "on_event"}
    public = {name for name in vars(everstep.Run) if not name.startswith("_")}
    own = {name for name in vars(AnalysedRun) if not name.startswith("_")}
    assert public - own == inherited
