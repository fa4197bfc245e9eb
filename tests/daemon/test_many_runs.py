"""Sixteen runs of one node save at once and again and again: all are exact, and none gets more than its share."""

import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from pausing import SCRIPTS, wait_until
from users import UIDS, let_in, trainer_of
from watched_drives import Drives, watched_daemon

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer
from everstep.proto import frames

SAVING = SCRIPTS / "saving.py"
DEADLINE_S = 120.0
RUNS = range(16)
ROUNDS = 2
SIZE_BYTES = 2 << 20
"""A segment of each checkpoint on each drive."""
PIECE_BYTES = 32 * 1024
BYTES_PER_S = 16e6
"""Of a drive: slower than who fills its queue, so that whose turn it is decides, and not who gets a processor."""
FAIRNESS_MIN = 0.9
SAVES_MAX = 40


def fairness(shares: list[float]) -> float:
    """Return Jain's index of some shares: 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(each * each for each in shares))


def user_of(number: int, *, several: bool) -> int:
    """Return whose run it is: everybody's own, or each fourth one's of four users."""
    return UIDS[number % len(UIDS)] if several else os.geteuid()


def attached(trainer: FakeTrainer, number: int, slot_count: int = ROUNDS) -> FakeArena:
    reply = trainer.open_run([Path("nvme0"), Path("nvme1")], name=f"run-{number}")
    assert isinstance(reply, frames.RunOpened), reply
    trainer.begin_attempt(1)
    leaf = whole_leaf("weight", "uint8", (SIZE_BYTES >> 10, 1 << 10))
    return trainer.make_arena(plan_layout([leaf], [], segment_count=2), slot_count=slot_count)


def test_jains_index() -> None:
    assert fairness([2.0] * 16) == 1
    assert fairness([1.0] + [0.0] * 15) == 1 / 16


@pytest.mark.parametrize(
    "several", [False, pytest.param(True, marks=pytest.mark.root)], ids=["one user", "four users"]
)
def test_sixteen_runs_that_save_at_once_are_exact_and_get_equal_shares(
    tmp_path: Path, node_config: Path, socket_path: Path, devices: list[Path], several: bool
) -> None:
    if several:
        let_in(node_config, socket_path, [str(uid) for uid in UIDS])
    drives = Drives(tmp_path / "drives", devices, 0)
    saved = [CheckpointId(1, step) for step in range(1, ROUNDS + 1)]
    with ExitStack() as stack:
        stack.enter_context(watched_daemon(drives, node_config, socket_path, piece_bytes=PIECE_BYTES))
        users = [user_of(number, several=several) for number in RUNS]
        trainers = [stack.enter_context(trainer_of(uid, socket_path)) for uid in users]
        arenas = [attached(trainer, number) for number, trainer in enumerate(trainers)]
        segments = len(arenas[0].layout.segments)
        assert segments == len(drives.names)
        for arena in arenas:
            stack.callback(arena.close)
        for number, arena in enumerate(
            arenas
        ):  # all that each has comes before that of the next: the worst order
            arena.save(saved[0], seed=number)
        wait_until(lambda: queued(drives) == len(RUNS) * segments)
        for slot in range(1, ROUNDS):
            for number, arena in enumerate(arenas):
                arena.save(saved[slot], seed=number + slot * len(RUNS), slot=slot)
        for name in drives.names:
            drives.hold(name, BYTES_PER_S)
        for trainer in trainers:
            for _ in saved:
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        contents = {
            (users[number], f"run-{number}", checkpoint): arena.content(seed=number + slot * len(RUNS))
            for number, arena in enumerate(arenas)
            for slot, checkpoint in enumerate(saved)
        }
    assert stored(devices) == contents
    shares = moved_by_half_time(drives)
    assert len(shares) == len(RUNS)
    assert fairness(shares) >= FAIRNESS_MIN, shares


def test_sixteen_processes_that_save_at_once_are_exact_and_get_equal_shares(
    tmp_path: Path, node_config: Path, socket_path: Path, devices: list[Path]
) -> None:
    """Each comes when it comes, and seals both of its checkpoints while the drives stand still."""
    drives = Drives(tmp_path / "drives", devices, 0)
    seeds = {f"run-{number}": [number, number + len(RUNS)] for number in RUNS}
    with watched_daemon(drives, node_config, socket_path, piece_bytes=PIECE_BYTES), ExitStack() as stack:
        savers: list[subprocess.Popen[bytes]] = []
        for run, contents in seeds.items():
            command = [
                sys.executable,
                "-P",
                SAVING,
                "--run",
                run,
                "--size-bytes",
                SIZE_BYTES,
                "--seeds",
                *contents,
            ]
            savers.append(subprocess.Popen([str(word) for word in command]))
            stack.callback(savers[-1].kill)
        wait_until(lambda: queued(drives) >= len(RUNS) * ROUNDS * len(drives.names))
        for name in drives.names:
            drives.hold(name, BYTES_PER_S)
        assert [saver.wait(DEADLINE_S) for saver in savers] == [0] * len(RUNS)
    assert stored(devices) == {
        (os.geteuid(), run, CheckpointId(1, slot + 1)): {"weight": random.Random(seed).randbytes(SIZE_BYTES)}
        for run, contents in seeds.items()
        for slot, seed in enumerate(contents)
    }
    shares = moved_by_half_time(drives)
    assert len(shares) == len(RUNS)
    assert fairness(shares) >= FAIRNESS_MIN, shares


def queued(drives: Drives) -> int:
    """Return how many segments wait for their drives, or have moved."""
    return sum(len(drives.lines("queued", name)) for name in drives.names)


def stored(devices: list[Path]) -> dict[tuple[int, str, CheckpointId], dict[str, bytes]]:
    """Return what is complete on the drives, by owner, run and checkpoint."""
    with opened(devices, read_only=True) as (store, _):
        return {
            (run.owner_uid, run.name, info.checkpoint): load(run, run.manifest(info.checkpoint, 0))
            for run in store.runs()
            for info in run.checkpoints()
            if info.state is CheckpointState.COMPLETE
        }


def test_a_daemon_that_is_told_to_end_does_so_although_a_run_never_stops_saving(
    tmp_path: Path, node_config: Path, socket_path: Path, devices: list[Path]
) -> None:
    """What was sealed by then is told; who always has another one under way goes on without a daemon."""
    drives = Drives(tmp_path / "drives", devices, 0)
    with watched_daemon(drives, node_config, socket_path) as daemon, FakeTrainer(socket_path) as trainer:
        arena = attached(trainer, 0, slot_count=3)
        arena.save(CheckpointId(1, 1), seed=1, slot=1)
        segments = len(arena.layout.segments)
        wait_until(lambda: queued(drives) == segments)
        daemon.terminate()
        log = socket_path.with_name("daemon.log")
        wait_until(lambda: "daemon_draining" in log.read_text())
        for name in drives.names:
            drives.hold(name, 10e6)
        told = 0
        try:
            for step in range(2, SAVES_MAX):
                arena.save(CheckpointId(1, step), seed=step, slot=step % 3)
                trainer.send(frames.SealedEverywhere(attempt=1, step=step))
                trainer.event(frames.Persisted)  # of the one before: there is always one under way
                told += 1
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        arena.close()
        assert 1 <= told < SAVES_MAX - 2
        assert daemon.wait(20) == 0
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        assert run.checkpoints()[0].state is CheckpointState.COMPLETE
        assert run.checkpoints()[0].checkpoint.step >= told


def moved_by_half_time(drives: Drives) -> list[float]:
    """Return what each run had moved on all drives when half of the first round was moved on each.

    Everything that is written then was there before a drive moved at all, so that their order alone decides.
    """
    by_arena = Counter[int]()
    for name in drives.names:
        lines = drives.lines("moved", name)
        by_arena.update({line.arena: 0 for line in lines})
        half, total = sum(line.size_bytes for line in lines) / ROUNDS / 2, 0
        for line in lines:
            if total >= half:
                break
            total += line.size_bytes
            by_arena[line.arena] += line.size_bytes
    return [float(each) for each in by_arena.values()]
