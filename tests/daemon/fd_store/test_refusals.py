"""What a daemon finds in the FD store and must not believe: refused, logged, taken out; and it starts all the same."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pausing import wait_until
from service_manager import ServiceManager

from everstep.checkpoint import linux
from everstep.checkpoint.draft_format import encode_draft
from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.checkpoint.manifest_types import Draft
from everstep.checkpoint.testing import SMALL_LEAVES, load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.fd_store import state_format as form
from everstep.daemon.fd_store.arena_state import ArenaState

TOKEN = "a" * 32
CHECKPOINT = CheckpointId(1, 4)


class Left:
    """An arena of one sealed slot with its state, as a daemon that was killed leaves them."""

    def __init__(
        self, store_id: str, *, run: str = "test", uid: int = 1000, rank: int = 0, seed: int = 1
    ) -> None:
        self.layout: Layout = plan_layout(SMALL_LEAVES, [], segment_count=2)
        size = self.layout.slot_size_bytes
        self.arena = os.memfd_create("everstep-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.arena, size)
        fcntl.fcntl(self.arena, fcntl.F_ADD_SEALS, linux.SEALS_FIXED_SIZE)
        self.content = {leaf.name: bytes([seed + 1]) * leaf.size_bytes for leaf in self.layout.leaves}
        with mmap.mmap(self.arena, size) as view:
            for piece in self.layout.pieces:
                plan = self.layout.segments[piece.segment]
                begin = next(entry.begin for entry in plan.entries if entry.key == piece.key)
                place = plan.slot_offset_bytes + plan.header_size_bytes + begin
                part = self.content[piece.leaf][piece.offset_in_leaf_bytes :][: piece.size_bytes]
                view[place : place + len(part)] = part
        self.head = form.ArenaHead(
            run_name=run,
            uid=uid,
            store_id=store_id,
            rank=rank,
            world_size=1,
            device_ids=[],
            layout_digest=self.layout.digest,
            slot_size_bytes=size,
            slot_count=1,
            arena_inode=os.fstat(self.arena).st_ino,
        )
        made = ArenaState.make(self.head)
        made.write(0, encode_draft(self.draft(0)))
        made.seal(0)
        self.state = made.fd

    def draft(self, rank: int) -> Draft:
        return Draft(
            checkpoint=CHECKPOINT,
            rank=rank,
            world_size=rank + 1,
            parent=None,
            layout_digest=self.layout.digest,
            leaves=self.layout.leaves,
            aliases=self.layout.aliases,
            pieces=self.layout.pieces,
            segments=self.layout.segments,
            values=b"{}",
        )

    def hand_over(self, manager: ServiceManager, token: str = TOKEN) -> None:
        manager.stored += [(f"everstep-arena-{token}", self.arena), (f"everstep-state-{token}", self.state)]


@pytest.fixture
def manager(tmp_path: Path, node_config: Path, socket_path: Path) -> Iterator[ServiceManager]:
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    made = ServiceManager(tmp_path, node_config)
    yield made
    made.close()


@pytest.fixture
def store_id(devices: list[Path]) -> str:
    """A store with runs of several users, each with an attempt begun."""
    with opened(devices) as (store, _):
        for uid in (1000, 1001, 1002):
            store.run(uid, "test", create=True).begin_attempt(1, fresh=False)
        return store.store_id


def shards(devices: list[Path]) -> list[Path]:
    return [path for device in devices for path in device.glob("runs/*/*/commits/*.mf")]


def test_runs_of_several_users_are_each_their_own(
    manager: ServiceManager, devices: list[Path], store_id: str
) -> None:
    left = {uid: Left(store_id, uid=uid, seed=uid % 100) for uid in (1000, 1001, 1002)}
    for number, one in enumerate(left.values()):
        one.hand_over(manager, f"{number:032x}")
    manager.start()
    wait_until(lambda: manager.log().count("shard_persisted") == 3)
    assert len(manager.names()) == 6  # kept in memory for their trainers, none of which lives
    manager.stop()
    wait_until(lambda: not manager.names())
    with opened(devices, read_only=True) as (store, _):
        for run in store.runs():
            assert load(run, run.manifest(CHECKPOINT, 0)) == left[run.owner_uid].content


def _cut_head(left: Left) -> None:
    os.pwrite(left.state, b"X", 60)


def _newer(left: Left) -> None:
    os.pwrite(left.state, b"\x02", 8)


def _other_arena(left: Left) -> None:
    head = msgspec.structs.replace(left.head, arena_inode=1)
    os.pwrite(left.state, form.encode_head(head).ljust(form.PAGE_BYTES, b"\0"), 0)


def _damaged_draft(left: Left) -> None:
    os.pwrite(left.state, b"X", form.record_offset_bytes(0) + form.PAGE_BYTES + 20)


def _another_rank(left: Left) -> None:
    state = ArenaState.read(left.state)
    state.clear(0)
    state.write(0, encode_draft(left.draft(5)))
    state.seal(0)


def _hostile_draft(left: Left) -> None:
    state = ArenaState.read(left.state)
    state.clear(0)
    state.write(0, b'{"checkpoint": [1, 2]}')
    state.seal(0)


def _swapped(left: Left) -> None:
    left.arena, left.state = left.state, left.arena


def _unsealed(left: Left) -> None:
    os.close(left.arena)
    left.arena = os.memfd_create("everstep-arena", os.MFD_CLOEXEC)
    os.ftruncate(left.arena, left.head.slot_size_bytes)


def _a_file(left: Left) -> None:
    os.close(left.arena)
    left.arena = os.open("/dev/null", os.O_RDWR)


def _a_pipe(left: Left) -> None:
    os.close(left.state)
    reader, left.state = os.pipe()
    os.close(reader)


SPOILED: dict[str, tuple[Callable[[Left], None], str]] = {
    "1" * 32: (
        _cut_head,
        "arena_refused stored={} reason=the head of an arena's state is not what was written",
    ),
    "2" * 32: (
        _newer,
        "arena_refused stored={} reason=the head of an arena's state has version 2, this daemon",
    ),
    "3" * 32: (_other_arena, "arena_refused stored={} reason=the arena of"),
    "4" * 32: (_swapped, "arena_refused stored={} reason=this is no head of an arena's state"),
    "5" * 32: (_unsealed, "arena_refused stored={} reason=this is no memfd of a fixed size"),
    "6" * 32: (_a_file, "arena_refused stored={} reason=this is no memfd"),
    "7" * 32: (_a_pipe, "arena_refused stored={} reason=this is no memfd"),
    "8" * 32: (_damaged_draft, "slot=0 reason=the draft in a slot's record is not the one that was sealed"),
    "9" * 32: (_another_rank, "slot=0 reason=it is of rank 5, the arena is of rank 0"),
    "a" * 32: (_hostile_draft, "slot=0 reason="),
}


def test_what_is_not_as_it_was_left(manager: ServiceManager, devices: list[Path], store_id: str) -> None:
    for token, (spoil, _) in SPOILED.items():
        left = Left(store_id)
        spoil(left)
        left.hand_over(manager, token)
    manager.start()
    wait_until(lambda: not manager.names())
    assert manager.stop() == 0
    log = manager.log()
    assert [said for token, (_, said) in SPOILED.items() if said.format(token) not in log] == []
    assert log.count("arena_refused") == 7
    assert log.count("snapshot_refused") == 3
    assert "internal_error" not in log
    assert shards(devices) == []


def test_half_of_a_pair_a_stranger_and_a_run_that_is_gone(
    manager: ServiceManager, devices: list[Path], store_id: str
) -> None:
    half, gone = Left(store_id), Left(store_id, run="removed")
    half.hand_over(manager, "1" * 32)
    del manager.stored[-1]
    os.close(half.state)
    gone.hand_over(manager, "2" * 32)
    manager.stored.append(("stored", os.open("/dev/null", os.O_RDONLY)))
    manager.start()
    wait_until(lambda: not manager.names())
    log = manager.log()
    assert "only its memory is there" in log
    assert "run 'removed' is not on the devices any more" in log
    assert "fd_refused name=stored" in log
    assert shards(devices) == []


def test_an_arena_of_devices_that_are_not_configured_waits_for_them(
    manager: ServiceManager, store_id: str
) -> None:
    assert store_id
    Left("f" * 32).hand_over(manager)
    manager.start()
    assert "arena_left" in manager.log()
    manager.stop()
    assert len(manager.names()) == 2
