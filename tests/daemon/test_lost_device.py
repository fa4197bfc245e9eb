"""A device that dies or fills under a daemon: what is sealed goes to the rest, and everybody is told."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_disk import LoopDisk, skip_without
from pausing import wait_until
from scraping import scrape

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import DeviceStatus
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames
from everstep.proto.frames import DeviceCondition

pytestmark = pytest.mark.root

FIRST, SECOND, THIRD = CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(1, 3)
NAMES = [Path("nvme0"), Path("nvme1")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    skip_without("ext4")
    made = LoopDisk(tmp_path, "ext4", "disk")
    try:
        made.mount()
        (made.path / "everstep").mkdir(mode=0o700)
        yield made
    finally:
        made.remove()


@pytest.fixture
def devices(disk: LoopDisk, tmp_path: Path) -> list[Path]:
    """The first one's power can be cut."""
    good = tmp_path / "good"
    good.mkdir()
    return [disk.path / "everstep", good]


def attached(trainer: FakeTrainer, *, world_size: int = 1) -> FakeArena:
    reply = trainer.open_run(NAMES, world_size=world_size)
    assert isinstance(reply, frames.RunOpened), reply
    assert [device.condition for device in reply.devices] == [DeviceCondition.OK] * 2
    trainer.begin_attempt(1)
    return trainer.make_arena(trainer.layout())


def conditions(event: frames.Reply) -> dict[str, DeviceCondition]:
    assert isinstance(event, frames.DevicesChanged)
    return {device.path: device.condition for device in event.devices}


def check_restored_from(device: Path, arena: FakeArena, expected: CheckpointId, seed: int) -> None:
    """The good device alone is enough."""
    with opened([device], read_only=True) as (store, _):
        (run,) = store.runs()
        assert run.offered()[0] == expected
        assert load(run, run.manifest(expected, 0)) == arena.content(seed)


def test_a_device_that_dies_is_left_out_and_the_snapshot_is_written_at_once_to_the_rest(
    node_config: Path, disk: LoopDisk, devices: list[Path], socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, world_size=2)  # nothing is completed meanwhile
            arena.save(FIRST, seed=1, world_size=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            disk.cut()
            arena.save(SECOND, seed=2, slot=1, world_size=2)
            saved = trainer.event(frames.Persisted)
            assert isinstance(saved, frames.Persisted)
            assert (saved.step, saved.under_replicated) == (2, True)
            changed = conditions(trainer.event(frames.DevicesChanged))
            assert changed == {
                str(devices[0]): DeviceCondition.SUSPECT,
                str(devices[1]): DeviceCondition.OK,
            }
            notice = trainer.event(frames.Notice)
            assert isinstance(notice, frames.Notice)
            assert "1.2 is written again without" in notice.message
            assert str(devices[0]) in notice.message
            states = {device.path: device for device in client.status().stores[0].devices}
            metrics = scrape(port)
            check_restored_from(devices[1], arena, SECOND, 2)
            arena.close()
    assert states[str(devices[0])].state is DeviceStatus.SUSPECT
    assert states[str(devices[0])].reason
    assert states[str(devices[1])].state is DeviceStatus.OK
    assert metrics[f"everstep_device_state{{{devices[0]},suspect}}"] == 1
    assert metrics["everstep_shard_writes_retried_total{StorageError}"] == 1
    assert metrics["everstep_shards_persisted_total"] == 2
    assert not any(
        value for name, value in metrics.items() if name.startswith("everstep_shards_failed_total")
    )
    log = socket_path.with_name("daemon.log").read_text()
    assert "persist_failed" in log
    assert "shard_written_again" in log


def test_when_a_device_dies_what_is_committed_there_is_written_again_from_memory(
    node_config: Path, disk: LoopDisk, devices: list[Path], socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, world_size=2)
            arena.save(FIRST, seed=1, world_size=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            disk.cut()
            trainer.send(frames.Complete(attempt=1, step=1))  # its floor cannot be written there
            assert DeviceCondition.SUSPECT in conditions(trainer.event(frames.DevicesChanged)).values()
            notice = trainer.event(frames.Notice)
            assert isinstance(notice, frames.Notice)
            assert notice.code == ""
            assert "rank 0 of checkpoint 1.1 was written again to the devices that are left" in notice.message
            metrics = scrape(port)
            check_restored_from(devices[1], arena, FIRST, 1)
            # From memory, too: its headers are those of the new generation now.
            fetched = trainer.fetch(FIRST)
            assert isinstance(fetched, frames.Fetched), fetched
            arena.close()
    assert metrics["everstep_shards_rewritten_total"] == 1
    assert metrics[f"everstep_device_sync_duration_seconds_count{{{devices[1]}}}"] == 2, (
        "the shard's, and what was written again"
    )
    assert metrics["everstep_shards_rewrite_failed_total"] == 0
    assert "shard_mended" in socket_path.with_name("daemon.log").read_text()


def test_a_device_that_fills_gets_nothing_more_and_status_and_metrics_say_so(
    node_config: Path, disk: LoopDisk, devices: list[Path], socket_path: Path
) -> None:
    with (
        node_daemon(node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        arena = attached(trainer)
        arena.save(FIRST, seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        filler = subprocess.run(
            ["dd", "if=/dev/zero", f"of={disk.path}/filler", "bs=64k"], capture_output=True, check=False
        )
        assert b"No space left" in filler.stderr
        port = client.status().daemon.metrics_port
        arena.save(SECOND, seed=2, slot=1)
        saved = trainer.event(frames.Persisted)
        assert isinstance(saved, frames.Persisted)
        assert saved.step == 2
        full, other = map(str, devices)
        is_full = f"everstep_device_full{{{full}}}"
        wait_until(lambda: scrape(port)[is_full] == 1)  # asked every second
        views = {device.path: device for device in client.status().stores[0].devices}
        metrics = scrape(port)
        (disk.path / "filler").unlink()
        wait_until(lambda: scrape(port)[is_full] == 0)
        (run,) = _runs(devices[1:])
        arena.close()
    assert {view.state for view in views.values()} == {DeviceStatus.OK}
    assert "has no room" in views[full].reason
    assert not views[other].reason
    assert (metrics[is_full], metrics[f"everstep_device_full{{{other}}}"]) == (1, 0)
    assert (
        metrics[f"everstep_device_free_bytes{{{full}}}"] < metrics[f"everstep_device_free_bytes{{{other}}}"]
    )
    assert len(run) == 2


def _runs(devices: list[Path]) -> list[list[Path]]:
    return [sorted(device.glob("runs/*/*/data/*")) for device in devices]


def begin_known_run(socket_path: Path) -> None:
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.open_run(NAMES, name="known"), frames.RunOpened)
        assert isinstance(trainer.begin_attempt(1), frames.Done)


def save_as_the_next_job(socket_path: Path, name: str) -> None:
    """Its checkpoint is durable, whatever became of a device."""
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.open_run(NAMES, name=name, takeover=True), frames.RunOpened)
        assert isinstance(trainer.begin_attempt(2), frames.Done)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(2, 1), seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


@pytest.mark.parametrize("name", ["known", "new"])
def test_a_job_that_comes_when_a_device_has_died_is_the_first_to_see_it_and_is_let_in(
    node_config: Path, disk: LoopDisk, devices: list[Path], socket_path: Path, name: str
) -> None:
    with node_daemon(node_config, socket_path):
        begin_known_run(socket_path)
        disk.cut()
        save_as_the_next_job(socket_path, name)
        with connected(socket_path) as client:
            (store,) = client.status().stores
            assert {device.path: device.state for device in store.devices} == {
                str(devices[0]): DeviceStatus.SUSPECT,
                str(devices[1]): DeviceStatus.OK,
            }


@pytest.mark.parametrize("name", ["known", "new"])
def test_a_job_that_comes_when_a_directory_was_emptied_writes_nothing_there(
    node_config: Path, devices: list[Path], socket_path: Path, name: str
) -> None:
    """It would be acknowledged, and the next daemon would not know the directory any more."""
    with node_daemon(node_config, socket_path):
        begin_known_run(socket_path)
        shutil.rmtree(devices[0])
        devices[0].mkdir()
        save_as_the_next_job(socket_path, name)
        with connected(socket_path) as client:
            (store,) = client.status().stores
            (emptied,) = (device for device in store.devices if device.path == str(devices[0]))
        assert emptied.state is DeviceStatus.SUSPECT
        assert "is not the directory that was opened" in emptied.reason
        assert list(devices[0].rglob("*")) == []
        shutil.rmtree(devices[1])
        devices[1].mkdir()
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(NAMES, name=name, takeover=True)
            refused = trainer.begin_attempt(3)
            assert isinstance(refused, frames.Failure)
            assert "was emptied, unmounted or replaced" in refused.message


def test_where_nothing_is_left_the_trainer_is_told(tmp_path: Path, disk: LoopDisk, socket_path: Path) -> None:
    config = tmp_path / "one.toml"
    config.write_text(
        f'[devices]\nnvme0 = "{disk.path}/everstep"\n[daemon]\nsocket = "{socket_path}"\n[metrics]\nenabled = true\n'
    )
    with (
        node_daemon(config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        assert isinstance(trainer.open_run(NAMES[:1]), frames.RunOpened)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        disk.cut()
        arena.save(FIRST, seed=1)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert "1.1 was not saved: device" in failed.message
        status = client.status().daemon
        assert (status.persisted_count, status.failed_count) == (0, 1)
        assert scrape(status.metrics_port)[f"everstep_shards_failed_total{{{failed.code}}}"] == 1
        fetched = trainer.fetch(FIRST)
        assert isinstance(fetched, frames.Fetched), fetched
        arena.close()


def test_a_device_that_does_not_answer_at_the_start_is_named_and_the_rest_goes_on(
    node_config: Path, disk: LoopDisk, devices: list[Path], socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path):
        pass
    disk.cut()
    with (
        node_daemon(node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        (store,) = client.status().stores
        assert [(device.path, device.state) for device in store.devices] == [
            (str(devices[0]), DeviceStatus.MISSING),
            (str(devices[1]), DeviceStatus.OK),
        ]
        assert "disk.id" in store.devices[0].reason
        assert "[EIO]" in store.devices[0].reason
        assert isinstance(trainer.open_run(NAMES), frames.RunOpened)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(FIRST, seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        check_restored_from(devices[1], arena, FIRST, seed=1)
        arena.close()
    disk.unmount()
    disk.mount()
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        (store,) = client.status().stores
        assert {device.state for device in store.devices} == {DeviceStatus.OK}
