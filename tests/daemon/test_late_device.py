"""A drive that stands still under a daemon: what it was given goes to the others, and everybody is told its name."""

from collections.abc import Generator
from pathlib import Path

import pytest
from pausing import wait_until
from places import memory_folder
from scraping import scrape
from watched_drives import Drives, watched_daemon

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import DeviceStatus
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames

FAST_BYTES_PER_S = 400e6
SEGMENT_COUNT = 8
LEAF = whole_leaf("weight", "uint8", (SEGMENT_COUNT, 4 << 20))


@pytest.fixture
def devices() -> Generator[list[Path]]:
    with memory_folder() as folder:
        made = [folder / "d0", folder / "d1"]
        for path in made:
            path.mkdir()
        yield made


def test_checkpoints_go_on_without_a_drive_that_stands_still_and_with_it_when_it_moves_again(
    node_config: Path, socket_path: Path, tmp_path: Path, devices: list[Path]
) -> None:
    """Also when there is no second slot any more, which the drive may read from."""
    drives = Drives(tmp_path / "drives", devices, FAST_BYTES_PER_S)
    well, still = map(str, devices)
    with (
        watched_daemon(drives, node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(plan_layout([LEAF], [], segment_count=SEGMENT_COUNT), slot_count=2)

        def offered() -> int:
            free = trainer.event(frames.SlotFree)
            assert isinstance(free, frames.SlotFree)
            return free.slot

        def save(step: int) -> frames.Persisted:
            slot = step - 1 if step <= 2 else offered()
            arena.save(CheckpointId(1, step), seed=step, slot=slot)
            trainer.send(frames.SealedEverywhere(attempt=1, step=step))
            persisted = trainer.event(frames.Persisted)
            assert isinstance(persisted, frames.Persisted)
            return persisted

        def states() -> dict[str, DeviceStatus]:
            return {device.path: device.state for device in client.status().stores[0].devices}

        save(1)
        before = set(devices[1].rglob("*.safetensors"))
        drives.hold(devices[1].name, 0)
        assert save(2).step == 2
        notice = trainer.event(frames.Notice)
        assert isinstance(notice, frames.Notice)
        assert "is written again without" in notice.message
        assert states() == {well: DeviceStatus.OK, still: DeviceStatus.SUSPECT}
        (found,) = [device for device in client.status().stores[0].devices if device.path == still]
        assert "has taken" in found.reason
        metrics = scrape(client.status().daemon.metrics_port)
        assert metrics[f"everstep_device_state{{{still},suspect}}"] == 1
        for step in (3, 4, 5):
            assert save(step).step == step
        drives.hold(devices[1].name, FAST_BYTES_PER_S)
        wait_until(lambda: states() == {well: DeviceStatus.OK, still: DeviceStatus.OK})
        assert set(devices[1].rglob("*.safetensors")) <= before
        for step in (6, 7):
            assert save(step).step == step
        arena.close()
