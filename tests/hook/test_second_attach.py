"""A second attach in one process, while the first attempt's snapshots are still being written."""

import contextlib
import os
from pathlib import Path

import pytest
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.attach import _Events
from everstep.proto import frames
from everstep.proto.frames import Reply

PERSISTED = frames.Persisted(
    attempt=1, step=1, size_bytes=1, persist_s=0.0, devices_s=0.0, under_replicated=False
)


def test_what_comes_before_there_is_a_run_is_held_back_in_order() -> None:
    events, heard = _Events(), list[Reply]()
    steer = frames.Steer(budget=0.01)
    events(steer)
    events(PERSISTED)
    events.connect(heard.append)
    later = frames.SlotFree(arena=1, slot=0)
    events(later)
    assert heard == [steer, PERSISTED, later]


def test_what_the_attempt_before_left_counts_for_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])), contextlib.suppress(KeyboardInterrupt):
        with everstep.attach("twice", model=model, storage=tmp_path) as run:
            run.step()
        with everstep.attach("twice", model=model, storage=tmp_path) as run:
            run.on_event(PERSISTED)
            assert run.report().checkpoints_complete == 0
            raise KeyboardInterrupt
    assert "event_before_run" not in caplog.text
