"""Missing, moved, swapped, doubled and retired devices at the start: every subset of three, in every order."""

import itertools
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from device_shuffles import shuffle_devices
from places import memory_folder

from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.device_change import find_device, retire
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.testing import State, load, make_state, opened, save
from everstep.core.errors import ConfigError, EverstepError, IncompleteError
from everstep.core.ids import CheckpointId, random_id

UID = os.geteuid()
NAMES = "abc"
OVER_ALL, OVER_ALL_TOO = CheckpointId(1, 1), CheckpointId(1, 2)
STATES: dict[CheckpointId, State] = {}


@pytest.fixture
def dirs() -> Generator[list[Path]]:
    """Three devices with two checkpoints over all of them, and a generation that nothing refers to on each."""
    with memory_folder() as folder:
        made = [folder / name for name in NAMES]
        for path in made:
            path.mkdir()
        with opened(made) as (store, _):
            run = store.run(UID, "demo", create=True)
            run.begin_attempt(1, fresh=False)
            for checkpoint in (OVER_ALL, OVER_ALL_TOO):
                STATES[checkpoint] = make_state(store, checkpoint.step)
                save(run, STATES[checkpoint], checkpoint)
            run.set_complete_floor(OVER_ALL_TOO)
        for path in made:
            orphan = next(path.glob("runs/*/*")) / "data" / random_id()
            orphan.mkdir()
            (orphan / "0.safetensors").write_bytes(b"never committed")
        yield made


def content(dirs: list[Path]) -> dict[str, bytes]:
    """Return every file that is not about who has opened the store."""
    return {
        str(path.relative_to(dirs[0].parent)): path.read_bytes()
        for each in dirs
        for path in each.rglob("*")
        if path.is_file() and path.name not in ("lock", "disk.id")
    }


def check_whole(dirs: list[Path]) -> None:
    with opened(dirs) as (store, report):
        run = store.run(UID, "demo")
        assert report.problems == []
        assert set(STATES) <= set(run.offered())
        for checkpoint, state in STATES.items():
            assert load(run, run.manifest(checkpoint, 0)) == state.content


SUBSETS = [subset for count in (1, 2) for subset in itertools.combinations(range(3), count)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "".join(NAMES[each] for each in subset))
def test_a_part_of_a_store_is_read_and_nothing_is_removed(dirs: list[Path], subset: tuple[int, ...]) -> None:
    present = [dirs[each] for each in subset]
    hidden = [path for path in dirs if path not in present]
    for path in hidden:
        path.rename(path.with_name(f"away-{path.name}"))
    before = content(present)
    for order in itertools.permutations(present):
        with opened(order) as (store, report):
            run = store.run(UID, "demo")
            assert len(store.missing) == len(hidden)
            assert (report.orphan_count, run.offered()) == (0, [])
            assert collect_garbage(run, keep=Keep(last=1)).reason
            for checkpoint in STATES:
                with pytest.raises(IncompleteError):
                    load(run, run.manifest(checkpoint, 0))
        assert content(present) == before
    for path in hidden:
        path.with_name(f"away-{path.name}").rename(path)
    check_whole(dirs)


def test_empty_directories_in_place_of_missing_devices_are_not_made_members(dirs: list[Path]) -> None:
    for hidden in dirs:
        away = hidden.with_name("away")
        hidden.rename(away)
        hidden.mkdir()
        with opened(dirs) as (store, _):
            assert len(store.missing) == 1
            assert store.run(UID, "demo").offered() == []
        assert list(hidden.iterdir()) == []
        hidden.rmdir()
        away.rename(hidden)
    check_whole(dirs)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_devices_are_known_by_their_ids_wherever_they_are(dirs: list[Path], order: tuple[int, ...]) -> None:
    for path in dirs:
        path.rename(path.with_name(f"away-{path.name}"))
    for path, other in zip(dirs, order, strict=True):
        path.with_name(f"away-{path.name}").rename(dirs[other])
    check_whole(dirs)


@pytest.mark.parametrize("number", range(3))
def test_a_copy_of_a_device_is_refused_in_any_place(dirs: list[Path], number: int) -> None:
    copy = dirs[0].with_name("copy")
    shutil.copytree(dirs[number], copy)
    before = content([*dirs, copy])
    for place in range(4):
        given = [*dirs[:place], copy, *dirs[place:]]
        with pytest.raises(EverstepError, match="copy"), opened(given):
            pytest.fail("it was opened")
    # Also in place of another one: two of the same and one missing.
    for place in {0, 1, 2} - {number}:
        given = [copy if each == place else path for each, path in enumerate(dirs)]
        with pytest.raises(EverstepError, match="copy"), opened(given):
            pytest.fail("it was opened")
    assert content([*dirs, copy]) == before
    shutil.rmtree(copy)
    check_whole(dirs)


@pytest.mark.parametrize("twice", range(3))
def test_one_directory_given_twice_is_refused(dirs: list[Path], twice: int) -> None:
    with pytest.raises(EverstepError, match=str(dirs[twice])), opened([*dirs, dirs[twice]]):
        pytest.fail("it was opened")
    check_whole(dirs)


@pytest.fixture
def returned(dirs: list[Path]) -> list[Path]:
    """The store after b was retired while it was away, a went on without it, collected, and b is there again."""
    hidden = dirs[1].rename(dirs[1].with_name("away"))
    with opened(dirs) as (store, _):
        retire(store, find_device(store, str(dirs[1])), force=False, now_unix_s=1.0)
        run = store.run(UID, "demo")
        run.begin_attempt(2, fresh=False)
        for step in (1, 2, 3):
            save(run, make_state(store, step), CheckpointId(2, step))
            run.set_complete_floor(CheckpointId(2, step))
        assert collect_garbage(run, keep=Keep(last=1)).removed == (OVER_ALL, OVER_ALL_TOO, CheckpointId(2, 1))
    with opened(dirs) as (_, report):
        assert report.orphan_count == 2, "the view is whole without b"
    hidden.rename(dirs[1])
    return dirs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_retired_device_that_is_back_changes_nothing_in_any_order(
    returned: list[Path], order: tuple[int, ...]
) -> None:
    before = content(returned)
    with opened([returned[each] for each in order]) as (store, report):
        run = store.run(UID, "demo")
        assert (report.orphan_count, report.damaged_count, store.missing) == (0, 0, ())
        assert run.offered() == [CheckpointId(2, 3), CheckpointId(2, 2)]
        assert run.highest_attempt() == 2
        assert load(run, run.manifest(CheckpointId(2, 3), 0)) == make_state(store, 3).content
    assert content(returned) == before


@pytest.mark.parametrize("other", [0, 2])
def test_beside_a_part_of_its_store_it_is_still_retired(returned: list[Path], other: int) -> None:
    before = content(returned)
    with opened([returned[1], returned[other]]) as (store, report):
        assert [device.path for device in store.devices] == [returned[other]]
        assert [missing.path for missing in store.missing] == [str(returned[2 - other])]
        assert report.orphan_count == 0
        assert store.run(UID, "demo").highest_attempt() == 2
    assert content(returned) == before


def test_a_copy_of_a_retired_device_and_one_in_place_of_a_member_are_told_apart(returned: list[Path]) -> None:
    copy = Path(shutil.copytree(returned[1], returned[1].with_name("copy")))
    with pytest.raises(ConfigError, match="copy"), opened([*returned, copy]):
        pytest.fail("it was opened")
    # The retired one where a was, a where the retired one was: known by their ids.
    away = returned[0].rename(returned[0].with_name("away"))
    returned[1].rename(returned[0])
    away.rename(returned[1])
    with opened(returned) as (store, _):
        assert {device.path for device in store.devices} == {returned[1], returned[2]}
        assert store.may_delete
        assert store.run(UID, "demo").offered() == [CheckpointId(2, 3), CheckpointId(2, 2)]


def test_the_search_of_soak_finds_nothing_in_arrangements_of_other_stores() -> None:
    found = shuffle_devices(seed=20261122, count=45)
    found.check()
    assert found.count == 45
    assert found.counted["devices away"] > 0
    assert found.counted["retired"] > 0
