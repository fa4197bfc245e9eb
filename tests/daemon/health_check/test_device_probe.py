"""The probe: what it writes leaves nothing, what hangs holds nobody, and callers share one write."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.checkpoint.device import DISK_ID_NAME
from everstep.daemon.health_check.device_probe import DeviceProbe, write_page


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / DISK_ID_NAME).touch()
    yield tmp_path
    for thread in threading.enumerate():  # one may need a while on a busy machine
        if thread.name == "everstep-probe":
            thread.join(60)


def test_a_well_device_takes_a_page_and_keeps_nothing(device: Path) -> None:
    write_page(str(device))
    assert [each.name for each in device.iterdir()] == [DISK_ID_NAME]


def test_an_empty_mount_point_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_page(str(tmp_path))


def test_what_hangs_is_said_in_time_and_gets_no_second_write(device: Path) -> None:
    go, begun, writes = threading.Event(), threading.Event(), 0

    def hang(directory: str) -> None:
        nonlocal writes
        writes += 1
        begun.set()
        assert go.wait(60)

    async def work() -> None:
        probe = DeviceProbe(hang, deadline_s=0.05)
        for _ in range(3):
            (error,) = (await probe.failures([str(device)])).values()
            assert isinstance(error, TimeoutError)
            assert "has not ended" in str(error)
        assert begun.wait(20)
        assert writes == 1
        go.set()
        while await probe.failures([str(device)]):  # the deadline, at most, for each
            pass

    asyncio.run(asyncio.wait_for(work(), 60))


def test_callers_at_the_same_time_share_a_write_and_one_that_leaves_takes_nothing(device: Path) -> None:
    go, writes = threading.Event(), 0

    def fail(directory: str) -> None:
        nonlocal writes
        writes += 1
        assert go.wait(60)
        raise OSError(errno.EIO, "as the drive said")

    async def work() -> None:
        probe = DeviceProbe(fail)
        leaving, *staying = (asyncio.create_task(probe.failures([str(device)])) for _ in range(9))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go.set()
        for found in await asyncio.gather(*staying):
            assert found[str(device)].errno == errno.EIO

    asyncio.run(asyncio.wait_for(work(), 60))
    assert writes == 1


def test_no_device_is_no_failure() -> None:
    assert asyncio.run(DeviceProbe().failures([])) == {}
