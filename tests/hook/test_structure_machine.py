"""What is known of a structure that changes: room for more, and whom it is said to."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.hook.structure_machine import (
    CHANGES_MAX,
    PAGE_BYTES,
    WASTE_FACTOR,
    WASTE_MAX,
    StructureMachine,
    changed_text,
)

MIB = 1024**2


def layout(**mib: int) -> Layout:
    leaves = [whole_leaf(name, "uint8", (size * MIB,)) for name, size in mib.items()]
    return plan_layout(leaves, [], segment_count=1)


class TestRoomToGrow:
    def test_the_first_arena_and_one_for_leaves_that_came_have_none(self) -> None:
        machine = StructureMachine()
        assert machine.asking(layout(a=8)) == 0
        assert machine.asking(layout(a=8, state=16)) == 0

    def test_where_a_leaf_grew_it_is_a_quarter_at_least_and_as_much_again_as_it_grew(self) -> None:
        machine, larger = StructureMachine(), layout(a=41)
        machine.asking(layout(a=40))
        assert machine.asking(larger) == larger.slot_size_bytes // 4 // PAGE_BYTES * PAGE_BYTES
        assert machine.asking(layout(a=71)) == 30 * MIB

    def test_where_the_arena_was_too_small_when_it_came_there_is_some_whatever_has_changed(self) -> None:
        machine = StructureMachine()
        machine.asking(layout(a=8))
        machine.skipped()
        assert machine.asking(layout(a=8, b=8)) > 0

    def test_none_where_it_shrank(self) -> None:
        machine = StructureMachine()
        machine.asking(layout(a=8))
        machine.skipped()
        assert machine.asking(layout(a=7)) == 0

    def test_what_was_restored_counts_as_the_former_one(self) -> None:
        machine = StructureMachine()
        machine.taken(layout(a=40), 0)
        assert machine.asking(layout(a=41)) > 0

    @given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
    def test_a_state_that_grows_steadily_outgrows_ever_fewer_arenas(self, sizes: list[int]) -> None:
        """By `growth` each time, however large that is: at most some twenty of any number of checkpoints."""
        machine, slot, asked = StructureMachine(), 0, 0
        growth = sizes[0]
        for count in range(1, len(sizes) + 1):
            now = layout(a=count * growth)
            if now.slot_size_bytes > slot:
                spare = machine.asking(now)
                assert 0 <= spare <= now.slot_size_bytes
                assert spare % PAGE_BYTES == 0
                slot, asked = now.slot_size_bytes + spare, asked + 1
                machine.skipped()
            else:
                machine.taken(now, slot)
        assert asked <= 12


class TestSaying:
    def test_the_second_refusal_in_a_row_names_the_leaf_and_what_to_do(self) -> None:
        machine = StructureMachine()
        machine.asking(layout(a=8, b=1))
        assert machine.skipped() == ""
        assert machine.skipped() == "", "the same arena is still being allocated"
        machine.asking(layout(a=9, b=1))
        why = machine.skipped()
        assert "a is uint8 of shape [9437184] and was uint8 of shape [8388608] before" in why
        assert "run.log(...)" in why
        assert "preallocate" in why
        assert machine.skipped() == why
        machine.taken(layout(a=9, b=1), 0)
        machine.asking(layout(a=10, b=1))
        assert machine.skipped() == "", "the one before was taken"

    def test_a_structure_that_changes_at_each_checkpoint_is_said_once(self) -> None:
        machine = StructureMachine()
        said = [machine.taken(layout(a=1 + number), 0) for number in range(3 * CHANGES_MAX)]
        assert [bool(each) for each in said].index(True) == CHANGES_MAX
        assert sum(map(bool, said)) == 1

    def test_phases_of_training_are_not(self) -> None:
        machine = StructureMachine()
        for number in range(20):
            assert machine.taken(layout(a=1 + number), 0) == ""
            assert machine.taken(layout(a=1 + number), 0) == ""

    @pytest.mark.parametrize(
        ("after", "text"),
        [
            ({"a": 1, "b": 4, "c": 2}, "b is"),
            ({"a": 1, "b": 1, "new": 1}, r"new \(uint8 of shape \[1048576\]\) was not there before"),
            ({"a": 1}, r"b \(uint8 of shape \[1048576\]\) is gone"),
        ],
    )
    def test_what_changed_most_is_named(self, after: dict[str, int], text: str) -> None:
        assert re.search(text, changed_text(layout(a=1, b=1), layout(**after)))


def test_slots_much_too_large_for_long_are_given_back() -> None:
    machine, small = StructureMachine(), layout(a=1)
    large = WASTE_FACTOR * small.slot_size_bytes
    for _ in range(WASTE_MAX):
        machine.taken(small, large)
    assert not machine.is_wasteful
    for number in range(3 * WASTE_MAX):
        machine.taken(small, large + PAGE_BYTES if number % WASTE_MAX else large)
        assert not machine.is_wasteful, "the large ones are still needed now and then"
    for _ in range(WASTE_MAX):
        machine.taken(small, large + PAGE_BYTES)
    assert machine.is_wasteful
    machine.asking(small)
    assert not machine.is_wasteful
