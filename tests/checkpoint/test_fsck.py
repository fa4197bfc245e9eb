"""fsck: each kind of finding, what repair does with it, and that it changes nothing without being told."""

import os
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from everstep.checkpoint.device import survey_directory
from everstep.checkpoint.device_change import find_device, retire
from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import FsckReport, fsck, inspect_beside
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.tags import add_tag
from everstep.checkpoint.testing import HOLDER, FaultyStorage, opened, save_steps
from everstep.core.errors import DeviceLockedError, NotFoundError
from everstep.core.ids import CheckpointId, random_id

UID = os.geteuid()
NOTE, REPAIRABLE, LOST = Severity.NOTE, Severity.REPAIRABLE, Severity.LOST


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@pytest.fixture
def dirs(dirs: list[Path]) -> Generator[list[Path]]:
    """A store of two devices, a run with three complete checkpoints, the first one tagged."""
    with opened(dirs) as (store, _):
        run = save_steps(store, (1, 2, 3))
        add_tag(run, "best", at(1))
    yield dirs
    fsck_of(dirs, repair=True)
    assert REPAIRABLE not in {each.severity for each in fsck_of(dirs).findings}


def fsck_of(dirs: Sequence[Path], *, repair: bool = False, data: bool = False) -> FsckReport:
    return fsck(dirs, ops=RealStorage(), holder=HOLDER, uid=UID, repair=repair, data=data)


def found(report: FsckReport) -> list[tuple[Severity, str]]:
    return [(each.severity, each.path) for each in report.findings]


def run_path(device: Path) -> Path:
    (path,) = device.glob("runs/*/*")
    return path


def content(dirs: Sequence[Path]) -> dict[Path, bytes | None]:
    """Return everything that stands there; the lock says who looked last."""
    paths = [path for folder in dirs for path in folder.rglob("*") if path.name != "lock"]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def offered(dirs: Sequence[Path]) -> list[int]:
    with opened(dirs, read_only=True) as (store, _):
        return [checkpoint.step for checkpoint in store.run(UID, "demo").offered()]


def test_a_store_in_order_has_no_findings(dirs: list[Path]) -> None:
    before = content(dirs)
    for report in (fsck_of(dirs), fsck_of(dirs, data=True), fsck_of(dirs, repair=True)):
        assert (report.findings, report.worst) == ((), NOTE)
        assert (report.run_count, report.shard_count) == (1, 3)
    assert content(dirs) == before


def test_what_a_crash_leaves_is_found_and_repaired(dirs: list[Path]) -> None:
    a, b = (run_path(path) for path in dirs)
    unfinished = [dirs[0] / ".tmp.1", a / ".tmp.2", b / "commits" / ".tmp.3", a / "tags" / ".tmp.4"]
    for path in unfinished:
        path.write_bytes(b"half")
    orphan = b / "data" / random_id()
    orphan.mkdir()
    (orphan / "0.safetensors").write_bytes(b"rest")
    behind = a / "floor.json"
    behind.write_bytes(behind.read_bytes().replace(b'"step":3', b'"step":2'))
    gone = [a / "commits" / "1.2.0.mf", b / "attempts" / "1", next((b / "tags").iterdir()), b / "run.json"]
    for path in gone:
        path.unlink()
    before = content(dirs)
    report = fsck_of(dirs)
    expected = {*unfinished, orphan, behind, *gone[:3], b}
    assert {Path(path) for _, path in found(report)} == expected
    assert {severity for severity, _ in found(report)} == {REPAIRABLE}
    assert all(each.repair for each in report.findings)
    assert content(dirs) == before
    repaired = fsck_of(dirs, repair=True)
    assert repaired.is_repaired
    assert found(repaired) == found(report)
    assert fsck_of(dirs).findings == ()
    assert offered(dirs) == [3, 2, 1]
    with opened(dirs) as (store, _):
        assert store.run(UID, "demo").complete_floor() == at(3)


def test_a_spoilt_copy_is_put_aside_and_made_again(dirs: list[Path]) -> None:
    spoilt = run_path(dirs[0]) / "commits" / "1.2.0.mf"
    spoilt.write_bytes(b"{}")
    assert set(found(fsck_of(dirs))) == {(REPAIRABLE, str(spoilt))}
    fsck_of(dirs, repair=True)
    (aside,) = (dirs[0] / "quarantine").iterdir()
    assert aside.read_bytes() == b"{}"
    assert offered(dirs) == [3, 2, 1]


@pytest.mark.parametrize("kind", ["missing", "truncated", "wrong stamp"])
def test_a_damaged_checkpoint_goes_to_quarantine_with_its_tag(dirs: list[Path], kind: str) -> None:
    with opened(dirs, read_only=True) as (store, _):
        run = store.run(UID, "demo")
        segment, other = (run.segment_path(run.shard(at(step), 0).segments[0]) for step in (1, 2))
    if kind == "missing":
        segment.unlink()
    elif kind == "truncated":
        os.truncate(segment, 5000)
    else:
        shutil.copy(other, segment)
    report = fsck_of(dirs)
    (finding,) = report.findings
    assert (finding.severity, report.worst) == (LOST, LOST)
    assert "demo@1.1 is damaged" in finding.problem
    assert str(segment) in finding.problem
    assert "quarantine" in finding.repair
    assert fsck_of(dirs, repair=True).worst is LOST
    names = {path.suffix for folder in dirs for path in (folder / "quarantine").iterdir()}
    assert names == {".lost", ".copy"}
    assert offered(dirs) == [3, 2]
    again = fsck_of(dirs)
    assert again.worst is NOTE
    assert "unreferenced generations stay" in again.findings[0].problem  # its whole segments are still there


def test_only_data_finds_a_flipped_bit(dirs: list[Path]) -> None:
    with opened(dirs, read_only=True) as (store, _):
        run = store.run(UID, "demo")
        segment = run.segment_path(run.shard(at(2), 0).segments[0])
    spoilt = bytearray(segment.read_bytes())
    spoilt[-1] ^= 1
    segment.write_bytes(spoilt)
    assert fsck_of(dirs).findings == ()
    (finding,) = fsck_of(dirs, data=True).findings
    assert (finding.severity, finding.path) == (LOST, str(segment))
    assert "block 0" in finding.problem
    assert segment.exists()
    fsck_of(dirs, data=True, repair=True)
    assert segment.read_bytes() == spoilt
    assert offered(dirs) == [3, 1]
    assert fsck_of(dirs, data=True).worst is NOTE


def test_with_a_device_missing_nothing_goes(dirs: list[Path]) -> None:
    orphan = run_path(dirs[0]) / "data" / random_id()
    orphan.mkdir()
    report = fsck_of(dirs[:1], repair=True)
    assert (LOST, str(dirs[1])) in found(report)
    assert (NOTE, str(orphan)) in found(report)
    assert sum("is damaged" in each.problem for each in report.findings) == 3
    assert not any(each.repair for each in report.findings if each.severity is LOST)
    assert orphan.exists()
    assert offered(dirs) == [3, 2, 1]


def test_a_retired_device_is_no_member_whatever_it_says_itself(dirs: list[Path]) -> None:
    """A crash may have come before it was told of its end."""
    stale = (dirs[0] / "disk.id").read_bytes()
    with opened(dirs) as (store, _):
        retire(store, find_device(store, str(dirs[0])), force=True, now_unix_s=1.0)
    for disk_id in ((dirs[0] / "disk.id").read_bytes(), stale):
        (dirs[0] / "disk.id").write_bytes(disk_id)
        devices = [each for each in fsck_of(dirs).findings if "is damaged" not in each.problem]
        assert [(each.severity, each.path) for each in devices] == [(NOTE, str(dirs[0]))]


def test_devices_that_do_not_belong_together(dirs: list[Path], tmp_path: Path) -> None:
    copy, foreign, empty, absent = (tmp_path / name for name in ("copy", "foreign", "empty", "absent"))
    shutil.copytree(dirs[0], copy)
    for path in (foreign, empty):
        path.mkdir()
    with opened([foreign]):
        pass
    temporary = dirs[0] / ".tmp.1"
    temporary.write_bytes(b"half")
    report = fsck_of([*dirs, copy, foreign, empty, absent], repair=True)
    assert found(report) == [
        (LOST, str(copy)),
        (LOST, str(foreign)),
        (NOTE, str(empty)),
        (NOTE, str(absent)),
        (REPAIRABLE, str(temporary)),
    ]
    assert not report.is_repaired  # who named the wrong directory may have forgotten the right one
    assert temporary.exists()
    assert not list(empty.iterdir())


def test_a_directory_that_moved_is_no_loss(dirs: list[Path]) -> None:
    moved = dirs[1].with_name("moved")
    dirs[1].rename(moved)
    report = fsck_of([dirs[0], moved])
    assert found(report) == [(REPAIRABLE, str(path / "disk.id")) for path in (dirs[0], moved)]
    fsck_of([dirs[0], moved], repair=True)
    assert fsck_of([dirs[0], moved]).findings == ()
    moved.rename(dirs[1])


def test_a_disk_id_that_is_lost_or_spoilt_is_named(dirs: list[Path]) -> None:
    disk_id = dirs[1] / "disk.id"
    whole = disk_id.read_bytes()
    disk_id.write_bytes(b"[]")
    report = fsck_of(dirs, repair=True)
    assert found(report)[:2] == [(LOST, str(disk_id)), (LOST, str(dirs[1]))]
    assert not report.is_repaired
    assert found(fsck_of(dirs[1:])) == [(LOST, str(disk_id))]
    disk_id.unlink()
    assert found(fsck_of(dirs))[0] == (LOST, str(dirs[1]))
    assert found(fsck_of(dirs[1:])) == [(LOST, str(dirs[1]))]
    disk_id.write_bytes(whole)
    assert survey_directory(RealStorage(), dirs[1], uid=UID).disk_id is not None


def test_no_store_is_an_error_and_none_is_made(dirs: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for repair in (False, True):
        with pytest.raises(NotFoundError, match="no store"):
            fsck_of([empty], repair=repair)
    assert not list(empty.iterdir())
    assert fsck_of(dirs).findings == ()


def test_a_store_in_use_is_only_looked_at_beside_its_daemon(dirs: list[Path]) -> None:
    temporary = run_path(dirs[0]) / "commits" / ".tmp.1"
    with opened(dirs):
        temporary.write_bytes(b"being written")
        for repair in (False, True):
            with pytest.raises(DeviceLockedError, match="pid 4711"):
                fsck_of(dirs, repair=repair)
        assert inspect_beside(dirs, ops=RealStorage(), holder=HOLDER, uid=UID).findings == ()
        (run_path(dirs[0]) / "floor.json").unlink()
        (finding,) = inspect_beside(dirs, ops=RealStorage(), holder=HOLDER, uid=UID).findings
        assert finding.severity is REPAIRABLE
    assert temporary.exists()


def test_what_everstep_cannot_repair_is_said_each_time(dirs: list[Path]) -> None:
    for device in dirs:
        next((run_path(device) / "tags").iterdir()).write_bytes(b"no tag")
    for repair in (True, False):
        report = fsck_of(dirs, repair=repair)
        (finding,) = report.findings
        assert (finding.severity, finding.repair) == (LOST, "")
        assert "what a tag keeps is unknown" in finding.problem


def test_a_device_that_fails_where_something_is_damaged_already_is_told_of(dirs: list[Path]) -> None:
    """Because of it nothing is repaired: that must not look as if there were nothing left to do."""
    with opened(dirs, read_only=True) as (store, _):
        run = store.run(UID, "demo")
        first, second = (run.segment_path(each) for each in run.shard(at(1), 0).segments)
    first.unlink()
    faulty = FaultyStorage(RealStorage())
    faulty.arm(1, times=99, only=lambda call: call.path == second)
    report = fsck(dirs, ops=faulty.as_ops(), holder=HOLDER, uid=UID, repair=True)
    told = [each for each in report.findings if "[EIO]" in each.problem]
    device = next(path for path in dirs if second.is_relative_to(path))
    assert [(each.severity, each.path) for each in told] == [(NOTE, str(device))]
    assert "nothing is removed or put aside" in told[0].problem
    assert report.put_aside == ()


def test_a_device_that_answers_once_and_never_again_is_told_of(dirs: list[Path]) -> None:
    faulty = FaultyStorage(RealStorage())
    faulty.arm(5, times=1 << 30, only=lambda call: call.path.is_relative_to(dirs[1]))
    report = fsck(dirs, ops=faulty.as_ops(), holder=HOLDER, uid=UID, repair=True)
    told = [each for each in report.findings if "[EIO]" in each.problem]
    assert [(each.severity, each.path) for each in told] == [(NOTE, str(dirs[1]))]
    assert "nothing is removed or put aside" in told[0].problem
