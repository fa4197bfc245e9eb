"""A committed shard written again without the devices that were lost, and several manifests under one name."""

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.checkpoint.commit import lost_segments
from everstep.checkpoint.device import Device
from everstep.checkpoint.manifest_format import decode_manifest
from everstep.checkpoint.manifest_types import ManifestHead
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.succession_plan import REPLACES_NOTE, SNAPSHOT_NOTE, newest_first, replaced_by
from everstep.checkpoint.testing import (
    FaultyStorage,
    encode_manifest,
    load,
    make_state,
    opened,
    save,
    save_again,
)
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import FencedError, NoSpaceError, NotFoundError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
SAVED = CheckpointId(1, 1)


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "abc"]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def run(dirs: list[Path], faulty: FaultyStorage) -> Generator[RunStore]:
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        made = store.run(UID, "demo", create=True)
        made.begin_attempt(1, fresh=False)
        yield made


def lose(run: RunStore, place: int) -> Device:
    device = run.store.devices[place]
    run.store.mark_suspect(device.device_id, StorageError("it hurts"))
    return device


def manifest_path(device: Device) -> Path:
    (path,) = device.path.glob("runs/*/*/commits/1.1.0.mf")
    return path


def heads(run: RunStore, count: int) -> list[ManifestHead]:
    """Manifests of one shard, each of which replaces those before."""
    made: list[ManifestHead] = [save(run, make_state(run.store), SAVED).manifest]
    while len(made) < count:
        last = made[-1]
        notes = {REPLACES_NOTE: replaced_by(last)}
        made.append(replace(last, generation=f"{len(made):032x}", notes=notes))
    return made


def test_manifests_are_ordered_by_what_they_replace(run: RunStore) -> None:
    first, second, third = heads(run, 3)
    assert newest_first([]) == []
    assert newest_first([first]) == [first]
    assert newest_first([first, third, second]) == [third, second, first]
    assert newest_first([first, third]) == [third, first]


def test_two_writers_contradict_each_other(run: RunStore) -> None:
    first, second, third = heads(run, 3)
    other = replace(first, generation="f" * 32)
    assert newest_first([first, other]) == ()
    assert newest_first([second, other]) == ()
    assert newest_first([third, replace(second, generation="e" * 32)]) == ()


def test_manifests_of_one_snapshot_never_contradict_each_other(run: RunStore) -> None:
    first, second, third = (
        replace(each, notes=each.notes | {SNAPSHOT_NOTE: "5" * 32}) for each in heads(run, 3)
    )
    other = replace(second, generation="e" * 32, created_unix_s=second.created_unix_s + 1)
    assert newest_first([first, second, other]) == [other, second, first]
    assert newest_first([other, third, second, first]) == [third, other, second, first]
    assert newest_first([second, replace(other, notes=other.notes | {SNAPSHOT_NOTE: "6" * 32})]) == ()


def test_a_write_whose_outcome_nobody_learnt_contradicts_no_later_one(
    run: RunStore, dirs: list[Path], faulty: FaultyStorage
) -> None:
    """Two devices fail when the new manifest is renamed there; one that was late meanwhile gets another."""
    state = make_state(run.store)
    save(run, state, SAVED, notes={SNAPSHOT_NOTE: "5" * 32})
    first, second, late = run.store.devices
    lose(run, 0)
    run.store.mark_late(late.device_id, StorageError("it does not return"))
    faulty.arm(1, only=lambda call: call.name == "sync_directory" and call.path.name == "commits")
    with pytest.raises(StorageError, match="is unknown"):
        save_again(run, state, SAVED)
    unknown = manifest_path(second).read_bytes()
    run.store.late_is_over(late.device_id)
    content = save_again(run, state, SAVED).content
    assert [manifest_path(device).read_bytes() == unknown for device in (first, second, late)] == [
        False,
        True,
        False,
    ]
    run.store.close()
    shutil.rmtree(first.path / "runs")
    with opened(dirs) as (store, report):
        again = store.run(UID, "demo")
        assert report.quarantined_count == 0
        assert load(again, again.manifest(SAVED, 0)) == state.content
        assert {manifest_path(device).read_bytes() for device in store.devices} == {content}


def test_only_what_was_lost_is_written_again(run: RunStore, dirs: list[Path]) -> None:
    state = make_state(run.store)
    before = save(run, state, SAVED).manifest
    assert lost_segments(run, before.segments) == ()
    lost = lose(run, 1)
    numbers = lost_segments(run, before.segments)
    assert [before.segments[number].device_id for number in numbers] == [lost.device_id]
    after = save_again(run, state, SAVED)
    assert (after.copy_count, after.device_count) == (2, 3)
    assert after.manifest.notes[REPLACES_NOTE] == before.generation
    for old, new in zip(before.segments, after.manifest.segments, strict=True):
        assert (old == new) == (old.segment not in numbers)
        assert new.device_id != lost.device_id
    shutil.rmtree(lost.path / "runs")
    assert load(run, run.manifest(SAVED, 0)) == state.content
    assert verify_checkpoint(run, SAVED).is_intact
    run.store.close()
    with opened([path for path in dirs if path != lost.path]) as (store, _):
        again = store.run(UID, "demo")
        assert again.offered() == [SAVED]
        assert load(again, again.manifest(SAVED, 0)) == state.content


def test_a_device_that_comes_back_gets_the_new_manifest_and_loses_what_is_no_longer_used(
    run: RunStore, dirs: list[Path]
) -> None:
    state = make_state(run.store)
    save(run, state, SAVED)
    lost = lose(run, 0)
    old = manifest_path(lost).read_bytes()
    content = save_again(run, state, SAVED).content
    run.store.close()
    assert manifest_path(lost).read_bytes() == old
    with opened(dirs) as (store, report):
        again = store.run(UID, "demo")
        assert (report.copy_count, report.orphan_count, report.quarantined_count, report.problems) == (
            1,
            1,
            0,
            [],
        )
        assert {manifest_path(device).read_bytes() for device in store.devices} == {content}
        assert load(again, again.manifest(SAVED, 0)) == state.content
        assert list(lost.path.rglob("*.safetensors")) == []


def test_where_the_new_segments_are_damaged_the_old_manifest_brings_the_shard_back(
    run: RunStore, dirs: list[Path]
) -> None:
    state = make_state(run.store)
    before = decode_manifest(save(run, state, SAVED).content)
    lost = lose(run, 0)
    after = save_again(run, state, SAVED).manifest
    (written,) = [each for each in after.segments if each.generation == after.generation]
    os.truncate(run.segment_path(written), 100)
    run.store.close()
    for _ in range(2):
        with opened(dirs) as (store, _):
            again = store.run(UID, "demo")
            assert again.manifest(SAVED, 0) == before
            assert load(again, before) == state.content
    assert decode_manifest(manifest_path(lost).read_bytes()) == before


def test_two_contents_of_two_writers_are_put_aside(run: RunStore, dirs: list[Path]) -> None:
    before = decode_manifest(save(run, make_state(run.store), SAVED).content)
    stranger = replace(before, created_unix_s=before.created_unix_s + 1)
    manifest_path(run.store.devices[0]).write_bytes(encode_manifest(stranger))
    run.store.close()
    with opened(dirs) as (store, report):
        assert report.quarantined_count == 3
        assert store.run(UID, "demo").offered() == []


def test_a_name_that_another_writer_took_is_not_written_over(run: RunStore) -> None:
    state = make_state(run.store)
    save(run, state, SAVED)
    lose(run, 0)
    foreign = manifest_path(run.store.devices[1])
    foreign.write_bytes(b"somebody else's")
    with pytest.raises(FencedError, match="another writer"):
        save_again(run, state, SAVED)
    assert foreign.read_bytes() == b"somebody else's"
    with pytest.raises(NotFoundError):
        save_again(run, state, CheckpointId(1, 2))


def test_without_room_the_committed_one_stays(run: RunStore, faulty: FaultyStorage) -> None:
    state = make_state(run.store)
    before = decode_manifest(save(run, state, SAVED).content)
    lose(run, 0)
    faulty.arm(1, number=28, times=1000, only=lambda call: call.name == "reserve")
    with pytest.raises(NoSpaceError, match="was not saved"):
        save_again(run, state, SAVED)
    faulty.arm(0)
    assert run.manifest(SAVED, 0) == before
    assert load(run, before) == state.content


def test_a_trainers_note_cannot_say_what_is_replaced(run: RunStore) -> None:
    saved = save(run, make_state(run.store), SAVED, notes={REPLACES_NOTE: "f" * 32, "epoch": "1"})
    assert saved.manifest.notes == {"epoch": "1"}
