"""A daemon over a device that is full: what is there is restored, what is new is refused until there is room."""

import mmap
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from drive_filler import empty, fill
from full_drives import mounted_drives
from loop_disk import SIZES_MIB, LoopDisk, skip_without
from pausing import Pause, Phase, pausing_daemon, wait_until
from scraping import scrape

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import opened
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames

pytestmark = pytest.mark.root

SAVED = CheckpointId(1, 7)
SAVED_BYTES = 8 << 20
"""Of a checkpoint."""
FULL_BYTES = 16 << 20
"""A device that has no more free gets nothing."""
LEFT_BYTES = 1 << 17
"""XFS says that it has a little left, and gives nobody any of it."""


@contextmanager
def mounted_tmpfs(path: Path, options: str) -> Generator[Path]:
    """Give a directory on a file system of its own."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "everstep-test", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    (path / "d0").mkdir()
    yield path / "d0"
    subprocess.run(["umount", "--lazy", path], check=True)  # also when a test failed and left something open


@contextmanager
def mapped(fd: int, size_bytes: int) -> Generator[mmap.mmap]:
    """Map what a descriptor that came over the socket stands for."""
    try:
        with mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ) as memory:
            yield memory
    finally:
        os.close(fd)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of few inodes."""
    with mounted_tmpfs(tmp_path / "few-inodes", "nr_inodes=60,size=64m") as made:
        yield made


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """With room for few checkpoints."""
    with mounted_tmpfs(tmp_path / "small", "size=64m") as made:
        yield made


@pytest.fixture(params=sorted(SIZES_MIB))
def drive(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small drive with a file system of its own, which fills to the last block."""
    skip_without(request.param)
    with mounted_drives(request.param, 1) as (_, (made,)):
        yield made.path


def use_all_inodes(folder: Path) -> None:
    paths = (folder / f"file-{number}" for number in count())
    with pytest.raises(OSError, match="No space left"):
        deque(map(Path.touch, paths), maxlen=0)


def save(trainer: FakeTrainer, arena: FakeArena, checkpoint: CheckpointId) -> str:
    """Save a checkpoint and return the code of the error, if it was refused."""
    refused = refusal(trainer, arena, checkpoint)
    return refused.code if refused is not None else ""


def refusal(trainer: FakeTrainer, arena: FakeArena, checkpoint: CheckpointId) -> frames.PersistFailed | None:
    """Save a checkpoint and return how it was refused, if it was."""
    arena.save(checkpoint, seed=checkpoint.step, slot=checkpoint.step % 2)
    trainer.send(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))
    while not isinstance(event := trainer.receive(), frames.Persisted):
        if isinstance(event, frames.PersistFailed):
            return event
    return None


def last_saved(trainer: FakeTrainer, device: Path, *, attempt: int, keep: int, steps: int) -> int:
    """Save so many checkpoints of 8 MiB, while they are saved; return the last step that was."""
    trainer.open_run([device], keep=frames.KeepRules(last=keep))
    assert isinstance(trainer.begin_attempt(attempt), frames.Done)
    arena = trainer.make_arena(trainer.layout((whole_leaf("w", "int8", (SAVED_BYTES,)),)))
    for step in range(1, steps + 1):
        code = save(trainer, arena, CheckpointId(attempt, step))
        if code:
            assert code == "NoSpaceError"
            arena.close()
            return step - 1
    arena.close()
    return steps


def offered(trainer: FakeTrainer) -> list[tuple[int, int]]:
    """Return what can be restored, the newest first."""
    return [(offer.attempt, offer.step) for offer in trainer.offers() if not offer.problem]


def test_without_a_free_inode_the_store_is_opened_and_restored_from(device: Path, tmp_path: Path) -> None:
    socket_path = tmp_path / "before" / "data.sock"
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([device])
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(SAVED, seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
    use_all_inodes(device.parent)
    socket_path = tmp_path / "after" / "data.sock"
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        opened = trainer.open_run([device])
        assert isinstance(opened, frames.RunOpened), opened
        assert any(str(device) in note and "No space left" in note for note in opened.notes)
        assert offered(trainer) == [(1, 7)]
        shard = trainer.fetch(SAVED)
        assert isinstance(shard, frames.Streaming), shard
        assert not trainer.stream(shard)[1].code
        refused = trainer.begin_attempt(2)
        assert isinstance(refused, frames.Failure)
        assert refused.code == "NoSpaceError"
        assert str(device) in refused.message
        assert refused.hint


def test_a_full_device_takes_checkpoints_again_once_fewer_are_kept(
    small_device: Path, socket_path: Path
) -> None:
    """Else it would stay full: what is outdated goes when a checkpoint is complete, and none can be."""
    with daemon_process(socket_path):
        with FakeTrainer(socket_path) as trainer:
            saved = last_saved(trainer, small_device, attempt=1, keep=99, steps=99)
            assert 1 < saved < 9
        with FakeTrainer(socket_path) as trainer:
            assert last_saved(trainer, small_device, attempt=2, keep=1, steps=2 * saved) == 2 * saved


def test_what_has_no_room_fails_before_the_device_counts_as_full(
    small_device: Path, socket_path: Path, tmp_path: Path
) -> None:
    """Room for a small checkpoint is no room for a large one: only what is refused tells of that."""
    config = tmp_path / "node.toml"
    config.write_text(f'[devices]\nnvme0 = "{small_device}"\n[daemon]\nsocket = "{socket_path}"\n')
    failed, full = "everstep_shards_failed_total{NoSpaceError}", f"everstep_device_full{{{small_device}}}"
    with node_daemon(config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        with FakeTrainer(socket_path) as trainer:
            assert last_saved(trainer, Path("nvme0"), attempt=1, keep=99, steps=99) > 1
            assert FULL_BYTES < shutil.disk_usage(small_device).free < FULL_BYTES + 2 * SAVED_BYTES
            metrics = scrape(port)
            assert (metrics[failed], metrics[full]) == (1, 0)
            fill(small_device.parent)
            wait_until(lambda: scrape(port)[full] == 1)  # asked every second


def test_where_a_device_that_has_failed_keeps_all_the_hint_names_it(
    small_device: Path, socket_path: Path, tmp_path: Path
) -> None:
    skip_without("ext4")
    disk = LoopDisk(tmp_path, "ext4", "disk")
    try:
        disk.mount()
        failing = disk.path / "everstep"
        failing.mkdir(mode=0o700)
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            trainer.open_run([small_device, failing], keep=frames.KeepRules(last=1))
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout((whole_leaf("w", "int8", (SAVED_BYTES,)),)))
            assert save(trainer, arena, CheckpointId(1, 1)) == ""
            disk.cut()
            step = 2
            while not (failed := refusal(trainer, arena, CheckpointId(1, step))):
                step += 1
            arena.close()
        assert failed.code == "NoSpaceError"
        assert (
            f"nothing is deleted while {failing} is suspect: `everstep device readmit` it once" in failed.hint
        )
    finally:
        disk.remove()


def test_what_could_not_be_written_waits_in_memory_behind_a_clean_end(
    small_device: Path, socket_path: Path
) -> None:
    with daemon_process(socket_path):
        with FakeTrainer(socket_path) as trainer:
            saved = last_saved(trainer, small_device, attempt=1, keep=99, steps=99)
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([small_device])
            newest = trainer.offers()[0]
            assert (newest.step, newest.in_memory) == (saved + 1, True)
            assert isinstance(trainer.fetch(CheckpointId(1, saved + 1)), frames.Fetched)
            os.close(trainer.reader.take_fd())
            assert last_saved(trainer, small_device, attempt=2, keep=1, steps=2) == 2
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([small_device])
            assert {offer.in_memory for offer in trainer.offers()} == {False}, "all is on the device"


def test_two_daemons_that_promise_the_same_room_lose_nothing(
    small_device: Path, socket_path: Path, pause: Pause, tmp_path: Path
) -> None:
    """Neither knows what the other one has promised: whoever allocates later writes nothing, and keeps its snapshot."""
    beside, theirs = tmp_path / "beside" / "data.sock", small_device.with_name("d1")
    theirs.mkdir()
    leaves = (whole_leaf("w", "int8", (40 << 20,)),)
    with pausing_daemon(pause, Phase("everstep.checkpoint.shard_write:ShardWrite._create")) as daemon:
        with FakeTrainer(socket_path) as late:
            late.open_run([small_device])
            late.begin_attempt(1)
            arena = late.make_arena(late.layout(leaves), slot_count=1)
            arena.save(SAVED, seed=1)
            expected = arena.content(1)["w"]
            pause.reached(daemon)  # its room is promised
            with daemon_process(beside), FakeTrainer(beside) as early:
                early.open_run([theirs])
                early.begin_attempt(1)
                other = early.make_arena(early.layout(leaves), slot_count=1)
                other.save(SAVED, seed=2)
                assert isinstance(early.event(frames.Persisted), frames.Persisted)
                other.close()
                pause.go()
                failed = late.event(frames.PersistFailed)
                assert isinstance(failed, frames.PersistFailed)
                assert failed.code == "NoSpaceError"
            arena.close()
        assert not [*small_device.glob("runs/*/*/data/*"), *small_device.glob("runs/*/*/commits/*")]
        with opened([theirs], read_only=True) as (store, _):
            assert verify_checkpoint(store.runs()[0], SAVED).is_intact
        shutil.rmtree(theirs)
        with FakeTrainer(socket_path) as again:
            again.open_run([small_device])
            assert [(offer.step, offer.in_memory) for offer in again.offers()] == [(SAVED.step, True)]
            fetched = again.fetch(SAVED)
            assert isinstance(fetched, frames.Fetched), fetched
            with mapped(again.reader.take_fd(), fetched.arena_size_bytes) as memory:
                assert memory.find(expected) >= 0
            again.begin_attempt(2)
            arena = again.make_arena(again.layout(leaves), slot_count=1)
            arena.save(CheckpointId(2, 8), seed=3)
            assert isinstance(again.event(frames.Persisted), frames.Persisted)
            arena.close()


def test_a_drive_that_fills_refuses_what_is_new_and_keeps_what_it_has(
    drive: Path, socket_path: Path, tmp_path: Path
) -> None:
    """Twice as much is saved as it holds, which retention makes room for; then somebody else takes all that is left."""
    device = drive / "everstep"
    device.mkdir()
    steps = 2 * shutil.disk_usage(drive).total // SAVED_BYTES
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        assert last_saved(trainer, device, attempt=1, keep=2, steps=steps) == steps
    kept = [(1, steps), (1, steps - 1)]
    again = tmp_path / "again" / "data.sock"
    with daemon_process(again):
        assert fill(drive) > 0
        assert shutil.disk_usage(drive).free < LEFT_BYTES
        with FakeTrainer(again) as trainer:
            assert isinstance(trainer.open_run([device]), frames.RunOpened)
            assert offered(trainer) == kept
            shard = trainer.fetch(CheckpointId(*kept[0]))
            assert isinstance(shard, frames.Streaming), shard
            assert not trainer.stream(shard)[1].code
            fill(drive)  # also what the opening gave back
            refused = trainer.begin_attempt(2)
            assert isinstance(refused, frames.Failure)
            assert refused.code == "NoSpaceError"
        empty(drive)
        with FakeTrainer(again) as trainer:
            trainer.open_run([device], keep=frames.KeepRules(last=2))
            assert isinstance(trainer.begin_attempt(2), frames.Done)
            arena = trainer.make_arena(trainer.layout((whole_leaf("w", "int8", (SAVED_BYTES,)),)))
            fill(drive)
            assert save(trainer, arena, CheckpointId(2, 1)) == "NoSpaceError"
            assert offered(trainer) == [(2, 1), *kept], "what was refused is in memory"
            empty(drive)
            assert save(trainer, arena, CheckpointId(2, 2)) == ""
            assert offered(trainer)[:2] == [(2, 2), kept[0]]
            arena.close()
    with opened([device]) as (store, report):
        run = store.run(os.geteuid(), "test")
        assert report.problems == []
        assert run.offered()[:2] == [CheckpointId(2, 2), CheckpointId(*kept[0])]
        assert all(verify_checkpoint(run, each).is_intact for each in run.offered())
