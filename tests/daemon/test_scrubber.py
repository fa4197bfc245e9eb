"""Scrubs of a real daemon: by the schedule and on request; what is damaged is said and offered no more."""

import os
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.errors import NotFoundError, RunBusyError
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import CheckpointStatus, ScrubView
from everstep.daemon.devices.scrub_plan import Scrub
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

RUN = "demo"


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """Two runs: `demo` with three checkpoints, `other` with one."""
    with opened(devices) as (store, _):
        for name, steps in ((RUN, (1, 2, 3)), ("other", (1,))):
            run = store.run(os.geteuid(), name, create=True)
            run.begin_attempt(1, fresh=False)
            for step in steps:
                save(run, make_state(store, step), CheckpointId(1, step))
    return devices


@contextmanager
def scrubbing(
    config: Path, socket_path: Path, section: str, *, after_s: float = 1000.0
) -> Generator[ControlClient]:
    with config.open("a") as file:
        file.write(f"[verify]\nafter_s = {after_s}\n[scrub]\n{section}\n")
    with node_daemon(config, socket_path), connected(socket_path) as client:
        yield client


def scrub_of(client: ControlClient) -> ScrubView:
    (store,) = client.status().stores
    return store.scrub


def newest(client: ControlClient) -> Scrub:
    scrub = scrub_of(client).newest
    assert scrub is not None
    return scrub


def ended(client: ControlClient) -> bool:
    scrub = scrub_of(client).newest
    return scrub is not None and scrub.ended_unix_s is not None


def spoil(devices: list[Path], step: int) -> None:
    with opened(devices, read_only=True) as (store, _):
        run = store.run(os.geteuid(), RUN)
        path = run.segment_path(run.manifest(CheckpointId(1, step), 0).segments[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def metric(client: ControlClient, name: str) -> float:
    port = client.status().daemon.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


@pytest.mark.usefixtures("stored")
def test_all_is_read_by_the_schedule(node_config: Path, socket_path: Path) -> None:
    with scrubbing(node_config, socket_path, 'every = "1s"', after_s=0.0) as client:
        found: list[Scrub] = []

        def one_has_ended() -> bool:
            """Ask once: the next one begins within a second."""
            scrub = scrub_of(client).newest
            found.extend([scrub] if scrub is not None and scrub.ended_unix_s is not None else [])
            return bool(found)

        wait_until(one_has_ended)
        (scrub,) = found
        assert (scrub.planned_count, scrub.checkpoint_count, scrub.damaged) == (4, 4, ())
        views = sorted(client.checkpoints(""), key=lambda view: view.checkpoint)
        assert scrub.size_bytes == sum(view.size_bytes for view in views)
        newest = {
            view.run_name: view.size_bytes for view in views
        }  # read after the opening: that counts, if it came last
        unread_bytes = scrub.size_bytes - sum(newest.values())
        assert unread_bytes > 0
        assert metric(client, "everstep_scrubbed_bytes_total") >= unread_bytes
        assert metric(client, "everstep_scrub_last_completed_timestamp_seconds") > scrub.started_unix_s
        next_unix_s = scrub_of(client).next_unix_s
        assert next_unix_s is not None
        assert next_unix_s > scrub.started_unix_s


def test_damage_is_said_and_not_offered(node_config: Path, socket_path: Path, stored: list[Path]) -> None:
    spoil(stored, 2)
    with (
        scrubbing(node_config, socket_path, 'every = "never"') as client,
        FakeTrainer(socket_path) as trainer,
    ):
        assert scrub_of(client) == ScrubView(newest=None, next_unix_s=None)
        started = client.start_scrub(RUN, [])
        assert started.checkpoint_count == 3
        wait_until(lambda: ended(client))
        assert newest(client).damaged == (f"{RUN}@1.2",)
        (problem,) = client.status().stores[0].problems
        assert problem.startswith(f"{RUN}@1.2 is damaged")
        assert metric(client, "everstep_scrub_damaged_segments_total") == 1
        assert [view.state for view in client.checkpoints(RUN)] == [
            CheckpointStatus.COMPLETE,
            CheckpointStatus.DAMAGED,
            CheckpointStatus.COMPLETE,
        ]
        trainer.open_run([Path("nvme0"), Path("nvme1")], name=RUN)
        assert [(offer.step, bool(offer.problem)) for offer in trainer.offers()] == [
            (3, False),
            (2, True),
            (1, False),
        ]
        assert (
            client.start_scrub("", []).checkpoint_count == 3
        )  # what is known to be damaged is not read again
    assert "scrubbed run=" in socket_path.with_name("daemon.log").read_text()


def test_one_at_a_time_of_stores_that_are_open(
    node_config: Path, socket_path: Path, stored: list[Path], tmp_path: Path
) -> None:
    slow = 'every = "never"\nbandwidth_share = 1e-9'
    with scrubbing(node_config, socket_path, slow) as client:
        for run, directories in (("nobody", []), ("", [tmp_path])):
            with pytest.raises(NotFoundError):
                client.start_scrub(run, directories)
        assert client.start_scrub("other", stored).checkpoint_count == 1
        with pytest.raises(RunBusyError, match=r"a scrub of .* goes on"):
            client.start_scrub(RUN, [])
        assert newest(client).ended_unix_s is None
        # The daemon ends at once although a device rests for years.


@pytest.mark.parametrize("is_restore", [False, True])
def test_it_waits_for_what_is_needed(
    socket_path: Path, stored: list[Path], pause: Pause, *, is_restore: bool
) -> None:
    place = "restore_stream:RestoreStream._read" if is_restore else "persist:persist_shard"
    with (
        pausing_daemon(pause, Phase(f"everstep.daemon.devices.{place}")) as daemon,
        FakeTrainer(socket_path) as trainer,
        connected(socket_path) as client,
    ):
        trainer.open_run(stored, name=RUN)
        trainer.begin_attempt(2)
        if is_restore:
            shard = trainer.fetch(CheckpointId(1, 3))
            assert isinstance(shard, frames.Streaming)
            trainer.send(frames.Stream(arena=shard.arena, ranges=[]))
        else:
            trainer.make_arena(trainer.layout()).save(CheckpointId(2, 4), seed=4)
        pause.reached(daemon)
        assert client.start_scrub("other", []).checkpoint_count == 1
        for _ in range(50):
            assert newest(client).checkpoint_count == 0
        pause.go()
        wait_until(lambda: newest(client).ended_unix_s is not None)
        assert newest(client).checkpoint_count == 1


def test_a_restart_knows_what_a_scrub_has_found(
    node_config: Path, socket_path: Path, stored: list[Path]
) -> None:
    spoil(stored, 2)
    with scrubbing(node_config, socket_path, 'every = "never"') as client:
        client.start_scrub(RUN, [])
        wait_until(lambda: ended(client))
    with (
        node_daemon(node_config, socket_path),
        connected(socket_path) as client,
        FakeTrainer(socket_path) as trainer,
    ):
        (problem,) = client.status().stores[0].problems
        assert "rank 0 of 1.2 is not offered, as reading it has shown before" in problem
        trainer.open_run([Path("nvme0"), Path("nvme1")], name=RUN)
        offers = [(offer.step, bool(offer.problem)) for offer in trainer.offers()]
        assert offers == [(3, False), (2, True), (1, False)]
