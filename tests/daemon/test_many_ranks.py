"""Sixteen ranks of one node save at once: all are complete, none is put off, and each device has its few submitters."""

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pausing import wait_until
from places import memory_folder
from watched_drives import AS_FAST_AS_IT_IS, Drives, Line, watched_daemon

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.devices.device_queue import QUEUE_LANES
from everstep.daemon.testing import FakeArena, FakeTrainer
from everstep.proto import frames

RANKS = range(16)
LARGE_RANK = 0
SMALL_BYTES, LARGE_BYTES = 1 << 20, 24 << 20
PIECE_BYTES = 32 * 1024
UNFAIR_MAX = 1.25
"""Times its fair share a device may have moved when a rank's last byte is written."""
SAVED = CheckpointId(1, 1)


@pytest.fixture
def devices() -> Generator[list[Path]]:
    with memory_folder() as folder:
        made = [folder / "d0", folder / "d1"]
        for path in made:
            path.mkdir()
        yield made


@pytest.fixture
def drives(tmp_path: Path, devices: list[Path]) -> Drives:
    """Both stand still."""
    return Drives(tmp_path / "drives", devices, 0)


def attached(trainer: FakeTrainer, rank: int) -> FakeArena:
    reply = trainer.open_run([Path("nvme0"), Path("nvme1")], rank=rank, world_size=len(RANKS))
    assert isinstance(reply, frames.RunOpened), reply
    trainer.begin_attempt(1)
    size_bytes = LARGE_BYTES if rank == LARGE_RANK else SMALL_BYTES
    leaf = whole_leaf("weight", "uint8", (size_bytes >> 10, 1 << 10))
    return trainer.make_arena(plan_layout([leaf], [], segment_count=2), slot_count=1)


def queued(drives: Drives) -> int:
    """Return how many segments wait for their drives, or have moved."""
    return sum(len(drives.lines("queued", name)) for name in drives.names)


def share_at_the_end(moved: list[Line]) -> dict[int, float]:
    """Return, by arena, what a drive had moved when it had moved all of it, in units of its fair share.

    That is what the drive moves until the last byte of that arena when all get the same as long as they wait.
    """
    sizes, ends, total = Counter[int](), dict[int, int](), 0
    for line in moved:
        total += line.size_bytes
        sizes[line.arena] += line.size_bytes
        ends[line.arena] = total
    return {arena: ends[arena] / sum(min(size, sizes[arena]) for size in sizes.values()) for arena in sizes}


def test_sixteen_ranks_that_save_at_once_take_turns_and_are_all_complete(
    node_config: Path, socket_path: Path, devices: list[Path], drives: Drives
) -> None:
    with ExitStack() as stack:
        stack.enter_context(watched_daemon(drives, node_config, socket_path, piece_bytes=PIECE_BYTES))
        trainers = [stack.enter_context(FakeTrainer(socket_path)) for _ in RANKS]
        arenas = [attached(trainer, rank) for rank, trainer in enumerate(trainers)]
        for rank, arena in enumerate(arenas):
            stack.callback(arena.close)
            arena.begin(SAVED)
            arena.fill(seed=rank)
        arenas[LARGE_RANK].seal(SAVED, rank=LARGE_RANK, world_size=len(RANKS))
        large = len(arenas[LARGE_RANK].layout.segments)
        wait_until(lambda: queued(drives) == large)  # it comes first and has by far the most
        for rank, arena in enumerate(arenas):
            if rank != LARGE_RANK:
                arena.seal(SAVED, rank=rank, world_size=len(RANKS))
        wait_until(lambda: queued(drives) == sum(len(arena.layout.segments) for arena in arenas))
        for name in drives.names:
            drives.hold(name, AS_FAST_AS_IT_IS)
        for trainer in trainers:
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        (offer,) = trainers[0].offers()
        contents = [arena.content(seed=rank) for rank, arena in enumerate(arenas)]
    assert (offer.attempt, offer.step, sorted(offer.shards)) == (1, 1, [*RANKS])
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        assert run.info(SAVED).state is CheckpointState.COMPLETE
        assert [load(run, run.manifest(SAVED, rank)) for rank in RANKS] == contents
    moved = {name: drives.lines("moved", name) for name in drives.names}
    shares = [share_at_the_end(lines) for lines in moved.values()]
    assert min(map(len, shares)) >= len(RANKS) / 2
    assert max(max(share.values()) for share in shares) <= UNFAIR_MAX, shares
    threads = [{line.thread for line in lines} for lines in moved.values()]
    assert max(map(len, threads)) <= QUEUE_LANES
    assert threads[0].isdisjoint(threads[1])
