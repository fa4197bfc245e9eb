"""Snapshots that a real daemon writes while their trainer still copies: it goes on, gives up, dies."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.slot_machine import SlotState
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process
from everstep.proto import frames

FIRST, SECOND = CheckpointId(1, 7), CheckpointId(1, 8)


@pytest.fixture
def daemon(socket_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with daemon_process(socket_path) as process:
        yield process


def attached(socket_path: Path, devices: list[Path], *, attempt: int = 1) -> tuple[FakeTrainer, FakeArena]:
    trainer = FakeTrainer(socket_path)
    trainer.open_run(devices)
    trainer.begin_attempt(attempt)
    return trainer, trainer.make_arena(trainer.layout())


def files(devices: list[Path]) -> list[Path]:
    return [path for device in devices for path in device.glob("runs/*/*/data/*/*.safetensors")]


def commits(devices: list[Path]) -> list[Path]:
    return [path for device in devices for path in device.glob("runs/*/*/commits/*.mf")]


def states(socket_path: Path) -> list[SlotState]:
    with connected(socket_path) as client:
        return [slot.state for run in client.status().runs for rank in run.ranks for slot in rank.slots]


def stored(devices: list[Path], checkpoint: CheckpointId) -> dict[str, bytes]:
    with opened(devices, read_only=True) as (store, _):
        run = store.runs()[0]
        return load(run, run.manifest(checkpoint, 0))


def test_it_is_on_the_devices_before_it_is_sealed_and_committed_after(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path):
        trainer, arena = attached(socket_path, devices)
        with trainer:
            arena.begin(FIRST)
            arena.fill(3)
            arena.announce(FIRST)
            for segment in arena.layout.segments:
                arena.copied(segment.segment)
            sizes = sorted(segment.file_size_bytes for segment in arena.layout.segments)
            wait_until(lambda: sorted(path.stat().st_size for path in files(devices)) == sizes)
            assert states(socket_path)[0] is SlotState.STREAMING
            assert commits(devices) == []
            arena.seal(FIRST)
            done = trainer.event(frames.Persisted)
            assert isinstance(done, frames.Persisted)
            assert (done.attempt, done.step) == (1, 7)
            assert states(socket_path)[0] is SlotState.KEPT
            content = arena.content(3)
            trainer.ask(frames.Detach(request_id=trainer.number()))
            arena.close()
    assert stored(devices, FIRST) == content


@pytest.mark.usefixtures("daemon")
def test_what_nobody_said_was_copied_is_written_at_the_seal(socket_path: Path, devices: list[Path]) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.begin(FIRST)
        arena.announce(FIRST)
        arena.fill(3)
        arena.seal(FIRST)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("how", ["abandons", "vanishes"])
def test_of_one_that_is_given_up_nothing_remains_and_the_slot_serves_again(
    socket_path: Path, devices: list[Path], how: str
) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.begin(FIRST)
        arena.fill(3)
        arena.announce(FIRST)
        arena.copied(0)
        wait_until(lambda: bool(files(devices)))
        if how == "abandons":
            trainer.send(frames.Abandon(arena=arena.ready.arena, slot=0, reason="it changed"))
            assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=arena.ready.arena, slot=0)
        else:
            trainer.close()
        wait_until(lambda: not files(devices) and SlotState.ABANDONED not in states(socket_path))
        assert commits(devices) == []
        if how == "vanishes":
            arena.close()
            trainer, arena = attached(socket_path, devices, attempt=2)
        after = CheckpointId(1 if how == "abandons" else 2, 8)
    with trainer if how == "vanishes" else FakeTrainer(socket_path) as other:
        if how == "abandons":
            other.open_run(devices, takeover=True)
            other.begin_attempt(2)
            arena.close()
            arena, after = other.make_arena(other.layout()), CheckpointId(2, 8)
        arena.save(after, seed=4)
        assert isinstance(other.event(frames.Persisted), frames.Persisted)
        arena.close()


def test_one_that_its_trainer_leaves_behind_is_given_up(
    socket_path: Path, devices: list[Path], daemon: "subprocess.Popen[bytes]"
) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.begin(FIRST)
        arena.fill(3)
        arena.announce(FIRST)
        arena.copied(0)
        wait_until(lambda: bool(files(devices)))
        assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
        assert files(devices) == []
        arena.close()
    assert daemon.wait(10) == 0, "nothing is left to wait for"


@pytest.mark.usefixtures("daemon")
def test_another_draft_at_the_seal_is_refused(socket_path: Path, devices: list[Path]) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.begin(FIRST)
        arena.fill(3)
        arena.announce(FIRST)
        frame = frames.Seal(
            arena=arena.ready.arena,
            slot=0,
            attempt=1,
            step=7,
            draft_offset_bytes=arena.layout.draft_offset_bytes,
            draft_size_bytes=10,
            draft_sha256="0" * 64,
        )
        trainer.send(frame)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert "announced" in failed.message
        assert trainer.event(frames.SlotFree) == frames.SlotFree(arena=arena.ready.arena, slot=0)
        arena.save(SECOND, seed=4)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


@pytest.mark.usefixtures("daemon")
def test_a_bad_draft_is_refused_at_the_seal(socket_path: Path, devices: list[Path]) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.begin(FIRST)
        arena.announce(FIRST, world_size=3)
        wait_until(lambda: states(socket_path)[0] is SlotState.COPYING)
        arena.seal(FIRST, world_size=3)
        failed = trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert "of 3" in failed.message
        arena.close()


@pytest.mark.usefixtures("daemon")
def test_frames_that_do_not_fit_are_refused(socket_path: Path, devices: list[Path]) -> None:
    trainer, arena = attached(socket_path, devices)
    with trainer:
        arena.announce(FIRST)  # nothing is being copied
        assert isinstance(trainer.event(frames.Failure), frames.Failure)
        arena.begin(FIRST)
        arena.announce(SECOND)  # another one is
        assert isinstance(trainer.event(frames.Failure), frames.Failure)
        arena.announce(CheckpointId(9, 7))  # of an attempt that has not begun
        assert isinstance(trainer.event(frames.Failure), frames.Failure)
        arena.copied(0)  # nothing was announced: no harm
        arena.copied(99)
        arena.fill(3)
        arena.seal(FIRST)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
