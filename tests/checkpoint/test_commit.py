import errno
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.checkpoint import shard_write
from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.commit import FailedTry, persist_shard
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_format import decode_manifest
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES, ManifestHead
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.storage_ops import SegmentHandle
from everstep.checkpoint.testing import (
    CrashedError,
    FaultyStorage,
    Mode,
    State,
    begun,
    each_engine,
    load,
    make_state,
    memory_arena,
    opened,
    save,
)
from everstep.core.errors import CorruptDataError, FencedError, NoSpaceError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
OLD, NEW, NEXT = CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(1, 3)


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def run(dirs: list[Path], faulty: FaultyStorage) -> Generator[RunStore]:
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        made = begun(store)
        yield made


def generations(dirs: list[Path]) -> set[str]:
    return {path.name for each in dirs for path in each.glob("runs/*/*/data/*")}


def test_a_shard_reads_back_bit_for_bit(run: RunStore, dirs: list[Path]) -> None:
    state = make_state(run.store)
    result = save(run, state, OLD)
    assert load(run, result.manifest) == state.content
    assert run.manifest(OLD, 0) == decode_manifest(result.content)
    assert (result.copy_count, result.device_count, result.problems) == (2, 2, ())
    assert not result.is_under_replicated
    assert sum(write.size_bytes for write in result.writes) == sum(
        path.stat().st_size for each in dirs for path in each.rglob("*.safetensors")
    )
    run.store.close()
    with opened(dirs) as (store, report):
        again = store.run(UID, "demo")
        assert load(again, again.manifest(OLD, 0)) == state.content
        assert (report.shard_count, report.problems) == (1, [])


def test_segments_of_several_blocks_over_an_asynchronous_engine(run: RunStore) -> None:
    leaves = (whole_leaf("w", "float32", (3000, 1001)), whole_leaf("b", "int8", (BLOCK_SIZE_BYTES + 13,)))
    state = make_state(run.store, leaves=leaves)
    engines = {device.device_id: LanedEngine(AioEngine) for device in run.store.devices}
    with memory_arena(state.layout.slot_size_bytes) as arena:
        state.copy_into(arena)
        result = persist_shard(run, state.draft(OLD), arena, engines=engines)
        for engine in engines.values():
            engine.close()
    assert max(len(record.block_checksums) for record in result.manifest.segments) >= 2
    assert load(run, result.manifest) == state.content


def test_a_state_without_tensors_is_a_manifest_alone(run: RunStore, dirs: list[Path]) -> None:
    result = save(run, make_state(run.store, leaves=()), OLD)
    assert result.manifest.segments == ()
    assert run.offered() == [OLD]
    assert generations(dirs) == set()


def test_stale_bytes_behind_a_segment_do_not_reach_the_disk(run: RunStore) -> None:
    state = make_state(run.store)
    with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(run.store) as engines:
        arena.view(0, arena.slot_size_bytes)[:] = b"\xaa" * arena.slot_size_bytes
        state.copy_into(arena)
        persist_shard(run, state.draft(OLD), arena, engines=engines)
        for plan in state.layout.segments:
            tail = -plan.file_size_bytes % 4096
            assert bytes(arena.view(plan.slot_offset_bytes + plan.file_size_bytes, tail)) == bytes(tail)


def test_every_call_comes_in_the_order_that_makes_it_durable(run: RunStore, faulty: FaultyStorage) -> None:
    faulty.arm(0)
    save(run, make_state(run.store), OLD)
    calls = [call for call in faulty.calls if call.name != "stat"]
    first_manifest = next(place for place, call in enumerate(calls) if call.name == "write_small_new")
    for device in run.store.devices:
        mine = [call for call in calls if device.path in (call.path, *call.path.parents)]
        names = [call.name for call in mine]
        assert (
            names
            == [
                "free_bytes",
                "make_directory",
                "open_new_segment",
                "reserve",
                "write_segment",
                "truncate",
                "sync_data",
                "close",
                "sync_directory",
                "sync_directory",
                "write_small_new",
                "rename_noreplace",
                "sync_directory",
            ][names[0] != "free_bytes" :]
        )  # both share a file system, so free space is asked once
        generation, data, commits = (call.path for call in mine if call.name == "sync_directory")
        assert (generation.parent, data.name, commits.name) == (data, "data", "commits")
        assert all(calls.index(call) < first_manifest for call in mine[:-3])


def test_room_for_all_is_promised_before_a_byte_is_written(
    run: RunStore, dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promised, or allocated already: a file is allocated when its turn comes."""
    promised: list[int] = []
    held: list[int] = []
    make, write = RealStorage.make_directory, RealStorage.write_segment

    def making(ops: RealStorage, path: Path) -> bool:
        promised.append(promised_bytes(run))
        return make(ops, path)

    def looking(ops: RealStorage, *arguments: Any) -> float:
        first = promised_bytes(run)  # what another thread allocates meanwhile counts twice, never not at all
        allocated = sum(path.stat().st_blocks * 512 for each in dirs for path in each.rglob("*.safetensors"))
        held.append(first + allocated)
        return write(ops, *arguments)

    monkeypatch.setattr(RealStorage, "make_directory", making)
    monkeypatch.setattr(RealStorage, "write_segment", looking)
    state = make_state(run.store)
    save(run, state, OLD)
    needed = sum(align_up(plan.file_size_bytes) for plan in state.layout.segments)
    assert len(promised) == len(dirs), "the generation's directories, before any file"
    assert min(promised) >= needed
    assert held[0] >= needed


def promised_bytes(run: RunStore) -> int:
    return sum(run.store.space._reserved_bytes.values())  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("mode", list(Mode))
def test_any_call_may_fail_or_be_the_last(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path], mode: Mode
) -> None:
    """No wrong acknowledgement, the old checkpoint intact, and recovery finds all or nothing of the new one.

    One failure costs one device: the shard is committed on the other.
    """
    old, new = make_state(run.store, 1), make_state(run.store, 2)
    save(run, old, OLD)
    run.store.close()
    step, failures = 10, 0
    for count in range(1, 60):
        step += 1
        acknowledged, checkpoint = False, CheckpointId(1, step)
        with opened(dirs, ops=faulty.as_ops()) as (store, _):
            again = store.run(UID, "demo")
            faulty.arm(count, mode)
            try:
                save(again, new, checkpoint)
                acknowledged = True
            except (StorageError, CrashedError):
                failures += 1
            reached = len(faulty.calls) >= count
            synced = [call.path for call in faulty.calls if call.name == "sync_data"]
            assert len(synced) == len(set(synced))
            faulty.arm(0)
            if mode is not Mode.CRASH:
                assert load(again, again.manifest(OLD, 0)) == old.content
                assert (checkpoint in again.offered()) == acknowledged
        check_after_restart(dirs, {OLD: old}, {checkpoint: new} if acknowledged else {}, {checkpoint: new})
        if not reached:
            break
    assert acknowledged  # pyright: ignore[reportPossiblyUnboundVariable]
    assert failures >= 15 if mode is Mode.CRASH else failures == 0


def check_after_restart(
    dirs: list[Path],
    old: dict[CheckpointId, State],
    sure: dict[CheckpointId, State],
    maybe: dict[CheckpointId, State],
) -> None:
    """Everything acknowledged is whole, the rest whole or absent, nothing is left over; and so it stays."""
    with opened(dirs) as (store, report):
        run = store.run(UID, "demo")
        for checkpoint, state in (old | sure).items():
            assert load(run, run.manifest(checkpoint, 0)) == state.content
        for checkpoint, state in maybe.items():
            if checkpoint in run.offered():
                assert load(run, run.manifest(checkpoint, 0)) == state.content
        assert generations(dirs) == {shard.generation for shard in run.shards()}
        assert (report.quarantined_count, report.damaged_count) == (0, 0)
        names = [{path.name for path in each.glob("runs/*/*/commits/*")} for each in dirs]
        assert names[0] == names[1]
    with opened(dirs) as (_, report):
        assert (report.copy_count, report.orphan_count, report.temporary_count, report.problems) == (
            0,
            0,
            0,
            [],
        )


def devices_of(manifest: ManifestHead) -> set[str]:
    return {record.device_id for record in manifest.segments}


@pytest.mark.parametrize("call", ["open_new_segment", "reserve", "write_segment", "sync_data"])
def test_a_failed_device_is_suspect_and_the_shard_is_written_at_once_to_the_rest(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path], call: str
) -> None:
    state, tries = make_state(run.store), list[FailedTry]()
    bad, good = run.store.devices
    faulty.arm(1, only=lambda made: made.name == call and bad.path in made.path.parents)
    result = save(run, state, OLD, on_failed_try=tries.append)
    faulty.arm(0)
    assert devices_of(result.manifest) == {good.device_id}
    assert load(run, result.manifest) == state.content
    assert (result.copy_count, result.device_count, len(result.problems)) == (1, 2, 1)
    assert [(each.device_paths, each.code) for each in tries] == [((str(bad.path),), "StorageError")]
    assert "EIO" in tries[0].message
    assert run.store.device_state(bad.device_id)[0] is DeviceState.SUSPECT
    assert run.store.writable == (good,)
    assert generations(dirs) == {result.manifest.generation}
    faulty.arm(0)
    assert devices_of(save(run, state, NEW).manifest) == {good.device_id}
    assert not [made for made in faulty.calls if bad.path in made.path.parents]


def test_only_when_every_device_failed_is_nothing_saved(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path]
) -> None:
    state, tries = make_state(run.store), list[FailedTry]()
    faulty.arm(1, times=1000, only=lambda call: call.name == "sync_data")
    with pytest.raises(StorageError, match=r"rank 0 of checkpoint 1\.1 was not saved: device /.*EIO"):
        save(run, state, OLD, on_failed_try=tries.append)
    faulty.arm(0)
    assert {path for each in tries for path in each.device_paths} == {str(path) for path in dirs}
    assert generations(dirs) == set()
    assert run.shards() == []
    assert len(run.store.trusted) == 2  # better those that failed than none
    assert load(run, save(run, state, OLD).manifest) == state.content


def test_a_full_device_is_left_out_of_this_write_only(run: RunStore, faulty: FaultyStorage) -> None:
    state, tries = make_state(run.store), list[FailedTry]()
    full, other = run.store.devices
    faulty.arm(
        1, number=errno.ENOSPC, only=lambda call: call.name == "reserve" and full.path in call.path.parents
    )
    assert devices_of(save(run, state, OLD, on_failed_try=tries.append).manifest) == {other.device_id}
    assert [each.code for each in tries] == ["NoSpaceError"]
    assert run.store.may_delete  # a full device is not a bad one
    faulty.arm(0)
    assert devices_of(save(run, state, NEW).manifest) == {full.device_id, other.device_id}


def test_one_durable_manifest_is_a_commit_and_the_missing_copy_is_reported(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path]
) -> None:
    state = make_state(run.store)
    save(run, state, OLD)
    faulty.arm(1, only=lambda call: call.name == "write_small_new")
    result = save(run, state, NEW)
    assert result.is_under_replicated
    assert (result.copy_count, result.device_count, len(result.problems)) == (1, 2, 1)
    assert run.offered() == [NEW, OLD]
    faulty.arm(0)
    run.store.close()
    with opened(dirs) as (store, report):
        assert report.copy_count == 1
        assert store.run(UID, "demo").offered() == [NEW, OLD]


def test_an_unknown_outcome_is_said_and_its_data_stay(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path]
) -> None:
    state = make_state(run.store)
    faulty.arm(0)
    save(run, state, OLD)
    faulty.arm(1, times=2, only=lambda call: call.name == "sync_directory" and call.path.name == "commits")
    with pytest.raises(StorageError, match="is unknown"):
        save(run, state, NEW)
    faulty.arm(0)
    assert run.offered() == [OLD]
    assert len(generations(dirs)) == 2
    run.store.close()
    check_after_restart(dirs, {OLD: state}, {}, {NEW: state})


def test_what_is_allocated_is_not_promised_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks that save at the same moment would need up to twice the room."""
    promised: list[int] = []
    make = RealStorage.open_new_segment

    def looking(ops: RealStorage, path: Path) -> SegmentHandle:
        promised.append(promised_bytes(run))
        return make(ops, path)

    monkeypatch.setattr(RealStorage, "open_new_segment", looking)
    monkeypatch.setattr(shard_write, "WRITERS_PER_DEVICE", 1)  # one file after the other
    with opened([tmp_path]) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, segment_count=4)
        save(run, state, OLD)
        sizes = [align_up(plan.file_size_bytes) for plan in state.layout.segments]
        assert promised == [sum(sizes[made:]) for made in range(len(sizes))]


def test_no_space_is_said_before_a_byte_is_written(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(run.store)
    free = run.store.ops.free_bytes(dirs[0])
    monkeypatch.setattr(RealStorage, "free_bytes", lambda *_: free)  # whoever else writes to this disk
    with run.store.space.reserve({run.store.devices[0].device_id: free - 16 * 1024 * 1024 - 64 * 1024}):
        run.store.space.reserve({run.store.devices[0].device_id: 1}).settle(run.store.devices[0].device_id)
        big = make_state(run.store, leaves=(whole_leaf("big", "int8", (1 << 20,)),))
        faulty.arm(0)
        with pytest.raises(NoSpaceError, match="are needed"):
            save(run, big, OLD)
        assert {call.name for call in faulty.calls} == {"free_bytes"}
    for count in range(1, 7):
        faulty.arm(
            count,
            number=errno.ENOSPC,
            times=1000,
            only=lambda call: (
                call.name in ("make_directory", "open_new_segment", "reserve", "write_small_new")
            ),
        )
        with pytest.raises(NoSpaceError, match="not saved"):
            save(run, state, OLD)
        faulty.arm(0)
        assert generations(dirs) == set()
    assert run.store.may_delete
    save(run, state, OLD)


def test_a_second_writer_is_fenced(run: RunStore, dirs: list[Path]) -> None:
    first, second = make_state(run.store, 1), make_state(run.store, 2)
    save(run, first, OLD)
    with pytest.raises(FencedError, match="another writer"):
        save(run, second, OLD)
    with run.writing(NEW, 0), pytest.raises(FencedError, match="another writer"):
        save(run, second, NEW)
    with pytest.raises(FencedError, match="has not begun"):
        save(run, second, CheckpointId(2, 1))
    assert load(run, run.manifest(OLD, 0)) == first.content
    assert len(generations(dirs)) == 1


def test_a_second_writer_on_the_device_alone_is_found_by_the_rename(run: RunStore, dirs: list[Path]) -> None:
    """A name that this process does not know of: the rename must not replace it, and our copy is taken back."""
    save(run, make_state(run.store), OLD)
    foreign = next(dirs[1].glob("runs/*/*/commits")) / "1.2.0.mf"
    foreign.write_bytes(b"somebody else's")
    with pytest.raises(FencedError, match=r"by another writer \(seen on .*/b\)"):
        save(run, make_state(run.store), NEW)
    assert foreign.read_bytes() == b"somebody else's"
    assert not (next(dirs[0].glob("runs/*/*/commits")) / "1.2.0.mf").exists()
    assert len(generations(dirs)) == 1
    assert run.offered() == [OLD]


def test_an_older_attempt_may_finish_what_it_sealed(run: RunStore) -> None:
    run.begin_attempt(2, fresh=False)
    save(run, make_state(run.store), OLD)
    assert run.offered() == [OLD]


def test_a_draft_that_does_not_hold_together_writes_nothing(run: RunStore, faulty: FaultyStorage) -> None:
    state = make_state(run.store)
    with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(run.store) as engines:
        faulty.arm(0)
        draft = state.draft(OLD)
        with pytest.raises(CorruptDataError, match="its pieces have"):
            persist_shard(run, replace(draft, pieces=(), segments=()), arena, engines=engines)
        with pytest.raises(StorageError, match="no device that this run may use"):
            persist_shard(run, draft, arena, engines=engines, device_ids={"f" * 32})
        assert faulty.calls == []
        with pytest.raises(CorruptDataError, match="not valid JSON"):
            persist_shard(run, replace(draft, values=b"{"), arena, engines=engines)
    assert run.shards() == []


def test_suspects_are_not_forgotten(run: RunStore, faulty: FaultyStorage) -> None:
    faulty.arm(5)
    save(run, make_state(run.store), OLD)
    faulty.arm(0)
    assert not run.store.may_delete
    reasons = [run.store.device_state(device.device_id) for device in run.store.devices]
    assert any(state is DeviceState.SUSPECT and "EIO" in reason for state, reason in reasons)
