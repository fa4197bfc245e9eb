"""The data socket against a real daemon process: leases, attempts, arenas, sealing, restoring, bad clients."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "data.sock"


@pytest.fixture
def daemon(socket_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with daemon_process(socket_path) as process:
        yield process


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


def failure(reply: object) -> frames.Failure:
    assert isinstance(reply, frames.Failure), reply
    return reply


@pytest.mark.usefixtures("daemon")
class TestSealing:
    def test_what_is_sealed_is_committed_and_reported(self, socket_path: Path, devices: list[Path]) -> None:
        checkpoint = CheckpointId(1, 7)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=3)
            persisted = trainer.event(frames.Persisted)
            assert isinstance(persisted, frames.Persisted)
            assert (persisted.attempt, persisted.step, persisted.under_replicated) == (1, 7, False)
            content = arena.content(3)
            arena.close()
        with opened(devices, read_only=True) as (store, _):
            (run,) = store.runs()
            assert load(run, run.manifest(checkpoint, 0)) == content

    def test_a_draft_changed_after_sealing_is_refused_and_the_slot_is_free_again(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout(), slot_count=1)
            arena.begin(CheckpointId(1, 1))
            arena.seal(CheckpointId(1, 1), spoil=True)
            failed = trainer.event(frames.PersistFailed)
            assert isinstance(failed, frames.PersistFailed)
            assert failed.code == "CorruptDataError"
            assert "changed after it was sealed" in failed.message
            assert isinstance(trainer.event(frames.SlotFree), frames.SlotFree)
            arena.save(CheckpointId(1, 2), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()

    def test_an_older_snapshot_is_freed_when_a_newer_one_is_sealed_everywhere(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            for slot in (0, 1):
                arena.save(CheckpointId(1, slot + 1), seed=slot, slot=slot)
                trainer.event(frames.Persisted)
            trainer.send(frames.SealedEverywhere(attempt=1, step=2))
            freed = trainer.event(frames.SlotFree)
            assert freed == frames.SlotFree(arena=arena.ready.arena, slot=0)
            arena.close()


@pytest.mark.usefixtures("daemon")
class TestRestoring:
    def test_memory_survives_the_trainer_and_is_handed_to_the_next(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        checkpoint = CheckpointId(1, 7)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=3)
            arena.close()  # and gone, before it heard of the commit
        with FakeTrainer(socket_path) as trainer:
            reply = trainer.open_run(devices)
            assert isinstance(reply, frames.RunOpened)
            assert reply.highest_attempt == 1
            trainer.begin_attempt(2)
            (offer,) = trainer.offers()
            assert (offer.attempt, offer.step, offer.in_memory, offer.shards) == (1, 7, True, [0])
            fetched = trainer.fetch(checkpoint)
            assert isinstance(fetched, frames.Fetched)

    def test_disk_is_used_when_the_memory_is_gone(self, socket_path: Path, devices: list[Path]) -> None:
        checkpoint = CheckpointId(1, 7)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=3)
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
            arena.close()
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(2)
            assert isinstance(trainer.fetch(checkpoint), frames.Streaming)

    def test_who_finds_the_memory_damaged_gets_the_bytes_of_the_devices(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        checkpoint = CheckpointId(1, 7)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=3)
            trainer.event(frames.Persisted)
            arena.close()
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(2)
            assert isinstance(trainer.fetch(checkpoint), frames.Fetched)
            assert isinstance(trainer.fetch(checkpoint, from_devices=True), frames.Streaming)
        assert "memory_damaged" in socket_path.with_name("daemon.log").read_text()

    def test_a_corrupt_segment_is_named_with_its_block(self, socket_path: Path, devices: list[Path]) -> None:
        checkpoint = CheckpointId(1, 7)
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=3)
            trainer.ask(frames.Detach(request_id=trainer.number()))
            arena.close()
        segment = next(devices[0].glob("runs/*/*/data/*/*.safetensors"))
        with segment.open("r+b") as file:
            file.seek(4096)
            byte = file.read(1)[0]
            file.seek(4096)
            file.write(bytes([byte ^ 4]))
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(2)
            shard = trainer.fetch(checkpoint)
            assert isinstance(shard, frames.Streaming)
            _, end = trainer.stream(shard)
            assert end.code == "CorruptDataError"
            assert str(segment) in end.message
            assert "block 0" in end.message
            (offer,) = trainer.offers()
            assert "block 0" in offer.problem


@pytest.mark.usefixtures("daemon")
class TestLeases:
    def test_a_living_trainer_keeps_its_run(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            first.open_run(devices)
            refused = failure(second.open_run(devices))
            assert refused.code == "RunBusyError"
            assert "held by this very process" in refused.message
            assert refused.hint.startswith(
                "close() that run, use another name, or attach(..., takeover=True)"
            )

    def test_a_store_is_new_until_somebody_begins_in_it(self, socket_path: Path, devices: list[Path]) -> None:
        """Who mistypes the name of a run must not hear that the directories were empty."""
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            for rank, trainer in enumerate((first, second)):
                reply = trainer.open_run(devices, rank=rank, world_size=2)
                assert isinstance(reply, frames.RunOpened)
                assert reply.new_store
            first.begin_attempt(1)
        with FakeTrainer(socket_path) as again, FakeTrainer(socket_path) as mistyped:
            for name, trainer in (("test", again), ("tset", mistyped)):
                reply = trainer.open_run(devices, name=name)
                assert isinstance(reply, frames.RunOpened)
                assert not reply.new_store

    def test_a_trainer_that_leaves_answers_unread_gives_its_run_back(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        """The daemon waits to write to it, and hears of its end by a reset."""
        with FakeTrainer(socket_path) as first:
            first.open_run(devices)
            for _ in range(2000):  # more than the socket holds, less than gets one cut off
                first.send(frames.ListOffers(request_id=first.number()))
            with FakeTrainer(socket_path) as other:
                other.open_run(devices, name="other")  # by now the daemon has answered all it could
        with FakeTrainer(socket_path) as second:
            assert isinstance(second.open_run(devices), frames.RunOpened)

    def test_a_dead_trainers_forked_children_do_not_keep_its_lease(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        """The child holds the socket open for minutes; the pidfd tells the death at once."""
        script = (
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from everstep.daemon.testing import FakeTrainer\n"
            "trainer = FakeTrainer(Path(sys.argv[1]))\n"
            "trainer.open_run([Path(path) for path in sys.argv[2:]])\n"
            "child = os.fork()\n"
            "if child:\n"
            "    print(child, flush=True)\n"
            "time.sleep(300)\n"
        )
        command = [sys.executable, "-P", "-c", script, str(socket_path), *map(str, devices)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            child = int(holder.stdout.readline())
            with FakeTrainer(socket_path) as trainer:
                refused = failure(trainer.open_run(devices))
                assert refused.code == "RunBusyError"
                assert f"held by a living trainer (pid {holder.pid})" in refused.message
                killed_s = time.perf_counter()
                holder.kill()
                while isinstance(reply := trainer.open_run(devices), frames.Failure):
                    assert reply.code == "RunBusyError"
                free_s = time.perf_counter() - killed_s
            os.kill(child, signal.SIGKILL)
        assert free_s < 0.1

    def test_a_takeover_fences_the_old_trainer(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            first.open_run(devices)
            first.begin_attempt(1)
            assert isinstance(second.open_run(devices, takeover=True), frames.RunOpened)
            assert isinstance(first.event(frames.Fenced), frames.Fenced)
            with pytest.raises(EOFError):
                first.receive()

    def test_two_ranks_share_a_run_and_an_attempt(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            first.open_run(devices, rank=0, world_size=2)
            second.open_run(devices, rank=1, world_size=2)
            assert isinstance(first.begin_attempt(1), frames.Done)
            assert isinstance(second.begin_attempt(1), frames.Done)

    def test_who_is_of_an_older_attempt_is_thrown_out(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            first.open_run(devices, rank=0, world_size=2)
            second.open_run(devices, rank=1, world_size=2)
            first.begin_attempt(1)
            arena = first.make_arena(first.layout())
            second.begin_attempt(2)
            fenced = first.event(frames.Fenced)
            assert isinstance(fenced, frames.Fenced)
            assert "attempt 1 of run 'test' is over: attempt 2 has started" in fenced.message
            with pytest.raises(EOFError):
                first.receive()
            arena.close()
            with FakeTrainer(socket_path) as again:
                again.open_run(devices, rank=0, world_size=2)
                assert failure(again.begin_attempt(1)).code == "FencedError"

    def test_a_part_of_an_open_store_is_refused(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            first.open_run(devices)
            refused = failure(second.open_run(devices[:1], name="other"))
            assert refused.code == "ConfigError"
            assert "not the whole" in refused.message


@pytest.mark.usefixtures("daemon")
class TestBadClients:
    def test_another_protocol_is_refused_with_both_versions(
        self, socket_path: Path, daemon: "subprocess.Popen[bytes]"
    ) -> None:
        with FakeTrainer(socket_path, protocol=99) as trainer:
            refused = failure(trainer.hello)
            assert refused.code == "VersionMismatchError"
            assert "99" in refused.message
            assert f"`kill {daemon.pid}`" in refused.hint
            with pytest.raises(EOFError):
                trainer.receive()

    def test_an_operator_of_another_protocol_is_welcome(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path, protocol=99, role=frames.Role.CONTROL) as operator:
            assert isinstance(operator.hello, frames.Welcome)
            assert operator.hello.token

    def test_a_client_must_say_hello_first(self, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path, hello=False) as trainer:
            assert failure(trainer.open_run(devices)).code == "UsageError"

    def test_before_hello_little_is_buffered(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path, hello=False) as trainer:
            trainer.sock.sendall((10**6).to_bytes(4, "little") + bytes(5000))
            with pytest.raises((EOFError, ConnectionResetError)):
                trainer.receive()

    def test_descriptors_from_clients_end_the_connection(self, socket_path: Path) -> None:
        import socket

        with FakeTrainer(socket_path) as trainer:
            socket.send_fds(trainer.sock, [b"\0"], [0, 1, 2])
            with pytest.raises((EOFError, ConnectionResetError)):
                trainer.receive()

    def test_snapshots_need_a_lease(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert failure(trainer.ask(frames.ListOffers(request_id=1))).code == "FencedError"

    @pytest.mark.parametrize("slot_size_bytes", [0, -4096, 4097, 2**62])
    def test_absurd_arenas_are_refused(
        self, socket_path: Path, devices: list[Path], slot_size_bytes: int
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            refused = failure(
                trainer.ask(
                    frames.MakeArena(
                        request_id=9, layout_digest="x", slot_size_bytes=slot_size_bytes, slot_count=2
                    )
                )
            )
            assert refused.code in ("UsageError", "MemoryRefusedError")

    @pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
    def test_names_that_are_no_names_are_refused(
        self, socket_path: Path, devices: list[Path], name: str
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert failure(trainer.open_run(devices, name=name)).code == "ConfigError"

    def test_a_name_is_never_a_path(self, socket_path: Path, devices: list[Path], tmp_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.open_run(devices, name="../../escape"), frames.RunOpened)
        assert not list(tmp_path.rglob("*escape*"))

    def test_a_missing_directory_is_named(self, socket_path: Path, tmp_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            refused = failure(trainer.open_run([tmp_path / "not there"]))
            assert str(tmp_path / "not there") in refused.message


class TestNodeDaemon:
    """`everstep daemon --config`: the devices are the node's, a run names those it wants."""

    @pytest.fixture
    def node(self, tmp_path: Path, devices: list[Path]) -> Iterator[Path]:
        config, path = tmp_path / "node.toml", tmp_path / "s" / "data.sock"
        path.parent.mkdir(mode=0o700)
        config.write_text(
            f'[daemon]\nsocket = "{path}"\n[devices]\nnvme0 = "{devices[0]}"\nnvme1 = "{devices[1]}"\n'
        )
        with node_daemon(config, path):
            yield path

    def test_a_run_takes_the_devices_that_it_names(self, node: Path, devices: list[Path]) -> None:
        with FakeTrainer(node) as trainer:
            opened_run = trainer.open_run([Path("nvme1")])
            assert isinstance(opened_run, frames.RunOpened)
            assert [device.path for device in opened_run.devices] == [str(devices[1])]
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 7), seed=3)
            trainer.event(frames.Persisted)
            arena.close()
        assert not list(devices[0].rglob("*.safetensors"))
        assert list(devices[1].rglob("*.safetensors"))

    def test_directories_are_not_for_clients_to_choose(self, node: Path, tmp_path: Path) -> None:
        with FakeTrainer(node) as trainer:
            refused = failure(trainer.open_run([tmp_path / "elsewhere"]))
            assert refused.code == "ConfigError"
            assert "nvme0, nvme1" in refused.hint
            assert not isinstance(trainer.open_run([tmp_path / "d0"]), frames.Failure), (
                "its own are named so, too"
            )


class TestLifetime:
    def test_a_private_daemon_ends_after_a_clean_close(self, socket_path: Path, devices: list[Path]) -> None:
        with daemon_process(socket_path) as process:
            with FakeTrainer(socket_path) as trainer:
                trainer.open_run(devices)
                trainer.begin_attempt(1)
                trainer.ask(frames.Detach(request_id=trainer.number()))
            assert process.wait(10) == 0
        assert not socket_path.exists()

    def test_it_lingers_after_a_crash_and_then_ends(self, socket_path: Path, devices: list[Path]) -> None:
        with daemon_process(socket_path, linger_s=1.0) as process:
            with FakeTrainer(socket_path) as trainer:
                trainer.open_run(devices)
                trainer.begin_attempt(1)
            assert process.wait(10) == 0

    def test_a_stale_socket_file_is_replaced(self, socket_path: Path) -> None:
        import socket

        socket_path.parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(socket_path))
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)

    def test_an_idle_private_daemon_hands_its_devices_over(self, tmp_path: Path, devices: list[Path]) -> None:
        first, second = tmp_path / "a" / "data.sock", tmp_path / "b" / "data.sock"
        with daemon_process(first) as old, daemon_process(second):
            with FakeTrainer(first) as trainer:
                trainer.open_run(devices)
                with FakeTrainer(second) as other:
                    refused = failure(other.open_run(devices))
                    assert refused.code == "DeviceLockedError"
                    assert f"pid {old.pid}" in refused.message
                trainer.begin_attempt(1)
                trainer.ask(frames.Detach(request_id=trainer.number()))
            with FakeTrainer(second) as other:
                assert isinstance(other.open_run(devices), frames.RunOpened)
            assert old.wait(10) == 0
