"""A run whose loader is a SharedLoader: killed in mid-epoch it goes on exactly once, alone or beside others."""

from collections import Counter
from typing import Any

import pytest

from everstep.daemon.cli.main import main
from everstep.hook.trainer_testing import Job

SAMPLES, EPOCH_STEPS = 96, 12


def ids_of(lines: list[dict[str, Any]], epoch: int) -> list[int]:
    return [sample for line in lines if line["epoch"] == epoch for sample in line["ids"]]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_it_goes_on_where_it_was_killed_and_ends_as_with_a_data_loader(
    job: Job, undisturbed: str, workers: str
) -> None:
    arguments = ["--group", "search", "--workers", workers]
    trainer = job.start("--until", "13", *arguments)
    trainer.until_key("waiting")
    trainer.kill()
    again = job.start(*arguments)
    assert again.until_key("restored")["restored"] == "1.10"
    (done,) = again.done()
    assert done["done"] == undisturbed
    lines = [line for line in trainer.steps if line["step"] <= 10] + again.steps
    for epoch in range(2):
        assert sorted(ids_of(lines, epoch)) == list(range(SAMPLES))


def test_who_came_late_and_takes_the_missed_part_last_goes_on_so_after_a_crash(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    early = job.start("--name", "early", "--until", "5", "--group", "search")
    early.until_key("waiting")
    order = [line["ids"] for line in early.steps]
    arguments = ["--name", "late", "--group", "search", "--join", "rotate"]
    late = job.start("--until", "9", *arguments)
    late.until_key("waiting")
    late.kill()
    assert main(["verify", "late", "--ledger"]) == 0
    assert "epoch 0, 40 of 96 samples" in capsys.readouterr().out
    again = job.start(*arguments)
    assert again.until_key("restored")["restored"] == "1.5"
    (done,) = again.done()
    assert done["failures"] == []
    lines = [line for line in late.steps if line["step"] <= 5] + again.steps
    assert [line["ids"] for line in lines if line["epoch"] == 0][EPOCH_STEPS - 5 :] == order
    for epoch in range(2):
        assert Counter(ids_of(lines, epoch)) == Counter(range(SAMPLES))
    assert main(["verify", "late", "--ledger"]) == 0


def test_a_rotated_epoch_is_refused_by_a_data_loader(job: Job) -> None:
    early = job.start("--name", "early", "--until", "5", "--group", "search")
    early.until_key("waiting")
    late = job.start("--name", "late", "--until", "5", "--group", "search", "--join", "rotate")
    late.until_key("waiting")
    late.kill()
    plain = job.start("--name", "late")
    assert plain.finish() != 0
    assert "of a SharedLoader that began its epoch at sample 40" in plain.log
