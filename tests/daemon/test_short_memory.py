"""A daemon whose budget does not hold what is asked for: fewer slots, which serve, and no memory kept for nothing."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import SMALL_LEAVES
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

NAMES = [Path("nvme0"), Path("nvme1")]
SLOT_BYTES = plan_layout(SMALL_LEAVES, [], segment_count=2).slot_size_bytes


def budget(node_config: Path, *, slots: int) -> None:
    """Let a node have room for so many slots, and a little more."""
    budget_bytes = slots * SLOT_BYTES + 4096
    with node_config.open("a") as file:
        file.write(f"[memory]\narena_max_bytes = {budget_bytes}\nreserve_bytes = 0\n")


@pytest.fixture
def slots(request: pytest.FixtureRequest, node_config: Path, socket_path: Path) -> Iterator[int]:
    """A node daemon with room for so many slots."""
    budget(node_config, slots=request.param)
    with node_daemon(node_config, socket_path):
        yield request.param


def attached(
    trainer: FakeTrainer, *, attempt: int = 1, rank: int = 0, world_size: int = 1, fresh: bool = False
) -> None:
    opened = trainer.open_run(NAMES, rank=rank, world_size=world_size)
    assert isinstance(opened, frames.RunOpened), opened
    assert isinstance(trainer.begin_attempt(attempt, fresh=fresh), frames.Done)


def ask(
    trainer: FakeTrainer, layout: Layout, slot_count: int = 2, *, times: int = 1, spare_size_bytes: int = 0
) -> frames.Reply:
    """Ask for an arena of slots that are so many times as large as a snapshot."""
    return trainer.ask(
        frames.MakeArena(
            request_id=trainer.number(),
            layout_digest=layout.digest,
            slot_size_bytes=layout.slot_size_bytes * times,
            slot_count=slot_count,
            spare_size_bytes=spare_size_bytes,
        )
    )


def log_of(socket_path: Path) -> str:
    return socket_path.with_name("daemon.log").read_text()


def save_one_that_is_damaged_later(
    trainer: FakeTrainer, client: ControlClient, devices: list[Path], slot_count: int = 2
) -> None:
    """A checkpoint that is whole in memory, in the first slot of an arena, and not on the devices any more."""
    arena = trainer.make_arena(trainer.layout(), slot_count)
    arena.save(CheckpointId(1, 1), seed=1)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
    arena.close()
    damage(client, devices)


def damage(client: ControlClient, devices: list[Path]) -> None:
    for path in devices:
        for segment in path.glob("runs/*/*/data/**/*.safetensors"):
            segment.write_bytes(bytes(segment.stat().st_size))
    assert not client.verify("test", CheckpointId(1, 1)).is_intact


@pytest.mark.parametrize("slots", [3], indirect=True)
def test_as_many_slots_are_made_as_fit_and_the_trainer_learns_why(slots: int, socket_path: Path) -> None:
    with FakeTrainer(socket_path) as trainer:
        attached(trainer)
        arena = trainer.make_arena(trainer.layout(), slot_count=5)
        assert arena.ready.slot_count == slots
        assert "the daemon's budget has" in arena.ready.reason
        assert "memory.arena_max_bytes" in arena.ready.reason
        arena.close()


@pytest.mark.parametrize("slots", [3], indirect=True)
def test_ranks_of_a_run_share_what_there_is(slots: int, socket_path: Path) -> None:
    with FakeTrainer(socket_path) as first, FakeTrainer(socket_path) as second:
        for rank, trainer in enumerate((first, second)):
            attached(trainer, rank=rank, world_size=2)
        arenas = [trainer.make_arena(trainer.layout()) for trainer in (first, second)]
        assert [arena.ready.slot_count for arena in arenas] == [1, slots - 1]
        for arena in arenas:
            arena.close()


@contextmanager
def ranks(
    socket_path: Path, count: int, *, attempt: int, fresh: bool = False
) -> Generator[list[FakeTrainer]]:
    """As many trainers of one run, which all vanish."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(FakeTrainer(socket_path)) for _ in range(count)]
        for rank, trainer in enumerate(trainers):
            attached(trainer, attempt=attempt, rank=rank, world_size=count, fresh=fresh)
        yield trainers


def save_and_vanish(socket_path: Path) -> None:
    """An attempt of two ranks, each with a checkpoint on the devices and in one of its two slots."""
    with ranks(socket_path, 2, attempt=1) as trainers:
        for rank, trainer in enumerate(trainers):
            arena = trainer.make_arena(trainer.layout())
            assert arena.ready.slot_count == 2
            arena.save(CheckpointId(1, 1), seed=rank, rank=rank, world_size=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()


def slot_counts(trainers: list[FakeTrainer], wanted: int = 2) -> list[int]:
    """Return how many slots each gets that asks for so many, one after the other."""
    replies = [ask(trainer, trainer.layout(), wanted) for trainer in trainers]
    return [reply.slot_count if isinstance(reply, frames.ArenaReady) else 0 for reply in replies]


@pytest.mark.parametrize("slots", [4], indirect=True)
@pytest.mark.usefixtures("slots")
class TestAnAttemptAfterOneThatWasKilled:
    """What the arenas before hold is on the devices: nobody gets less for good because they are there."""

    def test_one_that_begins_anew_has_all_slots(self, socket_path: Path) -> None:
        save_and_vanish(socket_path)
        with ranks(socket_path, 2, attempt=2, fresh=True) as trainers:
            assert slot_counts(trainers) == [2, 2]

    def test_one_of_more_ranks_shares_equally(self, socket_path: Path) -> None:
        save_and_vanish(socket_path)
        with ranks(socket_path, 4, attempt=2) as trainers:
            assert slot_counts([*trainers[2:], *trainers[:2]]) == [1, 1, 1, 1]

    def test_one_of_fewer_ranks_has_the_memory_of_those_that_are_no_more(self, socket_path: Path) -> None:
        save_and_vanish(socket_path)
        with ranks(socket_path, 1, attempt=2) as trainers:
            assert slot_counts(trainers, 4) == [4]

    def test_what_memory_alone_has_of_another_rank_stays(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        save_and_vanish(socket_path)
        with connected(socket_path) as client:
            damage(client, devices)
        with ranks(socket_path, 2, attempt=2) as trainers:
            assert slot_counts(trainers[:1]) == [1]
            assert [offer.in_memory for offer in trainers[1].offers()] == [True]
        (said,) = [line for line in log_of(socket_path).splitlines() if "unsaved_given_up" in line]
        assert "rank=0" in said, "its own, for there would be no slot"

    def test_an_arena_in_use_stays(self, socket_path: Path) -> None:
        save_and_vanish(socket_path)
        with ranks(socket_path, 2, attempt=2) as (first, second):
            assert isinstance(first.fetch(CheckpointId(1, 1)), frames.Fetched)
            assert slot_counts([second], 3) == [2]
            assert [offer.in_memory for offer in first.offers()] == [True]


def test_what_another_rank_has_that_is_being_written_is_waited_for(
    node_config: Path, socket_path: Path, pause: Pause
) -> None:
    """Its room comes by itself; who took less would have less for good."""
    budget(node_config, slots=4)
    with pausing_daemon(pause, Phase("everstep.daemon.devices.persist:persist_shard"), node_config):
        with ranks(socket_path, 2, attempt=1) as trainers:
            arenas = [trainer.make_arena(trainer.layout()) for trainer in trainers]
            arenas[1].save(CheckpointId(1, 1), seed=1, rank=1, world_size=2)
            wait_until((pause.folder / "reached").exists)
            for arena in arenas:
                arena.close()
        with ranks(socket_path, 2, attempt=2, fresh=True) as trainers:
            refused = ask(trainers[0], trainers[0].layout())
            assert isinstance(refused, frames.Failure)
            assert "waits until what is in the arenas before it is written" in refused.message
            pause.go()
            trainers[1].offers()  # which come once it is written
            assert slot_counts(trainers) == [2, 2]


def test_what_memory_alone_has_is_not_given_up_for_room_that_comes_by_itself(
    node_config: Path, socket_path: Path, pause: Pause, devices: list[Path]
) -> None:
    """Another rank's arena is being written: with that there is room for both."""
    budget(node_config, slots=4)
    second = Phase("everstep.daemon.devices.persist:persist_shard", 2)
    with pausing_daemon(pause, second, node_config), connected(socket_path) as client:
        with ranks(socket_path, 2, attempt=1) as trainers:
            arenas = [trainer.make_arena(trainer.layout()) for trainer in trainers]
            arenas[0].save(CheckpointId(1, 1), seed=1, rank=0, world_size=2)
            assert isinstance(trainers[0].event(frames.Persisted), frames.Persisted)
            arenas[1].save(CheckpointId(1, 1), seed=1, rank=1, world_size=2)
            wait_until((pause.folder / "reached").exists)
            for arena in arenas:
                arena.close()
        damage(client, devices)
        with ranks(socket_path, 2, attempt=2) as trainers:
            refused = ask(trainers[0], trainers[0].layout())
            assert isinstance(refused, frames.Failure)
            assert refused.code == "MemoryBusyError"
            assert [offer.in_memory for offer in trainers[0].offers()] == [True]
            pause.go()
    assert "unsaved_given_up" not in log_of(socket_path)


@pytest.mark.parametrize("slots", [3], indirect=True)
@pytest.mark.usefixtures("slots")
class TestNotToBeReadAnyMore:
    """What the devices cannot give back goes from memory only for an arena that there would not be without that."""

    @pytest.fixture
    def trainer(self, socket_path: Path, devices: list[Path]) -> Iterator[FakeTrainer]:
        """One whose newest checkpoint memory alone has; its arena takes two of three slots."""
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as client:
            attached(trainer)
            save_one_that_is_damaged_later(trainer, client, devices)
            yield trainer

    @staticmethod
    def is_offered_from_memory(trainer: FakeTrainer) -> bool:
        (offer,) = trainer.offers()
        assert (offer.problem == "") == offer.in_memory
        return offer.in_memory

    def test_it_goes_for_no_spare(self, trainer: FakeTrainer, socket_path: Path) -> None:
        ready = ask(trainer, trainer.layout(), slot_count=1, spare_size_bytes=SLOT_BYTES)
        assert isinstance(ready, frames.ArenaReady), ready
        assert ready.slot_size_bytes < 2 * SLOT_BYTES
        trainer.close()
        with FakeTrainer(socket_path) as again:
            attached(again, attempt=2)
            assert self.is_offered_from_memory(again)

    def test_nor_in_vain(self, trainer: FakeTrainer) -> None:
        refused = ask(trainer, trainer.layout(), times=4)
        assert isinstance(refused, frames.Failure)
        assert self.is_offered_from_memory(trainer)

    def test_it_goes_where_no_checkpoint_could_follow(self, trainer: FakeTrainer, socket_path: Path) -> None:
        ready = ask(trainer, trainer.layout(), times=2)
        assert isinstance(ready, frames.ArenaReady), ready
        assert not self.is_offered_from_memory(trainer)
        (said,) = [line for line in log_of(socket_path).splitlines() if "unsaved_given_up" in line]
        assert said.endswith("checkpoint=1.1")


def test_who_goes_back_where_memory_holds_one_arena_takes_checkpoints_all_the_same(
    node_config: Path, socket_path: Path, pause: Pause
) -> None:
    """Memory alone has the newest one, in the arena of the attempt before."""
    budget(node_config, slots=2)
    second_write = Phase("everstep.daemon.devices.persist:persist_shard", number=2, raises="StorageError")
    with pausing_daemon(pause, second_write, node_config):
        with FakeTrainer(socket_path) as trainer:
            attached(trainer)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.save(CheckpointId(1, 2), seed=2, slot=1)
            assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
            trainer.send(frames.SealedEverywhere(attempt=1, step=2))
            arena.close()
        with FakeTrainer(socket_path) as going_back:
            attached(going_back, attempt=2)
            going_back.send(frames.Restored(in_memory=False, checkpoint=(1, 1), goes_back=True))
            assert [offer.in_memory for offer in going_back.offers()] == [True, False]
            arena = going_back.make_arena(going_back.layout())
            assert arena.ready.slot_count == 2
            arena.save(CheckpointId(2, 2), seed=3)
            assert isinstance(going_back.event(frames.Persisted), frames.Persisted)
            arena.close()


@pytest.mark.parametrize("slots", [1], indirect=True)
@pytest.mark.usefixtures("slots")
class TestOneSlot:
    def test_it_serves_one_snapshot_after_the_other(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            attached(trainer)
            arena = trainer.make_arena(trainer.layout())
            for number in (1, 2, 3):
                arena.save(CheckpointId(1, number), seed=number)
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
                trainer.send(frames.SealedEverywhere(attempt=1, step=number))
                assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=arena.ready.arena, slot=0)
            assert trainer.offers()[0].in_memory
            assert not any(isinstance(event, frames.SlotFree) for event in trainer.events), "told once each"
            arena.begin(CheckpointId(1, 4))
            newest = trainer.offers()[0]
            assert (newest.step, newest.in_memory) == (3, False), "it is being overwritten"
            arena.close()

    def test_a_restart_finds_it_in_memory_and_may_overwrite_it(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            attached(trainer)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
        with FakeTrainer(socket_path) as trainer:
            attached(trainer, attempt=2)
            fetched = trainer.fetch(CheckpointId(1, 1))
            assert isinstance(fetched, frames.Fetched), fetched
            assert fetched.free_slots == [0]
            ready = frames.ArenaReady(
                re=0,
                arena=fetched.arena,
                slot_size_bytes=fetched.slot_size_bytes,
                slot_count=fetched.slot_count,
                allocation_s=0.0,
            )
            arena = FakeArena(trainer, ready, trainer.layout())
            arena.save(CheckpointId(2, 2), seed=2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()

    def test_another_structure_gets_the_memory_of_the_one_before(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            attached(trainer)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            changed = trainer.layout((whole_leaf("w", "int8", (9,)),))
            trainer.event(frames.Persisted)
            trainer.event(frames.SlotFree)
            arena.close()
            other = trainer.make_arena(changed)
            assert other.ready.slot_count == 1
            other.save(CheckpointId(1, 2), seed=2)
            trainer.event(frames.Persisted)
            offers = {offer.step: offer.in_memory for offer in trainer.offers()}
            assert offers == {1: False, 2: True}
            other.close()

    def test_so_it_does_where_what_was_before_is_damaged_on_the_devices(
        self, socket_path: Path, devices: list[Path]
    ) -> None:
        """Else no checkpoint would ever follow: what is in memory is better given up than all that comes."""
        with FakeTrainer(socket_path) as trainer, connected(socket_path) as client:
            attached(trainer)
            save_one_that_is_damaged_later(trainer, client, devices)
            changed = trainer.layout((whole_leaf("w", "int8", (9,)),))
            trainer.make_arena(changed).close()

    def test_while_that_is_being_written_it_waits(self, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            attached(trainer)
            arena = trainer.make_arena(trainer.layout())
            arena.begin(CheckpointId(1, 1))
            refused = ask(trainer, trainer.layout((whole_leaf("w", "int8", (9,)),)))
            assert isinstance(refused, frames.Failure)
            assert refused.code == "MemoryBusyError"
            assert "waits until what is in the arenas before it is written" in refused.message
            arena.close()
