"""Real jobs, a real daemon: each job gets what a DataLoader alone would give it, whoever prepares, dies or sleeps."""

import signal
import subprocess
from pathlib import Path

import pytest
import share_job
from share_search import Search

BATCHES = -(-share_job.SAMPLES // share_job.BATCH_SIZE)


@pytest.mark.parametrize("workers", [0, 2])
def test_three_jobs_prepare_each_batch_once_between_them(
    search: Search, alone: list[list[list[float]]], workers: int
) -> None:
    jobs = [search.begun({"num_workers": workers, "jobs": 3, "gather_s": 3600.0}) for _ in range(3)]
    for job in jobs:
        job.tell(epochs=2)
    for job in jobs:
        assert job.hear() == alone[:2]
        assert job.ask()["problems"] == []
    prepared = search.prepared()
    first = {tuple(row) for row in alone[0][: share_job.BATCH_SIZE]}
    ours = {tuple(row): 3 if tuple(row) in first else 1 for epoch in alone[:2] for row in epoch}
    assert {row: count for row, count in prepared.items() if row in ours} == ours


def test_a_producer_killed_in_mid_batch_is_replaced(search: Search, alone: list[list[list[float]]]) -> None:
    victim = int(alone[0][share_job.BATCH_SIZE + 1][0])  # in the second batch, which the victim is leased
    jobs = {"jobs": 2, "gather_s": 3600.0, "lease_s": 3600.0}
    one, other = search.begun(jobs, hang=victim), search.begun(jobs)
    one.tell(epochs=1)
    other.tell(take=1)
    assert other.hear()[0] == alone[0][: share_job.BATCH_SIZE]
    search.wait_for("hangs")
    other.tell(take=BATCHES)
    one.kill()
    assert [row for batch in other.hear() for row in batch] == alone[0][share_job.BATCH_SIZE :]
    assert other.ask()["problems"] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_consumer_that_is_killed_holds_nobody(
    search: Search, alone: list[list[list[float]]], workers: int
) -> None:
    jobs = [search.begun({"num_workers": workers, "jobs": 2, "gather_s": 3600.0}) for _ in range(2)]
    for job in jobs:
        job.tell(take=3)
    for job in jobs:
        assert len(job.hear()) == 3
    jobs[0].kill()
    assert jobs[1].take(BATCHES) == alone[0][3 * share_job.BATCH_SIZE :]
    assert [jobs[1].ask(epochs=1)] == [[alone[1]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_the_daemon_each_goes_on_in_the_same_order(
    search: Search, daemon: subprocess.Popen[bytes], alone: list[list[list[float]]], workers: int
) -> None:
    jobs = [search.begun({"num_workers": workers, "jobs": 2, "gather_s": 3600.0}) for _ in range(2)]
    for job in jobs:
        job.tell(take=3)
    got = [[row for batch in job.hear() for row in batch] for job in jobs]
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    for job, rows in zip(jobs, got, strict=True):
        assert rows + job.take(BATCHES) == alone[0]
        said = job.ask()
        assert (said["problems"], said["shared"]) == ([], False)
        assert job.errors.read_text().count("share_alone") == 1


def test_a_job_that_sleeps_holds_nobody(search: Search, alone: list[list[list[float]]]) -> None:
    jobs = [search.begun({"jobs": 2, "gather_s": 3600.0}) for _ in range(2)]
    for job in jobs:
        job.tell(take=1)
    assert [job.hear() for job in jobs] == [[alone[0][: share_job.BATCH_SIZE]]] * 2
    rest = jobs[1].take(BATCHES)
    assert rest == alone[0][share_job.BATCH_SIZE :]
    assert jobs[1].ask(epochs=5) == alone[1:6]  # 50 batches: more than the window is long
    assert jobs[0].take(BATCHES) == rest
    assert jobs[0].ask(epochs=1) == alone[1:2]


def test_who_comes_late_prepares_what_it_missed_until_it_meets_the_others(
    search: Search, alone: list[list[list[float]]]
) -> None:
    early = search.begun()
    assert early.take(5) == alone[0][: 5 * share_job.BATCH_SIZE]
    late = search.begun()
    assert late.take(BATCHES) == alone[0]
    assert early.take(BATCHES) == alone[0][5 * share_job.BATCH_SIZE :]
    counts = search.prepared()
    assert [counts[row[0], row[1]] for row in alone[0]] == [2] * 20 + [1] * 18  # pyright: ignore[reportArgumentType]
    assert early.ask()["received"] == 9, "all but the first batch"
    assert late.ask()["problems"] == []


def test_who_comes_late_may_take_what_it_missed_last_and_that_survives_a_restart(
    search: Search, alone: list[list[list[float]]]
) -> None:
    early = search.begun()
    early.take(5)
    late = search.begun({"join": "rotate"})
    got = late.take(3)
    assert got == alone[0][20:32]
    said = late.ask()
    assert said["state"]["shared"] == {"batch_size": 4, "drop_last": False, "start": 5, "taken": 3}
    assert said["state"]["format"] == "everstep-shared-loader/1"
    late.kill()
    again = search.begun({"join": "rotate"})
    assert again.ask(load={"state": said["state"], "ledger": said["ledger"]}) is None
    assert got + again.take(BATCHES) == alone[0][20:] + alone[0][:20]
    said = again.ask()
    assert said["problems"] == []
    assert said["state"]["epoch"] == 1
    assert early.take(BATCHES) == alone[0][20:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_taken_in_mid_epoch_goes_on_there(
    search: Search, alone: list[list[list[float]]], workers: int
) -> None:
    first = search.begun({"num_workers": workers})
    got = first.take(4)
    said = first.ask()
    first.kill()
    second = search.begun({"num_workers": 2 - workers})
    second.ask(load={"state": said["state"], "ledger": said["ledger"]})
    assert got + second.take(BATCHES) == alone[0]
    assert second.ask(epochs=1) == alone[1:2]
    assert second.ask()["problems"] == []


def test_differing_transforms_are_refused_with_the_leaf(search: Search) -> None:
    one, other = search.begun(), search.begun(scale=2.0)
    assert len(one.take(1)) == 4
    said = other.ask(take=1)["error"]
    assert "batch[1] of the first batch (float64 [4, 1]) has other contents here than in the group" in said
    assert "'search'" in said
    assert len(one.take(BATCHES)) == share_job.SAMPLES - 4


def test_a_sample_that_kills_workers_is_left_out_and_named_in_all_jobs(
    search: Search, alone: list[list[list[float]]]
) -> None:
    killer = int(alone[0][9][0])
    shared = {"num_workers": 2, "jobs": 3, "gather_s": 3600.0}
    jobs = [search.begun(shared, kills=killer) for _ in range(3)]
    for job in jobs:
        job.tell(epochs=2)
    expected = [[row for row in epoch if row[0] != killer] for epoch in alone[:2]]
    for job in jobs:
        assert job.hear() == expected
    for job in jobs:
        said = job.ask()
        assert (said["problems"], said["quarantined"]) == ([], [killer])
        assert f"sample {killer} is quarantined" in job.errors.read_text()
    assert (search.folder / "log").read_text().count("hangs") <= 2 * 3, "each finds it at most once"
    late = search.begun({"num_workers": 1}, kills=killer)
    assert late.ask(epochs=1) == expected[:1]
    assert (late.ask()["quarantined"], late.ask()["problems"]) == ([killer], [])


def test_a_worker_that_dies_is_replaced(
    search: Search, alone: list[list[list[float]]], tmp_path: Path
) -> None:
    fuse = tmp_path / "fuse"
    fuse.touch()
    job = search.begun({"num_workers": 2}, die=str(fuse), die_at=int(alone[0][9][0]))
    assert job.ask(epochs=1) == alone[:1]
    assert not fuse.exists()
    assert job.ask()["problems"] == []
