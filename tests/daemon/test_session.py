"""One client's misfortune is not another's: deaths at bad moments, waits of others, bugs of our own."""

import contextlib
import os
from pathlib import Path

import pytest
from pausing import Pause, Phase, pausing_daemon

from everstep.checkpoint.engine_choice import choose_engine
from everstep.core.errors import InternalError
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.slot_machine import SlotState
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

OPENING = Phase("everstep.checkpoint.recovery:recover")
PUBLISHING = Phase("everstep.checkpoint.commit:head_of")


def attached(trainer: FakeTrainer, devices: list[Path], name: str = "test") -> FakeArena:
    """Open a run, begin an attempt and make an arena."""
    assert isinstance(trainer.open_run(devices, name=name), frames.RunOpened)
    assert isinstance(trainer.begin_attempt(1), frames.Done)
    return trainer.make_arena(trainer.layout())


def failure(reply: object) -> frames.Failure:
    assert isinstance(reply, frames.Failure), reply
    return reply


class TestLeases:
    def test_a_trainer_that_dies_while_its_run_is_opened_holds_nothing(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        with pausing_daemon(pause, OPENING) as daemon:
            with FakeTrainer(socket_path) as dying:
                dying.send(
                    frames.OpenRun(
                        request_id=1,
                        name="test",
                        rank=0,
                        world_size=1,
                        storage=[str(path) for path in devices],
                        takeover=False,
                    )
                )
                pause.reached(daemon)
            with FakeTrainer(socket_path) as restarted:  # answered after the death has been noticed
                pause.go()
                assert isinstance(restarted.open_run(devices), frames.RunOpened)
                restarted.ask(frames.Detach(request_id=restarted.number()))
            assert daemon.wait(10) == 0, "a private daemon whose last trainer has left ends"

    def test_two_runs_on_one_connection_are_refused_however_fast_they_come(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        storage = [str(path) for path in devices]
        with pausing_daemon(pause, OPENING) as daemon, FakeTrainer(socket_path) as trainer:
            for number in (1, 2):
                trainer.send(
                    frames.OpenRun(
                        request_id=number,
                        name=f"run {number}",
                        rank=0,
                        world_size=1,
                        storage=storage,
                        takeover=False,
                    )
                )
            pause.reached(daemon)
            pause.go()
            assert isinstance(trainer.receive(), frames.RunOpened)
            assert "has a run already" in failure(trainer.receive()).message

    def test_one_who_is_fenced_while_it_leaves_takes_nothing_from_the_next(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        with pausing_daemon(pause, PUBLISHING) as daemon, FakeTrainer(socket_path) as second:
            with FakeTrainer(socket_path) as first:
                arena = attached(first, devices)
                arena.save(CheckpointId(1, 1), seed=1)
                pause.reached(daemon)
                first.send(frames.Detach(request_id=77))
                assert isinstance(second.open_run(devices, takeover=True), frames.RunOpened)
                pause.go()
                assert isinstance(first.event(frames.Fenced), frames.Fenced)
                arena.close()
            assert isinstance(second.begin_attempt(2), frames.Done)
            arena = second.make_arena(second.layout())
            arena.save(CheckpointId(2, 2), seed=2)
            assert isinstance(second.event(frames.Persisted), frames.Persisted)
            arena.close()

    def test_an_attempt_of_fewer_ranks_ends_those_of_the_one_before(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        """A takeover asks for the leases of the ranks that it has; nobody completes what the others would save."""
        with daemon_process(socket_path), FakeTrainer(socket_path) as only:
            with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
                for rank, old in enumerate((first, second)):
                    old.open_run(devices, rank=rank, world_size=2)
                    assert isinstance(old.begin_attempt(1), frames.Done)
                assert isinstance(only.open_run(devices, takeover=True), frames.RunOpened)
                assert isinstance(only.begin_attempt(2), frames.Done)
                for old in (first, second):
                    assert isinstance(old.event(frames.Fenced), frames.Fenced)
            assert isinstance(only.ask(frames.Detach(request_id=only.number())), frames.Done)

    def test_they_end_while_a_device_writes_for_others(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        """A device's thread stands still in the middle of a write until it is told to go on: nothing waits for it."""
        engine = choose_engine(devices[0]).factory()
        engine.close()
        phase = Phase(f"{type(engine).__module__}:{type(engine).__name__}.run", match="WRITE")
        with (
            pausing_daemon(pause, phase) as daemon,
            FakeTrainer(socket_path) as writing,
            FakeTrainer(socket_path) as leaving,
            FakeTrainer(socket_path) as dying,
        ):
            arenas = [
                attached(trainer, devices, name)
                for trainer, name in ((writing, "writing"), (leaving, "leaving"), (dying, "dying"))
            ]
            arenas[0].save(CheckpointId(1, 1), seed=1)
            pause.reached(daemon)
            leaving.ask(frames.Detach(request_id=77))
            dying.close()
            with FakeTrainer(socket_path) as restarted:
                assert isinstance(restarted.open_run(devices, name="dying"), frames.RunOpened)
            assert not any(isinstance(event, frames.Persisted) for event in writing.events)
            pause.go()
            assert isinstance(writing.event(frames.Persisted), frames.Persisted)
            for arena in arenas:
                arena.close()

    def test_a_store_that_hangs_holds_no_threads_that_others_need(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        """As many snapshots wait for it as the event loop has threads for whatever comes."""
        phase = Phase("everstep.checkpoint.real_storage:RealStorage.open_new_segment")
        with pausing_daemon(pause, phase) as daemon, contextlib.ExitStack() as held:
            for number in range((os.cpu_count() or 1) + 4):  # of concurrent.futures, up to 32
                trainer = held.enter_context(FakeTrainer(socket_path))
                arena = attached(trainer, devices[:1], f"run {number}")
                held.callback(arena.close)
                arena.save(CheckpointId(1, 1), seed=1)
                if not number:
                    pause.reached(daemon)
            other = held.enter_context(FakeTrainer(socket_path))
            assert isinstance(other.open_run(devices[1:], name="other"), frames.RunOpened)
            assert isinstance(other.begin_attempt(1), frames.Done)
            pause.go()


class TestRanks:
    def test_the_others_of_its_attempt_hear_of_a_rank_that_died_and_no_others(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        with (
            daemon_process(socket_path),
            FakeTrainer(socket_path) as first,
            FakeTrainer(socket_path) as other,
        ):
            first.open_run(devices, rank=0, world_size=3)
            first.begin_attempt(1)
            with FakeTrainer(socket_path) as leaving:
                leaving.open_run(devices, rank=1, world_size=3)
                leaving.begin_attempt(1)
                leaving.ask(frames.Detach(request_id=leaving.number()))
            with FakeTrainer(socket_path) as dying:
                dying.open_run(devices, rank=2, world_size=3)
                dying.begin_attempt(1)
                other.open_run(devices, rank=1, world_size=3)  # of the next group, which has not begun
            assert first.event(frames.RankGone) == frames.RankGone(rank=2)
            assert first.events == []
            other.offers()  # answered after all that was sent before
            assert other.events == []


class TestBugs:
    """An exception that nobody expects is told to the one whose work it was; everybody else goes on."""

    @pytest.fixture
    def log(self, socket_path: Path) -> Path:
        return socket_path.with_name("daemon.log")

    def test_in_a_request(self, socket_path: Path, devices: list[Path], pause: Pause, log: Path) -> None:
        phase = Phase("everstep.checkpoint.run_store:RunStore.begin_attempt", raises="RuntimeError")
        with (
            pausing_daemon(pause, phase),
            FakeTrainer(socket_path) as victim,
            FakeTrainer(socket_path) as other,
        ):
            victim.open_run(devices, name="victim")
            refused = failure(victim.begin_attempt(1))
            assert refused.code == "InternalError"
            assert "planted by a test" in refused.message
            assert "log" in refused.hint
            arena = attached(other, devices, "other")
            arena.close()
            assert isinstance(victim.begin_attempt(1), frames.Done)
        assert "internal_error doing='BeginAttempt'" in log.read_text()
        assert "Traceback" in log.read_text()

    def test_in_an_event(self, socket_path: Path, devices: list[Path], pause: Pause, log: Path) -> None:
        phase = Phase("everstep.daemon.slot_machine:SlotMachine.begin", raises="RuntimeError")
        with pausing_daemon(pause, phase), FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, devices)
            arena.begin(CheckpointId(1, 1))
            assert failure(trainer.receive()).code == "InternalError"
            arena.save(CheckpointId(1, 2), seed=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
        assert "internal_error doing='BeginSnapshot'" in log.read_text()

    def test_while_writing(self, socket_path: Path, devices: list[Path], pause: Pause, log: Path) -> None:
        phase = Phase(PUBLISHING.place, raises="RuntimeError")
        with pausing_daemon(pause, phase), FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, devices)
            arena.save(CheckpointId(1, 1), seed=1)
            failed = trainer.event(frames.PersistFailed)
            assert isinstance(failed, frames.PersistFailed)
            assert (failed.step, failed.code) == (1, "InternalError")
            assert "planted by a test" in failed.message
            assert isinstance(trainer.event(frames.SlotFree), frames.SlotFree)
            arena.save(CheckpointId(1, 2), seed=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            assert isinstance(trainer.ask(frames.Detach(request_id=9)), frames.Done)
            arena.close()
        assert "internal_error doing='persisting 1.1'" in log.read_text()

    def test_while_completing(self, socket_path: Path, devices: list[Path], pause: Pause, log: Path) -> None:
        phase = Phase("everstep.checkpoint.run_store:RunStore.set_complete_floor", raises="RuntimeError")
        with pausing_daemon(pause, phase) as daemon, FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, devices)
            for step in (1, 2):
                arena.save(CheckpointId(1, step), seed=step, slot=step - 1)
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
            daemon.terminate()
            assert daemon.wait(10) == 0, "draining waits for no completion that has failed"
        assert "internal_error doing='completing 1." in log.read_text()

    def test_in_a_call_of_the_command_line(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        phase = Phase("everstep.daemon.control.store_views:find_run", raises="RuntimeError")
        with (
            pausing_daemon(pause, phase),
            FakeTrainer(socket_path) as trainer,
            connected(socket_path) as client,
        ):
            trainer.open_run(devices)
            with pytest.raises(InternalError, match="planted by a test") as caught:
                client.checkpoints("test")
            assert "traceback" in caught.value.hint
            assert client.checkpoints("test") == []


class TestOpenFiles:
    def test_a_lease_can_be_judged_above_1024_descriptors(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        """select() knows no descriptor beyond that; a node's daemon has them."""
        with daemon_process(socket_path), contextlib.ExitStack() as idle:
            for _ in range(520):  # a socket and a pidfd each
                idle.enter_context(FakeTrainer(socket_path))
            with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
                first.open_run(devices)
                assert failure(second.open_run(devices)).code == "RunBusyError"


def test_a_slot_that_a_hanging_device_may_still_read_is_lost_and_shown(
    socket_path: Path, devices: list[Path], pause: Pause, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = Phase("everstep.checkpoint.real_storage:RealStorage.write_segment", raises="DeadlineError")
    with pausing_daemon(pause, phase), FakeTrainer(socket_path) as trainer:
        arena = attached(trainer, devices)
        arena.save(CheckpointId(1, 1), seed=1)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert failed.code == "DeadlineError"
        with connected(socket_path) as client:
            (slot, other) = client.status().runs[0].ranks[0].slots
        assert (slot.state, slot.checkpoint) == (SlotState.LOST, CheckpointId(1, 1))
        assert other.state is SlotState.FREE
        assert main(["status"]) == 0
        assert "1.1 lost" in capsys.readouterr().out
        arena.save(CheckpointId(1, 2), seed=2, slot=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
