"""How far a scrub is, on devices that fail, fill up or hold what is not theirs."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.scrub_mark import SCRUB_NAME, read_scrub_mark, write_scrub_mark
from everstep.checkpoint.store import Store
from everstep.checkpoint.store_format import ScrubMark
from everstep.checkpoint.testing import CrashedError, FaultyStorage, Mode, opened

EXPECTED = {"disk.id", "lock", "quarantine", "runs", SCRUB_NAME}


def mark_of(store: Store) -> ScrubMark:
    return ScrubMark(store_id=store.store_id, started_unix_s=1.5e9, checkpoint_count=4)


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


def test_the_newest_copy_counts(directories: list[Path]) -> None:
    with opened(directories) as (store, _):
        assert read_scrub_mark(store) is None
        mark = mark_of(store)
        write_scrub_mark(store, mark)
        older = (directories[0] / SCRUB_NAME).read_bytes()
        for newer in (
            replace(mark, checkpoint_count=5),
            replace(mark, ended_unix_s=1.6e9),
            replace(mark, started_unix_s=1.6e9, checkpoint_count=0),
        ):
            write_scrub_mark(store, newer)
            (directories[0] / SCRUB_NAME).write_bytes(older)
            assert read_scrub_mark(store) == newer


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 2}', b"\xff" * 5000])
def test_a_copy_that_cannot_be_read_counts_as_none(directories: list[Path], content: bytes) -> None:
    with opened(directories) as (store, _):
        write_scrub_mark(store, mark_of(store))
        (directories[0] / SCRUB_NAME).write_bytes(content)
        assert read_scrub_mark(store) == mark_of(store)
        (directories[1] / SCRUB_NAME).write_bytes(content)
        assert read_scrub_mark(store) is None
        assert store.is_whole


def test_the_mark_of_another_store_says_nothing(directories: list[Path]) -> None:
    with opened(directories) as (store, _):
        write_scrub_mark(store, replace(mark_of(store), store_id="0" * 32))
        assert read_scrub_mark(store) is None


@pytest.mark.parametrize("fail_at", [1, 2, 3], ids=["file", "name", "name_durable"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_device_that_does_not_take_it_stops_nothing(
    directories: list[Path], number: int, fail_at: int
) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(directories, ops=ops.as_ops()) as (store, _):
        mark, newer = mark_of(store), replace(mark_of(store), checkpoint_count=5)
        write_scrub_mark(store, mark)
        ops.arm(fail_at, number=number)
        write_scrub_mark(store, newer)
        ops.arm(0)
        assert read_scrub_mark(store) == newer
        suspects = [device for device in store.devices if device not in store.trusted]
        assert len(suspects) == (1 if number == errno.EIO else 0)


def test_a_crash_at_any_call_leaves_the_one_before_or_this_one(directories: list[Path]) -> None:
    ops = FaultyStorage(RealStorage())
    fail_at = 0
    while True:
        fail_at += 1
        with opened(directories, ops=ops.as_ops()) as (store, _):
            mark, newer = mark_of(store), replace(mark_of(store), checkpoint_count=5)
            write_scrub_mark(store, mark)
            ops.arm(fail_at, Mode.CRASH)
            try:
                write_scrub_mark(store, newer)
                break
            except CrashedError:
                ops.arm(0)
        with opened(directories) as (store, report):
            assert read_scrub_mark(store) in (mark, newer)
            assert not report.problems
        assert {path.name for path in directories[0].iterdir()} <= EXPECTED
    assert fail_at > 6
