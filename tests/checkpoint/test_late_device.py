"""A device that does not end what it was given: the others write it, and its memory is not anybody else's before."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bounded_drive import BoundedDrive, BoundedEngine
from pausing import wait_until
from places import memory_folder

from everstep.checkpoint import device_calls, shard_write
from everstep.checkpoint.commit import FailedTry, persist_shard
from everstep.checkpoint.copy_gate import CopyGate
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.engine import Engine, Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.late_writes import LateWrites
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_types import ManifestHead
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import State, load, memory_arena, opened
from everstep.core.errors import EverstepError, StorageError
from everstep.core.ids import CheckpointId

MB = 10**6
SEGMENT_COUNT, SEGMENT_BYTES = 12, 2 << 20


class Gated:
    """An engine whose writes from some moment on end when a test lets them, well or not."""

    def __init__(self) -> None:
        self.name, self._engine = "gated", LanedEngine(PlainEngine)
        self.opens, self.is_asked = threading.Event(), threading.Event()
        self.opens.set()
        self.error = 0

    def run(self, transfer: Transfer) -> TransferDone:
        if transfer.kind is TransferKind.WRITE:
            self.is_asked.set()
            self.opens.wait()
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
        return self._engine.run(transfer)

    def forget(self, arena_fd: int) -> None:
        self._engine.forget(arena_fd)

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(shard_write, "LATE_WRITE_S", 0.2)
    monkeypatch.setattr(shard_write, "LATE_CALL_S", 0.2)
    monkeypatch.setattr(device_calls, "STANDS_STILL_S", 0.1)


@pytest.fixture
def dirs() -> Generator[list[Path]]:
    with memory_folder() as folder:
        made = [folder / name for name in "abc"]
        for path in made:
            path.mkdir()
        yield made


@pytest.fixture
def run(dirs: list[Path]) -> Generator[RunStore]:
    with opened(dirs) as (store, _):
        made = store.run(os.geteuid(), "demo", create=True)
        made.begin_attempt(1, fresh=False)
        yield made


@pytest.fixture
def engines(run: RunStore) -> Generator[dict[str, Gated]]:
    with ExitStack() as stack:
        made = {device.device_id: Gated() for device in run.store.devices}
        for engine in made.values():
            stack.callback(engine.close)
            stack.callback(engine.opens.set)
        yield made


@pytest.fixture
def state() -> State:
    leaf = whole_leaf("w", "uint8", (SEGMENT_COUNT * SEGMENT_BYTES >> 10, 1 << 10))
    content = os.urandom(1 << 20) * (SEGMENT_COUNT * SEGMENT_BYTES >> 20)
    return State(plan_layout([leaf], [], segment_count=SEGMENT_COUNT), {"w": content})


def counts(manifest: ManifestHead) -> Counter[str]:
    return Counter(record.device_id for record in manifest.segments)


def files(path: Path) -> set[Path]:
    return set(path.rglob("*.safetensors"))


class Writer:
    """Persists a state, each time from a memory of its own, which stays until nothing is late any more."""

    def __init__(self, run: RunStore, state: State, engines: Mapping[str, Engine], arenas: ExitStack) -> None:
        self._run, self._state, self._engines, self._arenas = run, state, engines, arenas
        self.late = LateWrites()
        self.tries: list[FailedTry] = []

    def persist(self, step: int, gate: CopyGate | None = None) -> PersistResult:
        arena = self._arenas.enter_context(memory_arena(self._state.layout.slot_size_bytes))
        for engine in self._engines.values():
            self._arenas.callback(engine.forget, arena.fd)
        self._arenas.callback(self.late.wait)
        self._state.copy_into(arena)
        return persist_shard(
            self._run,
            self._state.draft(CheckpointId(1, step)),
            arena,
            engines=self._engines,
            on_failed_try=self.tries.append,
            late_writes=self.late,
            gate=gate,
        )


@pytest.fixture
def writer(run: RunStore, state: State, engines: dict[str, Gated]) -> Generator[Writer]:
    with ExitStack() as arenas:
        yield Writer(run, state, engines, arenas)
        for engine in engines.values():
            engine.opens.set()


def test_a_device_that_never_ends_is_left_behind_and_what_it_had_is_written_by_the_others(
    writer: Writer, run: RunStore, engines: dict[str, Gated], state: State, dirs: list[Path]
) -> None:
    first = writer.persist(1)
    assert writer.tries == []
    hanging = run.store.devices[0]
    engines[hanging.device_id].opens.clear()
    before = files(hanging.path)

    second = writer.persist(2)

    assert counts(second.manifest)[hanging.device_id] == 0
    assert sum(counts(second.manifest).values()) == SEGMENT_COUNT
    assert len({record.generation for record in second.manifest.segments}) == 2
    assert not writer.late.are_over, "its engine may still read from the slot"
    assert files(hanging.path) > before
    found, reason = run.store.device_state(hanging.device_id)
    assert found is DeviceState.SUSPECT
    assert "has taken" in reason
    assert hanging not in run.store.writable
    assert not run.store.may_delete
    (failed,) = writer.tries
    assert failed.device_paths == (str(hanging.path),)
    third = writer.persist(3)
    assert len(writer.tries) == 1, "it is not asked while it hangs"
    assert counts(third.manifest)[hanging.device_id] == 0

    engines[hanging.device_id].opens.set()
    writer.late.wait()

    wait_until(lambda: run.store.device_state(hanging.device_id)[0] is DeviceState.OK)
    assert files(hanging.path) == before
    assert run.store.may_delete
    for result in (first, second, third):
        assert load(run, result.manifest) == state.content
    assert all(run.store.speeds.backlog_bytes(device.device_id) == 0 for device in run.store.devices)
    run.store.close()
    with opened(dirs) as (_, report):
        assert report.problems == []
        assert report.orphan_count == 0


def test_a_call_that_returns_as_it_is_left_behind_is_over_then(
    writer: Writer, run: RunStore, engines: dict[str, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its end would not be counted, and the device be late for good."""
    hanging = run.store.devices[0]
    engine, mark = engines[hanging.device_id], run.store.mark_late
    engine.opens.clear()

    def slowly(device_id: str, error: EverstepError) -> None:
        engine.opens.set()
        threading.Event().wait(0.5)  # in which the call returns and its thread goes on
        mark(device_id, error)

    monkeypatch.setattr(run.store, "mark_late", slowly)
    result = writer.persist(1)
    writer.late.wait()
    wait_until(lambda: run.store.device_state(hanging.device_id)[0] is DeviceState.OK)
    assert not run.store.has_late
    assert counts(result.manifest)[hanging.device_id] == 0


def test_where_no_thread_is_to_be_had_for_a_device_the_others_have_ended(
    writer: Writer, run: RunStore, engines: dict[str, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is given back to the trainer, and the numbers of their files to whoever opens some."""
    moving: list[str] = []
    first = run.store.devices[0].device_id

    class Seen(Gated):
        def run(self, transfer: Transfer) -> TransferDone:
            moving.append("begun")
            try:
                self.is_asked.set()
                threading.Event().wait(0.3)
                return super().run(transfer)
            finally:
                moving.remove("begun")

    class Few(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            is_write = len(args) == 3 and args[1].__name__ == "<lambda>"
            if is_write and args[2].device is not run.store.devices[0]:
                assert engines[first].is_asked.wait(10)
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(shard_write, "ThreadPoolExecutor", Few)
    engines[first] = Seen()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        writer.persist(1)
    assert moving == []


def test_a_daemon_that_dies_meanwhile_leaves_an_orphan(
    writer: Writer, run: RunStore, engines: dict[str, Gated], state: State
) -> None:
    """No manifest names what lies there, so that the next opening removes it."""
    hanging = run.store.devices[0]
    engines[hanging.device_id].opens.clear()
    result = writer.persist(1)
    named = {
        run.generation_path(device, record.generation) / f"{record.segment}.safetensors"
        for record in result.manifest.segments
        for device in run.store.devices
        if device.device_id == record.device_id
    }
    written = {path for device in run.store.devices for path in files(device.path)}
    assert written - named == files(hanging.path)
    assert files(hanging.path)
    engines[hanging.device_id].opens.set()
    writer.late.wait()


@pytest.mark.parametrize("is_again_late", [False, True])
def test_a_device_that_turns_a_hundred_times_slower_in_the_middle_holds_nobody_up(
    run: RunStore, state: State, is_again_late: bool
) -> None:
    drives = {device.device_id: BoundedDrive(40 * MB) for device in run.store.devices}
    with ExitStack() as stack:
        engines = {key: BoundedEngine(drive, PlainEngine()) for key, drive in drives.items()}
        for engine in engines.values():
            stack.callback(engine.close)
        writer = Writer(run, state, engines, stack.enter_context(ExitStack()))
        writer.persist(1)
        slow = run.store.devices[-1]
        drive = drives[slow.device_id]
        if not is_again_late:
            drive.served = lambda transfer: setattr(drive, "bytes_per_s", 0.4 * MB)
        else:
            drive.bytes_per_s = 0.4 * MB
        second = writer.persist(2)
        assert counts(second.manifest)[slow.device_id] == 0
        assert [failed.device_paths for failed in writer.tries] == [(str(slow.path),)]
        writer.late.wait()
        wait_until(lambda: run.store.device_state(slow.device_id)[0] is not DeviceState.SUSPECT)
        third = writer.persist(3)
    assert len(writer.tries) == 1
    assert counts(third.manifest)[slow.device_id] == 0, "it is known now what it does"
    assert load(run, second.manifest) == load(run, third.manifest) == state.content


def test_one_that_fails_after_it_was_left_behind_is_suspect_for_good(
    writer: Writer, run: RunStore, engines: dict[str, Gated], state: State
) -> None:
    writer.persist(1)
    engine, device = engines[run.store.devices[0].device_id], run.store.devices[0]
    engine.opens.clear()
    engine.error = errno.EIO
    result = writer.persist(2)
    engine.opens.set()
    writer.late.wait()
    wait_until(lambda: "EIO" in run.store.device_state(device.device_id)[1])
    assert run.store.device_state(device.device_id)[0] is DeviceState.SUSPECT
    assert load(run, result.manifest) == state.content


def test_where_another_device_fails_too_all_is_written_again_to_the_last(
    writer: Writer, run: RunStore, engines: dict[str, Gated], state: State
) -> None:
    writer.persist(1)
    late, failing, last = (device.device_id for device in run.store.devices)
    engines[late].opens.clear()
    engines[failing].error = errno.EIO
    result = writer.persist(2)
    assert counts(result.manifest) == {last: SEGMENT_COUNT}
    assert load(run, result.manifest) == state.content
    engines[late].opens.set()
    writer.late.wait()


def test_devices_that_all_stand_still_are_waited_for_by_shards_of_which_each_is_on_one(
    run: RunStore, engines: dict[str, Gated]
) -> None:
    """To each the other devices seem free: it has nothing there, and whoever has does not come on."""
    leaf = whole_leaf("w", "uint8", (1 << 10, 1 << 10))
    states = [State(plan_layout([leaf], [], segment_count=1), {"w": os.urandom(1 << 20)}) for _ in engines]
    for engine in engines.values():
        engine.opens.clear()
    with ExitStack() as arenas, ThreadPoolExecutor(len(states)) as threads:
        writers = [Writer(run, state, engines, arenas) for state in states]
        writes = [threads.submit(writer.persist, step) for step, writer in enumerate(writers, 1)]
        try:
            wait_until(lambda: all(engine.is_asked.is_set() for engine in engines.values()))
            wait(writes, 10 * shard_write.LATE_WRITE_S)
            states_meanwhile = {run.store.device_state(device_id)[0] for device_id in engines}
        finally:
            for engine in engines.values():
                engine.opens.set()
        for write, state in zip(writes, states, strict=True):
            assert load(run, write.result().manifest) == state.content
        assert states_meanwhile == {DeviceState.OK}
        assert [writer.tries for writer in writers] == [[], [], []]


def test_who_does_not_look_after_what_is_late_waits_for_its_end(
    run: RunStore, engines: dict[str, Gated], state: State
) -> None:
    """After the return nothing reads from the slot any more."""
    hanging = engines[run.store.devices[0].device_id]
    hanging.opens.clear()
    results: list[PersistResult] = []
    with memory_arena(state.layout.slot_size_bytes) as arena:
        state.copy_into(arena)
        draft = state.draft(CheckpointId(1, 1))
        thread = threading.Thread(
            target=lambda: results.append(persist_shard(run, draft, arena, engines=engines))
        )
        thread.start()
        wait_until(lambda: bool(run.checkpoints()))
        assert thread.is_alive()
        hanging.opens.set()
        thread.join(60)
        for engine in engines.values():
            engine.forget(arena.fd)
    assert load(run, results[0].manifest) == state.content


def test_a_ring_that_has_given_up_bytes_ends_with_a_clean_error(
    writer: Writer, run: RunStore, engines: dict[str, Gated], state: State
) -> None:
    """The others wait for places in the slot that the late one does not give up, and what it had is gone."""
    writer.persist(1)
    given_up: list[int] = []
    gate = CopyGate(given_up.append)
    hanging = engines[run.store.devices[0].device_id]
    hanging.is_asked.clear()
    hanging.opens.clear()
    for segment in range(SEGMENT_COUNT):
        gate.copied(segment)
    with pytest.raises(StorageError, match="has taken"):
        writer.persist(2, gate)
    assert given_up
    hanging.opens.set()
    writer.late.wait()
    assert not run.shards() or all(shard.checkpoint.step == 1 for shard in run.shards())
