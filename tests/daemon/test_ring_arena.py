"""A snapshot that streams through a ring of a real daemon: what its trainer hears, and what is left when it ends."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.slot_machine import SlotState
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

MIB = 1024**2
NAMES = [Path("nvme0"), Path("nvme1")]
LEAVES = tuple(whole_leaf(f"w{number}", "int8", (3 * MIB,)) for number in range(10))
FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


NO_ROOM_FOR_A_MANIFEST = Phase(
    "everstep.checkpoint.real_storage:RealStorage.write_small_new", match="/commits/", raises="NoSpaceError"
)


@pytest.fixture(autouse=True)
def daemon(
    request: pytest.FixtureRequest, node_config: Path, socket_path: Path, pause: Pause
) -> Iterator[None]:
    """One with room for a draft and three windows; where a test says which call fails, over one device."""
    config = f"{node_config.read_text()}[memory]\narena_max_bytes = {20 * MIB}\nreserve_bytes = 0\n"
    phase: Phase | None = getattr(request, "param", None)
    if phase is None:
        node_config.write_text(config)
        running = node_daemon(node_config, socket_path)
    else:
        lines = config.splitlines(keepends=True)
        node_config.write_text("".join(line for line in lines if not line.startswith(str(NAMES[1]))))
        running = pausing_daemon(pause, phase, config=node_config)
    with running:
        yield


@pytest.fixture
def trainer(socket_path: Path) -> Iterator[FakeTrainer]:
    with FakeTrainer(socket_path) as made:
        assert isinstance(made.open_run(NAMES), frames.RunOpened)
        made.begin_attempt(1)
        yield made


@pytest.fixture
def ring(trainer: FakeTrainer) -> Iterator[FakeArena]:
    made = trainer.make_ring(trainer.layout(LEAVES))
    yield made
    made.close()


def stream(ring: FakeArena, checkpoint: CheckpointId, seed: int, end: int | None = None) -> None:
    """Announce a snapshot and copy its segments up to `end`, each once its window is free."""
    windows = ring.layout.windows
    assert windows is not None
    ring.begin(checkpoint)
    ring.announce(checkpoint)
    written: set[int] = set()
    for segment in range(len(ring.layout.segments) if end is None else end):
        while segment >= windows.count and segment - windows.count not in written:
            event = ring.trainer.event(frames.SegmentWritten)
            assert isinstance(event, frames.SegmentWritten)
            assert (event.arena, event.slot) == (ring.ready.arena, 0)
            written.add(event.segment)
        ring.fill(seed, segment=segment)
        ring.copied(segment)


def files(devices: list[Path]) -> list[Path]:
    """Return the segments; os.walk, because folders vanish meanwhile."""
    return [
        Path(folder, name)
        for device in devices
        for folder, _, names in os.walk(device / "runs")
        for name in names
        if name.endswith(".safetensors")
    ]


def states(socket_path: Path) -> list[SlotState]:
    with connected(socket_path) as client:
        return [slot.state for run in client.status().runs for rank in run.ranks for slot in rank.slots]


def test_it_is_committed_and_memory_promises_nothing(
    trainer: FakeTrainer, ring: FakeArena, devices: list[Path], socket_path: Path
) -> None:
    assert 12 * MIB <= ring.ready.slot_size_bytes <= 20 * MIB
    assert "the daemon's budget has 20 MiB left" in ring.ready.reason
    for number, checkpoint in enumerate((FIRST, SECOND)):
        stream(ring, checkpoint, seed=number)
        ring.seal(checkpoint)
        done = trainer.event(frames.Persisted)
        assert isinstance(done, frames.Persisted)
        assert done.step == checkpoint.step
        assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=ring.ready.arena, slot=0)
        assert states(socket_path) == [SlotState.FREE]
        newest = trainer.offers()[0]
        assert (newest.step, newest.in_memory) == (checkpoint.step, False)
    trainer.ask(frames.Detach(request_id=trainer.number()))
    trainer.close()
    with FakeTrainer(socket_path) as after:
        after.open_run(NAMES)
        assert isinstance(after.fetch(SECOND), frames.Streaming)
    with opened(devices, read_only=True) as (store, _):
        run = store.runs()[0]
        assert load(run, run.manifest(SECOND, 0)) == ring.content(1)


@pytest.mark.parametrize("how", ["abandons", "vanishes"])
def test_of_one_that_is_given_up_nothing_remains(
    trainer: FakeTrainer, ring: FakeArena, devices: list[Path], socket_path: Path, how: str
) -> None:
    stream(ring, FIRST, seed=1, end=6)
    assert files(devices)
    if how == "abandons":
        trainer.send(frames.Abandon(arena=ring.ready.arena, slot=0, reason="it changed"))
        assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=ring.ready.arena, slot=0)
        assert files(devices) == []
        stream(ring, SECOND, seed=2)
        ring.seal(SECOND)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        return
    trainer.close()
    wait_until(lambda: not files(devices) and set(states(socket_path)) <= {SlotState.FREE})
    with FakeTrainer(socket_path) as after:
        after.open_run(NAMES)
        after.begin_attempt(2)
        again = after.make_ring(after.layout(LEAVES))
        assert again.ready.slot_size_bytes == ring.ready.slot_size_bytes, "the dead one's memory serves again"
        stream(again, CheckpointId(2, 1), seed=2)
        again.seal(CheckpointId(2, 1))
        assert isinstance(after.event(frames.Persisted), frames.Persisted)
        again.close()


def test_a_bad_draft_is_refused_at_once(trainer: FakeTrainer, ring: FakeArena) -> None:
    """Its trainer would wait for windows that nobody empties."""
    ring.begin(FIRST)
    ring.announce(FIRST, world_size=3)
    failed = trainer.event(frames.PersistFailed)
    assert isinstance(failed, frames.PersistFailed)
    assert "of 3" in failed.message
    trainer.send(frames.Abandon(arena=ring.ready.arena, slot=0, reason="it failed"))
    assert isinstance(trainer.event(frames.SlotFree), frames.SlotFree)
    stream(ring, SECOND, seed=2)
    ring.seal(SECOND)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)


def test_a_seal_of_what_has_failed_only_frees_the_slot(trainer: FakeTrainer, ring: FakeArena) -> None:
    """Nothing holds its bytes any more: it must not be written as if the slot did."""
    ring.begin(FIRST)
    ring.announce(FIRST, world_size=3)
    assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
    ring.seal(FIRST)
    assert isinstance(trainer.event(frames.SlotFree), frames.SlotFree)
    assert trainer.offers() == []


@pytest.mark.parametrize("daemon", [NO_ROOM_FOR_A_MANIFEST], indirect=True)
def test_one_whose_manifest_finds_no_room_is_given_up(socket_path: Path, devices: list[Path]) -> None:
    """The daemon makes room and tries again, but not with a slot in which other bytes are by now."""
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES[:1])
        trainer.begin_attempt(1)
        ring = trainer.make_ring(trainer.layout(LEAVES))
        stream(ring, FIRST, seed=1)
        ring.seal(FIRST)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert (failed.step, failed.code) == (FIRST.step, "StorageError")
        assert "planted by a test; it streamed through a ring" in failed.message
        assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=ring.ready.arena, slot=0)
        assert files(devices) == []
        stream(ring, SECOND, seed=2)
        ring.seal(SECOND)
        done = trainer.event(frames.Persisted)
        assert isinstance(done, frames.Persisted)
        assert [(offer.attempt, offer.step) for offer in trainer.offers()] == [(1, SECOND.step)]
        ring.close()
