"""A drive that turns slow under a daemon: it gets less at once, and everybody is told."""

import time
from collections.abc import Generator
from pathlib import Path

import pytest
from places import memory_folder
from scraping import scrape
from watched_drives import Drives, watched_daemon

from everstep.checkpoint.late_plan import LATE_WRITE_S
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import opened
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import DeviceStatus
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames
from everstep.proto.frames import DeviceCondition

FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 40e6, 8e6
SEGMENT_COUNT = 16
LEAF = whole_leaf("weight", "uint8", (SEGMENT_COUNT, 4 << 20))
SAVES_MAX = 20
"""A drive counts as slow after 10 s of its own work, of which each checkpoint gives it more than one."""


@pytest.fixture
def devices() -> Generator[list[Path]]:
    with memory_folder() as folder:
        made = [folder / "d0", folder / "d1"]
        for path in made:
            path.mkdir()
        yield made


@pytest.fixture
def drives(tmp_path: Path, devices: list[Path]) -> Drives:
    """Both are fast."""
    return Drives(tmp_path / "drives", devices, FAST_BYTES_PER_S)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("COLUMNS", "200")


def segments_on(devices: list[Path], step: int) -> list[int]:
    """Return how many segments of a checkpoint each device has."""
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        on = [ref.device_id for ref in run.shard(CheckpointId(1, step), 0).segments]
        counts = {device.path: on.count(device.device_id) for device in store.devices}
    return [counts[path] for path in devices]


@pytest.mark.slow
def test_a_drive_that_turns_slow_is_relieved_at_once_and_said_to_be_slow(
    node_config: Path,
    socket_path: Path,
    devices: list[Path],
    drives: Drives,
    capsys: pytest.CaptureFixture[str],
) -> None:
    well, slow = map(str, devices)
    with (
        watched_daemon(drives, node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(plan_layout([LEAF], [], segment_count=SEGMENT_COUNT), slot_count=1)

        def save(step: int) -> None:
            arena.save(CheckpointId(1, step), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)

        save(1)
        assert segments_on(devices, 1) == [SEGMENT_COUNT / 2] * 2
        drives.hold(devices[1].name, SLOW_BYTES_PER_S)
        save(2)
        same = segments_on(devices, 2)
        speeds = {device.path: device.write_bytes_per_s for device in client.status().stores[0].devices}
        save(3)
        following = segments_on(devices, 3)
        step = 3
        while {device.state for device in client.status().stores[0].devices} == {DeviceStatus.OK}:
            assert step < SAVES_MAX
            save(step := step + 1)
        arena.close()
        status = client.status()
        told = trainer.event(frames.DevicesChanged)
        metrics = scrape(status.daemon.metrics_port)
        assert main(["status"]) == 0
    assert same[1] * 2 <= same[0]
    assert speeds[slow] < 2 * SLOW_BYTES_PER_S < speeds[well], "as seen beside whatever else the machine does"
    assert following[1] == pytest.approx(SEGMENT_COUNT * speeds[slow] / sum(speeds.values()), abs=1)
    found = {device.path: device for device in status.stores[0].devices}
    assert {path: device.state for path, device in found.items()} == {
        well: DeviceStatus.OK,
        slow: DeviceStatus.SLOW,
    }
    assert "MB/s; it gets fewer segments" in found[slow].reason
    assert isinstance(told, frames.DevicesChanged)
    assert {device.path: device.condition for device in told.devices} == {
        well: DeviceCondition.OK,
        slow: DeviceCondition.SLOW,
    }
    assert metrics[f"everstep_device_state{{{slow},slow}}"] == 1
    assert metrics[f"everstep_device_state{{{well},ok}}"] == 1
    assert metrics[f"everstep_device_write_bytes_per_second{{{slow}}}"] < 2 * SLOW_BYTES_PER_S
    assert f"{slow}: {found[slow].reason}" in capsys.readouterr().out


SMALL_S = LATE_WRITE_S / 2
"""No call of which is late; two of them are enough to measure a drive by."""


@pytest.mark.slow
def test_a_slow_drive_is_relieved_and_named_also_where_segments_are_small(
    node_config: Path, socket_path: Path, devices: list[Path], drives: Drives
) -> None:
    """Many times slower, with 1 MiB for each drive: no single transfer tells of its bandwidth, nor is one late."""
    leaf = whole_leaf("weight", "uint8", (2, 1 << 20))
    drives.hold(devices[1].name, (1 << 20) / SMALL_S)
    with (
        watched_daemon(drives, node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(plan_layout([leaf], [], segment_count=2), slot_count=1)

        def save(step: int) -> None:
            arena.save(CheckpointId(1, step), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)

        for step in (1, 2, 3):
            save(step)
        assert segments_on(devices, 1) == [1, 1]
        assert segments_on(devices, 3) == [2, 0]
        deadline_s = time.monotonic() + 120
        while all(device.state is DeviceStatus.OK for device in client.status().stores[0].devices):
            assert time.monotonic() < deadline_s
            save(step := step + 1)
        arena.close()
        (slow,) = [
            device for device in client.status().stores[0].devices if device.state is not DeviceStatus.OK
        ]
    assert (slow.path, slow.state) == (str(devices[1]), DeviceStatus.SLOW)
    assert "MB/s; it gets fewer segments" in slow.reason
