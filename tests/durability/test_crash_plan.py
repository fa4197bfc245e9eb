from random import Random

import pytest
from crash_plan import (
    SECTOR_BYTES,
    CutState,
    EntryChange,
    Image,
    Op,
    Restart,
    SectorWrite,
    SizeChange,
    Step,
    Sync,
    cuts,
    losses,
)
from hypothesis import given
from hypothesis import strategies as st

ROOT, FOLDER, FILE, OTHER = -1, -2, 3, 4


def add(directory: int, name: str, target: int) -> EntryChange:
    return EntryChange(((directory, name, target),))


def remove(directory: int, name: str) -> EntryChange:
    return EntryChange(((directory, name, None),))


def rename(directory: int, old: str, new: str, target: int) -> EntryChange:
    return EntryChange(((directory, old, None), (directory, new, target)))


def after(*ops: Op) -> CutState:
    state = CutState(Image({ROOT: {}}))
    for op in ops:
        state.advance(op)
    return state


def trees(state: CutState) -> list[dict[str, bytes | None]]:
    found = losses(state, Random(1), count_max=1 << 12)
    return [dict(image.tree(ROOT)) for image in found]


def test_nothing_is_durable_before_a_sync() -> None:
    state = after(add(ROOT, "f", FILE), SizeChange(FILE, 2), SectorWrite(FILE, 0, b"ab"))
    found = trees(state)
    assert {} in found
    assert {"f": b""} in found, "the name alone"
    assert {"f": b"\0\0"} in found, "the size alone"
    assert {"f": b"ab"} in found
    assert all(tree in ({}, {"f": b""}, {"f": b"\0\0"}, {"f": b"ab"}) for tree in found)


def test_a_file_and_its_name_are_synced_apart() -> None:
    content = after(add(ROOT, "f", FILE), SizeChange(FILE, 1), SectorWrite(FILE, 0, b"a"), Sync(FILE))
    assert {} in trees(content)
    assert all(tree in ({}, {"f": b"a"}) for tree in trees(content))
    name = after(add(ROOT, "f", FILE), SizeChange(FILE, 1), SectorWrite(FILE, 0, b"a"), Sync(ROOT))
    assert all("f" in tree for tree in trees(name))
    assert {"f": b""} in trees(name)


def test_a_rename_is_whole_or_not_there() -> None:
    state = after(add(ROOT, "old", FILE), Sync(ROOT), rename(ROOT, "old", "new", FILE))
    assert sorted(map(sorted, trees(state))) == [["new"], ["old"]]


def test_a_file_that_was_moved_twice_may_be_under_two_names() -> None:
    """Moved to the pool and from there to a new generation: only the second move is known to be durable."""
    old, pool, new = -2, -3, -4
    state = after(*(add(ROOT, name, number) for name, number in (("old", old), ("pool", pool), ("new", new))))
    for op in (add(old, "s", FILE), Sync(ROOT), Sync(old)):
        state.advance(op)
    state.advance(EntryChange(((old, "s", None), (pool, "x", FILE))))
    state.advance(EntryChange(((pool, "x", None), (new, "n", FILE))))
    before = [{path for path, content in tree.items() if content is not None} for tree in trees(state)]
    assert sorted(map(sorted, before)) == [["new/n"], ["new/n", "old/s"], ["old/s"], ["pool/x"]]
    state.advance(Sync(new))
    found = [{path for path, content in tree.items() if content is not None} for tree in trees(state)]
    assert sorted(map(sorted, found)) == [["new/n", "old/s"], ["new/n", "pool/x"]]


def test_of_a_file_that_is_written_over_each_sector_may_be_old_or_new() -> None:
    old, new = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES
    state = after(add(ROOT, "f", FILE), Sync(ROOT), SizeChange(FILE, 2 * SECTOR_BYTES))
    for op in (SectorWrite(FILE, 0, old), SectorWrite(FILE, SECTOR_BYTES, old), Sync(FILE)):
        state.advance(op)
    state.advance(SectorWrite(FILE, 0, new))
    state.advance(SectorWrite(FILE, SECTOR_BYTES, new))
    whole = [state.image(kept) for kept in ((), (0,), (1,), (0, 1))]
    assert [image.files[FILE] for image in whole] == [old + old, new + old, old + new, new + new]
    assert {image.files[FILE] for image in whole} <= {tree["f"] for tree in trees(state)}
    state.advance(Sync(FILE))
    assert {tree["f"] for tree in trees(state)} == {new + new}


def test_a_file_below_a_lost_directory_is_lost() -> None:
    state = after(add(ROOT, "d", FOLDER), add(FOLDER, "f", FILE), Sync(FOLDER))
    assert trees(state) == [{}, {"d": None, "d/f": b""}]


def test_a_torn_sector_has_old_zero_and_new_parts() -> None:
    old, new = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES
    state = after(
        add(ROOT, "f", FILE),
        Sync(ROOT),
        SizeChange(FILE, SECTOR_BYTES),
        SectorWrite(FILE, 0, old),
        Sync(FILE),
    )
    state.advance(SectorWrite(FILE, 0, new))
    seen = {bytes(sorted(set(content or b""))) for seed in range(40) for content in _contents(state, seed)}
    assert {b"o", b"n", b"\0no"} <= seen


def _contents(state: CutState, seed: int) -> list[bytes | None]:
    return [dict(image.tree(ROOT))["f"] for image in losses(state, Random(seed), count_max=4)]


def test_after_a_failed_sync_the_next_one_of_a_file_proves_nothing() -> None:
    state = after(add(ROOT, "f", FILE), Sync(ROOT), SizeChange(FILE, 1), Sync(FILE, failed=True), Sync(FILE))
    assert {"f": b""} in trees(state)
    state.advance(Restart())
    state.advance(Sync(FILE))
    assert {"f": b""} in trees(state)


def test_after_a_failed_sync_names_count_again_in_another_process() -> None:
    state = after(add(ROOT, "f", FILE), Sync(ROOT, failed=True), Sync(ROOT))
    assert {} in trees(state)
    state.advance(Restart())
    state.advance(Sync(ROOT))
    assert {} not in trees(state)


def test_a_durable_newer_fate_of_a_name_ends_the_older_ones() -> None:
    state = after(
        add(ROOT, "f", FILE), Sync(ROOT, failed=True), remove(ROOT, "f"), add(ROOT, "g", OTHER), Sync(ROOT)
    )
    assert trees(state) == [{"g": b""}]


def test_parallel_calls_may_have_got_any_distance_each() -> None:
    trace = [
        Step(add(ROOT, "a1", 11), section=1, lane=1),
        Step(add(ROOT, "a2", 12), section=1, lane=1),
        Step(add(ROOT, "b1", 21), section=1, lane=2),
        Step(Sync(ROOT)),
    ]
    seen = {
        tuple(sorted(dict(state.seen().tree(ROOT))))
        for state in cuts(trace, CutState(Image({ROOT: {}})), Random(1), lanes_max=100)
    }
    assert seen == {(), ("a1",), ("a1", "a2"), ("b1",), ("a1", "b1"), ("a1", "a2", "b1")}


NAMES = st.sampled_from(["x", "y", "z"])
OPS: st.SearchStrategy[Op] = st.one_of(
    st.builds(lambda name, number: add(ROOT, name, number), NAMES, st.integers(3, 5)),
    st.builds(lambda name: remove(ROOT, name), NAMES),
    st.builds(SizeChange, st.integers(3, 5), st.integers(0, 9)),
    st.builds(lambda number: SectorWrite(number, 0, bytes([number]) * 8), st.integers(3, 5)),
    st.builds(Sync, st.sampled_from([ROOT, 3, 4, 5])),
)


@given(st.lists(OPS, max_size=14), st.integers(0, 99))
def test_what_everything_synced_leaves_is_what_a_process_sees(ops: list[Op], seed: int) -> None:
    state = after(*ops)
    seen = dict(state.seen().tree(ROOT))
    assert seen == dict(_applied(ops).tree(ROOT)), "syncs change nothing that a process sees"
    for target in (ROOT, 3, 4, 5):
        state.advance(Sync(target))
    assert not state.pending
    assert [dict(image.tree(ROOT)) for image in losses(state, Random(seed), count_max=4)] == [seen]


def _applied(ops: list[Op]) -> Image:
    image = Image({ROOT: {}})
    for op in ops:
        if not isinstance(op, Sync):
            assert isinstance(op, EntryChange | SizeChange | SectorWrite)
            image.apply(op)
    return image


@pytest.mark.parametrize("count_max", [4, 40])
def test_choices_are_bounded_and_repeat_with_the_seed(count_max: int) -> None:
    state = after(*(add(ROOT, str(index), 100 + index) for index in range(12)))
    first = [dict(image.tree(ROOT)) for image in losses(state, Random(7), count_max=count_max)]
    assert first == [dict(image.tree(ROOT)) for image in losses(state, Random(7), count_max=count_max)]
    assert len(first) <= count_max
