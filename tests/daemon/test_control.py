"""The control API of a real daemon: who may call, how errors travel, what may be removed, how it ends."""

import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec import structs
from rich.console import Console

from everstep.checkpoint.keep import Keep
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.errors import (
    DaemonUnavailableError,
    NotFoundError,
    ProtectedError,
    RunBusyError,
    UsageError,
)
from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.cli import render
from everstep.daemon.control import store_views
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.messages import LEAVES_BYTES_MAX
from everstep.daemon.control.views import CheckpointStatus, DeviceStatus, PaceView, RankState
from everstep.daemon.devices.verifier import Restrained, StoppedError
from everstep.daemon.slot_machine import SlotState
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames, node_pb2_grpc
from everstep.proto import node_pb2 as pb

UID = os.geteuid()
RUN = "demo"


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "data.sock"


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("d0", "d1")]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """A run with four complete checkpoints."""
    with opened(devices) as (store, _):
        run = store.run(UID, RUN, create=True)
        run.begin_attempt(1, fresh=False)
        for step in (1, 2, 3, 4):
            save(run, make_state(store, step), CheckpointId(1, step))
        run.set_complete_floor(CheckpointId(1, 3))
    return devices


@pytest.fixture
def client(socket_path: Path) -> Iterator[ControlClient]:
    with daemon_process(socket_path), connected(socket_path) as found:
        yield found


@pytest.fixture
def trainer(socket_path: Path, client: ControlClient) -> Iterator[FakeTrainer]:
    with FakeTrainer(socket_path) as found:
        yield found


@pytest.fixture
def stub(socket_path: Path) -> Iterator[node_pb2_grpc.NodeStub]:
    """A client without any manners."""
    with (
        daemon_process(socket_path),
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
    ):
        yield node_pb2_grpc.NodeStub(channel)


def _last(call: Callable[..., Iterator[object]], *arguments: object, **options: Any) -> object:
    """Read an answer that is a stream to its end."""
    return list(call(*arguments, **options))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def refused(call: Callable[..., object], request: object, **options: Any) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, **options)
    error: Any = caught.value
    return error


def test_of_leaves_with_long_names_those_come_that_have_room(
    trainer: FakeTrainer, client: ControlClient, devices: list[Path]
) -> None:
    """An answer has 16 MiB; these names have 16.7 MB."""
    leaves = [whole_leaf(f"{number:04d}{'.layer' * 660}", "uint8", (1,)) for number in range(4200)]
    with opened(devices) as (store, _):
        run = store.run(UID, RUN, create=True)
        run.begin_attempt(1, fresh=False)
        save(run, make_state(store, 1, leaves), CheckpointId(1, 1))
    trainer.open_run(devices, name=RUN)
    found = client.detail(RUN, None, leaf_count_max=20_000)
    assert found.leaf_count == len(leaves)
    assert 0.99 * LEAVES_BYTES_MAX < sum(len(leaf.name) for leaf in found.leaves) <= LEAVES_BYTES_MAX
    assert [leaf.name for leaf in found.leaves] == [leaf.name for leaf in leaves[: len(found.leaves)]]


class TestWhoMayCall:
    @pytest.mark.parametrize(
        "metadata",
        [
            (),
            bearer(""),
            bearer("0" * 64),
            (("authorization", "0" * 64),),
            (("authorization", "bearer"),),
            (("authorization", "Bearer ~ weird ~"),),
            (("everstep-token", "0" * 64),),
        ],
    )
    def test_nobody_without_a_valid_token(
        self, stub: node_pb2_grpc.NodeStub, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        error = refused(stub.GetStatus, pb.GetStatusRequest(), timeout=5, metadata=metadata)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "data socket" in (error.details() or "")

    def test_every_method_is_guarded(self, stub: node_pb2_grpc.NodeStub) -> None:
        methods = [name for name in vars(stub) if not name.startswith("_")]
        assert len(methods) == len(pb.DESCRIPTOR.services_by_name["Node"].methods)
        for name in methods:
            request = getattr(pb, f"{name}Request")()
            call = getattr(stub, name)
            is_stream = pb.DESCRIPTOR.services_by_name["Node"].methods_by_name[name].server_streaming
            if is_stream:
                call = partial(_last, call)
            assert refused(call, request, timeout=5).code() is grpc.StatusCode.UNAUTHENTICATED

    def test_a_token_ends_with_the_connection_that_got_it(
        self, stub: node_pb2_grpc.NodeStub, socket_path: Path
    ) -> None:
        with FakeTrainer(socket_path) as trainer, FakeTrainer(socket_path) as other:
            assert isinstance(trainer.hello, frames.Welcome)
            assert isinstance(other.hello, frames.Welcome)
            token, still = bearer(trainer.hello.token), bearer(other.hello.token)
            assert stub.GetStatus(pb.GetStatusRequest(), timeout=5, metadata=token).daemon.pid
            trainer.close()
            # The daemon has seen the end once it has answered what came after it.
            other.open_run([socket_path.parent])
            error = refused(stub.GetStatus, pb.GetStatusRequest(), timeout=5, metadata=token)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert stub.GetStatus(pb.GetStatusRequest(), timeout=5, metadata=still).daemon.pid

    @pytest.mark.parametrize("timeout", [None, 4000, 10**6])
    def test_nobody_without_a_deadline(
        self, stub: node_pb2_grpc.NodeStub, socket_path: Path, timeout: float | None
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)
            metadata = bearer(trainer.hello.token)
            error = refused(stub.GetStatus, pb.GetStatusRequest(), timeout=timeout, metadata=metadata)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "deadline of at most 3600 s" in (error.details() or "")

    def test_a_request_above_the_limit_is_not_even_read(
        self, stub: node_pb2_grpc.NodeStub, socket_path: Path
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)
            metadata = bearer(trainer.hello.token)
            request = pb.ListCheckpointsRequest(run="x" * 2**21)
            error = refused(stub.ListCheckpoints, request, timeout=5, metadata=metadata)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def test_the_socket_is_of_one_user(self, stub: node_pb2_grpc.NodeStub, socket_path: Path) -> None:
        assert stub
        control = control_socket_path(socket_path)
        assert stat.S_ISSOCK(control.stat().st_mode)
        assert not control.stat().st_mode & 0o077
        assert not control.parent.stat().st_mode & 0o077


class TestErrors:
    def test_class_message_and_hint_arrive(self, client: ControlClient) -> None:
        with pytest.raises(NotFoundError) as caught:
            client.detail("größe “ü” 'x'", None, leaf_count_max=0)
        assert caught.value.message == "no run \"größe “ü” 'x'\""
        assert "everstep ls" in caught.value.hint

    def test_other_languages_see_a_status(self, stub: node_pb2_grpc.NodeStub, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)
            request = pb.GetCheckpointRequest(selector=pb.Selector(run="nobody"))
            error = refused(stub.GetCheckpoint, request, timeout=5, metadata=bearer(trainer.hello.token))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert dict(error.trailing_metadata() or ())["everstep-code"] == "NotFoundError"

    @pytest.mark.parametrize("drain_s", [float("nan"), -1.0, float("-inf")])
    def test_a_stop_within_no_time_is_refused_and_nothing_stops(
        self, client: ControlClient, drain_s: float
    ) -> None:
        with pytest.raises(UsageError, match="drain_s is"):
            client._call(client._stub.Shutdown, pb.ShutdownRequest(drain_s=drain_s))
        assert not client.status().daemon.is_draining

    def test_a_cache_of_no_possible_number_is_not_there(self, client: ControlClient) -> None:
        for number in (-1, 0, 1 << 32, 10**20):
            with pytest.raises(NotFoundError, match=f"no cache {number}"):
                client.drop_cache(number)

    def test_a_checkpoint_that_is_no_id_is_refused(
        self, client: ControlClient, stored: list[Path], trainer: FakeTrainer
    ) -> None:
        trainer.open_run(stored, name=RUN)
        request = pb.GetCheckpointRequest(selector=pb.Selector(run=RUN, checkpoint="1"))
        with pytest.raises(UsageError, match=r"<attempt>\.<step>"):
            client._call(client._stub.GetCheckpoint, request)

    def test_not_there_and_not_yours_answer_alike(self, stored: list[Path]) -> None:
        with opened(stored) as (store, _):
            store.run(UID + 1, "theirs", create=True)
            answers: list[str] = []
            for name in ("theirs", "nobody"):
                with pytest.raises(NotFoundError) as caught:
                    store_views.find_run([store], name, UID)
                answers.append(str(caught.value).replace(name, ""))
            assert answers[0] == answers[1]
            assert [run.name for run in store_views.visible_runs([store], UID)] == [RUN]
            assert store_views.find_run([store], "theirs", None).owner_uid == UID + 1

    def test_no_daemon_is_said_with_the_path(self, socket_path: Path) -> None:
        with pytest.raises(DaemonUnavailableError) as caught, connected(socket_path):
            pytest.fail("nobody is there")
        assert str(socket_path) in str(caught.value)


def costs(*, train_s: float, guard_s: float) -> frames.Costs:
    return frames.Costs(
        train_s=train_s,
        boundary_s=0.0,
        eager_s=0.0,
        wait_s=0.0,
        guard_s=guard_s,
        slower_s=-1.0,
        skipped={frames.SkipReason.SLOT: 2},
        interval_steps=120,
        reason="bound by the budget: 5 ms stall / 3.5 %",
        goal_missed="no way",
    )


class TestStatus:
    def test_what_a_run_wants_kept_is_shown(
        self, client: ControlClient, trainer: FakeTrainer, devices: list[Path]
    ) -> None:
        keep = Keep(last=5, every_steps=1000, every="6h")
        trainer.open_run(devices, name=RUN, keep=frames.KeepRules(last=5, every_steps=1000, every="6h"))
        status = client.status()
        assert [(run.keep, run.is_own_keep) for run in status.runs] == [(keep, True)]
        said = io.StringIO()
        render.status(Console(file=said, width=120), status)
        assert (
            f"{RUN} keeps last 5, one every 1000 steps, one every 6h, as its trainer says" in said.getvalue()
        )

    def test_how_often_a_run_takes_checkpoints_is_shown_with_its_reason_and_cost(
        self, client: ControlClient, trainer: FakeTrainer, devices: list[Path]
    ) -> None:
        trainer.open_run(devices, name=RUN)
        assert client.status().runs[0].pace is None
        trainer.send(costs(train_s=105.0, guard_s=5.0))
        trainer.begin_attempt(1)  # answered after what was sent before
        status = client.status()
        (run,) = status.runs
        assert run.pace is not None
        assert run.pace == PaceView(
            interval_steps=120,
            reason="bound by the budget: 5 ms stall / 3.5 %",
            goal_missed="no way",
            cost_share=run.pace.cost_share,
            skipped_count=2,
            train_s=run.pace.train_s,
            stall_s=run.pace.stall_s,
        )
        assert run.pace.cost_share == pytest.approx(0.05)
        said = io.StringIO()
        render.status(Console(file=said, width=160), status)
        assert (
            f"{RUN} takes a checkpoint every 120 steps, bound by the budget: 5 ms stall / 3.5 %"
            in said.getvalue()
        )
        assert "they cost 5.00 %, 2 skipped" in said.getvalue()
        for stall_s in (0.01, 0.0):  # with a checkpoint at its first boundary, or none
            new = replace(run.pace, cost_share=0.0, train_s=0.01, stall_s=stall_s, skipped_count=0, steps=1)
            said = io.StringIO()
            render.status(Console(file=said, width=160), replace(status, runs=(replace(run, pace=new),)))
            assert "they cost" not in said.getvalue(), "it has restored, and trained for no step yet"
        assert f"{RUN}: no way" in said.getvalue()
        paused = replace(run.pace, reason="paused until noon, as asked", paused_until_unix_s=4e9)
        said = io.StringIO()
        render.status(Console(file=said, width=160), replace(status, runs=(replace(run, pace=paused),)))
        assert f"{RUN} takes no checkpoint, paused until noon, as asked, 2 skipped" in said.getvalue()

    def test_how_far_training_is_is_shown_between_snapshots(
        self, client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
    ) -> None:
        def step() -> int:
            (run,) = client.status().runs
            return run.ranks[0].step

        with FakeTrainer(socket_path) as first:
            first.open_run(devices, name=RUN)
            first.begin_attempt(1)
            assert step() == 0
            arena = first.make_arena(first.layout())
            arena.save(CheckpointId(1, 7), seed=1)
            first.event(frames.Persisted)
            assert step() == 7
            first.send(structs.replace(costs(train_s=1.0, guard_s=0.0), step=12))
            first.offers()  # answered after what was sent before it
            assert step() == 12
            arena.close()
        trainer.open_run(devices, name=RUN)
        assert step() == 0  # it may restore an older one
        trainer.send(structs.replace(costs(train_s=1.0, guard_s=0.0), step=3))
        trainer.offers()
        assert step() == 3

    def test_an_idle_daemon_has_nothing_to_show(self, client: ControlClient, socket_path: Path) -> None:
        status = client.status()
        assert status.runs == status.stores == ()
        assert status.daemon.socket == str(socket_path)
        assert status.daemon.is_private
        assert status.daemon.metrics_port == 0
        assert client.checkpoints("") == []

    def test_ranks_slots_and_devices_are_shown(
        self, client: ControlClient, trainer: FakeTrainer, devices: list[Path]
    ) -> None:
        trainer.open_run(devices, name=RUN, rank=1, world_size=2)
        assert [(run.keep, run.is_own_keep) for run in client.status().runs] == [(Keep(), False)]
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 7), seed=1, rank=1, world_size=2)
        trainer.event(frames.Persisted)
        arena.begin(CheckpointId(1, 8), slot=1)
        trainer.offers()  # answered after what was sent before it
        status = client.status()
        (run,) = status.runs
        (rank,) = run.ranks
        assert (run.name, run.attempt, run.world_size, run.complete_floor) == (RUN, 1, 2, None)
        assert (rank.rank, rank.state, rank.step, rank.pid) == (1, RankState.ATTACHED, 7, os.getpid())
        assert [(slot.state, slot.checkpoint) for slot in rank.slots] == [
            (SlotState.KEPT, CheckpointId(1, 7)),
            (SlotState.COPYING, CheckpointId(1, 8)),
        ]
        assert rank.arena_bytes == status.daemon.arena_bytes > 0
        assert status.daemon.persisted_count == 1
        (store,) = status.stores
        assert {device.path for device in store.devices} == {str(path) for path in devices}
        assert all(device.state is DeviceStatus.OK and device.free_bytes for device in store.devices)
        (view,) = client.checkpoints(RUN)
        assert (view.state, view.is_in_memory, view.ranks) == (CheckpointStatus.LOCAL, True, (1,))
        arena.close()

    def test_a_lost_and_a_closed_trainer_are_told_apart(
        self, client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
    ) -> None:
        with FakeTrainer(socket_path) as lost:
            lost.open_run(devices, name=RUN, rank=0, world_size=2)
            lost.begin_attempt(1)
            arena = lost.make_arena(lost.layout())
            arena.save(CheckpointId(1, 1), seed=1, world_size=2)
            arena.close()
        trainer.open_run(devices, name=RUN, rank=1, world_size=2)
        trainer.ask(frames.Detach(request_id=trainer.number()))
        (run,) = client.status().runs
        assert [rank.state for rank in run.ranks] == [RankState.LINGERING, RankState.CLOSED]


class TestCheckpoints:
    def test_the_newest_complete_one_is_chosen(
        self, client: ControlClient, trainer: FakeTrainer, stored: list[Path]
    ) -> None:
        trainer.open_run(stored, name=RUN)
        detail = client.detail(RUN, None, leaf_count_max=3)
        assert detail.summary.checkpoint == CheckpointId(1, 4)
        assert (len(detail.leaves), detail.leaf_count, len(detail.segments)) == (3, 7, 2)
        by_id = client.detail(detail.summary.run_id, CheckpointId(1, 2), leaf_count_max=0)
        assert (by_id.summary.title, by_id.leaves) == (f"{RUN}@1.2", ())

    def test_damage_is_found_and_remembered(
        self, client: ControlClient, trainer: FakeTrainer, stored: list[Path]
    ) -> None:
        trainer.open_run(stored, name=RUN)
        assert client.verify(RUN, CheckpointId(1, 4)).is_intact
        segment = client.detail(RUN, CheckpointId(1, 4), leaf_count_max=0).segments[0]
        path = next(device / segment.file for device in stored if (device / segment.file).exists())
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        verdict = client.verify(RUN, CheckpointId(1, 4))
        assert not verdict.is_intact
        bad = [each for each in verdict.segments if each.problem]
        assert [(each.path, each.bad_block) for each in bad] == [(str(path), 0)]
        assert verdict.summary.state is CheckpointStatus.DAMAGED
        assert (1, 4) not in [(offer.attempt, offer.step) for offer in trainer.offers() if not offer.problem]

    def test_what_a_restart_may_need_is_removed_by_force_only(
        self, client: ControlClient, trainer: FakeTrainer, stored: list[Path]
    ) -> None:
        trainer.open_run(stored, name=RUN)
        for step in (2, 3, 4):
            with pytest.raises(ProtectedError):
                client.remove(RUN, CheckpointId(1, step), force=False)
        assert client.remove(RUN, CheckpointId(1, 1), force=False).freed_bytes > 0
        client.remove(RUN, CheckpointId(1, 4), force=True)
        assert [view.checkpoint.step for view in client.checkpoints(RUN)] == [3, 2]
        assert not [name for device in stored for name in device.rglob("1.4.*.mf")]

    def test_a_living_trainer_keeps_its_run(
        self, client: ControlClient, trainer: FakeTrainer, stored: list[Path]
    ) -> None:
        trainer.open_run(stored, name=RUN)
        with pytest.raises(RunBusyError, match="living trainer"):
            client.remove_run(RUN, force=False)
        assert len(client.checkpoints(RUN)) == 4

    def test_a_removed_run_does_not_come_back_from_memory(
        self, client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
    ) -> None:
        with FakeTrainer(socket_path) as lost:
            lost.open_run(devices, name=RUN)
            lost.begin_attempt(1)
            arena = lost.make_arena(lost.layout())
            arena.save(CheckpointId(1, 5), seed=1)
            lost.event(frames.Persisted)
            arena.close()
        trainer.open_run(devices, name="other")
        assert client.status().daemon.arena_bytes > 0
        assert client.remove_run(RUN, force=False).checkpoint_count == 1
        assert client.status().daemon.arena_bytes == 0
        assert not list(devices[0].rglob("*.safetensors"))
        with FakeTrainer(socket_path) as again:
            reply = again.open_run(devices, name=RUN)
            assert isinstance(reply, frames.RunOpened)
            assert reply.highest_attempt == 1
            assert again.offers() == []

    def test_a_stopped_verification_is_no_damage(self, stored: list[Path]) -> None:
        with opened(stored) as (store, _):
            run = store.run(UID, RUN)
            stop = threading.Event()
            engines = {
                device.device_id: Restrained(device.device_id, PlainEngine(), stop)
                for device in store.devices
            }
            assert store_views.verify(run, CheckpointId(1, 4), engines=engines).is_intact
            stop.set()
            with pytest.raises(StoppedError):
                store_views.verify(run, CheckpointId(1, 4), engines=engines)
            assert run.offered()[0] == CheckpointId(1, 4)
            assert not run.pinned()

    def test_a_manifest_that_cannot_be_looked_at_is_a_problem_and_no_checkpoint_that_has_gone(
        self, stored: list[Path]
    ) -> None:
        """Retention may remove one that is verified beside it: who cannot tell says what is wrong."""
        with opened(stored) as (store, _):
            run = store.run(UID, RUN)
            folders = [run.commits_path(device) for device in store.devices]
            for folder in folders:
                folder.rename(folder.with_name("aside"))
                folder.touch()
            verdict = store_views.verify(run, CheckpointId(1, 4))
            assert not verdict.is_intact
            assert verdict.problems
            for folder in folders:
                folder.unlink()
            with pytest.raises(NotFoundError):
                store_views.verify(run, CheckpointId(1, 4))
            for folder in folders:
                folder.with_name("aside").rename(folder)
            assert store_views.verify(run, CheckpointId(1, 4)).is_intact


class TestStop:
    def test_it_ends_the_daemon_and_leaves_no_socket(self, socket_path: Path) -> None:
        with daemon_process(socket_path) as process:
            with connected(socket_path) as client:
                stopped = client.stop()
            assert process.wait(5) == 0
        assert (stopped.persisted_count, stopped.lost_count, stopped.attached_count) == (0, 0, 0)
        assert not socket_path.exists()
        assert not control_socket_path(socket_path).exists()

    def test_what_waits_in_memory_since_it_could_not_be_written_is_lost(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices[:1], name=RUN)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            devices[0].rename(devices[0].with_name("away"))
            arena.save(CheckpointId(1, 9), seed=1)
            assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
            with connected(socket_path) as client:
                stopped = client.stop()
            arena.close()
        assert (stopped.persisted_count, stopped.lost_count) == (0, 1)

    def test_what_is_sealed_is_committed_first(self, socket_path: Path, devices: list[Path]) -> None:
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices, name=RUN)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 9), seed=1)
            with connected(socket_path) as client:
                stopped = client.stop()
            arena.close()
        assert stopped.attached_count == 1
        assert stopped.lost_count == 0
        with opened(devices, read_only=True) as (store, _):
            assert store.run(UID, RUN).complete_floor() == CheckpointId(1, 9)
