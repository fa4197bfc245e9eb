"""Other users of the node, by their real uids: a connection's other end is whoever connects, as the kernel says."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer
from everstep.proto import frames

UIDS = (60001, 60002, 60003, 60004)
"""No account has them, and none needs one."""


@contextmanager
def acting_as(uid: int) -> Generator[None]:
    """Be another user in this block, in all threads, with none of root's rights."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def open_the_way(socket_path: Path) -> None:
    """Let others pass to the socket's directory, which lies in this test session's own."""
    for folder in socket_path.parents[:2]:
        folder.chmod(0o711)


def let_in(config: Path, socket_path: Path, users: Sequence[str]) -> None:
    """Let these users save their runs with the node's daemon of a configuration that ends with `[daemon]`."""
    open_the_way(socket_path)
    with config.open("a") as file:
        file.write(f"users = [{', '.join(map(repr, users))}]\n")


def trainer_of(uid: int, socket_path: Path) -> FakeTrainer:
    """Return a trainer of this user, which has said Hello."""
    if uid == os.geteuid():
        return FakeTrainer(socket_path)
    with acting_as(uid):
        return FakeTrainer(socket_path)


def begun(trainer: FakeTrainer, name: str, attempt: int = 1) -> FakeArena:
    """Begin an attempt of a run and return its arena."""
    opened = trainer.open_run([Path("nvme0"), Path("nvme1")], name=name)
    assert isinstance(opened, frames.RunOpened), opened
    assert opened.highest_attempt == attempt - 1
    assert isinstance(trainer.begin_attempt(attempt), frames.Done)
    return trainer.make_arena(trainer.layout())


def save(trainer: FakeTrainer, arena: FakeArena, checkpoint: CheckpointId, *, seed: int) -> None:
    """Save and wait until it is committed."""
    arena.save(checkpoint, seed=seed)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
