"""A shard's checksums: taken beside its writes, by threads that do nothing else."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.checkpoint import shard_write
from everstep.checkpoint.checksum import block_checksums
from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.engine import Transfer, TransferDone
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import SegmentHandle
from everstep.checkpoint.testing import State, load, memory_arena, opened
from everstep.core.ids import CheckpointId

MIB = 1 << 20
SEGMENTS = 8
DEADLINE_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Generator[RunStore]:
    dirs = [tmp_path / name for name in "ab"]
    for path in dirs:
        path.mkdir()
    with opened(dirs) as (store, _):
        made = store.run(os.geteuid(), "demo", create=True)
        made.begin_attempt(1, fresh=False)
        yield made


class Meeting:
    """Lets no write end before a checksum has begun, and no checksum before every segment is written."""

    def __init__(self) -> None:
        self.hashing, self.written = threading.Event(), threading.Event()
        self.writers: list[str] = []
        self.hashers: list[str] = []

    def checksums(self, view: memoryview, length_bytes: int) -> tuple[int, ...]:
        self.hashers.append(threading.current_thread().name)
        self.hashing.set()
        if not self.written.wait(DEADLINE_S):
            raise AssertionError("the segments are not written while one is hashed")
        return block_checksums(view, length_bytes)

    def engine(self) -> "MeetingEngine":
        return MeetingEngine(self)


class MeetingEngine(PlainEngine):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting

    def run(self, transfer: Transfer) -> TransferDone:
        if not self._meeting.hashing.wait(DEADLINE_S):
            raise AssertionError("no checksum begins while a segment is written")
        done = super().run(transfer)
        self._meeting.writers.append(threading.current_thread().name)
        if len(self._meeting.writers) == SEGMENTS:
            self._meeting.written.set()
        return done


def test_checksums_are_taken_beside_the_writes_by_threads_of_their_own(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting()
    monkeypatch.setattr(shard_write, "block_checksums", meeting.checksums)
    leaf = whole_leaf("w", "uint8", (SEGMENTS * MIB // 1024, 1024))
    state = State(plan_layout([leaf], [], segment_count=SEGMENTS), {"w": os.urandom(SEGMENTS * MIB)})
    engines = {device.device_id: LanedEngine(meeting.engine) for device in run.store.devices}
    with memory_arena(state.layout.slot_size_bytes) as arena:
        state.copy_into(arena)
        try:
            result = persist_shard(run, state.draft(CheckpointId(1, 1)), arena, engines=engines)
        finally:
            for engine in engines.values():
                engine.close()
    assert len(meeting.writers) == len(meeting.hashers) == SEGMENTS
    assert {name.rstrip("0123456789_") for name in meeting.writers} == {"everstep-writer"}
    assert {name.rstrip("0123456789_") for name in meeting.hashers} == {"everstep-checksum"}
    monkeypatch.undo()
    assert load(run, result.manifest) == state.content


def test_shards_that_are_written_together_share_the_cores_for_hashing(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks save at once, half of the cores stay with those who hand blocks to the devices."""
    at_once, too_many, lock = Counter[str](), threading.Event(), threading.Lock()

    def checksums(view: memoryview, length_bytes: int) -> tuple[int, ...]:
        with lock:
            at_once["now"] += 1
            if at_once["now"] > shard_write._HASHING_MAX:  # pyright: ignore[reportPrivateUsage]
                too_many.set()
        too_many.wait(0.1)  # time for another to begin, which would end it
        with lock:
            at_once["now"] -= 1
            at_once["all"] += 1
        return block_checksums(view, length_bytes)

    monkeypatch.setattr(shard_write, "block_checksums", checksums)
    ranks = 2 * shard_write._HASHING_MAX + 1  # pyright: ignore[reportPrivateUsage]
    leaf = whole_leaf("w", "uint8", (MIB,))
    state = State(plan_layout([leaf], [], segment_count=1), {"w": os.urandom(MIB)})

    def persist(rank: int) -> None:
        engines = {device.device_id: LanedEngine(PlainEngine) for device in run.store.devices}
        with memory_arena(state.layout.slot_size_bytes) as arena:
            state.copy_into(arena)
            draft = state.draft(CheckpointId(1, 1), rank=rank, world_size=ranks)
            persist_shard(run, draft, arena, engines=engines)
        for engine in engines.values():
            engine.close()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(persist, range(ranks)))
    assert at_once == {"now": 0, "all": ranks}
    assert not too_many.is_set()


def wait_until(is_reached: Callable[[], bool]) -> bool:
    for _ in range(int(DEADLINE_S * 100)):
        if is_reached():
            break
        threading.Event().wait(0.01)
    return is_reached()


@pytest.mark.parametrize("is_patient", [True, False])
def test_all_else_waits_until_each_drive_has_its_first_file_but_not_for_ever(
    run: RunStore, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    """Of two drives one is slow to make a file: the other has one file and nothing is hashed, or it goes on."""
    slow, first = run.store.devices[1].path, threading.Event()
    opened_fast, hashed, seen = list[Path](), list[int](), list[tuple[int, int]]()
    make = run.store.ops.open_new_segment

    def open_new_segment(path: Path) -> SegmentHandle:
        if not path.is_relative_to(slow):
            opened_fast.append(path)
        elif not first.is_set():
            reached = wait_until(
                lambda: bool(opened_fast) if is_patient else len(opened_fast) > 1 and bool(hashed)
            )
            assert reached
            if is_patient:
                threading.Event().wait(0.3)  # time for all else to begin, which would end it
            seen.append((len(opened_fast), len(hashed)))
            first.set()
        return make(path)

    def checksums(view: memoryview, length_bytes: int) -> tuple[int, ...]:
        hashed.append(length_bytes)
        return block_checksums(view, length_bytes)

    class Waiting(PlainEngine):
        def run(self, transfer: Transfer) -> TransferDone:
            assert first.wait(DEADLINE_S)
            return super().run(transfer)

    monkeypatch.setattr(run.store.ops, "open_new_segment", open_new_segment)
    monkeypatch.setattr(shard_write, "block_checksums", checksums)
    monkeypatch.setattr(shard_write, "TOGETHER_S", 2 * DEADLINE_S if is_patient else 0.05)
    leaf = whole_leaf("w", "uint8", (SEGMENTS * MIB // 1024, 1024))
    state = State(plan_layout([leaf], [], segment_count=SEGMENTS), {"w": os.urandom(SEGMENTS * MIB)})
    engines = {device.device_id: LanedEngine(Waiting) for device in run.store.devices}
    with memory_arena(state.layout.slot_size_bytes) as arena:
        state.copy_into(arena)
        try:
            result = persist_shard(run, state.draft(CheckpointId(1, 1)), arena, engines=engines)
        finally:
            for engine in engines.values():
                engine.close()
    files, hashes = seen[0]
    assert (files, hashes) == (1, 0) if is_patient else (files > 1 and hashes > 0)
    assert load(run, result.manifest) == state.content
