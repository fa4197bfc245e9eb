"""The slots of an arena: any order of events keeps its promises."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.core.errors import UsageError
from everstep.core.ids import CheckpointId
from everstep.daemon.slot_machine import SlotMachine, SlotState


def step(number: int) -> CheckpointId:
    return CheckpointId(1, number)


def test_a_kept_snapshot_is_freed_only_when_a_newer_one_is_sealed_everywhere() -> None:
    machine = SlotMachine(2)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    assert machine.sealed_everywhere(step(10)) == []
    machine.persist(0)
    assert machine.settle(0) == []
    machine.begin(1, step(20))
    machine.seal(1, step(20))
    assert machine.slots[0].state is SlotState.KEPT
    assert machine.sealed_everywhere(step(20)) == [0]
    assert machine.free_slots == [0]


def test_a_slot_still_being_written_is_freed_when_the_write_ends() -> None:
    machine = SlotMachine(2)
    for slot, number in ((0, 10), (1, 20)):
        machine.begin(slot, step(number))
        machine.seal(slot, step(number))
        machine.persist(slot)
    assert machine.sealed_everywhere(step(20)) == []
    assert machine.settle(0) == [0]
    assert machine.settle(1) == []


def test_a_kept_snapshot_may_be_written_again_and_stays_until_that_has_ended() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    machine.persist(0)
    machine.settle(0)
    machine.persist_again(0)
    assert machine.sealed_everywhere(step(20)) == []
    with pytest.raises(UsageError, match="expected kept"):
        machine.persist_again(0)
    assert machine.settle(0) == [0]


def test_a_dead_trainer_loses_only_what_it_was_copying() -> None:
    machine = SlotMachine(2)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    machine.begin(1, step(20))
    assert machine.trainer_gone() == [1]
    assert machine.slots[0].checkpoint == step(10)


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_dropped_snapshot_frees_its_slot(is_accepted: bool) -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    assert machine.drop(0) == [], "it is the trainer's until it is sealed"
    machine.seal(0, step(10))
    if is_accepted:
        machine.persist(0)
    assert machine.drop(0) == [0]
    assert machine.free_slots == [0]
    assert machine.drop(0) == []


def test_a_lost_slot_is_never_used_again() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    machine.persist(0)
    machine.lose(0)
    assert machine.slots[0].state is SlotState.LOST
    assert not machine.busy
    assert machine.sealed_everywhere(step(20)) == machine.give_up(step(10)) == machine.trainer_gone() == []
    assert not machine.is_free()


def test_what_is_settled_is_not_dropped_any_more() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    machine.persist(0)
    machine.settle(0)
    assert machine.drop(0) == []
    assert machine.slots[0].state is SlotState.KEPT


def test_one_that_is_written_while_it_is_copied_is_persisting_when_sealed() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    with pytest.raises(UsageError, match=r"holds 1\.10"):
        machine.stream(0, step(11))
    machine.stream(0, step(10))
    assert machine.busy
    with pytest.raises(UsageError, match=r"holds 1\.10"):
        machine.seal_streaming(0, step(11))
    machine.seal_streaming(0, step(10))
    assert machine.slots[0].state is SlotState.PERSISTING


def test_one_that_is_given_up_while_it_is_written_is_free_when_nobody_reads_it() -> None:
    for give_up in (lambda machine: machine.abandon(0), SlotMachine.trainer_gone):
        machine = SlotMachine(1)
        machine.begin(0, step(10))
        machine.stream(0, step(10))
        assert give_up(machine) == []
        assert machine.busy
        assert machine.free_slots == []
        assert machine.abandoned_written(0) == [0]
        assert machine.is_free()


def test_a_write_that_failed_before_the_seal_leaves_a_copy_as_any_other() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    machine.stream(0, step(10))
    machine.stream_failed(0)
    machine.seal(0, step(10))
    assert machine.slots[0].state is SlotState.SEALED


@pytest.mark.parametrize("slot", [-1, 2, 10**9])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    with pytest.raises(UsageError, match="there is no slot"):
        SlotMachine(2).begin(slot, step(1))


def test_sealing_another_checkpoint_than_was_begun_changes_nothing() -> None:
    machine = SlotMachine(1)
    machine.begin(0, step(10))
    with pytest.raises(UsageError, match=r"holds 1\.10"):
        machine.seal(0, step(11))
    assert machine.slots[0].state is SlotState.COPYING


def kept(slot_count: int) -> SlotMachine:
    machine = SlotMachine(slot_count)
    machine.begin(0, step(10))
    machine.seal(0, step(10))
    machine.persist(0)
    machine.settle(0)
    return machine


def test_what_the_only_slot_keeps_may_be_overwritten() -> None:
    machine = kept(1)
    assert machine.usable_slots == [0]
    assert machine.slots[0].checkpoint == step(10), "until then it is kept"
    assert not machine.is_free()
    machine.begin(0, step(20))
    assert machine.slots[0].checkpoint == step(20)
    assert machine.usable_slots == []


def test_with_two_slots_it_may_not() -> None:
    machine = kept(2)
    assert machine.usable_slots == [1]
    with pytest.raises(UsageError, match="kept, expected free"):
        machine.begin(0, step(20))


def test_each_slot_is_offered_once() -> None:
    machine = kept(1)
    assert machine.offer() == [0]
    assert machine.give_up(step(10)) == [0], (
        "it is free now, and the trainer knows already that it may use it"
    )
    assert machine.offer() == []
    machine.begin(0, step(20))
    assert machine.offer() == []
    assert machine.abandon(0) == [0]
    assert machine.offer() == [0]


@pytest.mark.parametrize("slot_count", [1, 2])
def test_who_reads_from_a_slot_is_waited_for(slot_count: int) -> None:
    machine = kept(slot_count)
    assert machine.is_settled
    machine.persist_again(0)
    assert not machine.is_settled
    assert 0 not in machine.usable_slots


def test_what_is_not_restored_makes_room_at_once_or_when_it_is_written() -> None:
    machine = SlotMachine(3)
    for slot, number in ((0, 10), (1, 20), (2, 30)):
        machine.begin(slot, step(number))
        machine.seal(slot, step(number))
        machine.persist(slot)
    machine.settle(0)
    machine.settle(1)
    assert machine.restored(step(20)) == [0]
    assert machine.settle(2) == [2]
    assert (machine.free_slots, machine.slots[1].checkpoint) == ([0, 2], step(20))


class AnyOrder(RuleBasedStateMachine):
    """Random events against what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SlotMachine(3)
        self.number = 0
        self.everywhere = 0

    def _in(self, state: SlotState) -> list[int]:
        return [index for index, slot in enumerate(self.machine.slots) if slot.state is state]

    @rule()
    def begin(self) -> None:
        for slot in self.machine.free_slots[:1]:
            self.number += 1
            self.machine.begin(slot, step(self.number))

    @rule(pick=st.integers(0, 2))
    def seal(self, pick: int) -> None:
        for slot in self._in(SlotState.COPYING)[pick : pick + 1]:
            held = self.machine.slots[slot].checkpoint
            assert held is not None
            self.machine.seal(slot, held)

    @rule(pick=st.integers(0, 2))
    def stream(self, pick: int) -> None:
        for slot in self._in(SlotState.COPYING)[pick : pick + 1]:
            held = self.machine.slots[slot].checkpoint
            assert held is not None
            self.machine.stream(slot, held)

    @rule(pick=st.integers(0, 2), fails=st.booleans())
    def end_streaming(self, pick: int, fails: bool) -> None:
        for slot in self._in(SlotState.STREAMING)[pick : pick + 1]:
            held = self.machine.slots[slot].checkpoint
            assert held is not None
            if fails:
                self.machine.stream_failed(slot)
            else:
                self.machine.seal_streaming(slot, held)
        for slot in self._in(SlotState.ABANDONED):
            assert self.machine.abandoned_written(slot) == [slot]

    @rule(pick=st.integers(0, 2), is_accepted=st.booleans())
    def check_draft(self, pick: int, is_accepted: bool) -> None:
        for slot in self._in(SlotState.SEALED)[pick : pick + 1]:
            held = self.machine.slots[slot].checkpoint
            assert held is not None
            if is_accepted or held.step == self.everywhere:
                self.machine.persist(slot)
            else:
                assert self.machine.drop(slot) == [slot]

    @rule(pick=st.integers(0, 2))
    def settle(self, pick: int) -> None:
        for slot in self._in(SlotState.PERSISTING)[pick : pick + 1]:
            self.machine.settle(slot)

    @rule(pick=st.integers(0, 2))
    def sealed_everywhere(self, pick: int) -> None:
        held = [
            slot
            for state in (SlotState.SEALED, SlotState.PERSISTING, SlotState.KEPT)
            for slot in self._in(state)
        ]
        for slot in held[pick : pick + 1]:
            checkpoint = self.machine.slots[slot].checkpoint
            assert checkpoint is not None
            self.everywhere = max(self.everywhere, checkpoint.step)
            freed = self.machine.sealed_everywhere(checkpoint)
            assert slot not in freed

    @rule()
    def trainer_dies(self) -> None:
        self.machine.trainer_gone()

    @invariant()
    def the_newest_sealed_everywhere_is_never_lost(self) -> None:
        if self.everywhere:
            steps = [slot.checkpoint.step for slot in self.machine.slots if slot.checkpoint is not None]
            assert self.everywhere in steps

    @invariant()
    def free_means_empty(self) -> None:
        for slot in self.machine.slots:
            assert (slot.state is SlotState.FREE) == (slot.checkpoint is None)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_that_a_late_device_reads_from_is_not_used_again_and_the_other_one_is_alone() -> None:
    machine = SlotMachine(2)
    first, second, third = (CheckpointId(1, step) for step in (1, 2, 3))
    machine.begin(0, first)
    machine.seal(0, first)
    machine.persist(0)
    machine.hold(0)
    assert machine.settle(0) == []
    machine.begin(1, second)
    machine.seal(1, second)
    machine.persist(1)
    assert machine.sealed_everywhere(second) == [], "outdated, but held"
    assert machine.settle(1) == []
    assert not machine.is_settled
    assert machine.offer() == [1]
    assert machine.let_go(0) == [0]
    assert machine.offer() == [0]
    assert machine.may_be_taken(1), "so that nobody writes it again meanwhile"
    machine.begin(1, third)  # as it was offered, though the other one is free by now
    assert machine.free_slots == [0]


def test_a_slot_that_is_dropped_while_it_is_held_is_free_later() -> None:
    machine = SlotMachine(1)
    machine.begin(0, CheckpointId(1, 1))
    machine.seal(0, CheckpointId(1, 1))
    machine.hold(0)
    machine.hold(0)
    assert machine.drop(0) == [0]
    assert (machine.usable_slots, machine.is_free()) == ([], False)
    machine.let_go(0)
    assert machine.usable_slots == []
    assert machine.let_go(0) == [0]
    assert machine.usable_slots == [0]


def test_a_slot_that_a_daemon_before_had_sealed_is_offered_once_it_is_outdated() -> None:
    """A trainer that restores from memory is told which slots are free then: of the others it knows nothing."""
    machine = SlotMachine(2)
    first, second = (CheckpointId(attempt, 1) for attempt in (1, 2))
    machine.adopt(0, first)
    machine.persist(0)
    assert machine.settle(0) == []
    assert machine.offer_anew() == [1]
    assert not machine.may_be_taken(0)
    machine.begin(1, second)
    machine.seal(1, second)
    assert machine.sealed_everywhere(second) == [0]
    assert machine.offer() == [0]
