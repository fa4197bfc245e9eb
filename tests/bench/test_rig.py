"""The rig of slow drives: refused where it is not as fast as it says, held to its speed both ways, gone afterwards."""

import os
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import rig as rig_module
from places import memory_folder
from rig import MB, Drive, RigError, check, groups, held_to, rig, throttle

SIZE_BYTES = 48 * 2**20
SPEEDS = (50 * MB, 80 * MB)


@pytest.fixture
def own_rig(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A place of its own, so that somebody's rig that is up stays."""
    with memory_folder() as folder:
        monkeypatch.setattr(rig_module, "IMAGES", folder / "rig")
        monkeypatch.setattr(rig_module, "LOCK", folder / "rig.lock")
        yield


@pytest.fixture
def can_throttle() -> None:
    try:
        groups()
    except RigError as error:
        pytest.skip(str(error))


@pytest.fixture
def own_group() -> Generator[Path]:
    """This process in a blkio group below the root's, as in a container."""
    group = rig_module.BLKIO / f"everstep-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        (rig_module.BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


needs_rig = pytest.mark.usefixtures("own_rig", "can_throttle")


def limits(numbers: Sequence[str]) -> dict[tuple[str, str, str], int]:
    """Return the limits of these devices, by group, direction and device, as the kernel has them."""
    found: dict[tuple[str, str, str], int] = {}
    for group in groups():
        for way in ("read", "write"):
            for line in (group / f"blkio.throttle.{way}_bps_device").read_text().splitlines():
                device, _, speed = line.partition(" ")
                if device in numbers:
                    found[str(group), way, device] = int(speed)
    return found


def left() -> list[str]:
    """Return loop devices and mounts of the rig that are still there."""
    loops = subprocess.run(["losetup", "--list", "--noheadings"], capture_output=True, text=True, check=True)
    mounts = Path("/proc/mounts").read_text().splitlines()
    return [
        line
        for line in (*loops.stdout.splitlines(), *mounts)
        if str(rig_module.IMAGES) in line or tempfile.gettempdir() in line
    ]


def fio_at(monkeypatch: pytest.MonkeyPatch, *shares: float, nominal: int) -> list[dict[str, Any]]:
    """Let fio find these shares of the drives' speed, one call after the other; return the calls' arguments."""
    calls, ahead = list[dict[str, Any]](), [1.0, *shares]  # the first only empties what mkfs has left

    def fio(mounts: Sequence[Path], **options: Any) -> float:
        calls.append({"direct": True, "way": "write", **options})
        return ahead.pop(0) * nominal * len(mounts)

    monkeypatch.setattr(rig_module, "fio", fio)
    return calls


def drives_at(*speeds: int) -> list[Drive]:
    return [
        Drive(image=Path(f"/i{n}"), loop=f"/dev/loop{n}", mount=Path(f"/m{n}"), bytes_per_s=speed)
        for n, speed in enumerate(speeds)
    ]


@pytest.mark.parametrize("share", [0.5, 0.969, 1.031, 20.0])
def test_a_rig_that_fio_finds_slower_or_faster_is_refused(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fio_at(monkeypatch, share, share, share, nominal=100 * MB)
    with pytest.raises(RigError, match=f"fio writes direct at {share:.3f}, .*the rig does not hold"):
        check(drives_at(100 * MB, 100 * MB))
    assert len(calls) == 1 + rig_module.CHECK_TRIES


def test_one_whose_buffered_writes_nobody_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel's own threads are not throttled, pages are written back at the speed of memory."""
    fio_at(monkeypatch, 1.0, 20.0, 20.0, 20.0, nominal=100 * MB)
    with pytest.raises(RigError, match=r"fio writes buffered at 20.000, 20.000, 20.000 of"):
        check(drives_at(100 * MB))


def test_what_holds_is_said_for_each_way_and_one_of_three_tries_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fio_at(monkeypatch, 0.8, 1.1, 1.029, 0.971, 1.01, nominal=100 * MB)
    found = check(drives_at(100 * MB))
    assert found == pytest.approx({"writes direct": 1.029, "writes buffered": 0.971, "reads": 1.01})
    assert [call["direct"] for call in calls] == [False, True, True, True, False, True]
    assert [call["way"] for call in calls] == ["write"] * 5 + ["read"]
    assert all(call["size_bytes"] >= 10 * 100 * MB for call in calls[1:])


def test_one_that_nobody_holds_when_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fio_at(monkeypatch, 1.0, 1.0, 1.2, 1.2, 1.2, nominal=100 * MB)
    with pytest.raises(RigError, match=r"fio reads at 1.200, 1.200, 1.200 of"):
        check(drives_at(100 * MB))


def test_drives_that_are_held_to_another_speed_are_checked_at_that_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = list[tuple[str, int]]()
    monkeypatch.setattr(rig_module, "throttle", lambda drive, speed: held.append((drive.loop, speed)))
    calls = fio_at(monkeypatch, 1.0, 1.0, 1.0, nominal=50 * MB)
    changed = held_to(drives_at(100 * MB, 100 * MB), 50 * MB)
    assert held == [("/dev/loop0", 50 * MB), ("/dev/loop1", 50 * MB)]
    assert [drive.bytes_per_s for drive in changed] == [50 * MB] * 2
    assert [call["size_bytes"] for call in calls[1:]] == [50 * MB * rig_module.CHECK_S] * 3
    fio_at(monkeypatch, 2.0, 2.0, 2.0, nominal=50 * MB)
    with pytest.raises(RigError, match=r"fio writes direct at 2\.000"):
        held_to(drives_at(100 * MB), 50 * MB)


@pytest.mark.root
@pytest.mark.usefixtures("own_rig")
def test_a_rig_that_does_not_fit_in_memory_is_refused() -> None:
    with pytest.raises(RigError, match=r"do not fit|no blkio controller"), rig([MB] * 32, size_bytes=2**40):
        pytest.fail("it is up")
    assert left() == []


@pytest.mark.root
@needs_rig
def test_each_is_held_to_its_speed_for_reading_and_writing_and_is_gone_afterwards(own_group: Path) -> None:
    """In the group of this process, and in the root group, whose are the kernel threads that write pages back."""
    assert groups() == [rig_module.BLKIO, own_group]
    with rig(SPEEDS, size_bytes=SIZE_BYTES, file_system="ext4", checked=False) as drives:
        numbers = [drive.numbers for drive in drives]
        wanted = {
            (str(group), way, drive.numbers): speed
            for group in groups()
            for way in ("read", "write")
            for drive, speed in zip(drives, SPEEDS, strict=True)
        }
        assert limits(numbers) == wanted
        throttle(drives[0], 7 * MB)
        assert {limits(numbers)[key] for key in wanted if key[2] == numbers[0]} == {7 * MB}
        assert all(drive.mount.is_mount() for drive in drives)
        images = [drive.image for drive in drives]
        assert [image.stat().st_blocks * 512 >= SIZE_BYTES for image in images] == [True, True]  # no holes
    assert limits(numbers) == {}
    assert left() == []
    assert not rig_module.IMAGES.exists()


@pytest.mark.root
@needs_rig
def test_one_that_is_refused_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives of different speeds are checked one by one: the second is the one that does not hold."""
    mounts: list[int] = []

    def fio(checked: Sequence[Path], **_: Any) -> float:
        mounts.append(len(checked))
        return SPEEDS[0]  # what the first should have

    monkeypatch.setattr(rig_module, "fio", fio)
    with (
        pytest.raises(RigError, match=r"at 0.625, 0.625, 0.625 of the drives' speed"),
        rig(SPEEDS, size_bytes=SIZE_BYTES, file_system="ext4"),
    ):
        pytest.fail("it is up")
    assert mounts == [1] * (4 + 1 + rig_module.CHECK_TRIES)
    assert left() == []
    assert not rig_module.IMAGES.exists()
