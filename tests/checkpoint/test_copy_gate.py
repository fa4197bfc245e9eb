import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.copy_gate import CopyAbandonedError, CopyGate
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import (
    FaultyStorage,
    State,
    each_engine,
    load,
    make_state,
    memory_arena,
    opened,
)
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
ONE = CheckpointId(1, 1)
LEAVES = tuple(whole_leaf(f"w.{index}", "int8", (1024 * 1024,)) for index in range(8))


def never() -> bool:
    return False


def test_a_segment_opens_when_it_is_copied_and_all_when_sealed() -> None:
    gate = CopyGate()
    gate.copied(3)
    assert gate.wait_copied(3, never)
    assert not gate.wait_copied(4, lambda: True)
    gate.seal()
    assert gate.wait_copied(4, never)
    gate.wait_sealed()


def test_who_waits_is_let_go_by_each_end() -> None:
    for end, expected in ((CopyGate.seal, True), (CopyGate.wake, False)):
        gate, over = CopyGate(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(gate.wait_copied, 1, over.is_set)
            over.set() if not expected else None
            end(gate)
            assert waiting.result(10) is expected
    gate = CopyGate()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(gate.wait_copied, 1, never), pool.submit(gate.wait_sealed)]
        gate.abandon()
        for each in both:
            with pytest.raises(CopyAbandonedError):
                each.result(10)


def test_what_is_sealed_cannot_be_abandoned() -> None:
    gate = CopyGate()
    gate.seal()
    gate.abandon()
    gate.wait_sealed()  # raises CopyAbandonedError where it could be


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


@pytest.fixture
def state(run: RunStore) -> State:
    return make_state(run.store, leaves=LEAVES, segment_count=4)


@contextmanager
def being_copied(
    run: RunStore, state: State
) -> Generator[tuple[CopyGate, Callable[[int], None], Future[PersistResult]]]:
    """Persist a slot that is filled segment by segment: give the gate, how to copy one, and what comes of it."""
    gate = CopyGate()
    with (
        memory_arena(state.layout.slot_size_bytes) as arena,
        memory_arena(state.layout.slot_size_bytes) as source,
        each_engine(run.store) as engines,
        ThreadPoolExecutor(1) as pool,
    ):
        state.copy_into(source)

        def copy(segment: int) -> None:
            plan = state.layout.segments[segment]
            begin = plan.slot_offset_bytes + plan.header_size_bytes
            arena.view(begin, plan.data_size_bytes)[:] = source.view(begin, plan.data_size_bytes)
            gate.copied(segment)

        writing = pool.submit(persist_shard, run, state.draft(ONE), arena, engines=engines, gate=gate)
        try:
            yield gate, copy, writing
        finally:
            gate.abandon()


def files(run: RunStore) -> list[Path]:
    return [path for device in run.store.devices for path in run.data_path(device).glob("*/*")]


def wait_for(reached: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if reached():
            return
        threading.Event().wait(0.005)
    raise AssertionError("did not happen within 60 s")


def test_segments_are_written_as_they_come_and_committed_when_sealed(run: RunStore, state: State) -> None:
    with being_copied(run, state) as (gate, copy, writing):
        for segment in (2, 0, 3, 1):
            assert not writing.done()
            copy(segment)
        whole = {plan.file_size_bytes for plan in state.layout.segments}
        wait_for(lambda: len(files(run)) == 4 and {path.stat().st_size for path in files(run)} == whole)
        assert run.checkpoints() == []
        gate.seal()
        assert writing.result(20).manifest.checkpoint == ONE
    assert load(run, run.manifest(ONE, 0)) == state.content


def test_the_seal_alone_is_enough(run: RunStore, state: State) -> None:
    with being_copied(run, state) as (gate, copy, writing):
        for segment in range(4):
            copy(segment)
        gate.seal()
        writing.result(20)
    assert load(run, run.manifest(ONE, 0)) == state.content


@pytest.mark.parametrize("copied", [0, 2, 4])
def test_of_an_abandoned_one_nothing_remains(run: RunStore, state: State, copied: int) -> None:
    with being_copied(run, state) as (gate, copy, writing):
        for segment in range(copied):
            copy(segment)
        wait_for(lambda: bool(files(run)))
        gate.abandon()
        with pytest.raises(CopyAbandonedError):
            writing.result(20)
    assert [path for device in run.store.devices for path in run.data_path(device).iterdir()] == []
    assert run.checkpoints() == []
    assert run.pinned() == set()


def test_a_device_that_fails_meanwhile_is_worked_around(
    run: RunStore, state: State, faulty: FaultyStorage
) -> None:
    broken = run.store.devices[0].path
    faulty.arm(1, times=99, only=lambda call: call.name == "write_segment" and broken in call.path.parents)
    with being_copied(run, state) as (gate, copy, writing):
        for segment in range(4):
            copy(segment)
        gate.seal()
        manifest = writing.result(20).manifest
    faulty.arm(0)
    assert {record.device_id for record in manifest.segments} == {run.store.devices[1].device_id}
    assert load(run, run.manifest(ONE, 0)) == state.content


def test_when_all_fail_nobody_waits_for_the_copy(run: RunStore, state: State, faulty: FaultyStorage) -> None:
    """Only one segment comes; the writers of the others must not wait for theirs."""
    faulty.arm(1, times=99, only=lambda call: call.name == "write_segment")
    with being_copied(run, state) as (_, copy, writing):
        for segment in range(2):
            copy(segment)
        with pytest.raises(StorageError, match="was not saved"):
            writing.result(20)
    faulty.arm(0)
