"""A daemon, jobs that end with the test, and what each of them must get."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import share_job
from share_search import Search

from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.dataloader import DataLoader
from everstep.proto.share_frames import JoinShare, ShareJoined, ShareKey


@pytest.fixture(scope="module")
def fork_server() -> None:  # pyright: ignore[reportUnusedFunction]
    """Have the process that all jobs are forked from before the first look at what is left behind."""
    process = share_job.context().Process(target=int)
    process.start()
    process.join()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The user's daemon. It does not end for want of jobs, however long the first takes to come."""
    socket_path = Path(os.environ["EVERSTEP_SOCKET"])
    with daemon_process(socket_path) as process, FakeTrainer(socket_path) as keeper:
        key = ShareKey(
            dataset="d", samples=1, order="o", seed=0, batch_size=1, drop_last=False, augment_seed=True
        )
        joined = keeper.ask(
            JoinShare(
                request_id=1,
                group="keeper",
                key=key,
                first_batch=[],
                first_batch_size_bytes=1,
                budget_bytes=1,
                lease_s=60.0,
                position=0,
            )
        )
        assert isinstance(joined, ShareJoined)
        yield process


@pytest.fixture
def search(fork_server: None, daemon: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Search]:
    """Jobs that end with the test."""
    found = Search(tmp_path)
    yield found
    for job in found.jobs:
        job.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    """What a DataLoader hands out in eight epochs."""
    noted = share_job.Noted({"log": str(tmp_path_factory.mktemp("alone") / "log")})
    loader: DataLoader[Any] = DataLoader(noted, batch_size=share_job.BATCH_SIZE, shuffle=True, seed=5)  # pyright: ignore[reportArgumentType]
    found = [[row for batch in loader for row in share_job.rows(batch)] for _ in range(8)]
    os.close(noted.log)
    return found
