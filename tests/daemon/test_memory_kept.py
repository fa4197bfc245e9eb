"""What is kept in memory and for whom, and what is waited for, where ranks are several, fewer, or thrown out."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pausing import Pause, Phase, pausing_daemon

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

ONE = CheckpointId(1, 1)


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    return Pause(tmp_path / "pause")


def attached(trainer: FakeTrainer, devices: list[Path], rank: int, *, world_size: int = 2) -> FakeArena:
    assert isinstance(trainer.open_run(devices, rank=rank, world_size=world_size), frames.RunOpened)
    assert isinstance(trainer.begin_attempt(1), frames.Done)
    return trainer.make_arena(trainer.layout())


def save(arena: FakeArena, rank: int) -> None:
    arena.begin(ONE)
    arena.fill(seed=rank)
    arena.seal(ONE, rank=rank, world_size=2)
    arena.close()


def detach(trainer: FakeTrainer) -> None:
    assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)


def test_a_clean_end_keeps_in_memory_what_was_given_up_and_is_about_to_be_deleted(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """Another rank could not write its part: this one's goes from the devices, and all ranks have it in memory."""
    with pausing_daemon(pause, Phase("everstep.checkpoint.run_store:RunStore.forget")) as daemon:
        with FakeTrainer(socket_path) as trainer:
            save(attached(trainer, devices, rank=0), rank=0)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            trainer.send(frames.GiveUp(attempt=1, step=1, in_memory=True))
            pause.reached(daemon)
            detach(trainer)
            pause.go()
        with FakeTrainer(socket_path) as again:
            again.open_run(devices, rank=0, world_size=2)
            again.begin_attempt(2)
            (offer,) = again.offers()
            assert (offer.attempt, offer.step, offer.in_memory) == (1, 1, True)
            detach(again)


def test_so_it_does_where_the_only_drive_has_failed(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    phase = Phase("everstep.checkpoint.run_store:publish_over", match="floor", raises="StorageError")
    with pausing_daemon(pause, phase):
        with FakeTrainer(socket_path) as trainer:
            arena = attached(trainer, devices[:1], rank=0, world_size=1)
            arena.save(ONE, seed=1)
            arena.close()
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            detach(trainer)
        with FakeTrainer(socket_path) as again:
            again.open_run(devices[:1])
            again.begin_attempt(2)
            assert [offer.in_memory for offer in again.offers()] == [True]
            detach(again)


def test_where_the_drive_of_one_that_does_not_come_back_hangs_it_is_not_waited_for_long(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    with pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of", number=2)) as daemon:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            save(attached(first, devices, rank=0), rank=0)
            assert isinstance(first.event(frames.Persisted), frames.Persisted)
            save(attached(second, devices, rank=1), rank=1)
            pause.reached(daemon)
        with FakeTrainer(socket_path) as alone:
            alone.open_run(devices)
            alone.begin_attempt(2)
            (offer,) = alone.offers()
            assert offer.shards == [0]
            assert "offers_incomplete" in socket_path.with_name("daemon.log").read_text()
            pause.go()
            detach(alone)


def test_what_ranks_that_do_not_come_back_had_sealed_is_waited_for(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """Two have died, one comes: without the second one's part the newest checkpoint could not be restored."""
    with pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of", number=2)) as daemon:
        with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
            save(attached(first, devices, rank=0), rank=0)
            assert isinstance(first.event(frames.Persisted), frames.Persisted)
            save(attached(second, devices, rank=1), rank=1)
            pause.reached(daemon)
        with FakeTrainer(socket_path) as alone, ThreadPoolExecutor(1) as beside:
            alone.open_run(devices)
            alone.begin_attempt(2)
            asked = beside.submit(alone.offers)
            threading.Event().wait(0.3)  # long enough to be answered at once
            pause.go()
            (offer,) = asked.result(60)
            assert sorted(offer.shards) == [0, 1]
            detach(alone)


def test_memory_that_a_rank_has_mapped_which_was_thrown_out_is_given_to_nobody(
    socket_path: Path, devices: list[Path]
) -> None:
    """By an attempt of fewer ranks: it may live on, and write to what it copies into."""
    with daemon_process(socket_path), FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
        attached(first, devices, rank=0).close()
        save(attached(second, devices, rank=1), rank=1)
        assert isinstance(second.event(frames.Persisted), frames.Persisted)
        with FakeTrainer(socket_path) as only:
            assert isinstance(only.open_run(devices, takeover=True), frames.RunOpened)
            assert isinstance(only.begin_attempt(2), frames.Done)
            assert isinstance(second.event(frames.Fenced), frames.Fenced)
            detach(only)
        with FakeTrainer(socket_path) as third:
            third.open_run(devices, rank=1, world_size=2)
            third.begin_attempt(3)
            assert [offer.in_memory for offer in third.offers()] == [False]
            assert isinstance(third.fetch(ONE, 1), frames.Streaming)
