"""A node's daemon that saves runs of several users: each has its own, and hears of no other's."""

import os
import random
import stat
from pathlib import Path

import pytest
from cached import HostileReader
from pausing import wait_until
from users import UIDS, acting_as, begun, let_in, open_the_way, save, trainer_of

from everstep.checkpoint.testing import load, opened
from everstep.core.errors import ConfigError, NotFoundError, UsageError
from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.access.served_users import ServedUsers, uids_of
from everstep.daemon.cli.main import main
from everstep.daemon.config import load_config
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

A, B, STRANGER = UIDS[:3]
SAME = "the-same-name"
ONLY_A = "only-of-a"
FIRST = CheckpointId(1, 1)


def reader_of(uid: int, socket_path: Path) -> HostileReader:
    with acting_as(uid):
        return HostileReader(socket_path)


def memory_of(arena: FakeArena, reader: HostileReader, budget_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Return all that is in an arena, in a staging and in a cache, once that one has all its pages."""
    wait_until(lambda: os.fstat(reader.arena_fd).st_size == budget_bytes)
    cache = os.pread(
        reader.arena_fd, os.fstat(reader.arena_fd).st_size, 0
    )  # a page that is not there is zeros
    return bytes(arena.map), bytes(reader.staging), cache


class TestWhoIsServed:
    def test_alone_it_saves_its_own_users_runs(self) -> None:
        served = ServedUsers(own_uid=A)
        assert served.has(A)
        assert not served.are_several
        served.check_hello(B)  # whoever opened the socket has said who comes, for caches
        with pytest.raises(UsageError, match=f"no runs of uid {B}") as refused:
            served.check_run(B)
        assert "daemon.users" in refused.value.hint

    def test_those_who_are_named(self) -> None:
        served = ServedUsers(own_uid=A, others=frozenset({B}))
        assert served.are_several
        for uid in (A, B):
            served.check_hello(uid)
            served.check_run(uid)
        for uid in (STRANGER, 0):
            with pytest.raises(UsageError, match=r"daemon\.users does not name"):
                served.check_run(uid)
        served.check_hello(0)  # who may look after everything
        with pytest.raises(UsageError, match=r"daemon\.users does not name"):
            served.check_hello(STRANGER)

    def test_everybody(self) -> None:
        served = ServedUsers(own_uid=A, is_open=True)
        served.check_hello(STRANGER)
        served.check_run(STRANGER)

    def test_names_and_numbers(self, node_config: Path) -> None:
        assert uids_of(["nobody", "60001", "*"]) == {65534, 60001}
        with pytest.raises(ConfigError, match=r"daemon.users: user .nobody-at-all."):
            uids_of(["nobody-at-all"])

    def test_a_file_may_name_users_of_another_machine(
        self, node_config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The daemon does not start with it; who looks at the file alone finds nothing wrong."""
        node_config.write_text(node_config.read_text() + 'users = ["nobody-at-all"]\n')
        assert main(["config", "check", "--no-machine", str(node_config)]) == 0
        assert main(["config", "check", str(node_config)]) == 1
        assert "daemon.users: user 'nobody-at-all' is not known here" in capsys.readouterr().out
        with pytest.raises(ConfigError, match=r"daemon.users: user .nobody-at-all."):
            ServedUsers.of(load_config(node_config).daemon.users)

    def test_its_own_user_named_is_nobody_else(self) -> None:
        assert not ServedUsers(own_uid=A, others=frozenset({A})).are_several


@pytest.mark.root
class TestRuns:
    def test_each_has_its_own_of_a_name_and_sees_no_others(
        self, node_config: Path, socket_path: Path, devices: list[Path]
    ) -> None:
        let_in(node_config, socket_path, [str(A), str(B)])
        contents: dict[int, dict[str, bytes]] = {}
        with node_daemon(node_config, socket_path):
            with trainer_of(A, socket_path) as a, trainer_of(B, socket_path) as b:
                arenas = {A: begun(a, SAME), B: begun(b, SAME)}  # neither fences the other
                assert all(map(zeroed, arenas.values()))
                for trainer, uid in ((a, A), (b, B)):
                    save(trainer, arenas[uid], FIRST, seed=uid)
                    contents[uid] = arenas[uid].content(seed=uid)
                    arenas[uid].close()
            with trainer_of(A, socket_path) as a:
                begun(a, ONLY_A).close()
            with acting_as(B), connected(socket_path) as client:
                assert [(each.name, each.owner_uid) for each in client.status().runs] == [(SAME, B)]
                assert [each.owner_uid for each in client.checkpoints("")] == [B]
                with pytest.raises(NotFoundError):
                    client.checkpoints(f"{A}/{SAME}")
            with connected(socket_path) as root:  # who sees all, and can say whose is meant
                with pytest.raises(UsageError, match=f"{A}/{SAME}"):
                    root.checkpoints(SAME)
                assert [each.owner_uid for each in root.checkpoints(f"{A}/{SAME}")] == [A]
        for path in (path for device in devices for path in device.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
            assert path.stat().st_uid == os.getuid()
        with (
            node_daemon(node_config, socket_path),  # which finds the runs of all
            trainer_of(B, socket_path) as b,
            trainer_of(A, socket_path) as a,
        ):
            for trainer in (a, b):
                reply = trainer.open_run([Path("nvme0"), Path("nvme1")], name=SAME)
                assert isinstance(reply, frames.RunOpened)
                assert (reply.highest_attempt, reply.new_store) == (1, False)
                assert [(each.attempt, each.step) for each in trainer.offers()] == [(1, 1)]
        with opened(devices, read_only=True) as (store, _):
            found = {run.owner_uid: run for run in store.runs() if run.name == SAME}
            assert {uid: load(run, run.manifest(FIRST, 0)) for uid, run in found.items()} == contents

    def test_memory_that_one_gave_back_comes_to_another_without_its_bytes(
        self, node_config: Path, socket_path: Path
    ) -> None:
        """Arena, cache and staging, of the same sizes, right after the first has gone."""
        let_in(node_config, socket_path, ["*"])
        sample, budget_bytes = random.Random("canary").randbytes(4096), 1 << 20
        with node_daemon(node_config, socket_path):
            with trainer_of(A, socket_path) as a, reader_of(A, socket_path) as reader:
                arena = begun(a, SAME)
                save(a, arena, FIRST, seed=1)
                kept = [each for each in arena.content(1).values() if len(each) >= 32]
                assert kept
                reader.open_cache(4, fingerprint="photographs", budget_bytes=budget_bytes)
                reader.stage()
                reader.fill({0: sample})
                places = memory_of(arena, reader, budget_bytes)
                assert all(each in places[0] for each in kept)
                assert sample in places[1]
                assert sample in places[2]
                sizes = [len(each) for each in places]
                arena.close()
            with connected(socket_path) as root:
                wait_until(lambda: root.status().caches[0].client_count == 0)
                root.drop_cache(root.status().caches[0].number)
            with trainer_of(B, socket_path) as b, reader_of(B, socket_path) as reader:
                arena = begun(b, SAME)
                reply = reader.open_cache(4, fingerprint="photographs", budget_bytes=budget_bytes)
                assert isinstance(reply, frames.CacheOpened), reply
                reader.stage()
                places = memory_of(arena, reader, budget_bytes)
                assert [len(each) for each in places] == sizes
                canaries = [each[:32] for each in (sample, *kept)]
                assert not [canary for canary in canaries for place in places if canary in place]
                arena.close()

    def test_who_is_not_named_is_refused_and_told_the_key(self, node_config: Path, socket_path: Path) -> None:
        let_in(node_config, socket_path, [str(A)])
        with node_daemon(node_config, socket_path):
            refused = trainer_of(STRANGER, socket_path)
            with refused:
                assert isinstance(refused.hello, frames.Failure)
                assert "daemon.users" in refused.hello.message
            with FakeTrainer(socket_path) as own:
                assert isinstance(own.open_run([Path("nvme0"), Path("nvme1")]), frames.RunOpened)
            for path in (socket_path, control_socket_path(socket_path)):
                assert stat.S_IMODE(path.stat().st_mode) == 0o666

    def test_without_the_key_the_sockets_stay_closed(self, node_config: Path, socket_path: Path) -> None:
        with node_daemon(node_config, socket_path):
            for path in (socket_path, control_socket_path(socket_path)):
                assert not stat.S_IMODE(path.stat().st_mode) & 0o077
            open_the_way(socket_path)
            socket_path.chmod(0o666)
            with trainer_of(A, socket_path) as trainer:
                refused = trainer.open_run([Path("nvme0"), Path("nvme1")])
                assert isinstance(refused, frames.Failure)
                assert "daemon.users" in refused.message

    @pytest.mark.parametrize("mode", [0o700, 0o777])
    def test_a_directory_that_does_not_fit_is_named(
        self, node_config: Path, socket_path: Path, mode: int
    ) -> None:
        let_in(node_config, socket_path, ["*"])
        socket_path.parent.chmod(mode)
        with pytest.raises(AssertionError, match="chmod 711"), node_daemon(node_config, socket_path):
            pass

    def test_what_one_has_of_a_quota_is_not_taken_from_another(
        self, node_config: Path, socket_path: Path
    ) -> None:
        let_in(node_config, socket_path, ["*"])
        with node_config.open("a") as file:
            file.write("[quota]\ndisk_bytes = 30000\nslots = 2\n")
        with (
            node_daemon(node_config, socket_path),
            trainer_of(A, socket_path) as a,
            trainer_of(B, socket_path) as b,
        ):
            arena = begun(a, SAME)
            save(a, arena, FIRST, seed=1)
            arena.save(CheckpointId(1, 2), seed=2, slot=1)
            failed = a.event(frames.PersistFailed)
            assert isinstance(failed, frames.PersistFailed)
            assert f"quota of uid {A}" in failed.message
            other = begun(b, SAME)
            save(b, other, FIRST, seed=3)
            with trainer_of(A, socket_path) as more:
                assert isinstance(
                    more.open_run([Path("nvme0"), Path("nvme1")], name=ONLY_A), frames.RunOpened
                )
                more.begin_attempt(1)
                with pytest.raises(AssertionError, match=f"quota of uid {A}: it has 2 of 2 slots"):
                    more.make_arena(more.layout())
            arena.close()
            other.close()

    def test_ranks_that_write_at_once_stay_within_it_together(
        self, node_config: Path, socket_path: Path
    ) -> None:
        let_in(node_config, socket_path, ["*"])
        with node_config.open("a") as file:
            file.write("[quota]\ndisk_bytes = 30000\n")
        with node_daemon(node_config, socket_path):
            trainers = [trainer_of(A, socket_path) for _ in range(4)]
            arenas = [begun(trainer, f"run-{number}") for number, trainer in enumerate(trainers)]
            for number, arena in enumerate(arenas):
                arena.save(FIRST, seed=number)
            said = [settled(trainer) for trainer in trainers]
            assert said.count(frames.Persisted) == 1, said
            assert said.count(frames.PersistFailed) == 3
            for arena, trainer in zip(arenas, trainers, strict=True):
                arena.close()
                trainer.close()

    def test_shards_are_lent_to_whose_they_are(self, node_config: Path, socket_path: Path) -> None:
        let_in(node_config, socket_path, ["*"])
        with (
            node_daemon(node_config, socket_path),
            trainer_of(A, socket_path) as a,
            trainer_of(B, socket_path) as b,
        ):
            arena = begun(a, ONLY_A)
            save(a, arena, FIRST, seed=1)
            arena.close()
            assert isinstance(a.ask(manifest_of(ONLY_A, a.number())), frames.ManifestBytes)
            assert isinstance(a.ask(segment_of(ONLY_A, a.number())), frames.SegmentOpened)
            fd = a.reader.take_fd()
            assert os.read(fd, 1)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            with acting_as(A), pytest.raises(PermissionError):  # nor can it be opened again for more
                os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            os.close(fd)
            for make in (manifest_of, segment_of):
                said = [b.ask(make(name, b.number())) for name in (ONLY_A, "not-there")]
                (foreign, absent) = said
                assert isinstance(foreign, frames.Failure)
                assert isinstance(absent, frames.Failure)
                assert foreign.message == absent.message.replace("not-there", ONLY_A)
                assert (foreign.code, foreign.hint) == (absent.code, absent.hint)
            odd = a.ask(segment_of(ONLY_A, a.number(), segment=99))
            assert isinstance(odd, frames.Failure)
            assert odd.code == "NotFoundError"


def manifest_of(name: str, number: int) -> frames.ReadManifest:
    return frames.ReadManifest(request_id=number, run=name, attempt=1, step=1, rank=0)


def segment_of(name: str, number: int, segment: int = 0) -> frames.OpenSegment:
    return frames.OpenSegment(request_id=number, run=name, attempt=1, step=1, rank=0, segment=segment)


def zeroed(arena: FakeArena) -> bool:
    """Tell whether an arena shows nothing of anybody before."""
    content = arena.map[:]
    return bool(content) and not any(content)


def settled(trainer: FakeTrainer) -> type:
    """Return how what was sealed has ended."""
    while True:
        for event in trainer.events:
            if isinstance(event, frames.Persisted | frames.PersistFailed):
                return type(event)
        trainer.events.append(trainer.receive())
