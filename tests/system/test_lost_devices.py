"""A drive dies under a real training run: it goes on, every checkpoint after that is complete on the rest."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drive_filler import empty, fill
from loop_disk import LoopDisk, skip_without

from everstep.hook.trainer_testing import Job, end_daemon

pytestmark = pytest.mark.root


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDisk]:
    skip_without(request.param)
    made = LoopDisk(tmp_path, request.param, "disk")
    try:
        made.mount()
        (made.path / "everstep").mkdir(mode=0o700)
        yield made
    finally:
        end_daemon()
        made.remove()


def test_training_goes_on_and_its_last_checkpoint_needs_the_good_drive_only(
    disk: LoopDisk, job: Job, undisturbed: str
) -> None:
    bad, good = disk.path / "everstep", job.storage[1]
    trainer = job.start("--settle", "--step-s", "0.2", storage=[bad, good])
    trainer.until_step(7)
    disk.cut()
    (done,) = trainer.done()
    assert done["done"] == undisturbed
    assert (done["complete"], done["failures"], done["skipped"]) == ("1.25", [], {})
    assert any(f"device {bad} is suspect" in note for note in done["notes"])
    assert f"device {bad} is suspect" in trainer.log
    end_daemon()
    again = job.start(storage=[good])
    first = again.until_key("restored")
    assert (first["restored"], first["source"], first["finished"]) == ("1.25", "disk", True)
    (last,) = again.done()
    assert last["done"] == undisturbed


def test_what_a_full_drive_did_not_take_is_restored_from_memory_behind_a_run_that_ended_well(
    disk: LoopDisk, job: Job, undisturbed: str
) -> None:
    trainer = job.start("--settle", "--step-s", "0.2", storage=[disk.path / "everstep"])
    trainer.until_step(7)
    fill(disk.path)
    (done,) = trainer.done()
    assert done["done"] == undisturbed
    assert "close_incomplete run=small reason=" in trainer.log
    empty(disk.path)
    again = job.start(storage=[disk.path / "everstep"])
    first = again.until_key("restored")
    assert (first["restored"], first["source"], first["finished"]) == ("1.25", "memory", True)
    (last,) = again.done()
    assert last["done"] == undisturbed
