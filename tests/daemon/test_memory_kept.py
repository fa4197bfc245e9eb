"""What is kept in memory and for whom, and what is waited for, where ranks are several, fewer, or thrown out."""

import asyncio
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.devices import restore
from everstep.daemon.devices.restore import Restorer
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

ONE, TWO = CheckpointId(1, 1), CheckpointId(1, 2)
SECOND_WRITE_FAILS = Phase("everstep.daemon.devices.persist:persist_shard", number=2, raises="StorageError")


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
            with connected(socket_path) as client:
                wait_until(lambda: "planted by a test" in str(client.status().stores))
            detach(trainer)
        with FakeTrainer(socket_path) as again:
            again.open_run(devices[:1])
            again.begin_attempt(2)
            assert [offer.in_memory for offer in again.offers()] == [True]
            detach(again)


def save_two(trainer: FakeTrainer, devices: list[Path]) -> FakeArena:
    """Two checkpoints of a single rank, of which memory alone has the second one."""
    arena = attached(trainer, devices, rank=0, world_size=1)
    arena.save(ONE, seed=1)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
    arena.save(TWO, seed=2, slot=1)
    assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
    return arena


def in_memory(trainer: FakeTrainer) -> dict[tuple[int, int], bool]:
    return {(offer.attempt, offer.step): offer.in_memory for offer in trainer.offers()}


def test_who_goes_back_leaves_what_memory_alone_has_until_something_newer_is_sealed(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """Should it end before, whoever starts without `back_to` goes on from that, as if nothing had happened."""
    with pausing_daemon(pause, SECOND_WRITE_FAILS):
        with FakeTrainer(socket_path) as first:
            save_two(first, devices).close()
            first.send(frames.SealedEverywhere(attempt=1, step=2))
        with FakeTrainer(socket_path) as going_back:
            going_back.open_run(devices)
            going_back.begin_attempt(2)
            assert in_memory(going_back) == {(1, 1): False, (1, 2): True}
            shard = going_back.fetch(ONE)
            assert isinstance(shard, frames.Streaming)
            going_back.stream(shard)
            going_back.send(frames.Release(arena=shard.arena))
            going_back.send(frames.Restored(in_memory=False, checkpoint=(1, 1), goes_back=True))
        with FakeTrainer(socket_path) as again:
            again.open_run(devices)
            again.begin_attempt(3)
            assert in_memory(again) == {(1, 1): False, (1, 2): True}
            again.send(frames.Restored(in_memory=False, checkpoint=(1, 1), goes_back=True))
            arena = again.make_arena(again.layout())
            arena.save(CheckpointId(3, 2), seed=3)
            arena.close()
            assert isinstance(again.event(frames.Persisted), frames.Persisted)
            again.send(frames.SealedEverywhere(attempt=3, step=2))
            assert in_memory(again) == {(1, 1): False, (3, 2): True}
            detach(again)


def test_unless_no_slot_were_left_for_what_comes(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """What it goes on from stays then."""
    with pausing_daemon(pause, SECOND_WRITE_FAILS):
        with FakeTrainer(socket_path) as first:
            save_two(first, devices).close()
        with FakeTrainer(socket_path) as going_back:
            going_back.open_run(devices)
            going_back.begin_attempt(2)
            fetched = going_back.fetch(ONE)
            assert isinstance(fetched, frames.Fetched)
            assert fetched.free_slots == []
            going_back.send(frames.Restored(in_memory=True, checkpoint=(1, 1), goes_back=True))
            assert going_back.event(frames.SlotFree) == frames.SlotFree(arena=fetched.arena, slot=1)
            assert in_memory(going_back) == {(1, 1): True}
            detach(going_back)


def test_where_the_drive_of_another_rank_hangs_it_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where what it writes is of another world size, whoever of that has come back."""
    monkeypatch.setattr(restore, "OTHERS_WAIT_S", 0.05)
    asked = list[int]()

    class Hanging:
        async def settled(self, rank: Any) -> None:
            asked.append(rank.rank)
            await asyncio.Event().wait()

    def rank(number: int, *writing: int) -> SimpleNamespace:
        return SimpleNamespace(rank=number, world_size=2, run=run, writing_world_sizes=set(writing))

    run = SimpleNamespace(run_id="demo", ranks={})
    here = rank(0)
    run.ranks = {0: here, 1: rank(1, 2)}
    node: Any = SimpleNamespace(persister=Hanging())
    asking: Any = here
    asyncio.run(Restorer(node)._others_settled(asking))
    assert asked == []
    run.ranks |= {1: rank(1, 2, 3), 2: rank(2, 3)}
    asyncio.run(Restorer(node)._others_settled(asking))
    assert asked == [1]
    assert "offers_incomplete run=demo" in caplog.text


def save_of_two(
    socket_path: Path, devices: list[Path], pause: Pause, daemon: "subprocess.Popen[bytes]"
) -> None:
    """Two ranks seal a checkpoint and end; the first one's part is written by then, the second one's begun."""
    with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
        save(attached(first, devices, rank=0), rank=0)
        assert isinstance(first.event(frames.Persisted), frames.Persisted)
        save(attached(second, devices, rank=1), rank=1)
        pause.reached(daemon)


def assert_waits_for_both(asking: FakeTrainer, pause: Pause, beside: ThreadPoolExecutor) -> None:
    """Who asks what there is hears of both parts, as the second one has been written meanwhile."""
    asked = beside.submit(asking.offers)
    threading.Event().wait(0.3)  # long enough to be answered at once
    pause.go()
    (offer,) = asked.result(60)
    assert sorted(offer.shards) == [0, 1]
    detach(asking)


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_another_rank_had_sealed_at_another_world_size_is_waited_for(
    socket_path: Path, devices: list[Path], pause: Pause, *, comes_back: bool
) -> None:
    """Without the second one's part the newest checkpoint could not be restored, whether or not it has come, too."""
    with pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of", number=2)) as daemon:
        save_of_two(socket_path, devices, pause, daemon)
        with (
            FakeTrainer(socket_path) as asking,
            FakeTrainer(socket_path) as other,
            ThreadPoolExecutor(1) as beside,
        ):
            for rank, trainer in enumerate((asking, other) if comes_back else (asking,)):
                trainer.open_run(devices, rank=rank, world_size=3 if comes_back else 1)
                trainer.begin_attempt(2)
            assert_waits_for_both(asking, pause, beside)


def test_so_it_is_where_the_trainer_of_that_world_size_is_not_the_first_after_it(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """A restart at another world size that had itself to be restarted, while the old part is still being written."""
    with pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of", number=2)) as daemon:
        save_of_two(socket_path, devices, pause, daemon)
        with FakeTrainer(socket_path) as in_vain, FakeTrainer(socket_path) as its_other:
            for rank, trainer in enumerate((in_vain, its_other)):
                assert isinstance(trainer.open_run(devices, rank=rank, world_size=3), frames.RunOpened)
        with FakeTrainer(socket_path) as asking, ThreadPoolExecutor(1) as beside:
            asking.open_run(devices, rank=0, world_size=3)
            asking.begin_attempt(2)
            assert_waits_for_both(asking, pause, beside)


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
