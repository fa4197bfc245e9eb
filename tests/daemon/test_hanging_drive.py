"""A daemon of which one drive answers nothing for a while: the kernel holds every call that writes to it."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from full_drives import mounted_drives
from loop_disk import LoopDisk, skip_without
from pausing import wait_until

from everstep.checkpoint.device import lock_directory
from everstep.checkpoint.device_survey import lock_all
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import LockHandle
from everstep.checkpoint.testing import HOLDER, opened
from everstep.core.dead_process import is_dead_but_held
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import DeviceStatus
from everstep.daemon.events.event_types import EventKind, EventQuery
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames
from everstep.proto.frames import DeviceCondition

pytestmark = pytest.mark.root

FREEZE, THAW = 0xC0045877, 0xC0045878
"""FIFREEZE, FITHAW."""
LATE_S = 10
IDLE_S = 1.0
EVERY_COMPLETE = EventQuery(since=0, kinds=frozenset({EventKind.CHECKPOINT_COMPLETE}), follow=True)


@contextmanager
def frozen(drive: LoopDisk) -> Generator[None]:
    """Let calls that write to a drive hang while the block runs."""
    fd = os.open(drive.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, THAW, 0)
    finally:
        os.close(fd)


def made_on(drives: Iterable[LoopDisk]) -> list[Path]:
    """Return a new directory for a store on each drive."""
    places = [drive.path / "everstep" for drive in drives]
    for place in places:
        place.mkdir(mode=0o700)
    return places


def save(trainer: FakeTrainer, checkpoint: CheckpointId) -> frames.Persisted:
    arena = trainer.make_arena(trainer.layout())
    arena.save(checkpoint, seed=checkpoint.step)
    persisted = trainer.event(frames.Persisted)
    arena.close()
    assert isinstance(persisted, frames.Persisted)
    return persisted


def small_files(place: Path) -> set[str]:
    """Return what a device says of the runs of its store: of which checkpoints, attempts and so on.

    Not each manifest is the same: what lies in memory was written once more meanwhile, without the drive.
    """
    found = (path for path in place.glob("runs/**/*") if path.is_file())
    return {str(path.relative_to(place)) for path in found if path.suffix != ".safetensors"}


def test_a_run_begins_beside_a_drive_that_hangs_and_is_on_it_when_it_answers_again(socket_path: Path) -> None:
    skip_without("ext4")
    with mounted_drives("ext4", 2) as (_, drives), daemon_process(socket_path) as daemon:
        places = made_on(drives)
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as client:
            trainer.open_run(places)
            trainer.begin_attempt(1)
            save(trainer, CheckpointId(1, 1))
            next(client.events(EVERY_COMPLETE))  # nothing of it is written to the drive any more
        with FakeTrainer(socket_path) as trainer:
            with frozen(drives[1]):
                assert isinstance(trainer.open_run(places), frames.RunOpened)
                assert isinstance(trainer.begin_attempt(2), frames.Done)
                changed = trainer.event(frames.DevicesChanged)
                assert isinstance(changed, frames.DevicesChanged)
                (late,) = [
                    device for device in changed.devices if device.condition is DeviceCondition.SUSPECT
                ]
                assert late.path == str(places[1])
                assert f"beginning attempt 2 was done on another device {LATE_S}." in late.reason
                assert save(trainer, CheckpointId(2, 1)).under_replicated
            wait_until(lambda: small_files(places[0]) == small_files(places[1]))
            assert not save(trainer, CheckpointId(2, 2)).under_replicated
        daemon.terminate()
        assert daemon.wait(60) == 0
        with opened(places) as (store, report):
            assert (store.is_whole, report.problems) == (True, [])


def test_a_daemon_that_starts_beside_a_drive_that_hangs_goes_on_without_it_and_takes_it_back(
    socket_path: Path,
) -> None:
    skip_without("ext4")
    with mounted_drives("ext4", 2) as (_, drives):
        places = made_on(drives)
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            trainer.open_run(places)
            trainer.begin_attempt(1)
            save(trainer, CheckpointId(1, 1))
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            with frozen(drives[1]):
                found = trainer.open_run(places)
                assert isinstance(found, frames.RunOpened)
                assert any(f"{places[1]} has not answered for {LATE_S} s" in note for note in found.notes)
                assert isinstance(trainer.begin_attempt(2), frames.Done)
                save(trainer, CheckpointId(2, 1))
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
            with connected(socket_path) as daemon:
                wait_until(lambda: daemon.readmit_device(str(places[1])).device.state is DeviceStatus.OK)
        with opened(places) as (store, report):
            assert (store.is_whole, report.problems) == (True, [])
            (run,) = store.runs()
            assert {info.checkpoint for info in run.checkpoints()} == {CheckpointId(1, 1), CheckpointId(2, 1)}


DEAD = """
import sys, threading, time
from pathlib import Path
from everstep.checkpoint.device import lock_directory
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import HOLDER
locks = [lock_directory(RealStorage(), Path(each), HOLDER) for each in sys.argv[1:]]
print("locked", flush=True)
sys.stdin.readline()
threading.Thread(target=lambda: Path(sys.argv[1], "hangs").write_bytes(b"x")).start()
print("goes on", flush=True)
time.sleep(600)
"""


def hangs(pid: int) -> bool:
    """Tell whether a thread of a process is in a call that nothing interrupts."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return any(stat.rpartition(") ")[2].startswith("D") for stat in stats)


def test_the_locks_of_a_process_that_was_ended_and_hangs_are_of_the_dead(tmp_path: Path) -> None:
    """The kernel keeps them, also of drives that are well, until its call returns: who waits for what is said."""
    skip_without("ext4")
    well, other = tmp_path / "well", tmp_path / "other"
    well.mkdir()
    other.mkdir()
    with mounted_drives("ext4", 1) as (_, (drive,)):
        place = drive.path / "everstep"
        place.mkdir(mode=0o700)
        command = [sys.executable, "-P", "-c", DEAD, str(place), str(well)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            with frozen(drive):
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == "goes on\n"
                wait_until(lambda: hangs(process.pid))
                process.kill()
                wait_until(lambda: is_dead_but_held(process.pid))
                locks: dict[Path, LockHandle] = {}
                found = lock_all(RealStorage(), [place, well, other], HOLDER, locks)
                assert (found.keys(), locks.keys()) == ({place, well}, {other})
                locks[other].release()
                with pytest.raises(
                    StorageError, match="is held by a process that was ended while a call on a drive"
                ):
                    lock_all(RealStorage(), [place, well], HOLDER, {})
        assert not is_dead_but_held(process.pid)
        lock_directory(RealStorage(), well, HOLDER).release()


def test_a_device_that_hangs_again_holds_up_its_readmission_alone(socket_path: Path) -> None:
    skip_without("ext4")
    with mounted_drives("ext4", 2) as (_, drives), daemon_process(socket_path):
        places = made_on(drives)
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as daemon:
            trainer.open_run(places)
            trainer.begin_attempt(1)
            save(trainer, CheckpointId(1, 1))
            away = places[1].with_name("away")
            places[1].rename(away)
            assert save(trainer, CheckpointId(1, 2)).under_replicated
            away.rename(places[1])
            with frozen(drives[1]), ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(daemon.readmit_device, str(places[1])) for _ in range(8)]
                (store,) = daemon.devices()
                assert {each.path for each in store.devices} == {str(each) for each in places}
                for each in asked:
                    with pytest.raises(StorageError, match=f"has not answered for {LATE_S} s"):
                        each.result()
            wait_until(lambda: daemon.readmit_device(str(places[1])).device.state is DeviceStatus.OK)
            assert not save(trainer, CheckpointId(1, 3)).under_replicated


def test_a_readmission_of_one_that_still_hangs_leaves_the_store_open_without_it(
    socket_path: Path, tmp_path: Path
) -> None:
    skip_without("ext4")
    other = tmp_path / "other"
    other.mkdir()
    with (
        mounted_drives("ext4", 2) as (_, drives),
        daemon_process(socket_path),
        FakeTrainer(socket_path) as living,
        connected(socket_path) as daemon,
    ):
        places = made_on(drives)
        living.open_run([other], name="living")
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(places)
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
        with frozen(drives[1]):
            for _ in range(2):
                with pytest.raises(StorageError, match=f"is missing still: {places[1]} has not answered"):
                    daemon.readmit_device(str(places[1]))
                found = {each.path: each.state for store in daemon.devices() for each in store.devices}
                assert found[str(places[0])] is DeviceStatus.OK
                assert found[str(places[1])] is DeviceStatus.MISSING
        wait_until(lambda: daemon.readmit_device(str(places[1])).device.state is DeviceStatus.OK)


def test_no_store_is_closed_for_idleness_while_a_drive_of_it_hangs(socket_path: Path, tmp_path: Path) -> None:
    """Who opened it again would find the drive locked by this very daemon."""
    skip_without("ext4")
    other = tmp_path / "other"
    other.mkdir()
    log = socket_path.with_name("daemon.log")
    with (
        mounted_drives("ext4", 2) as (_, drives),
        daemon_process(socket_path, linger_s=IDLE_S),
        FakeTrainer(socket_path) as living,
    ):
        places = made_on(drives)
        living.open_run([other], name="living")
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(places)
            with frozen(drives[1]):
                assert isinstance(trainer.begin_attempt(1), frames.Done)
                assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
                assert not threading.Event().wait(4 * IDLE_S)
                with FakeTrainer(socket_path) as again:
                    again.sock.settimeout(4 * IDLE_S)
                    assert isinstance(again.open_run(places), frames.RunOpened)
                    assert isinstance(again.begin_attempt(2), frames.Done)
                    assert isinstance(again.ask(frames.Detach(request_id=again.number())), frames.Done)
            wait_until(lambda: "store_closed" in log.read_text())
