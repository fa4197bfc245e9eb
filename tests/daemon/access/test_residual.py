"""What one user leaves behind when it is removed, no other finds: not in memory that it is given, not in files."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import pytest
from cached import HostileReader
from users import UIDS, acting_as, begun, let_in, trainer_of

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

A, B = UIDS[:2]
CANARY = b"canary-of-user-A"
STEPS = (1, 2, 3, 4)
"""More than are kept, so that segments are written over."""

pytestmark = pytest.mark.root


def full_of_canaries(arena: FakeArena) -> None:
    """Let every leaf that is saved from this arena be canaries."""

    def content(_: int) -> dict[str, bytes]:
        return {
            leaf.name: (CANARY * (leaf.size_bytes // len(CANARY) + 1))[: leaf.size_bytes]
            for leaf in arena.layout.leaves
        }

    arena.content = content  # pyright: ignore[reportAttributeAccessIssue]


def save_steps(trainer: FakeTrainer, arena: FakeArena) -> None:
    for step in STEPS:
        arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        trainer.send(frames.SealedEverywhere(attempt=1, step=step))
        trainer.send(frames.Complete(attempt=1, step=step))
        if step > 1:
            trainer.event(frames.SlotFree)


def content_of(fd: int) -> bytes:
    """Return everything behind a descriptor, which is closed."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def files_with_canary(devices: list[Path]) -> list[Path]:
    """Return the files in which it is found, of a daemon that may delete some meanwhile."""
    found = list[Path]()
    for folder, _, names in (each for device in devices for each in os.walk(device)):
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):
                if CANARY in path.read_bytes():
                    found.append(path)
    return found


def lent(trainer: FakeTrainer, arena: FakeArena, step: int) -> list[bytes]:
    """Return what a user is lent of a checkpoint of its own: the manifest, and each file."""
    manifest = trainer.ask(
        frames.ReadManifest(request_id=trainer.number(), run="b", attempt=1, step=step, rank=0)
    )
    assert not isinstance(manifest, frames.Failure), manifest
    found = [repr(manifest).encode()]
    for segment in range(len(arena.layout.segments)):
        reply = trainer.ask(
            frames.OpenSegment(
                request_id=trainer.number(), run="b", attempt=1, step=step, rank=0, segment=segment
            )
        )
        assert isinstance(reply, frames.SegmentOpened), reply
        found.append(content_of(trainer.reader.take_fd()))
    return found


def test_nobody_finds_what_another_user_has_left(
    node_config: Path, socket_path: Path, devices: list[Path]
) -> None:
    let_in(node_config, socket_path, [str(A), str(B)])
    with node_daemon(node_config, socket_path):
        with trainer_of(A, socket_path) as a:
            arena = begun(a, "a")
            full_of_canaries(arena)
            save_steps(a, arena)
            assert CANARY in arena.map[:]
            arena.close()
            assert isinstance(a.ask(frames.Detach(request_id=a.number())), frames.Done)
        assert files_with_canary(devices), "it could be found"
        with acting_as(A), HostileReader(socket_path) as a_reader:
            a_reader.open_cache(8, fingerprint="the-same")
            a_reader.stage()
            assert isinstance(a_reader.fill({0: CANARY * 64}), frames.CacheFilled)
        with connected(socket_path) as root:
            root.remove_run("a", force=True)
            for each in root.caches():
                root.drop_cache(each.number)

        with trainer_of(B, socket_path) as b:
            arena = begun(b, "b")
            assert not any(arena.map[:]), "a fresh arena is empty"
            save_steps(b, arena)
            for step in STEPS[-2:]:
                assert not any(CANARY in each for each in lent(b, arena, step))
            ring = b.fetch(CheckpointId(1, STEPS[-1]), from_devices=True)
            assert isinstance(ring, frames.Streaming), ring
            assert CANARY not in content_of(b.reader.take_fd())
            arena.close()
        with acting_as(B), HostileReader(socket_path) as b_reader:
            b_reader.open_cache(8, fingerprint="the-same")
            b_reader.stage()
            with mmap.mmap(b_reader.arena_fd, 0, prot=mmap.PROT_READ) as shared:
                assert CANARY not in shared[:]
            assert CANARY not in b_reader.staging[:]
            assert b_reader.found(0) is None
