"""A real trainer with a state large enough to be written while it is copied, and what the daemon hears of it."""

from pathlib import Path

import pytest
import torch

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.client import DaemonClient
from everstep.hook.slot_sealing import ANNOUNCE_BYTES_MIN
from everstep.proto import frames

LAYER_FLOATS = 8 * 1024 * 1024
LARGE = ANNOUNCE_BYTES_MIN // (4 * LAYER_FLOATS) + 1
"""Layers of 32 MiB each."""


class Layers(torch.nn.Module):
    def __init__(self, count: int, value: float) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(
            torch.full((LAYER_FLOATS,), value + index) for index in range(count)
        )


def train_one_step(model: Layers, storage: list[Path], told: list[frames.Request]) -> None:
    """Leave a checkpoint; `told` gets what the daemon is told without an answer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def tell(client: DaemonClient, frame: frames.Request) -> bool:
        told.append(frame)
        return original(client, frame)

    original = DaemonClient.tell
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DaemonClient, "tell", tell)
        with everstep.attach("large", model=model, optimizer=optimizer, storage=storage, every=1) as run:
            run.step()


@pytest.mark.parametrize(("count", "is_announced"), [(LARGE, True), (1, False)])
def test_what_is_large_is_announced_and_comes_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_announced: bool
) -> None:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "s" / "data.sock"))
    storage = [tmp_path / "d0", tmp_path / "d1"]
    for path in storage:
        path.mkdir()
    told: list[frames.Request] = []
    with daemon_process(tmp_path / "s" / "data.sock"):
        train_one_step(Layers(count, 0.5), storage, told)
    announced = [frame for frame in told if isinstance(frame, frames.Announce)]
    copied = [frame for frame in told if isinstance(frame, frames.Copied)]
    assert bool(announced) is is_announced
    for frame in announced:
        segments = [each.segment for each in copied if (each.arena, each.slot) == (frame.arena, frame.slot)]
        assert sorted(set(segments)) == list(range(max(segments) + 1))
    with daemon_process(tmp_path / "t" / "data.sock") as _:
        monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "t" / "data.sock"))
        model = Layers(count, 9.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with everstep.attach("large", model=model, optimizer=optimizer, storage=storage) as run:
            restored = run.restore()
    assert restored is not None
    expected = Layers(count, 0.5)
    for found, wanted in zip(model.layers, expected.layers, strict=True):
        assert torch.equal(found, wanted)
