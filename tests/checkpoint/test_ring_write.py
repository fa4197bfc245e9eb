"""A shard larger than its slot, written while it streams through: whole on the devices, or not at all."""

import errno
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pausing import wait_until

from everstep.checkpoint import shard_write
from everstep.checkpoint.checksum import block_checksums
from everstep.checkpoint.commit import FailedTry, persist_shard
from everstep.checkpoint.copy_gate import CopyAbandonedError, CopyGate
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.ring_layout_plan import WINDOW_BYTES_MIN, least_ring_bytes, plan_ring
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import ArenaRange
from everstep.checkpoint.testing import FaultyStorage, State, each_engine, load, memory_arena, opened
from everstep.core.errors import CorruptDataError, NoSpaceError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
ONE = CheckpointId(1, 1)
MIB = 1024**2
LEAVES = tuple(whole_leaf(f"w.{index}", "int8", (2 * MIB - 100,)) for index in range(18))
WHOLE = plan_layout(LEAVES, [], segment_count=2)
CONTENT = {leaf.name: bytes([index]) * leaf.size_bytes for index, leaf in enumerate(LEAVES)}


def state(windows: int) -> State:
    """A state in ten segments, which take turns in so many windows."""
    slot = least_ring_bytes(WHOLE, 0) + (windows - 1) * WINDOW_BYTES_MIN
    ring = plan_ring(WHOLE, slot_size_bytes=slot, staged_bytes=0, device_count=2)
    assert ring.windows is not None
    assert ring.windows.count == windows
    assert len(ring.segments) == 10
    return State(ring, CONTENT)


class Streaming:
    """A trainer's side: copies segment after segment, each when its window is free."""

    def __init__(self, state: State, arena: ArenaRange) -> None:
        self._state, self._arena = state, arena
        self._changed = threading.Condition()
        self._written: set[int] = set()
        self.gate = CopyGate(self.written)
        self.is_over = False

    @property
    def count(self) -> int:
        return len(self._state.layout.segments)

    def written(self, segment: int) -> None:
        with self._changed:
            assert segment not in self._written
            self._written.add(segment)
            self._changed.notify_all()

    def copy(self, end: int | None = None, begin: int = 0) -> None:
        """Copy the segments [begin, end)."""
        windows = self._state.layout.windows
        assert windows is not None
        for segment in range(begin, self.count if end is None else end):
            with self._changed:
                before = segment - windows.count
                assert self._changed.wait_for(
                    lambda before=before: before < 0 or before in self._written or self.is_over, 20
                )
                if self.is_over:
                    return
            self._state.copy_into(self._arena, segment)
            self.gate.copied(segment)

    def stop(self, _: object = None) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def run(tmp_path: Path, faulty: FaultyStorage) -> Generator[RunStore]:
    directories = [tmp_path / name for name in "ab"]
    for path in directories:
        path.mkdir()
    with opened(directories, ops=faulty.as_ops()) as (store, _):
        made = store.run(UID, "demo", create=True)
        made.begin_attempt(1, fresh=False)
        yield made


@contextmanager
def streaming(
    run: RunStore,
    state: State,
    *,
    checkpoint: CheckpointId = ONE,
    on_failed_try: Callable[[FailedTry], object] = lambda _: None,
) -> Generator[tuple[Streaming, Future[PersistResult]]]:
    layout = state.layout
    with (
        memory_arena(layout.slot_size_bytes) as arena,
        each_engine(run.store) as engines,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer = Streaming(state, arena)
        writing = pool.submit(
            persist_shard,
            run,
            state.draft(checkpoint),
            arena,
            engines=engines,
            gate=trainer.gate,
            on_failed_try=on_failed_try,
        )
        writing.add_done_callback(trainer.stop)
        try:
            yield trainer, writing
        finally:
            trainer.gate.abandon()


def files(run: RunStore) -> list[Path]:
    return [path for device in run.store.devices for path in run.data_path(device).glob("*/*")]


_steps = iter(range(1, 10**6))


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # files, threads
@given(windows=st.integers(1, 8), speeds=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_it_comes_back_whole(run: RunStore, windows: int, speeds: tuple[int, int]) -> None:
    """However many windows there are, and however the segments are dealt to devices of any speed."""
    for device, speed in zip(run.store.devices, speeds, strict=True):
        run.store.measured(device.device_id, speed * 1024 * MIB, 1.0)
    checkpoint = CheckpointId(1, next(_steps))
    with streaming(run, state(windows), checkpoint=checkpoint) as (trainer, writing):
        trainer.copy()
        assert not writing.done(), "the manifest waits for the seal"
        trainer.gate.seal()
        manifest = writing.result(20).manifest
    assert load(run, manifest) == CONTENT


def test_a_device_that_fails_before_anything_is_overwritten_is_worked_around(
    run: RunStore, faulty: FaultyStorage
) -> None:
    broken = run.store.devices[0].path
    faulty.arm(1, times=99, only=lambda call: call.name == "make_directory" and broken in call.path.parents)
    tries: list[FailedTry] = []
    with streaming(run, state(3), on_failed_try=tries.append) as (trainer, writing):
        trainer.copy()
        trainer.gate.seal()
        manifest = writing.result(20).manifest
    faulty.arm(0)
    assert len(tries) == 1
    assert {record.device_id for record in manifest.segments} == {run.store.devices[1].device_id}
    assert load(run, manifest) == CONTENT


@pytest.mark.parametrize("number", [5, 28], ids=["EIO", "ENOSPC"])
def test_a_device_that_fails_later_ends_it_and_the_next_one_avoids_that_device(
    run: RunStore, faulty: FaultyStorage, number: int
) -> None:
    """What was on it is gone from memory. A full device is no reason to collect and try again, either."""
    broken = run.store.devices[0]
    calls = ("write_segment", "reserve")
    faulty.arm(
        6,
        times=99,
        number=number,
        only=lambda call: call.name in calls and broken.path in call.path.parents,
    )
    with streaming(run, state(2)) as (trainer, writing):
        trainer.copy()
        with pytest.raises(StorageError, match="streamed through a ring") as caught:
            writing.result(20)
    assert not isinstance(caught.value, NoSpaceError)
    assert str(broken.path) in caught.value.message
    assert files(run) == []
    assert run.checkpoints() == []
    faulty.arm(0)
    if number == 5:
        with streaming(run, state(2), checkpoint=CheckpointId(1, 2)) as (trainer, writing):
            trainer.copy()
            trainer.gate.seal()
            manifest = writing.result(20).manifest
        assert {record.device_id for record in manifest.segments} == {run.store.devices[1].device_id}
        assert load(run, manifest) == CONTENT


def test_manifests_that_find_no_room_end_it_and_it_is_not_written_from_what_the_slot_has_now(
    run: RunStore, faulty: FaultyStorage
) -> None:
    """Room is made after a NoSpaceError, and all tried again: that would commit later segments as earlier ones."""
    faulty.arm(
        1,
        times=2,
        number=errno.ENOSPC,
        only=lambda call: call.name == "write_small_new" and call.path.parent.name == "commits",
    )
    made = state(2)
    with streaming(run, made) as (trainer, writing):
        trainer.copy()
        trainer.gate.seal()
        with pytest.raises(StorageError, match=r"No space left.*streamed through a ring") as caught:
            writing.result(20)
    assert not isinstance(caught.value, NoSpaceError)
    assert files(run) == []
    assert run.checkpoints() == []
    with (
        memory_arena(made.layout.slot_size_bytes) as arena,
        each_engine(run.store) as engines,
        pytest.raises(StorageError, match="streamed through a ring"),
    ):
        persist_shard(run, made.draft(ONE), arena, engines=engines, gate=trainer.gate)
    assert files(run) == []
    assert run.checkpoints() == []


@pytest.mark.parametrize("copied", [0, 1, 4, 9])
def test_of_an_abandoned_one_nothing_remains(run: RunStore, copied: int) -> None:
    with streaming(run, state(2)) as (trainer, writing):
        trainer.copy(copied)
        trainer.gate.abandon()
        with pytest.raises(CopyAbandonedError):
            writing.result(20)
    assert [path for device in run.store.devices for path in run.data_path(device).iterdir()] == []
    assert run.checkpoints() == []
    assert run.pinned() == set()


def test_a_checksum_that_fails_ends_it(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its window would never be free, and everybody would wait for ever."""
    from everstep.checkpoint import shard_write

    real, calls = shard_write.block_checksums, iter(range(100))

    def fails_once(view: memoryview, size_bytes: int) -> tuple[int, ...]:
        if next(calls) == 3:
            raise MemoryError("planted by a test")
        return real(view, size_bytes)

    monkeypatch.setattr(shard_write, "block_checksums", fails_once)
    with streaming(run, state(2)) as (trainer, writing):
        trainer.copy()
        with pytest.raises(MemoryError, match="planted"):
            writing.result(20)
    assert files(run) == []


def test_only_in_a_ring_may_segments_have_one_place(run: RunStore) -> None:
    made = state(2)
    with (
        memory_arena(made.layout.slot_size_bytes) as arena,
        pytest.raises(CorruptDataError, match="segment 2"),
    ):
        persist_shard(run, made.draft(ONE), arena, engines={}, gate=CopyGate())


def test_a_place_is_given_up_when_its_checksum_is_taken_too(
    run: RunStore, faulty: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hash, heard = threading.Event(), list[int]()

    def hashed(view: memoryview, size_bytes: int) -> tuple[int, ...]:
        assert may_hash.wait(20)
        return block_checksums(view, size_bytes)

    monkeypatch.setattr(shard_write, "block_checksums", hashed)
    whole = State(WHOLE, CONTENT)
    gate = CopyGate(heard.append)
    gate.seal()
    faulty.arm(0)
    with (
        memory_arena(WHOLE.slot_size_bytes) as arena,
        each_engine(run.store) as engines,
        ThreadPoolExecutor(1) as pool,
    ):
        whole.copy_into(arena)
        writing = pool.submit(persist_shard, run, whole.draft(ONE), arena, engines=engines, gate=gate)
        try:
            # A device's files are made durable when its last one is written, and each was given up by who wrote it.
            wait_until(lambda: len({call.path for call in faulty.calls if call.name == "sync_data"}) == 2)
            assert heard == []
        finally:
            may_hash.set()
        writing.result(20)
    assert sorted(heard) == [0, 1]
