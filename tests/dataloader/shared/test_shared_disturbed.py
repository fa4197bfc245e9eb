"""What may happen to jobs that share: many at once, little memory, stopped, late, gone, back; no daemon for a while."""

import os
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import share_job
import torch
from pausing import wait_until
from share_search import Search

from everstep.daemon.control.client import connected
from everstep.daemon.control.views import ShareGroupView
from everstep.daemon.testing import daemon_process
from everstep.dataloader.tensor_tree import encode_batch
from everstep.proto.frames import PROTOCOL, Welcome
from everstep.proto.wire import pack

BATCHES = -(-share_job.SAMPLES // share_job.BATCH_SIZE)
TOGETHER = {"gather_s": 3600.0}
WELCOME = Welcome(version="0", protocol=PROTOCOL, token="t", private=True, pid=1, control_socket="")

Rows = list[list[float]]


def groups() -> list[ShareGroupView]:
    """Return the groups of the search, as operators see them."""
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        return [each for each in client.status().groups if each.name == "search"]


def test_eight_jobs_at_once(search: Search, alone: list[Rows]) -> None:
    jobs = [search.begun({"jobs": 8, **TOGETHER}) for _ in range(8)]
    for job in jobs:
        job.tell(epochs=1)
    for job in jobs:
        assert job.hear() == alone[:1]
        assert job.ask()["problems"] == []
    first, rest = alone[0][: share_job.BATCH_SIZE], alone[0][share_job.BATCH_SIZE :]
    expected = Counter({tuple(row): 8 for row in first} | {tuple(row): 1 for row in rest})
    counts = search.prepared()
    assert Counter({row: count for row, count in counts.items() if row in expected}) == expected


def test_memory_for_one_batch_is_enough(search: Search, alone: list[Rows]) -> None:
    ids = torch.arange(share_job.BATCH_SIZE)
    batch = [ids, torch.zeros(share_job.BATCH_SIZE, 1, dtype=torch.float64)]
    budget = encode_batch(ids.numpy(), batch).size_bytes  # pyright: ignore[reportUnknownMemberType]
    jobs = [search.begun({"jobs": 3, "budget": budget, **TOGETHER}) for _ in range(3)]
    for job in jobs:
        job.tell(epochs=2)
    for job in jobs:
        assert job.hear() == alone[:2]
    for place in range(BATCHES):  # in step: who is far behind prepares for itself
        for job in jobs:
            job.tell(take=1)
        rows = alone[2][place * share_job.BATCH_SIZE : (place + 1) * share_job.BATCH_SIZE]
        assert [job.hear() for job in jobs] == [[rows]] * 3
    (group,) = groups()
    assert group.prepared_count > 0
    assert group.used_bytes <= group.budget_bytes == budget
    assert all(job.ask()["received"] > 0 for job in jobs)


def test_a_stopped_job_holds_nobody_and_misses_nothing(search: Search, alone: list[Rows]) -> None:
    jobs = [search.begun({"jobs": 3, "num_workers": 1, "lease_s": 1.0, **TOGETHER}) for _ in range(3)]
    for job in jobs:
        job.tell(take=2)
    for job in jobs:
        assert [row for batch in job.hear() for row in batch] == alone[0][: 2 * share_job.BATCH_SIZE]
    pid = jobs[0].ask()["pid"]
    os.kill(pid, signal.SIGSTOP)  # with leases: it offered to prepare ahead
    try:
        for job in jobs[1:]:
            assert job.take(BATCHES) == alone[0][2 * share_job.BATCH_SIZE :]
            assert job.ask(epochs=5) == alone[1:6]  # far beyond the window
        (group,) = groups()
        assert (group.job_count, group.outside_count, group.slowest_pid) == (3, 1, pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert jobs[0].take(BATCHES) == alone[0][2 * share_job.BATCH_SIZE :]
    assert jobs[0].ask(epochs=2) == alone[1:3]
    assert [job.ask()["problems"] for job in jobs] == [[], [], []]


def test_a_producer_that_hangs_in_mid_batch_costs_one_lease(search: Search, alone: list[Rows]) -> None:
    victim = int(alone[0][share_job.BATCH_SIZE + 1][0])  # in the second batch, which the victim is leased
    terms = {"jobs": 2, "lease_s": 1.0, **TOGETHER}
    one, other = search.begun(terms, hang=victim), search.begun(terms)
    one.tell(epochs=1)
    other.tell(take=1)
    other.hear()
    search.wait_for("hangs")
    assert other.take(BATCHES) == alone[0][share_job.BATCH_SIZE :]
    assert other.ask(epochs=1) == alone[1:2]
    one.kill()


def test_who_leaves_early_and_comes_back_goes_on_where_it_was(search: Search, alone: list[Rows]) -> None:
    jobs = [search.begun({"jobs": 2, "num_workers": 1, **TOGETHER}) for _ in range(2)]
    for job in jobs:
        job.tell(take=3)
    got = [[row for batch in job.hear() for row in batch] for job in jobs]
    jobs[0].ask(close=True)
    got[1] += jobs[1].take(4)
    wait_until(lambda: [group.job_count for group in groups()] == [1])
    got[0] += jobs[0].take(BATCHES)
    got[1] += jobs[1].take(BATCHES)
    assert got == [alone[0]] * 2
    for job in jobs:
        assert job.ask(epochs=1) == alone[1:2]
        assert job.ask()["problems"] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_daemon_that_comes_back_in_mid_epoch_is_found_again(
    search: Search, daemon: subprocess.Popen[bytes], alone: list[Rows], workers: int
) -> None:
    terms = {"jobs": 2, "num_workers": workers, **TOGETHER}
    jobs = [search.begun(terms, again_s=0.0) for _ in range(2)]
    for job in jobs:
        job.tell(take=2)
    got = [[row for batch in job.hear() for row in batch] for job in jobs]
    daemon.kill()
    daemon.wait()
    for place, job in enumerate(jobs):
        got[place] += job.take(2)  # which may have been there before
        wait_until(lambda job=job: job.ask()["shared"] is False)
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        for place, job in enumerate(jobs):
            got[place] += job.take(1)
        for place, job in enumerate(jobs):
            got[place] += job.take(BATCHES)
            assert got[place] == alone[0]
            said = job.ask()
            assert (said["shared"], said["problems"]) == (True, [])
        for job in jobs:
            job.tell(epochs=1)
        for job in jobs:
            assert job.hear() == alone[1:2]


def test_a_daemon_that_ends_between_two_words_is_no_error(
    fork_server: None, tmp_path: Path, alone: list[Rows]
) -> None:
    """It answers Hello and is gone: the job prepares for itself, and finds the one that comes next in mid-epoch."""
    address = os.environ["EVERSTEP_SOCKET"]
    search = Search(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        job = search.begun(again_s=0.0)
        job.tell(take=2)
        connection, _ = listener.accept()
        assert connection.recv(1 << 16)  # its Hello: a connection that ends before that is no daemon at all
        connection.sendall(pack(WELCOME))
        connection.close()
    Path(address).unlink()
    try:
        got = [row for batch in job.hear() for row in batch]
        assert job.ask()["shared"] is False
        assert "share_alone" in job.errors.read_text()
        with daemon_process(Path(address)):
            got += job.take(BATCHES)
            said = job.ask()
            assert (got, said["shared"], said["problems"]) == (alone[0], True, [])
    finally:
        job.close()
