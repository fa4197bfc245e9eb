"""Quotas of a real daemon: what is too much is refused with what to do, and `everstep quota` shows it."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pausing import wait_until

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.control.service import CALLS_MAX, STREAMS_MAX
from everstep.daemon.testing import DEADLINE_S, FakeTrainer, node_daemon
from everstep.proto import frames


def begin(trainer: FakeTrainer, name: str = "test") -> None:
    assert isinstance(trainer.open_run([Path("nvme0"), Path("nvme1")], name=name), frames.RunOpened)
    trainer.begin_attempt(1)


def used(socket_path: Path) -> dict[str, tuple[int, int]]:
    with connected(socket_path) as client:
        users = {user.uid: user for user in client.quotas()}
    return {each.name: (each.used, each.bound) for each in users[os.getuid()].bounded}


@pytest.mark.parametrize(
    ("quota", "hint"), [("memory_bytes = 8192", "quota.memory_bytes"), ("slots = 1", "quota.slots")]
)
def test_memory_and_slots(node_config: Path, socket_path: Path, quota: str, hint: str) -> None:
    with node_config.open("a") as file:
        file.write(f"[quota]\n{quota}\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        begin(trainer)
        refused = trainer.ask(
            frames.MakeArena(
                request_id=trainer.number(), layout_digest="", slot_size_bytes=1 << 20, slot_count=2
            )
        )
        assert isinstance(refused, frames.Failure)
        assert refused.code == "MemoryRefusedError"
        assert f"quota of uid {os.getuid()}" in refused.message
        assert hint in refused.hint


def test_room_to_grow_is_given_as_far_as_the_quota_goes(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write(f"[quota]\nmemory_bytes = {10 * 4096 + 100}\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        begin(trainer)
        ready = trainer.ask(
            frames.MakeArena(
                request_id=trainer.number(),
                layout_digest="",
                slot_size_bytes=3 * 4096,
                slot_count=2,
                spare_size_bytes=100 * 4096,
            )
        )
        os.close(trainer.reader.take_fd())
        assert isinstance(ready, frames.ArenaReady)
        assert (ready.slot_size_bytes, ready.slot_count, ready.reason) == (5 * 4096, 2, "")


@pytest.mark.parametrize("how", ["another structure", "taken over"])
def test_an_arena_that_its_trainer_uses_no_more_counts_only_until_it_asks_for_another(
    node_config: Path, socket_path: Path, how: str
) -> None:
    """It asks again and again, and the attempt took no checkpoint any more."""
    with node_config.open("a") as file:
        file.write("[quota]\nslots = 2\n")
    with (
        node_daemon(node_config, socket_path),
        FakeTrainer(socket_path) as trainer,
        FakeTrainer(socket_path) as other,
    ):
        begin(trainer)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        trainer.event(frames.Persisted)
        arena.close()
        if how == "taken over":
            storage = [Path("nvme0"), Path("nvme1")]
            assert isinstance(other.open_run(storage, takeover=True), frames.RunOpened)
            other.begin_attempt(2)
        asking = trainer if how == "another structure" else other
        asking.make_arena(asking.layout((whole_leaf("w", "int8", (9,)),))).close()


def test_disk(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write("[quota]\ndisk_bytes = 30000\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        begin(trainer)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        trainer.event(frames.Persisted)
        taken, bound = used(socket_path)["disk_bytes"]
        assert 0 < taken <= bound == 30000
        arena.save(CheckpointId(1, 2), seed=2, slot=1)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert failed.code == "NoSpaceError"
        assert f"quota of uid {os.getuid()}" in failed.message
        assert used(socket_path)["disk_bytes"] == (taken, 30000)
        arena.close()


def test_status_says_what_is_near_its_bound_and_nothing_else(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write("[quota]\nslots = 2\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        begin(trainer)
        assert "quota" not in everstep("status")
        arena = trainer.make_arena(trainer.layout())
        assert f"! quota of uid {os.getuid()}: slots 2 of 2 (`everstep quota`)" in everstep("status")
        bounded = json.loads(everstep("status", "--json"))["quotas"][0]["bounded"]
        assert {"name": "slots", "used": 2, "bound": 2} in bounded
        arena.close()


def everstep(*arguments: str) -> str:
    return subprocess.run(
        [Path(sys.executable).with_name("everstep"), *arguments],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


def test_connections_and_what_is_shown(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write("[quota]\nconnections = 3\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        begin(trainer)
        arena = trainer.make_arena(trainer.layout())
        with FakeTrainer(socket_path), FakeTrainer(socket_path):
            shown = subprocess.run(
                [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "quota", "--json"],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert shown.returncode == 1
            assert "3 connections" in shown.stdout
            assert "quota.connections" in shown.stdout
        found = used(socket_path)
        assert found["memory_bytes"][0] == arena.ready.slot_size_bytes * arena.ready.slot_count
        assert found["slots"] == (2, 4096)
        assert found["connections"][1] == 3
        shown = subprocess.run(
            [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "quota", "--json"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        (user,) = json.loads(shown.stdout)["users"]
        assert (user["uid"], user["refused_count"]) == (os.getuid(), 1)
        arena.close()


def test_no_more_calls_run_at_once_than_the_daemon_answers_whoever_makes_them(
    node_config: Path, socket_path: Path
) -> None:
    """Beside what each user may: the bound of gRPC's server itself, over all connections."""
    with node_config.open("a") as file:
        file.write("[quota]\ncalls = 1000\n")
    go = threading.Event()

    def request_when_told() -> Iterator[bytes]:
        go.wait(DEADLINE_S)
        yield b""

    with (
        node_daemon(node_config, socket_path),
        FakeTrainer(socket_path) as trainer,
        contextlib.ExitStack() as channels,
    ):
        assert isinstance(trainer.hello, frames.Welcome)
        metadata = (("authorization", f"Bearer {trainer.hello.token}"),)
        target, options = f"unix:{trainer.hello.control_socket}", [("grpc.use_local_subchannel_pool", 1)]
        calls = list[Any]()
        for _ in range(3):
            channel = channels.enter_context(grpc.insecure_channel(target, options=options))
            method = channel.stream_unary("/everstep.node.v1.Node/GetStatus")
            calls += [
                method.future(request_when_told(), timeout=DEADLINE_S, metadata=metadata)
                for _ in range(STREAMS_MAX)
            ]
        too_many = len(calls) - CALLS_MAX
        assert too_many > 0
        wait_until(lambda: sum(call.done() for call in calls) == too_many)
        refused = [call for call in calls if call.done()]
        go.set()
        assert {call.exception().code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert sum(call.exception() is None for call in calls) == CALLS_MAX
