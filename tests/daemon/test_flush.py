"""Whether a drive's flush can be believed."""

import asyncio
import logging
from pathlib import Path

import pytest

from everstep.daemon.config import DaemonConfig
from everstep.daemon.devices import stores
from everstep.daemon.devices.drive_flush import DriveFlush, look_at_flush
from everstep.daemon.devices.flush_plan import FSYNC_S_MIN, UNKNOWN, VOLATILE, is_doubtful
from everstep.daemon.devices.stores import StoreBook


@pytest.mark.parametrize(
    ("write_cache", "fsync_s", "expected"),
    [
        (VOLATILE, FSYNC_S_MIN / 2, True),
        (VOLATILE, FSYNC_S_MIN, False),
        (VOLATILE, None, False),
        ("write through", FSYNC_S_MIN / 2, False),
        (UNKNOWN, FSYNC_S_MIN / 2, False),
    ],
)
def test_a_volatile_cache_that_is_empty_at_once_is_doubted(
    write_cache: str, fsync_s: float | None, expected: bool
) -> None:
    assert is_doubtful(write_cache, fsync_s) is expected


def test_memory_has_no_cache_that_the_kernel_knows_of() -> None:
    assert look_at_flush(Path("/dev/shm")).write_cache == UNKNOWN


def test_a_directory_without_room_for_a_file_is_not_timed() -> None:
    assert look_at_flush(Path("/proc")).fsync_s is None


def test_the_log_says_which_drive_is_doubted(
    devices: list[Path], socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {devices[0]: DriveFlush(VOLATILE, 7e-6), devices[1]: DriveFlush(VOLATILE, 1e-3)}
    monkeypatch.setattr(stores, "look_at_flush", found.__getitem__)

    async def open_and_close() -> None:
        book = StoreBook(DaemonConfig(), socket=socket_path, private=True)
        await book.open([str(each) for each in devices])
        await book.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(open_and_close())
    said = [record.getMessage() for record in caplog.records if "flush_doubtful" in record.getMessage()]
    assert said == [f"flush_doubtful path={devices[0]} write_cache=write back fsync_s=0.000007"]
