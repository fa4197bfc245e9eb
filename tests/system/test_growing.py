"""A state that grows or shrinks at each step gets its checkpoints, and comes back bit for bit."""

from pathlib import Path

import pytest

from everstep.hook.trainer_testing import Job, Line, Trainer, end_daemon

JOB_SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "growing_train.py"


def killed_when_ready(trainer: Trainer) -> Line:
    """Return the last step's line of a trainer that is killed behind it."""
    trainer.until_key("ready")
    last = [line for line in trainer.lines if "step" in line][-1]
    trainer.kill()
    return last


@pytest.mark.parametrize(("way", "skipped_most"), [("grows", 5), ("shrinks", 1), ("both", 3)])
def test_it_gets_checkpoints_and_comes_back_from_memory_and_from_the_devices(
    job: Job, way: str, skipped_most: int
) -> None:
    """Of 12 boundaries those are skipped at which an arena is asked for; each trainer is killed behind the last."""
    first = killed_when_ready(job.start("--way", way))
    assert first["failures"] == []
    assert first["complete"] == 12 - first["skipped"]
    assert first["skipped"] <= skipped_most

    second = job.start("--way", way, "--steps", "6")
    found = second.until_key("restored")
    assert (found["source"], found["whole"]) == ("memory", True)
    saved = next(line for line in job.trainers[0].lines if line.get("step") == found["restored"])
    assert found["model"] == saved["model"]
    last = killed_when_ready(second)
    assert last["failures"] == []
    assert last["complete"] >= 4, "what was restored from memory has room for what comes next"

    end_daemon()
    third = job.start("--way", way, "--steps", "0")
    again = third.until_key("restored")
    assert (again["source"], again["whole"]) == ("disk", True)
    third.kill()


def test_the_leaf_that_changes_is_named_with_what_to_do(job: Job) -> None:
    last = killed_when_ready(job.start("--way", "grows"))
    notes = [note for note in last["notes"] if "the structure of the state changes" in note]
    (note,) = notes
    assert "growing.array is" in note
    assert "run.log(...)" in note
    assert "structure_changes" in job.trainers[0].log
