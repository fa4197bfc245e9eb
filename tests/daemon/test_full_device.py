"""A daemon over a device on which no file can be made any more: what is there is restored, what is new is refused."""

import subprocess
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

pytestmark = pytest.mark.root

SAVED = CheckpointId(1, 7)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of few inodes."""
    path = tmp_path / "few-inodes"
    path.mkdir()
    options = "nr_inodes=60,size=64m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "everstep-test", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    (path / "d0").mkdir()
    yield path / "d0"
    subprocess.run(["umount", "--lazy", path], check=True)  # also when a test failed and left something open


def use_all_inodes(folder: Path) -> None:
    paths = (folder / f"file-{number}" for number in count())
    with pytest.raises(OSError, match="No space left"):
        deque(map(Path.touch, paths), maxlen=0)


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
        assert [(offer.attempt, offer.step) for offer in trainer.offers()] == [(1, 7)]
        shard = trainer.fetch(SAVED)
        assert isinstance(shard, frames.Streaming), shard
        assert not trainer.stream(shard)[1].code
        refused = trainer.begin_attempt(2)
        assert isinstance(refused, frames.Failure)
        assert refused.code == "NoSpaceError"
        assert str(device) in refused.message
        assert refused.hint
