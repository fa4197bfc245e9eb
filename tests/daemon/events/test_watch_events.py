"""Events of a real daemon over its real socket: what a checkpoint's life, a death and an end look like."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from everstep.core.errors import DaemonUnavailableError
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.events.event_types import Event, EventKind, EventQuery
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames, node_pb2_grpc
from everstep.proto import node_pb2 as pb


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with daemon_process(socket_path) as process:
        yield process


@pytest.fixture
def client(socket_path: Path, daemon: subprocess.Popen[bytes]) -> Iterator[ControlClient]:
    with connected(socket_path) as found:
        yield found


def save_one(trainer: FakeTrainer, devices: list[Path], *, name: str = "demo") -> None:
    trainer.open_run(devices, name=name)
    trainer.begin_attempt(1)
    arena = trainer.make_arena(trainer.layout())
    arena.save(CheckpointId(1, 5), seed=1)
    trainer.event(frames.Persisted)
    arena.close()


def until(events: Iterator[Event], kind: EventKind) -> list[Event]:
    """Return the events up to the first of this kind."""
    found: list[Event] = []
    for event in events:
        found.append(event)
        if event.kind is kind:
            return found
    raise AssertionError(f"no {kind}: {found}")


def test_the_life_of_a_checkpoint_is_told_in_order(
    client: ControlClient, socket_path: Path, devices: list[Path]
) -> None:
    with FakeTrainer(socket_path) as trainer:
        save_one(trainer, devices)
        found = until(client.events(EventQuery(since=0, follow=True)), EventKind.CHECKPOINT_COMPLETE)
        assert [each.kind for each in found] == [
            EventKind.RUN_ATTACHED,
            EventKind.SNAPSHOT_SEALED,
            EventKind.SHARD_COMMITTED,
            EventKind.CHECKPOINT_COMPLETE,
        ]
        attached, _, committed, complete = found
        assert (attached.run_name, attached.attempt, attached.count) == ("demo", 1, 1)
        assert (committed.rank, committed.checkpoint) == (0, CheckpointId(1, 5))
        assert committed.size_bytes == complete.size_bytes > 0
        assert 0 < committed.elapsed_s <= complete.elapsed_s
        assert [each.sequence for each in found] == [1, 2, 3, 4]
        since = EventQuery(since=2, log_id=found[0].log_id)
        assert [each.sequence for each in client.events(since)] == [3, 4]
        assert list(client.events(EventQuery(run="another"))) == []


def test_a_death_a_change_of_pace_and_the_end_reach_who_follows(
    client: ControlClient, daemon: subprocess.Popen[bytes], socket_path: Path, devices: list[Path]
) -> None:
    trainer = FakeTrainer(socket_path)
    trainer.open_run(devices, name="demo", world_size=2)
    trainer.begin_attempt(1)
    said = frames.Costs(
        train_s=10.0,
        boundary_s=0.1,
        eager_s=0.0,
        wait_s=0.0,
        guard_s=0.0,
        slower_s=0.0,
        skipped={},
        interval_steps=40,
        reason="bound by the budget",
        goal_missed="",
    )
    trainer.send(said)
    trainer.send(said)  # says nothing new
    trainer.send(frames.Skipped(attempt=1, step=40, reason=frames.SkipReason.SLOT, text="no slot is free"))
    trainer.send(frames.GiveUp(attempt=1, step=40))  # which was skipped, as is known
    trainer.send(frames.GiveUp(attempt=1, step=80))
    trainer.send(frames.GiveUp(attempt=1, step=80))  # as another rank says
    events = client.events(EventQuery(since=0, follow=True))
    found = until(events, EventKind.CHECKPOINT_GIVEN_UP)
    trainer.close()
    found += until(events, EventKind.RANK_LOST)
    daemon.terminate()
    found += list(events)
    assert [each.kind for each in found] == [
        EventKind.RUN_ATTACHED,
        EventKind.INTERVAL_CHANGED,
        EventKind.CHECKPOINT_SKIPPED,
        EventKind.CHECKPOINT_GIVEN_UP,
        EventKind.RANK_LOST,
        EventKind.DRAINING,
        EventKind.DRAINED,
    ]
    assert found[1].interval_steps == 40
    assert "bound by the budget" in found[1].text
    assert (found[2].checkpoint, found[2].code) == (CheckpointId(1, 40), "slot")
    assert found[3].checkpoint == CheckpointId(1, 80)


def test_following_needs_no_deadline_but_a_token(socket_path: Path, client: ControlClient) -> None:
    del client
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.hello, frames.Welcome)
        with grpc.insecure_channel(f"unix:{trainer.hello.control_socket}") as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.WatchEvents(pb.WatchEventsRequest()))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore[reportAttributeAccessIssue]
            metadata = (("authorization", f"Bearer {trainer.hello.token}"),)
            assert list(stub.WatchEvents(pb.WatchEventsRequest(), metadata=metadata)) == []
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.WatchEvents(pb.WatchEventsRequest(kinds=[999]), metadata=metadata))  # pyright: ignore[reportArgumentType]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore[reportAttributeAccessIssue]


def test_a_killed_daemon_is_an_error_and_not_an_end(
    client: ControlClient, daemon: subprocess.Popen[bytes]
) -> None:
    events = client.events(EventQuery(follow=True))
    killer = threading.Timer(0.0, daemon.kill)
    killer.start()
    with pytest.raises(DaemonUnavailableError):
        list(events)
    killer.join()


def test_the_command_prints_a_line_for_each(
    client: ControlClient, socket_path: Path, devices: list[Path]
) -> None:
    with FakeTrainer(socket_path) as trainer:
        save_one(trainer, devices)
        until(client.events(EventQuery(since=0, follow=True)), EventKind.CHECKPOINT_COMPLETE)
        command = [sys.executable, "-m", "everstep.daemon.cli.main", "events"]
        environment = {**os.environ, "EVERSTEP_SOCKET": str(socket_path)}

        def said(*arguments: str) -> str:
            return subprocess.run(
                [*command, *arguments],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout

        lines = [json.loads(line) for line in said("--json", "--since", "1h").splitlines()]
        assert [line["kind"] for line in lines][:2] == ["run_attached", "snapshot_sealed"]
        assert lines[2]["checkpoint"] == "1.5"
        (line,) = said("--kind", "checkpoint_complete").splitlines()
        assert "demo@1.5 is complete on all ranks" in line
