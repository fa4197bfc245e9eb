"""Tags: durable on all devices, mended, never a path; what has one is not collected."""

import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.device_change import drain, find_device
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store_format import Tag, encode_tag
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import (
    CrashedError,
    FaultyStorage,
    Mode,
    opened,
    save_steps,
)
from everstep.core.errors import NotFoundError, ProtectedError, RunBusyError, StorageError, UsageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
BEST = CheckpointId(1, 1)


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@pytest.fixture
def run(dirs: list[Path]) -> Generator[RunStore]:
    with opened(dirs) as (store, _):
        yield save_steps(store, range(1, 5))


def tag_files(dirs: list[Path]) -> list[Path]:
    return [path for folder in dirs for path in sorted(folder.glob("runs/*/*/tags/*"))]


def test_a_tagged_checkpoint_stays_until_it_is_untagged(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    add_tag(run, "../../best of all", BEST)
    assert collect_garbage(run, keep=Keep(last=1)).removed == (at(2),)
    with pytest.raises(ProtectedError, match="has a tag"):
        remove_checkpoint(run, BEST)
    assert run.info(BEST).tags == ("../../best of all", "best")
    assert len(tag_files(dirs)) == 4
    run.store.close()
    with opened(dirs) as (store, report):
        found = store.run(UID, "demo")
        assert report.problems == []
        assert found.tags() == {"../../best of all": BEST, "best": BEST}
        assert remove_tag(found, "best") == BEST
        assert collect_garbage(found, keep=Keep(last=1)).removed == ()
        remove_tag(found, "../../best of all")
        assert collect_garbage(found, keep=Keep(last=1)).removed == (BEST,)
    with opened(dirs) as (store, report):
        assert (store.run(UID, "demo").tags(), report.problems) == ({}, [])
    assert tag_files(dirs) == []


def test_what_is_refused(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    add_tag(run, "best", BEST)  # again is nothing
    with pytest.raises(UsageError, match=r"'best' of run 'demo' is on checkpoint 1\.1"):
        add_tag(run, "best", at(2))
    with pytest.raises(NotFoundError, match=r"no checkpoint 1\.9"):
        add_tag(run, "other", at(9))
    for name in ("", "x" * 101, "two\nlines", "\x00"):
        with pytest.raises(UsageError, match="1 to 100 bytes of printable text"):
            add_tag(run, name, at(2))
    with pytest.raises(NotFoundError, match="no tag 'other'"):
        remove_tag(run, "other")
    assert run.tags() == {"best": BEST}
    assert len(tag_files(dirs)) == 2
    run.store.close()
    with opened(dirs, read_only=True) as (store, _):
        found = store.run(UID, "demo")
        for change in (lambda: add_tag(found, "other", BEST), lambda: remove_tag(found, "best")):
            with pytest.raises(StorageError, match="reading only"):
                change()


def test_a_tag_cannot_be_removed_while_a_device_is_missing(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    run.store.close()
    shutil.move(dirs[1], dirs[1].with_name("away"))
    with opened(dirs) as (store, _):
        found = store.run(UID, "demo")
        with pytest.raises(StorageError, match="cannot be removed: missing devices"):
            remove_tag(found, "best")
        add_tag(found, "other", at(2))
    shutil.move(dirs[1].with_name("away"), dirs[1])
    with opened(dirs) as (store, report):
        assert store.run(UID, "demo").tags() == {"best": BEST, "other": at(2)}
        assert report.copy_count == 1
    assert len(tag_files(dirs)) == 4


def test_a_missing_copy_is_made_again_and_a_spoilt_one_put_aside(run: RunStore, dirs: list[Path]) -> None:
    for name in ("one", "two"):
        add_tag(run, name, BEST)
    run.store.close()
    first, second = tag_files([dirs[0]])
    whole = second.read_bytes()
    shutil.rmtree(first.parent)
    tag_files([dirs[1]])[1].write_bytes(b"{}")
    with opened(dirs) as (store, report):
        # one whole copy of the first on b; none of the second
        found = store.run(UID, "demo")
        assert len(found.tags()) == 1
        assert "what a tag keeps is unknown" in collect_garbage(found, keep=Keep(last=1)).reason
        assert any("nothing is removed" in problem for problem in report.problems)
    tag_files([dirs[1]])[1].write_bytes(whole)
    first.write_bytes(b"no tag")
    with opened(dirs) as (store, report):
        assert store.run(UID, "demo").tags() == {"one": BEST, "two": BEST}
        assert report.quarantined_count == 1
    assert [path.read_bytes() for path in tag_files([dirs[0]])] == [
        path.read_bytes() for path in tag_files([dirs[1]])
    ]


def test_copies_that_differ_stop_collection_and_can_be_untagged(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    run.store.close()
    tag_files([dirs[1]])[0].write_bytes(encode_tag(Tag(name="best", checkpoint=at(2))))
    with opened(dirs) as (store, _):
        found = store.run(UID, "demo")
        assert "different contents" in collect_garbage(found, keep=Keep(last=1)).reason
        remove_tag(found, "best")
    with opened(dirs) as (store, report):
        assert report.problems == []
        assert collect_garbage(store.run(UID, "demo"), keep=Keep(last=1)).removed == (at(1), at(2))


def test_a_tag_of_a_newer_format_stops_collection(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    run.store.close()
    for path in tag_files(dirs):
        path.write_bytes(b'{"format":2,"names":["best"]}')
    with opened(dirs) as (store, _):
        found = store.run(UID, "demo")
        assert "format version 2" in collect_garbage(found, keep=Keep(last=1)).reason
    assert len(tag_files(dirs)) == 2


def test_a_collection_and_a_tag_at_once_never_lose_what_was_tagged(run: RunStore) -> None:
    """Whichever comes first: either the tag is refused, or the checkpoint stays."""
    start = threading.Barrier(2)
    outcome: list[bool] = []

    def tag() -> None:
        start.wait()
        try:
            add_tag(run, "best", BEST)
        except NotFoundError:
            outcome.append(False)
        else:
            outcome.append(True)

    thread = threading.Thread(target=tag)
    thread.start()
    start.wait()
    removed = collect_garbage(run, keep=Keep(last=1)).removed
    thread.join()
    assert (BEST in removed) != outcome[0]
    assert (BEST in run.offered()) == outcome[0]


def with_each_call_failing(
    run: RunStore, dirs: list[Path], mode: Mode, change: Callable[[RunStore], object]
) -> Generator[tuple[RunStore, bool]]:
    """Make a change again and again, the next call failing each time; yield what is there then, and `done`."""
    run.store.close()
    template = dirs[0].with_name("template")
    for place, path in enumerate(dirs):
        shutil.copytree(path, template / str(place))
    for count in range(1, 60):
        for place, path in enumerate(dirs):
            shutil.rmtree(path)
            shutil.copytree(template / str(place), path)
        ops, done = FaultyStorage(RealStorage()), False
        with opened(dirs, ops=ops.as_ops()) as (store, _):
            found = store.run(UID, "demo")
            ops.arm(count, mode)
            try:
                change(found)
                done = True
            except (StorageError, CrashedError):
                pass
            reached = len(ops.calls) >= count
        with opened(dirs) as (store, report):
            assert report.problems == []
            after = store.run(UID, "demo")
            assert len(tag_files(dirs)) == 2 * len(after.tags())
            yield after, done
        if not reached:
            assert count > 4
            return
    pytest.fail("the call count was never reached")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("is_there", [False, True])
def test_any_call_may_fail_or_be_the_last(
    run: RunStore, dirs: list[Path], mode: Mode, *, is_there: bool
) -> None:
    """An acknowledged tag is there, an acknowledged removal too; else either, the same on both devices."""
    if is_there:
        add_tag(run, "best", BEST)

    def change(found: RunStore) -> None:
        _ = remove_tag(found, "best") if is_there else add_tag(found, "best", BEST)

    for after, done in with_each_call_failing(run, dirs, mode, change):
        assert not done or bool(after.tags()) != is_there


@pytest.mark.parametrize("mode", list(Mode))
def test_a_checkpoint_is_removed_with_its_tags_and_no_tag_outlives_it(
    run: RunStore, dirs: list[Path], mode: Mode
) -> None:
    add_tag(run, "best", BEST)
    add_tag(run, "first", BEST)
    add_tag(run, "other", at(2))

    def change(found: RunStore) -> None:
        remove_checkpoint(found, BEST, with_tags=True)

    for after, done in with_each_call_failing(run, dirs, mode, change):
        here = {info.checkpoint for info in after.checkpoints()}
        assert at(2) in here
        assert after.tags()["other"] == at(2)
        assert set(after.tags().values()) <= here
        assert not done or BEST not in here


def test_what_is_read_keeps_its_tags(run: RunStore, dirs: list[Path]) -> None:
    add_tag(run, "best", BEST)
    with run.reading(BEST), pytest.raises(RunBusyError):
        remove_checkpoint(run, BEST, with_tags=True)
    assert run.info(BEST).tags == ("best",)
    assert len(tag_files(dirs)) == 2


def test_the_same_tag_again_makes_no_draining_device_suspect(dirs: list[Path]) -> None:
    with opened(dirs) as (store, _):
        run = save_steps(store, range(1, 3))
        name = find_device(store, str(dirs[1]))
        add_tag(run, "best", BEST)
        drain(store, name)
        add_tag(run, "best", BEST)
        assert store.device_state(name)[0] is DeviceState.DRAINING
        assert store.may_delete
        remove_tag(run, "best")
