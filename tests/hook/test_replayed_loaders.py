"""torchdata's StatefulDataLoader, attached: a restart trains on with the same samples and the same random numbers."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from overlapping import Loop, attached
from torch.utils.data import Dataset

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EPOCHS = 3
Seen = tuple[list[float], list[float], float, float]


class Noisy(Dataset[torch.Tensor]):
    """Draws for each sample, in the loop's process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)]) + torch.rand(1)


def make_loop() -> Loop:
    loaders = {
        "loader": stateful.StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
        "judge": stateful.StatefulDataLoader(Noisy(), batch_size=8, shuffle=True),
    }
    return Loop(loaders, lambda number, run: None)


def train(run: Any, objects: dict[str, Any], *, saved: int, leaves: bool = False) -> list[Seen]:
    """Train from where the run is, save boundary `saved`, and leave there or train to the end; return what it saw.

    Every run is asked for its state at the same boundaries: for that a loader makes an iterator, and draws.
    """
    seen: list[Seen] = []

    def see(batch: torch.Tensor) -> None:
        seen.append((batch.flatten().tolist(), torch.rand(2).tolist(), random.random(), np.random.random()))

    for _ in run.epochs(EPOCHS):
        for batch in objects["loader"]:
            see(batch)
            is_saved = run.steps + 1 in (1, saved)  # at the first one the arena is allocated
            if is_saved:
                run.checkpoint()
            run.step()
            assert not is_saved or run.wait(20)
            if leaves and run.steps == saved:
                return seen
        for batch in objects["judge"]:
            see(batch)
    return seen


@pytest.mark.parametrize("saved", [2, 4, 6])
def test_a_restart_sees_what_the_undisturbed_run_sees(
    devices: list[Path], tmp_path: Path, saved: int
) -> None:
    """In mid-epoch, and at an epoch's last boundary, where the restored iterator is at its end."""

    def begin(seed: int) -> Loop:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return make_loop()

    whole = begin(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with attached(whole, [elsewhere]) as run:
        undisturbed = train(run, whole.objects, saved=saved)
    first = begin(1)
    with attached(first, devices) as run:
        before = train(run, first.objects, saved=saved, leaves=True)
    again = begin(2)
    with attached(again, devices) as run:
        assert run.restore() is not None
        after = train(run, again.objects, saved=saved)
    assert len(after) == len(undisturbed) - len(before) > 0
    assert before + after == undisturbed
