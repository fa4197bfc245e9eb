"""Several ranks under torchrun with DDP on gloo: one step for all, complete only together, data split exactly once."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.testing import opened
from everstep.hook.trainer_start_testing import Start
from everstep.hook.trainer_testing import Job, Trainer, daemon_pid, end_daemon

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "small_train.py"
EPOCH_STEPS = 6
"""96 samples in batches of 8 on each of two ranks."""


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory, start_trainer: Start) -> list[str]:
    return undisturbed_digests(tmp_path_factory.mktemp("pair"), start_trainer)


def undisturbed_digests(folder: Path, start_trainer: Start, *arguments: str, ranks: int = 2) -> list[str]:
    """Return how each rank ends when nobody kills it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_SOCKET", str(folder / "s" / "data.sock"))
        job = Job(folder / "job", SCRIPT, start_trainer)
        lines = job.start("--every", "2", *arguments, ranks=ranks, torchrun=True).done()
        end_daemon()
    return [line["done"] for line in lines]


def restored(trainer: Trainer, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank said it restored, by rank."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < ranks:
        line = trainer.until_key("restored")
        found[line["rank"]] = line
    return [found[rank] for rank in range(ranks)]


def entered(lineages: list[tuple[int, list[dict[str, Any]]]], epoch: int) -> list[int]:
    """Return the samples of an epoch that entered training: of each part of the lineage, up to where the next began."""
    return sorted(
        sample
        for last, lines in lineages
        for line in lines
        if line["epoch"] == epoch and line["step"] <= last
        for sample in line["ids"]
    )


def test_both_ranks_restore_the_same_step_and_end_the_same(job: Job, undisturbed_pair: list[str]) -> None:
    # Held before boundary 8: who dies as it seals may have told the other ranks, and not yet its daemon.
    first = job.start("--every", "2", "--settle", "--hold", "7", ranks=2)
    first.until_step(7)
    first.kill()
    second = job.start("--every", "2", ranks=2)
    a, b = restored(second, 2)
    assert a["restored"] == b["restored"]
    assert a["attempt"] == b["attempt"] == 2
    assert a["source"] == b["source"] == "memory"
    assert [line["done"] for line in second.done()] == undisturbed_pair
    base = int(a["restored"].split(".")[1])
    for epoch in (0, 1):
        assert entered([(base, first.steps), (10**9, second.steps)], epoch) == list(range(96))


def test_both_ranks_go_back_to_an_older_checkpoint(job: Job, undisturbed_pair: list[str]) -> None:
    first = job.start("--every", "2", "--until", "8", ranks=2)
    assert first.until_key("waiting")["complete"] == "1.8"
    first.kill()
    second = job.start("--every", "2", "--back-to", "1.4", ranks=2)
    assert [line["restored"] for line in restored(second, 2)] == ["1.4", "1.4"]
    assert [line["done"] for line in second.done()] == undisturbed_pair


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", 1)])
def test_ranks_on_one_gpu_restore_the_same_step_and_end_the_same(
    job: Job, tmp_path: Path, start_trainer: Start, backend: str, ranks: int
) -> None:
    on_gpu = ("--device", "cuda", "--backend", backend)
    undisturbed = undisturbed_digests(tmp_path / "undisturbed", start_trainer, *on_gpu, ranks=ranks)
    first = job.start("--every", "2", "--settle", *on_gpu, ranks=ranks, torchrun=True)
    first.until_step(7)
    first.kill()
    second = job.start("--every", "2", *on_gpu, ranks=ranks, torchrun=True)
    said = restored(second, ranks)
    assert len({line["restored"] for line in said}) == 1
    assert {(line["source"], line["attempt"]) for line in said} == {("memory", 2)}
    assert [line["done"] for line in second.done()] == undisturbed


def test_after_the_daemon_died_too_both_restore_from_disk(job: Job, undisturbed_pair: list[str]) -> None:
    first = job.start("--every", "2", "--until", "7", ranks=2)
    first.until_key("waiting")
    os.kill(daemon_pid(), signal.SIGKILL)
    first.kill()
    second = job.start("--every", "2", ranks=2)
    a, b = restored(second, 2)
    assert (a["source"], b["source"]) == ("disk", "disk")
    assert a["restored"] == b["restored"] == "1.6"
    assert [line["done"] for line in second.done()] == undisturbed_pair


def test_a_checkpoint_is_complete_only_with_both_shards(job: Job) -> None:
    for line in job.start("--every", "2", "--settle", ranks=2).done():
        assert line["failures"] == []
    with opened(job.storage, read_only=True) as (store, _):
        (run,) = store.runs()
        assert run.checkpoints()
        for info in run.checkpoints():
            assert info.ranks == (0, 1)
            assert info.state.value == "complete"
        assert run.complete_floor() == run.checkpoints()[0].checkpoint


def test_a_lost_shard_makes_both_ranks_take_the_older_checkpoint(job: Job) -> None:
    first = job.start("--every", "2", "--until", "7", ranks=2)
    first.until_key("waiting")
    os.kill(daemon_pid(), signal.SIGKILL)
    first.kill()
    for device in job.storage:
        for manifest in device.glob("runs/*/*/commits/1.6.1.mf"):
            manifest.unlink()
    second = job.start("--every", "2", ranks=2)
    a, b = restored(second, 2)
    assert a["restored"] == b["restored"] == "1.4"
    second.kill()


def test_a_request_of_any_rank_becomes_a_checkpoint_of_all(job: Job) -> None:
    trainer = job.start("--every", "1000", "--request-at", "3", "--epochs", "5", "--settle", ranks=2)
    trainer.done()
    with opened(job.storage, read_only=True) as (store, _):
        (run,) = store.runs()
        steps = sorted(info.checkpoint.step for info in run.checkpoints())
    assert len(steps) == 2  # the one asked for, and the last boundary
    assert 3 < steps[0] <= 3 + 16
    assert steps[1] == 5 * EPOCH_STEPS + 1


def rank_0_waits(trainer: Trainer) -> dict[str, Any]:
    """Return the line of rank 0, whose shard is what another world size restores (BatchNorm's differ by rank)."""
    return trainer.until(lambda line: "waiting" in line and line["rank"] == 0)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_ddp_checkpoint_restores_at_another_world_size(job: Job, before: int, after: int) -> None:
    first = job.start("--every", "2", "--until", "4", ranks=before)
    state = rank_0_waits(first)["state"]
    first.kill()
    second = job.start("--every", "2", ranks=after)
    said = restored(second, after)
    assert {line["restored"] for line in said} == {"1.4"}
    assert {line["state"] for line in said} == {state}
    second.done()
    assert "buffers_of_rank_0" not in second.log
    for epoch in (0, 1):
        assert entered([(4, first.steps), (10**9, second.steps)], epoch) == list(range(96))
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "verify", "small", "--ledger", *job.storage],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "each sample exactly once" in verified.stdout


def test_that_ranks_had_buffers_of_their_own_is_said_at_another_world_size(job: Job) -> None:
    first = job.start("--every", "2", "--until", "4", "--own-buffers", ranks=2)
    states = {
        line["rank"]: line["state"] for line in (first.until_key("waiting"), first.until_key("waiting"))
    }
    first.kill()
    assert states[0] != states[1]
    said = (
        "buffers_of_rank_0 run=small buffers=model.1.running_mean and 2 more: of 2 ranks each had its own",
        "values_of_rank_0 run=small components=own: of 2 ranks each had its own",
    )
    same = job.start("--every", "2", "--own-buffers", "--until", "5", ranks=2)
    assert {line["rank"]: line["state"] for line in restored(same, 2)} == states
    same.kill()
    assert not any(each in same.log for each in said)
    other = job.start("--every", "2", "--until", "6")
    (line,) = restored(other, 1)
    other.kill()
    assert line["state"] == states[0]
    assert all(each in other.log for each in said), other.log


def test_what_the_user_calls_replicated_restores_at_another_world_size(job: Job) -> None:
    first = job.start("--every", "2", "--until", "4", "--replicated", ranks=2)
    state = rank_0_waits(first)["state"]
    first.kill()
    second = job.start("--every", "2", "--until", "6", "--replicated")
    (line,) = restored(second, 1)
    assert (line["restored"], line["state"]) == ("1.4", state)
    second.kill()


def test_a_boundary_that_fails_on_one_rank_alone_holds_up_none_that_follow(job: Job) -> None:
    ends = job.start("--every", "2", "--epochs", "1", "--settle", "--stumble-at", "4", ranks=2).done()
    for line in ends:
        assert line["failures"] == [
            "1.4: rank 1: RuntimeError: not now; while state_dict() of 'stumbling' was read for a snapshot"
        ]
        assert line["complete"] == f"1.{EPOCH_STEPS + 1}"
        assert line["steps"] == EPOCH_STEPS


def died(job: Job, step: int) -> None:
    """Train on two ranks; one dies just before a boundary that gets a checkpoint, and the other one seals its part."""
    first = job.start("--every", "2", "--settle", "--slots", "2", "--die-at", str(step), ranks=2)
    assert first.finish() != 0


def test_what_refuses_one_rank_is_raised_by_all(job: Job) -> None:
    """Rank 0 found its directory another one, and rank 1 was refused: rank 0 waited five minutes for it."""
    first = job.start("--every", "1", "--until", "3", ranks=2)
    first.until_key("waiting")
    first.until_key("waiting")
    first.kill()
    for path in job.storage:
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
    second = job.start("--epochs", "1", ranks=2)
    assert second.finish() != 0
    refused = re.findall(r"StorageError: (rank \d: )?(.* is not the directory that was opened)", second.log)
    assert len({who for who, _ in refused}) == 2, second.log


def test_what_one_rank_alone_had_sealed_leaves_room_for_what_follows(job: Job) -> None:
    """Both slots of rank 0 hold checkpoints of the attempt before: the restored one, and one that rank 1 lacks."""
    died(job, 4)
    second = job.start("--every", "2", "--settle", "--slots", "2", "--epochs", "1", ranks=2)
    for line in restored(second, 2):
        assert (line["restored"], line["source"]) == ("1.2", "memory")
    for line in second.done():
        assert (line["failures"], line["complete"]) == ([], f"2.{EPOCH_STEPS + 1}")
        assert line["taken"] == 3  # 2.4, 2.6 and the last boundary


def test_another_world_size_restores_what_all_ranks_had_saved(job: Job) -> None:
    died(job, 4)
    end_daemon()
    with opened(job.storage, read_only=True) as (store, _):
        (run,) = store.runs()
        assert [(str(each.checkpoint), each.ranks) for each in run.checkpoints()] == [
            ("1.4", (0,)),
            ("1.2", (0, 1)),
        ]
    (line,) = restored(job.start("--every", "2", "--until", "4"), 1)
    assert line["restored"] == "1.2"


def test_a_crash_before_any_checkpoint_was_complete_begins_anew(job: Job) -> None:
    died(job, 2)
    second = job.start("--every", "2", "--settle", "--slots", "2", "--epochs", "1", ranks=2)
    assert [line["restored"] for line in restored(second, 2)] == [None, None]
    for line in second.done():
        assert (line["failures"], line["complete"]) == ([], f"2.{EPOCH_STEPS + 1}")
    assert "none_was_complete checkpoints=1.2" in second.log


def test_what_differs_between_ranks_is_refused_at_another_world_size(job: Job) -> None:
    first = job.start("--every", "2", "--until", "4", "--per-rank", ranks=2)
    first.until_key("waiting")
    first.kill()
    second = job.start("--every", "2", "--per-rank")
    assert second.finish() == 1
    assert "StateMismatchError" in second.log
    assert "'own.weight' is different on each" in second.log
