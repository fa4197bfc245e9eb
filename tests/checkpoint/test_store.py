import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.checkpoint.device import DISK_ID_NAME
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.fsck import fsck
from everstep.checkpoint.readmission import check_readmission
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.testing import (
    HOLDER,
    CrashedError,
    FaultyStorage,
    Mode,
    begun,
    make_state,
    opened,
    save,
)
from everstep.core.errors import (
    ConfigError,
    CorruptDataError,
    DeviceLockedError,
    DeviceMissingError,
    FormatVersionError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from everstep.core.ids import CheckpointId

UID = os.geteuid()


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "abc"]
    for path in made:
        path.mkdir()
    return made


def reopen(directories: Sequence[Path], *, read_only: bool = False, ops: StorageOps | None = None) -> Store:
    return open_store(directories, ops=ops or RealStorage(), holder=HOLDER, uid=UID, read_only=read_only)


def disk_id(path: Path) -> dict[str, object]:
    return json.loads((path / DISK_ID_NAME).read_bytes())


def test_a_new_store_knows_all_its_members(dirs: list[Path]) -> None:
    with reopen(dirs) as store:
        assert store.is_new
        assert not store.degraded
        assert len({device.device_id for device in store.devices}) == 3
        assert "on one file system" in store.notes[0]
        members = {device.device_id: str(device.path) for device in store.devices}
        for device in store.devices:
            found = disk_id(device.path)
            assert (found["device_id"], found["members"], found["ready"]) == (device.device_id, members, True)
    with reopen(list(reversed(dirs))) as again:
        assert not again.is_new
        assert again.store_id == store.store_id
        assert [device.path for device in again.devices] == [device.path for device in store.devices]


def test_a_device_that_was_unmounted_is_missing_and_never_made_anew(dirs: list[Path]) -> None:
    reopen(dirs).close()
    shutil.move(dirs[1], dirs[1].with_name("unmounted"))
    dirs[1].mkdir()
    for directories in (dirs, [dirs[0], dirs[2]]):
        with reopen(directories) as store:
            assert store.degraded
            assert not store.may_delete
            assert [missing.path for missing in store.missing] == [str(dirs[1])]
            assert store.device_state(store.missing[0].device_id) == (
                DeviceState.MISSING,
                "it is not where it was",
            )
            assert len(store.devices) == 2
        assert list(dirs[1].iterdir()) == []
    dirs[1].rmdir()
    with reopen(dirs) as store:
        assert store.degraded
    shutil.move(dirs[1].with_name("unmounted"), dirs[1])
    with reopen(dirs) as store:
        assert not store.degraded
        assert len(store.devices) == 3


def test_a_member_that_does_not_answer_is_missing_and_named(dirs: list[Path]) -> None:
    storage = FaultyStorage(RealStorage())
    disk_id = dirs[1] / "disk.id"

    def fails(number: int) -> None:
        storage.arm(1, times=9, number=number, only=lambda call: call.path == disk_id)

    fails(errno.EIO)
    with pytest.raises(StorageError, match=r"disk\.id.*EIO"):  # nobody knows it yet
        reopen(dirs, ops=storage.as_ops())
    storage.arm(0)
    reopen(dirs).close()
    fails(errno.EIO)
    with reopen(dirs, ops=storage.as_ops()) as store:
        assert [(missing.path, "EIO" in missing.reason) for missing in store.missing] == [
            (str(dirs[1]), True)
        ]
        state, reason = store.device_state(store.missing[0].device_id)
        assert (state, "EIO" in reason, store.may_delete) == (DeviceState.MISSING, True, False)
        assert any(str(disk_id) in note for note in store.notes)
        assert len(store.devices) == 2
        with pytest.raises(StorageError, match="EIO"):
            check_readmission(dirs, dirs[1], ops=storage.as_ops(), uid=UID)
    with pytest.raises(StorageError, match="EIO"):
        reopen(dirs[1:2], ops=storage.as_ops())
    report = fsck(dirs, ops=storage.as_ops(), holder=HOLDER, uid=UID, repair=True)
    assert (report.findings[0].path, report.is_repaired) == (str(disk_id), False)
    with reopen(dirs) as store:
        assert not store.missing


def test_a_member_that_this_user_may_not_read_is_an_error(dirs: list[Path]) -> None:
    reopen(dirs).close()
    storage = FaultyStorage(RealStorage())
    storage.arm(1, number=errno.EACCES, only=lambda call: call.path == dirs[1] / "disk.id")
    with pytest.raises(StorageError, match="EACCES"):
        reopen(dirs, ops=storage.as_ops())


def test_each_subset_of_devices_opens_degraded(dirs: list[Path]) -> None:
    reopen(dirs).close()
    for absent in range(7):
        present = [path for place, path in enumerate(dirs) if not absent >> place & 1]
        with reopen(present) as store:
            assert len(store.missing) == 3 - len(present)
            assert store.degraded == (len(present) < 3)


def test_a_device_is_known_by_its_id_wherever_it_is_mounted(dirs: list[Path]) -> None:
    with reopen(dirs) as store:
        first = {device.path: device.device_id for device in store.devices}
    for source, target in [
        (dirs[0], "tmp"),
        (dirs[1], dirs[0].name),
        (dirs[0].with_name("tmp"), dirs[1].name),
    ]:
        source.rename(source.with_name(target))
    with reopen(dirs) as store:
        assert not store.degraded
        now = {device.path: device.device_id for device in store.devices}
        assert (now[dirs[0]], now[dirs[1]]) == (first[dirs[1]], first[dirs[0]])
        assert disk_id(dirs[2])["members"] == {device_id: str(path) for path, device_id in now.items()}


def test_a_further_directory_becomes_a_member_only_when_all_are_there(dirs: list[Path]) -> None:
    reopen(dirs[:2]).close()
    with reopen([dirs[0], dirs[1], dirs[2]]) as store:
        assert not store.is_new
        assert len(store.devices) == 3
    assert all(len(disk_id(path)["members"]) == 3 for path in dirs)  # pyright: ignore[reportArgumentType]
    further = dirs[0].with_name("d")
    further.mkdir()
    with pytest.raises(DeviceMissingError, match="unmounted"):
        reopen([dirs[0], dirs[1], further])
    assert list(further.iterdir()) == []


def test_devices_of_two_stores_are_refused(dirs: list[Path]) -> None:
    first, second = reopen(dirs[:1]), reopen(dirs[1:2])
    first.close()
    second.close()
    with pytest.raises(
        ConfigError, match=rf"(?s){first.store_id}.*{second.store_id}|{second.store_id}.*{first.store_id}"
    ):
        reopen(dirs)


def test_directories_that_cannot_be_a_store_are_named(dirs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        reopen([])
    with pytest.raises(ConfigError, match="same directory"):
        reopen([dirs[0], dirs[0] / ".." / "a"])
    (tmp_path / "link").symlink_to(dirs[0])
    with pytest.raises(ConfigError, match="same directory"):
        reopen([dirs[0], tmp_path / "link"])
    with pytest.raises(ConfigError, match=r"/none does not exist"):
        reopen([dirs[0], tmp_path / "none"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no directory"):
        reopen([tmp_path / "file"])
    assert list(dirs[0].iterdir()) == []


def test_a_copied_device_is_refused(dirs: list[Path]) -> None:
    reopen(dirs[:1]).close()
    shutil.copytree(dirs[0], dirs[1], dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="same device id"):
        reopen(dirs[:2])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", CorruptDataError),
        (b"garbage", CorruptDataError),
        (b'{"format":1}', CorruptDataError),
        (b'{"format":3,"anything":[]}', FormatVersionError),
        (b'{"format":1,"device_id":"x","store_id":"y","members":{},"ready":true}', CorruptDataError),
        (
            b'{"format":1,"device_id":"%s","store_id":"%s","members":{},"ready":true}'
            % (b"a" * 32, b"b" * 32),
            CorruptDataError,
        ),
    ],
)
def test_a_disk_id_that_cannot_be_read_is_no_empty_directory(
    dirs: list[Path], content: bytes, error: type[Exception]
) -> None:
    (dirs[0] / DISK_ID_NAME).write_bytes(content)
    with pytest.raises(error, match=r"a/disk\.id"):
        reopen(dirs)


def test_runs_without_a_disk_id_are_refused(dirs: list[Path]) -> None:
    with opened(dirs[:1]) as (store, _):
        store.run(UID, "demo", create=True)
    (dirs[0] / DISK_ID_NAME).unlink()
    with pytest.raises(CorruptDataError, match=r"disk\.id is lost"):
        reopen(dirs[:1])


def test_whoever_finds_a_device_held_is_told_by_whom(dirs: list[Path]) -> None:
    with reopen(dirs), pytest.raises(DeviceLockedError, match=r"private daemon \(pid 4711.*/run/test\.sock"):
        reopen(dirs[1:])
    (dirs[0] / "lock").write_bytes(b"half a JS")
    lock = RealStorage().try_lock(dirs[0] / "lock", b"half")
    assert lock is not None
    with pytest.raises(DeviceLockedError, match="held by another process"):
        reopen(dirs)
    lock.release()
    reopen(dirs).close()


def test_a_read_only_opening_needs_no_lock_and_writes_nothing(dirs: list[Path]) -> None:
    with pytest.raises(NotFoundError, match="no store"):
        reopen(dirs, read_only=True)
    with reopen(dirs[:2]):
        before = {path: path.stat().st_mtime_ns for path in dirs[0].rglob("*")}
        with reopen(dirs[:2], read_only=True) as store:
            assert not store.may_delete
            assert len(store.devices) == 2
        assert {path: path.stat().st_mtime_ns for path in dirs[0].rglob("*")} == before


@pytest.mark.root
def test_a_directory_that_cannot_be_written_is_named(dirs: list[Path]) -> None:
    code = (
        "import os, sys; from pathlib import Path; from everstep.checkpoint.store import open_store\n"
        "from everstep.checkpoint.real_storage import RealStorage; from everstep.checkpoint.testing import HOLDER\n"
        "os.setuid(65534)\n"
        "try: open_store([Path(sys.argv[1])], ops=RealStorage(), holder=HOLDER, uid=65534)\n"
        "except Exception as exc: print(type(exc).__name__, exc)"
    )
    folder = Path("/tmp") / f"everstep-{os.getpid()}-unwritable"
    folder.mkdir(mode=0o755)
    try:
        out = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
        ).stdout
    finally:
        shutil.rmtree(folder)
    assert out.startswith("StorageError")
    assert f"{folder}/lock" in out
    assert "belong to the user" in out


def test_space_is_promised_once_per_file_system(dirs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with reopen(dirs) as store:
        first, second, _ = (device.device_id for device in store.devices)
        free = store.ops.free_bytes(dirs[0])
        monkeypatch.setattr(RealStorage, "free_bytes", lambda *_: free)  # whoever else writes to this disk
        with store.space.reserve({first: free // 2}) as promised:
            with pytest.raises(NoSpaceError, match="promised to other writes"):
                store.space.reserve({second: free // 2})
            promised.settle(first)
            promised.settle(first)
            store.space.reserve({second: free // 2}).settle(second)
        with pytest.raises(NoSpaceError):
            store.space.reserve({first: free // 3, second: free})
        store.space.reserve({first: free // 2}).settle(first)


def test_runs_are_made_once_and_found_again(dirs: list[Path]) -> None:
    with opened(dirs) as (store, _):
        with pytest.raises(NotFoundError, match="no run 'demo'"):
            store.run(1000, "demo")
        run = store.run(1000, "demo", create=True)
        assert store.run(1000, "demo", create=True) is run
        assert store.run(1001, "demo", create=True) is not run
        with pytest.raises(ValueError, match="printable"):
            store.run(1000, "a\0b", create=True)
    with opened(dirs) as (store, report):
        assert [(run.owner_uid, run.name) for run in store.runs()] == [(1000, "demo"), (1001, "demo")]
        assert report.problems == []
    for path in (dirs[0] / "runs").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_making_a_store_may_fail_or_crash_at_every_call(tmp_path: Path, mode: Mode) -> None:
    """Never is a half-made store taken for one with a missing device, nor a ready one made anew."""
    count = 0
    while True:
        count += 1
        dirs = [tmp_path / f"{count}{name}" for name in "ab"]
        for path in dirs:
            path.mkdir()
        ops = FaultyStorage(RealStorage())
        ops.arm(count, mode)
        try:
            open_store(dirs, ops=ops.as_ops(), holder=HOLDER, uid=UID).close()
        except (StorageError, CrashedError):
            pass
        else:
            break
        with opened(dirs) as (store, _):
            assert len(store.devices) == 2
            assert not store.degraded
            run = store.run(UID, "demo", create=True)
            run.begin_attempt(1, fresh=False)
            save(run, make_state(store), CheckpointId(1, 1))
        with opened(dirs) as (store, _):
            assert not store.is_new
            assert len(store.run(UID, "demo").checkpoints()) == 1
    assert count > 20


@pytest.mark.parametrize("mode", list(Mode))
def test_adding_a_device_may_fail_or_crash_at_every_call(tmp_path: Path, mode: Mode) -> None:
    count = 0
    while True:
        count += 1
        dirs = [tmp_path / f"{count}{name}" for name in "abc"]
        for path in dirs:
            path.mkdir()
        reopen(dirs[:2]).close()
        ops = FaultyStorage(RealStorage())
        ops.arm(count, mode)
        try:
            open_store(dirs, ops=ops.as_ops(), holder=HOLDER, uid=UID).close()
        except (StorageError, CrashedError):
            pass
        else:
            break
        with reopen(dirs) as store:
            assert len(store.devices) == 3
            assert not store.degraded
    assert count > 20


def test_a_disk_id_that_somebody_removes_is_written_again(
    dirs: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it nobody could open what was acknowledged; and what replaced the directory gets none."""
    one, two = CheckpointId(1, 1), CheckpointId(1, 2)
    with opened(dirs) as (store, _):
        run = begun(store)
        whole = (dirs[0] / DISK_ID_NAME).read_bytes()
        save(run, make_state(store), one)
        (dirs[0] / DISK_ID_NAME).unlink()
        run.set_complete_floor(one)
        assert (dirs[0] / DISK_ID_NAME).read_bytes() == whole
        assert f"disk_id_written_again path={dirs[0] / DISK_ID_NAME}" in caplog.text
    with opened(dirs) as (store, _):
        run = store.run(os.geteuid(), "demo")
        assert run.offered() == [one]
        run.begin_attempt(2, fresh=False)
        for path in dirs[0].iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run.set_complete_floor(two)
        assert not (dirs[0] / DISK_ID_NAME).exists()
