"""A real daemon and jobs that speak the frames by hand: leases, batches, refusals, deaths."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from pausing import wait_until

from everstep.core.paths import control_socket_path
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames
from everstep.proto.share_frames import (
    FailShare,
    JoinShare,
    LocateShare,
    OfferShare,
    PublishShare,
    ShareJoined,
    ShareKey,
    ShareLeased,
    SharePlace,
    SharePrivate,
    ShareReady,
    ShareStaged,
    StageShare,
    TookShare,
    WantShare,
)

SIZE = 5000
KEY = ShareKey(
    dataset="d", samples=100, order="permuted-1", seed=7, batch_size=4, drop_last=False, augment_seed=True
)
FIRST = [("batch", "list", "00"), ("batch[0]", "float32 [4, 3]", "11")]


class FakeJob(FakeTrainer):
    """A job without torch: its batches are SIZE times one byte."""

    group = "hp"

    def __enter__(self) -> "FakeJob":
        return self

    def join(self, **arguments: object) -> frames.Reply:
        values: dict[str, object] = {
            "group": self.group,
            "key": KEY,
            "first_batch": FIRST,
            "first_batch_size_bytes": SIZE,
            "budget_bytes": 1 << 20,
            "lease_s": 60.0,
            "position": 0,
        }
        return self.ask(msgspec.convert(values | arguments | {"request_id": self.number()}, JoinShare))

    def stage(self) -> None:
        reply = self.ask(StageShare(request_id=self.number(), size_bytes=SIZE))
        assert isinstance(reply, ShareStaged), reply
        fd = self.reader.take_fd()
        with mmap.mmap(fd, SIZE) as staging:
            staging[:] = b"x" * SIZE
        self.staging = fd

    def close(self) -> None:
        if hasattr(self, "staging"):
            os.close(self.staging)
            del self.staging
        super().close()

    def offer(self, count: int) -> list[int]:
        self.send(OfferShare(count=count))
        event = self.event(ShareLeased)
        assert isinstance(event, ShareLeased)
        return event.batches

    def publish(
        self,
        batch: int,
        *,
        offset: int = 0,
        size: int = SIZE,
        xxh3: int | None = None,
        left_out: list[tuple[int, int, str]] | None = None,
    ) -> frames.Reply:
        content = xxhash.xxh3_64_intdigest(b"x" * size) if xxh3 is None else xxh3
        return self.ask(
            PublishShare(
                request_id=self.number(),
                batch=batch,
                offset_bytes=offset,
                size_bytes=size,
                xxh3=content,
                left_out=left_out or [],
            )
        )

    def want(self, batch: int) -> None:
        self.wanted = self.number()
        self.send(WantShare(request_id=self.wanted, batch=batch))

    def answer(self) -> frames.Reply:
        while True:
            for event in self.events:
                if getattr(event, "re", None) == self.wanted:
                    self.events.remove(event)
                    return event
            self.events.append(self.receive())

    def take(self, batch: int) -> bytes:
        """Return a batch that is ready or will be."""
        self.want(batch)
        reply = self.answer()
        assert isinstance(reply, ShareReady), reply
        fd = self.reader.take_fd()
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, reply.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with mmap.mmap(fd, reply.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
                content = bytes(view)
        finally:
            os.close(fd)
        self.send(TookShare(batch=batch))
        return content

    def heard(self) -> None:
        """Return when the daemon has heard all that this job has told it."""
        assert isinstance(self.ask(LocateShare(request_id=self.number())), SharePlace)

    def private(self, batch: int) -> SharePrivate:
        self.want(batch)
        reply = self.answer()
        assert isinstance(reply, SharePrivate), reply
        return reply


@pytest.fixture(scope="module")
def one_daemon() -> Iterator[Path]:
    """One for all tests of this file: each has a group of its own."""
    folder = Path(tempfile.mkdtemp(prefix="es-share-"))
    with daemon_process(folder / "s" / "data.sock"):
        yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.fixture
def jobs(one_daemon: Path, request: pytest.FixtureRequest) -> Iterator[list[FakeJob]]:
    """Three jobs that have not joined the group of this test."""
    with ExitStack() as held:
        jobs = [held.enter_context(FakeJob(one_daemon)) for _ in range(3)]
        for job in jobs:
            job.group = request.node.name[:100]
        yield jobs


def test_one_prepares_and_all_take(jobs: list[FakeJob]) -> None:
    for number, job in enumerate(jobs, start=1):
        reply = job.join()
        assert isinstance(reply, ShareJoined)
        assert reply.jobs == number
    jobs[0].stage()
    for job in jobs[1:]:
        job.want(0)
    assert jobs[0].offer(2) == [0, 1]
    assert isinstance(jobs[0].publish(0), frames.Done)
    for job in jobs[1:]:
        assert isinstance(job.answer(), ShareReady)
        os.close(job.reader.take_fd())
        job.send(TookShare(batch=0))
    assert jobs[0].take(0) == b"x" * SIZE
    for job in jobs:
        job.heard()
    for job in jobs[1:]:  # the batch is gone by now: asked again, it would be one's own
        assert job.private(0).until == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": msgspec.structs.replace(KEY, seed=8)}, "seed is 8 here and 7 in the group"),
        ({"key": msgspec.structs.replace(KEY, dataset="e")}, "dataset is 'e' here and 'd' in the group"),
        ({"key": msgspec.structs.replace(KEY, samples=9)}, "samples is 9 here and 100 in the group"),
        ({"key": msgspec.structs.replace(KEY, batch_size=8)}, "batch_size is 8 here and 4 in the group"),
        ({"first_batch": [FIRST[0], ("batch[0]", "float32 [4, 3]", "12")]}, r"batch[0] of the first batch"),
        (
            {"first_batch": [FIRST[0], ("batch[0]", "float16 [4]", "11")]},
            "is float16 [4] here and float32 [4, 3]",
        ),
        ({"first_batch": [FIRST[0], ("batch['x']", "float32 [4, 3]", "11")]}, "has batch['x'] where"),
        ({"first_batch": FIRST[:1]}, "1 leaves and the group's 2"),
    ],
)
def test_who_makes_other_batches_is_refused_with_the_difference(
    jobs: list[FakeJob], change: dict[str, object], said: str
) -> None:
    assert isinstance(jobs[0].join(), ShareJoined)
    reply = jobs[1].join(**change)
    assert isinstance(reply, frames.Failure)
    assert reply.code == "UsageError"
    assert said in reply.message
    assert isinstance(jobs[2].join(**change, group="another"), ShareJoined)


def test_what_does_not_hold_is_refused_and_each_prepares_it(jobs: list[FakeJob]) -> None:
    for job in jobs[:2]:
        job.join()
    jobs[0].stage()
    assert jobs[0].offer(3) == [0, 1, 2]
    wrongs: list[dict[str, Any]] = [{"xxh3": 1}, {"offset": 1}, {"offset": 1 << 61}]
    for batch, wrong in enumerate(wrongs):
        reply = jobs[0].publish(batch, **wrong)
        assert isinstance(reply, frames.Failure)
        assert reply.code == ("CorruptDataError" if "xxh3" in wrong else "UsageError")
    assert jobs[1].private(0).until == 3


def test_a_staging_cannot_be_made_shorter(jobs: list[FakeJob]) -> None:
    jobs[0].join()
    jobs[0].stage()
    with pytest.raises(PermissionError):
        os.ftruncate(jobs[0].staging, 1)
    reply = jobs[0].ask(StageShare(request_id=jobs[0].number(), size_bytes=1 << 30))
    assert isinstance(reply, frames.Failure)
    assert reply.code == "MemoryRefusedError"


def test_who_takes_part_in_nothing_is_told_so(jobs: list[FakeJob]) -> None:
    reply = jobs[0].ask(StageShare(request_id=jobs[0].number(), size_bytes=SIZE))
    assert isinstance(reply, frames.Failure)
    assert reply.code == "NotFoundError"
    jobs[0].join()
    assert isinstance(jobs[0].join(), frames.Failure)


def test_a_producer_that_vanishes_is_replaced_at_once(jobs: list[FakeJob]) -> None:
    for job in jobs[:2]:
        job.join(lease_s=3600.0)
    assert jobs[0].offer(1) == [0]
    jobs[1].want(0)
    jobs[1].stage()
    jobs[1].send(OfferShare(count=1))
    jobs[0].close()
    leased: list[int] = []
    while 0 not in leased:
        event = jobs[1].event(ShareLeased)
        assert isinstance(event, ShareLeased)
        leased += event.batches
        for batch in event.batches:
            jobs[1].publish(batch)
        jobs[1].send(OfferShare(count=1))
    assert isinstance(jobs[1].answer(), ShareReady)
    os.close(jobs[1].reader.take_fd())


def test_a_producer_that_hangs_costs_one_lease(jobs: list[FakeJob]) -> None:
    jobs[0].join(lease_s=0.2)
    jobs[1].join()
    assert jobs[1].offer(1) == [0]
    assert jobs[0].offer(1) == [1]  # last: nobody can say how long a test takes until then
    jobs[1].want(1)
    jobs[1].stage()
    jobs[1].publish(0)
    jobs[1].send(OfferShare(count=1))
    leased = jobs[1].event(ShareLeased)
    while isinstance(leased, ShareLeased) and leased.batches != [1]:
        jobs[1].publish(leased.batches[0])
        jobs[1].send(OfferShare(count=1))
        leased = jobs[1].event(ShareLeased)
    jobs[1].publish(1)
    assert isinstance(jobs[1].answer(), ShareReady)
    os.close(jobs[1].reader.take_fd())


def test_what_one_cannot_prepare_is_each_ones_own(jobs: list[FakeJob]) -> None:
    for job in jobs[:2]:
        job.join()
    jobs[1].want(0)
    assert jobs[0].offer(1) == [0]
    jobs[0].send(FailShare(batch=0))
    reply = jobs[1].answer()
    assert isinstance(reply, SharePrivate)
    assert reply.until == 1


def test_a_job_can_ask_where_the_others_are(jobs: list[FakeJob]) -> None:
    jobs[0].join(position=12)
    place = jobs[0].ask(LocateShare(request_id=jobs[0].number()))
    assert isinstance(place, SharePlace)
    assert place.batch == -1
    jobs[1].join(position=20)
    place = jobs[1].ask(LocateShare(request_id=jobs[1].number()))
    assert isinstance(place, SharePlace)
    assert place.batch == 12


def test_nothing_is_leased_before_the_expected_jobs_are_there(jobs: list[FakeJob]) -> None:
    jobs[0].join(jobs=2, gather_s=3600.0)
    jobs[0].send(OfferShare(count=1))
    reply = jobs[0].ask(StageShare(request_id=jobs[0].number(), size_bytes=SIZE))
    assert isinstance(reply, ShareStaged)
    os.close(jobs[0].reader.take_fd())
    assert jobs[0].events == []
    jobs[1].join(jobs=2, gather_s=3600.0)
    event = jobs[0].event(ShareLeased)
    assert isinstance(event, ShareLeased)
    assert event.batches == [0]


def test_what_one_job_leaves_out_is_told_to_all(jobs: list[FakeJob]) -> None:
    killer = (7, 2, "was killed by SIGSEGV")
    for job in jobs[:2]:
        job.join()
    jobs[0].stage()
    assert jobs[0].offer(1) == [0]
    jobs[1].want(0)
    assert isinstance(jobs[0].publish(0, left_out=[killer]), frames.Done)
    ready = jobs[1].answer()
    assert isinstance(ready, ShareReady)
    os.close(jobs[1].reader.take_fd())
    assert ready.left_out == [killer]
    for job, told in ((jobs[1], [killer]), (jobs[1], [])):  # once
        job.send(OfferShare(count=1))
        leased = job.event(ShareLeased)
        assert isinstance(leased, ShareLeased)
        assert leased.quarantined == told
    joined = jobs[2].join()
    assert isinstance(joined, ShareJoined)
    assert joined.quarantined == [killer]


def arena_bytes(socket_path: Path) -> int:
    with connected(socket_path) as client:
        return client.status().daemon.arena_bytes


def test_groups_are_listed_and_their_memory_counts_beside_all_other(
    socket_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon_process(socket_path):
        assert main(["shared", "list"]) == 0
        assert "no jobs share their preparation" in capsys.readouterr().out
        with FakeJob(socket_path) as one, FakeJob(socket_path) as other:
            for job in (one, other):
                job.join()
            one.stage()
            assert arena_bytes(socket_path) == SIZE
            assert one.offer(2) == [0, 1]
            assert isinstance(one.publish(0, left_out=[(7, 2, "exited with code 3")]), frames.Done)
            assert one.take(0) == b"x" * SIZE
            assert one.private(90).until > 90
            one.want(95)
            one.heard()
            assert arena_bytes(socket_path) == 2 * SIZE
            assert main(["shared", "list", "--json"]) == 0
            (found,) = json.loads(capsys.readouterr().out)["groups"]
            with connected(socket_path) as client:
                assert client.groups() == list(client.status().groups)
                assert [each.name for each in client.groups()] == ["hp"]
            assert found == {
                "name": "hp",
                "uid": os.getuid(),
                "job_count": 2,
                "outside_count": 1,
                "window": [0, 32],
                "ready_count": 1,
                "leased_count": 1,
                "prepared_count": 1,
                "served_count": 1,
                "private_count": 5,
                "used_bytes": SIZE,
                "budget_bytes": 1 << 20,
                "slowest_pid": os.getpid(),
                "slowest_behind": 95,
                "quarantined": [7],
            }
            assert main(["status"]) == 0
            shown = capsys.readouterr().out
            assert "group hp leaves out samples 7" in shown
            assert f"pid {os.getpid()} by 95" in shown
            assert max(map(len, shown.splitlines())) <= 80
            other.want(0)
            assert isinstance(other.answer(), ShareReady)
            os.close(other.reader.take_fd())
            other.send(TookShare(batch=0))
            other.heard()
            assert arena_bytes(socket_path) == SIZE, "the batch is gone, the staging is not"
        wait_until(lambda: arena_bytes(socket_path) == 0)


def test_what_has_no_room_in_the_daemons_budget_is_each_ones_own(node_config: Path) -> None:
    text = node_config.read_text()
    assert "[memory]" not in text
    node_config.write_text(f"{text}\n[memory]\narena_max_bytes = {2 * SIZE + 100}\nreserve_bytes = 0\n")
    socket_path = Path(os.environ["EVERSTEP_SOCKET"])
    with node_daemon(node_config, socket_path), FakeJob(socket_path) as one, FakeJob(socket_path) as other:
        for job in (one, other):
            job.join()
        one.stage()
        assert one.offer(2) == [0, 1]
        assert isinstance(one.publish(0), frames.Done)
        reply = one.publish(1)
        assert isinstance(reply, frames.Failure)
        assert reply.code == "MemoryRefusedError"
        assert "the daemon's budget has" in reply.message
        other.want(0)
        assert isinstance(other.answer(), ShareReady)
        os.close(other.reader.take_fd())
        other.send(TookShare(batch=0))
        assert other.private(1).until == 2
        refused = other.ask(StageShare(request_id=other.number(), size_bytes=SIZE))
        assert isinstance(refused, frames.Failure), "the staging of one and its batch are all there is"
        assert one.take(0) == b"x" * SIZE
        one.heard()
        other.stage()


def test_a_private_daemon_stays_while_a_job_takes_part_and_ends_when_told(socket_path: Path) -> None:
    with daemon_process(socket_path) as daemon, FakeJob(socket_path) as job:
        job.join()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0


CHILD = """
import json, os, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[2])
from test_share_book import *
import everstep.proto.wire

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
with FakeJob(Path(sys.argv[1])) as job:
    refused = job.ask(StageShare(request_id=job.number(), size_bytes=SIZE))
    joined = job.join(key=msgspec.structs.replace(KEY, seed=99), first_batch=FIRST[:1])
    print(json.dumps([refused.code, type(joined).__name__, joined.jobs, job.offer(1)]))
"""


@pytest.mark.root
def test_another_users_group_of_the_same_name_is_not_found(node_config: Path) -> None:
    """It is as if there were none: what the other user makes is a group of its own, which learns nothing."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    socket_path = folder / "s" / "data.sock"
    socket_path.parent.mkdir(mode=0o700)
    node_config.write_text(node_config.read_text().replace(os.environ["EVERSTEP_SOCKET"], str(socket_path)))
    try:
        with node_daemon(node_config, socket_path), FakeJob(socket_path) as job:
            for path, mode in (
                (folder, 0o711),
                (socket_path.parent, 0o711),
                (socket_path, 0o666),
                (control_socket_path(socket_path), 0o666),
            ):
                path.chmod(mode)
            assert isinstance(job.join(), ShareJoined)
            assert job.offer(1) == [0]
            child = [
                sys.executable,
                "-P",
                "-c",
                CHILD,
                str(socket_path),
                json.dumps([str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]),
            ]
            said = subprocess.run(child, capture_output=True, text=True, check=True).stdout
            assert json.loads(said) == ["NotFoundError", "ShareJoined", 1, [0]]
            job.stage()
            assert isinstance(job.publish(0), frames.Done)
            assert job.take(0) == b"x" * SIZE
    finally:
        shutil.rmtree(folder)
