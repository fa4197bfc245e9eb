import errno
import os
import random
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import RecoveryReport, recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.testing import (
    HOLDER,
    Call,
    CrashedError,
    FaultyStorage,
    Mode,
    State,
    encode_manifest,
    load,
    make_state,
    opened,
    save,
)
from everstep.core.errors import DataError, FormatVersionError, IncompleteError, NoSpaceError, StorageError
from everstep.core.ids import CheckpointId, random_id

UID = os.geteuid()
FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


@pytest.fixture
def states(dirs: list[Path]) -> dict[CheckpointId, State]:
    """Two checkpoints of a run in a store that was closed."""
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        made = {FIRST: make_state(store, 1), SECOND: make_state(store, 2)}
        for checkpoint, state in made.items():
            save(run, state, checkpoint)
        run.set_complete_floor(SECOND)
    return made


@contextmanager
def recovered(dirs: list[Path]) -> Generator[tuple[Store, RunStore, RecoveryReport]]:
    with opened(dirs) as (store, report):
        yield store, store.run(UID, "demo"), report


def run_dir(path: Path) -> Path:
    return next(path.glob("runs/*/*"))


def manifest(path: Path, checkpoint: CheckpointId = SECOND) -> Path:
    return run_dir(path) / "commits" / f"{checkpoint}.0.mf"


def segments(path: Path) -> list[Path]:
    return sorted(run_dir(path).glob("data/*/*.safetensors"))


def generation_of(dirs: list[Path], checkpoint: CheckpointId) -> str:
    with opened(dirs, read_only=True) as (store, _):
        return store.run(UID, "demo").shard(checkpoint, 0).generation


def test_an_untouched_store_is_recovered_as_it_was(
    dirs: list[Path], states: dict[CheckpointId, State]
) -> None:
    with recovered(dirs) as (_, run, report):
        assert (report.run_count, report.shard_count, report.problems) == (1, 2, [])
        assert (report.copy_count, report.orphan_count, report.temporary_count) == (0, 0, 0)
        assert [info.state for info in run.checkpoints()] == [CheckpointState.COMPLETE] * 2
        assert run.complete_floor() == SECOND
        for checkpoint, state in states.items():
            assert load(run, run.manifest(checkpoint, 0)) == state.content


@pytest.mark.usefixtures("states")
def test_unfinished_files_and_orphans_go(dirs: list[Path]) -> None:
    for path in dirs:
        for place in (".", "commits", "attempts"):
            (run_dir(path) / place / ".tmp.123").write_bytes(b"half")
        (path / ".tmp.1").write_bytes(b"half")
        orphan = run_dir(path) / "data" / random_id()
        orphan.mkdir()
        (orphan / "0.safetensors").write_bytes(b"never committed")
        (run_dir(path) / "data" / "not-ours").mkdir()
    with recovered(dirs) as (_, run, report):
        assert (report.temporary_count, report.orphan_count, len(run.offered())) == (8, 2, 2)
    for path in dirs:
        assert len(list((run_dir(path) / "data").iterdir())) == 3
        assert (run_dir(path) / "data" / "not-ours").exists()
        assert not list(path.rglob(".tmp.*"))


@pytest.mark.usefixtures("states")
def test_missing_copies_are_made_again(dirs: list[Path]) -> None:
    for name in ("commits/1.2.0.mf", "attempts/1", "floor.json", "run.json"):
        (run_dir(dirs[1]) / name).unlink()
    with recovered(dirs) as (_, run, report):
        assert report.copy_count == 2  # manifest and attempt; the others are written without counting
        assert run.offered() == [SECOND, FIRST]
    for name in ("commits/1.2.0.mf", "attempts/1", "floor.json", "run.json"):
        assert (run_dir(dirs[1]) / name).read_bytes() == (run_dir(dirs[0]) / name).read_bytes()


@pytest.mark.usefixtures("states")
def test_nothing_is_deleted_while_a_device_is_missing(dirs: list[Path]) -> None:
    shutil.move(dirs[1], dirs[1].with_name("away"))
    orphan = run_dir(dirs[0]) / "data" / random_id()
    orphan.mkdir()
    with recovered(dirs[:1]) as (store, run, report):
        assert store.degraded
        assert report.orphan_count == 0
        assert [info.state for info in run.checkpoints()] == [CheckpointState.DAMAGED] * 2
        assert "missing" in run.checkpoints()[0].problems[0]
        assert run.offered() == []
        with pytest.raises(IncompleteError, match="missing"):
            load(run, run.manifest(SECOND, 0))
        # Going on with what is left works meanwhile, and is kept when the device returns.
        run.begin_attempt(2, fresh=False)
        state = make_state(store, 3)
        save(run, state, CheckpointId(2, 1))
    assert orphan.exists()
    shutil.move(dirs[1].with_name("away"), dirs[1])
    with recovered(dirs) as (_, run, report):
        assert [info.state for info in run.checkpoints()] == [CheckpointState.COMPLETE] * 3
        assert run.highest_attempt() == 2
        assert report.orphan_count == 1
        assert load(run, run.manifest(CheckpointId(2, 1), 0)) == state.content
    assert manifest(dirs[1], CheckpointId(2, 1)).exists()


@pytest.mark.usefixtures("states")
def test_a_device_that_comes_late_gets_the_runs(dirs: list[Path]) -> None:
    third = dirs[0].with_name("c")
    third.mkdir()
    with recovered([*dirs, third]) as (store, run, report):
        assert report.copy_count == 3
        save(run, make_state(store, 5), CheckpointId(1, 3))
    assert len(list(run_dir(third).glob("commits/*.mf"))) == 3
    assert len(segments(third)) == 1


def test_each_bit_flip_of_a_manifest_is_found_and_the_copy_stands_in(
    dirs: list[Path], states: dict[CheckpointId, State]
) -> None:
    whole = manifest(dirs[0]).read_bytes()
    places = random.Random(5).sample(range(8 * len(whole)), 25)
    for count, place in enumerate(places, 1):
        if 64 <= place < 96:
            continue  # the version: a newer one is another case
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        manifest(dirs[0]).write_bytes(broken)
        with recovered(dirs) as (_, run, report):
            assert (report.quarantined_count, report.copy_count) == (1, 1), place
            assert run.offered() == [SECOND, FIRST]
            assert load(run, run.manifest(SECOND, 0)) == states[SECOND].content
        assert manifest(dirs[0]).read_bytes() == whole
        assert len(list((dirs[0] / "quarantine").iterdir())) <= count


@pytest.mark.usefixtures("states")
def test_a_manifest_lost_on_all_devices_goes_to_quarantine_and_its_data_stay(dirs: list[Path]) -> None:
    for path in dirs:
        manifest(path).write_bytes(manifest(path).read_bytes()[:-1])
    before = segments(dirs[0])
    for quarantined in (2, 0):
        with recovered(dirs) as (_, run, report):
            assert run.offered() == [FIRST]
            assert (report.quarantined_count, report.orphan_count) == (quarantined, 0)
            assert "unreferenced generations stay" in report.problems[-1]
        assert segments(dirs[0]) == before
    for path in dirs:
        for found in (path / "quarantine").iterdir():
            assert found.name.endswith(".lost")
            found.unlink()
    with recovered(dirs) as (_, run, report):
        assert (report.orphan_count, report.problems) == (2, [])
    assert len(segments(dirs[0])) == 1


@pytest.mark.usefixtures("states")
def test_two_contents_under_one_name_are_both_put_aside(dirs: list[Path]) -> None:
    with opened(dirs, read_only=True) as (store, _):
        found = store.run(UID, "demo").manifest(SECOND, 0)
    manifest(dirs[1]).write_bytes(encode_manifest(replace(found, created_unix_s=1.0)))
    with recovered(dirs) as (_, run, report):
        assert run.offered() == [FIRST]
        assert report.quarantined_count == 2
        assert "different contents" in " ".join(report.problems)
        assert report.orphan_count == 0


@pytest.mark.usefixtures("states")
def test_an_old_manifest_under_a_new_name_is_not_believed(dirs: list[Path]) -> None:
    for path in dirs:
        shutil.copy(manifest(path, FIRST), manifest(path, CheckpointId(1, 9)))
        (run_dir(path) / "commits" / "strange").write_bytes(b"")
    with recovered(dirs) as (_, run, report):
        assert run.offered() == [SECOND, FIRST]
        assert report.quarantined_count == 2
        assert any("'strange' in commits is no manifest's name" in problem for problem in report.problems)


@pytest.mark.usefixtures("states")
def test_what_is_no_plain_file_of_ours_is_no_manifest(dirs: list[Path]) -> None:
    manifest(dirs[0]).unlink()
    manifest(dirs[0]).symlink_to(manifest(dirs[1]))
    os.mkfifo(run_dir(dirs[0]) / "commits" / "1.3.0.mf")
    with recovered(dirs) as (_, run, report):
        assert run.offered() == [SECOND, FIRST]
        assert report.quarantined_count == 2
    assert manifest(dirs[0]).is_file()
    assert not manifest(dirs[0]).is_symlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def swap_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b'"generation":"') + 14
    content[place : place + 32] = random_id().encode()
    path.write_bytes(content)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def zero_header(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "is gone"),
        (cut, "bytes, expected"),
        (extend, "bytes, expected"),
        (swap_header, "not the file that was committed"),
        (replace_by_directory, "no regular file"),
        (zero_header, "is not what|not padded|names a header|does not begin"),
    ],
)
def test_a_wrong_segment_is_named_not_offered_and_not_deleted(
    dirs: list[Path], states: dict[CheckpointId, State], damage: Callable[[Path], None], reason: str
) -> None:
    generation = generation_of(dirs, SECOND)
    path = next(found for found in segments(dirs[0]) if found.parent.name == generation)
    damage(path)
    with recovered(dirs) as (_, run, report):
        info = run.info(SECOND)
        assert info.state is CheckpointState.DAMAGED
        assert run.offered() == [FIRST]
        assert report.damaged_count == 1
        with pytest.raises(DataError, match=reason):
            load(run, run.manifest(SECOND, 0))
        assert load(run, run.manifest(FIRST, 0)) == states[FIRST].content
    assert manifest(dirs[0]).exists()


@pytest.mark.usefixtures("states")
def test_segments_of_two_checkpoints_that_were_swapped_are_found(dirs: list[Path]) -> None:
    one, two = segments(dirs[0])
    assert one.stat().st_size == two.stat().st_size
    shutil.move(one, one.with_suffix(".x"))
    shutil.move(two, one)
    shutil.move(one.with_suffix(".x"), two)
    with recovered(dirs) as (_, run, report):
        assert run.offered() == []
        assert report.damaged_count == 2


@pytest.mark.usefixtures("states")
def test_a_newer_manifest_is_left_alone_and_so_is_all_it_may_refer_to(dirs: list[Path]) -> None:
    for path in dirs:
        content = bytearray(manifest(path).read_bytes())
        content[8] = 2
        manifest(path).write_bytes(content)
    with recovered(dirs) as (_, run, report):
        assert run.offered() == [FIRST]
        assert (report.quarantined_count, report.orphan_count) == (0, 0)
        assert "upgrade everstep" in report.problems[0]
    assert len(segments(dirs[0])) == 2


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("name", ["attempts/1", "floor.json", "run.json"])
def test_damaged_small_files_are_replaced_by_their_copies(dirs: list[Path], name: str) -> None:
    (run_dir(dirs[0]) / name).write_bytes(b'{"format":1')
    with recovered(dirs) as (_, run, report):
        assert report.quarantined_count == 1
        assert (run.highest_attempt(), run.complete_floor(), run.name) == (1, SECOND, "demo")
    assert (run_dir(dirs[0]) / name).read_bytes() == (run_dir(dirs[1]) / name).read_bytes()
    for path in dirs:
        (run_dir(path) / name).write_bytes(b'{"format":1')
    with recovered(dirs) as (_, run, report):
        # The number of an attempt is in its name, the run's name in each manifest; a lost floor is learnt again.
        assert (run.highest_attempt(), run.name) == (1, "demo")
        assert run.complete_floor() == (None if name == "floor.json" else SECOND)
        assert run.offered() == [SECOND, FIRST]


@pytest.mark.usefixtures("states")
def test_a_newer_small_file_refuses_the_store(dirs: list[Path]) -> None:
    (run_dir(dirs[0]) / "run.json").write_bytes(b'{"format":2,"future":true}')
    with pytest.raises(FormatVersionError, match="version 2"), recovered(dirs):
        pytest.fail("opened")


@pytest.mark.usefixtures("states")
def test_a_run_that_nobody_can_name_is_reported(dirs: list[Path]) -> None:
    for path in dirs:
        (run_dir(path) / "run.json").unlink()
        for found in run_dir(path).glob("commits/*"):
            found.unlink()
    with opened(dirs) as (store, report):
        assert store.runs() == ()
        assert "run.json is lost" in report.problems[0]


def test_a_run_that_was_just_being_made_is_made_again(dirs: list[Path]) -> None:
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo", create=True)
        (run.path_on(store.devices[0]) / "run.json").unlink()
        (run.path_on(store.devices[1]) / "run.json").unlink()
    with opened(dirs) as (store, report):
        assert report.problems == []
        store.run(UID, "demo", create=True).begin_attempt(1, fresh=False)
    with opened(dirs) as (store, _):
        assert store.run(UID, "demo").highest_attempt() == 1


def test_a_read_only_recovery_sees_the_same_and_changes_nothing(
    dirs: list[Path], states: dict[CheckpointId, State]
) -> None:
    manifest(dirs[0]).write_bytes(b"broken")
    (run_dir(dirs[0]) / "commits" / ".tmp.1").write_bytes(b"")
    orphan = run_dir(dirs[0]) / "data" / random_id()
    orphan.mkdir()
    before = {path: path.stat().st_mtime_ns for each in dirs for path in each.rglob("*")}
    with opened(dirs, read_only=True) as (store, report):
        run = store.run(UID, "demo")
        assert run.offered() == [SECOND, FIRST]
        assert load(run, run.manifest(SECOND, 0)) == states[SECOND].content
        assert report.quarantined_count == 1
    assert {path: path.stat().st_mtime_ns for each in dirs for path in each.rglob("*")} == before


def writes_on(path: Path) -> Callable[[Call], bool]:
    """Tell which calls take room on a device: they fail while it is full."""
    return lambda call: call.name == "write_small_new" and call.path.is_relative_to(path)


def fill(ops: FaultyStorage, path: Path) -> None:
    """Let the device be full from here on."""
    ops.arm(1, times=10**6, number=errno.ENOSPC, only=writes_on(path))


@pytest.mark.usefixtures("states")
def test_opening_writes_nothing_where_everything_stands(dirs: list[Path]) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(dirs, ops=ops.as_ops()):
        assert {call.name for call in ops.calls}.isdisjoint(
            {"write_small_new", "replace", "rename_noreplace"}
        )


def test_a_full_device_is_read_and_what_only_it_knows_is_kept(
    dirs: list[Path], states: dict[CheckpointId, State]
) -> None:
    manifest(dirs[0], SECOND).unlink()  # the other copy of it had not become durable
    manifest(dirs[1], FIRST).unlink()
    (run_dir(dirs[1]) / "attempts" / "1").unlink()
    (run_dir(dirs[1]) / "floor.json").unlink()
    before = [segments(path) for path in dirs]
    ops = FaultyStorage(RealStorage())
    fill(ops, dirs[1])
    with opened(dirs, ops=ops.as_ops()) as (store, report):
        run = store.run(UID, "demo")
        assert run.offered() == [SECOND, FIRST]
        assert store.may_delete
        assert report.orphan_count == 0
        assert len(report.problems) == 3  # the copies that found no room
        assert all("ENOSPC" in problem for problem in report.problems)
        for checkpoint, state in states.items():
            assert load(run, run.manifest(checkpoint, 0)) == state.content
    assert [segments(path) for path in dirs] == before
    with recovered(dirs) as (_, run, report):
        assert report.problems == []
        assert run.offered() == [SECOND, FIRST]
    assert manifest(dirs[1], FIRST).exists()


@pytest.mark.usefixtures("states")
def test_a_full_device_without_the_run_gets_it_when_there_is_room(dirs: list[Path]) -> None:
    third = dirs[0].with_name("c")
    third.mkdir()
    with opened([*dirs, third]):
        pass
    shutil.rmtree(run_dir(third))
    ops = FaultyStorage(RealStorage())
    fill(ops, third)
    with opened([*dirs, third], ops=ops.as_ops()) as (store, report):
        run = store.run(UID, "demo")
        assert run.offered() == [SECOND, FIRST]
        assert any("ENOSPC" in problem for problem in report.problems)
        with pytest.raises(NoSpaceError):
            run.begin_attempt(2, fresh=False)
        ops.arm(0)
        run.begin_attempt(3, fresh=False)
        save(run, make_state(store, 5), CheckpointId(3, 1))
    assert len(segments(third)) == 1


@pytest.mark.usefixtures("states")
def test_a_moved_store_with_a_full_device_is_opened(dirs: list[Path]) -> None:
    moved = [path.rename(path.with_name(f"moved-{path.name}")) for path in dirs]
    ops = FaultyStorage(RealStorage())
    fill(ops, moved[1])
    for _ in range(2):
        with opened(moved, ops=ops.as_ops()) as (store, _):
            assert store.run(UID, "demo").offered() == [SECOND, FIRST]
    third = dirs[0].with_name("c")
    third.mkdir()
    with pytest.raises(NoSpaceError, match="moved-b"), opened([*moved, third], ops=ops.as_ops()):
        pytest.fail("a member that the full device does not know was taken in")


READS = ("list_directory", "read_small", "read_head")
READS_AND_MENDS = (*READS, "stat", "sync_directory")


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(("number", "names"), [(errno.EIO, READS_AND_MENDS), (errno.ENOSPC, READS)])
def test_whatever_cannot_be_read_or_trusted_forbids_deleting_everywhere(
    dirs: list[Path], number: int, names: tuple[str, ...]
) -> None:
    """Each call on one device fails once: orphans stay on both, also those of a run that was read whole before."""
    with opened(dirs) as (store, _):
        for name in ("another", "demo"):
            run = store.run(UID, name, create=True)
            for device in store.devices:
                run.generation_path(device, "a" * 32).mkdir()
    ops = FaultyStorage(RealStorage())

    def before_deleting(call: Call) -> bool:
        reads = call.name in names and call.path.is_relative_to(dirs[1]) and call.path.name != "a" * 32
        return reads and all(made.name != "remove_directory" for made in ops.calls)

    for count in range(1, 100):
        with open_store(dirs, ops=ops.as_ops(), holder=HOLDER, uid=UID) as store:
            ops.arm(count, number=number, only=before_deleting)
            report = recover(store)
            ops.arm(0)
            left = sum(len(list(path.glob(f"runs/*/*/data/{'a' * 32}"))) for path in dirs)
            if store.may_delete:
                assert (left, report.orphan_count, report.problems) == (0, 4, [])
                assert count > 15
                return
            assert (left, report.orphan_count) == (4, 0), count
            assert report.problems
    pytest.fail("the call count was never reached")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("times", [1, 1000])
def test_recovery_may_fail_or_crash_at_every_call(
    dirs: list[Path], states: dict[CheckpointId, State], mode: Mode, times: int
) -> None:
    """Whatever fails in the middle of mending: the next recovery finds everything."""
    template = dirs[0].with_name("template")
    manifest(dirs[0], FIRST).unlink()
    manifest(dirs[1], SECOND).write_bytes(b"broken")
    (run_dir(dirs[0]) / "attempts" / "1").unlink()
    (run_dir(dirs[1]) / "floor.json").unlink()
    orphan = run_dir(dirs[0]) / "data" / random_id()
    orphan.mkdir()
    (orphan / "0.safetensors").write_bytes(b"x")
    (run_dir(dirs[0]) / "commits" / ".tmp.9").write_bytes(b"x")
    for place, path in enumerate(dirs):
        shutil.copytree(path, template / str(place))
    step = 1 if times == 1 else 7
    for count in range(1, 200, step):
        for place, path in enumerate(dirs):
            shutil.rmtree(path)
            shutil.copytree(template / str(place), path)
        ops = FaultyStorage(RealStorage())
        ops.arm(count, mode, times=times, number=errno.EIO)
        try:
            with opened(dirs, ops=ops.as_ops()) as (store, _):
                for run in store.runs():
                    for checkpoint in run.offered():
                        assert checkpoint in states
        except (StorageError, CrashedError):
            pass
        reached = len(ops.calls) >= count
        with recovered(dirs) as (_, run, report):
            assert run.offered() == [SECOND, FIRST]
            assert (run.highest_attempt(), run.complete_floor()) == (1, SECOND)
            for checkpoint, state in states.items():
                assert load(run, run.manifest(checkpoint, 0)) == state.content
            assert not orphan.exists()
            assert report.damaged_count == 0
        if not reached:
            assert count > 60
            return
    pytest.fail("the call count was never reached")


def test_where_only_a_new_device_is_left_while_it_is_taken_in_nothing_goes_on(
    dirs: list[Path], states: dict[CheckpointId, State], tmp_path: Path
) -> None:
    """It knows nothing of the newest checkpoint: another one would get its name, and both would be put aside."""
    new = tmp_path / "new"
    new.mkdir()
    faulty = FaultyStorage(RealStorage())
    newest = {manifest(path, SECOND) for path in dirs}
    faulty.arm(1, times=len(dirs), only=lambda call: call.path in newest)
    with (
        pytest.raises(StorageError, match="failed while a new device was taken into the store"),
        opened([*dirs, new], ops=faulty.as_ops()),
    ):
        pass
    with recovered([*dirs, new]) as (store, run, report):
        assert len(store.devices) == len(dirs) + 1
        assert (run.offered(), report.problems) == ([SECOND, FIRST], [])
        for checkpoint, state in states.items():
            assert load(run, run.manifest(checkpoint, 0)) == state.content


def test_a_new_device_is_taken_in_beside_one_that_fails_and_one_that_does_not(
    dirs: list[Path], states: dict[CheckpointId, State], tmp_path: Path
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    faulty = FaultyStorage(RealStorage())
    faulty.arm(1, only=lambda call: call.path == manifest(dirs[0], SECOND))
    with opened([*dirs, new], ops=faulty.as_ops()) as (store, _):
        assert store.run(UID, "demo").shard(SECOND, 0).checkpoint == SECOND
    assert manifest(new, SECOND).read_bytes() == manifest(dirs[1], SECOND).read_bytes()
    assert states
