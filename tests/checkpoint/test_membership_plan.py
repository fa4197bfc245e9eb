"""Copies of the membership, merged: any crash in the middle of any change, read in any order by any part of a store."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.membership_plan import Membership, merge
from everstep.checkpoint.store_format import DiskId, RetiredDevice
from everstep.core.errors import ConfigError

A, B, C, D = (each * 32 for each in "abcd")
NAMES = (A, B, C, D)
WHOLE = Membership(members={name: f"/{name[0]}" for name in NAMES})


def record(name: str, at: float = 1.0) -> RetiredDevice:
    return RetiredDevice(path=f"/{name[0]}", retired_unix_s=at)


def copy(name: str, membership: Membership = WHOLE) -> DiskId:
    return membership.disk_id(name, store_id="e" * 32)


def retired(*names: str, membership: Membership = WHOLE) -> Membership:
    for name in names:
        membership = membership.retire(name, record(name))
    return membership


def test_copies_that_agree_are_what_they_say() -> None:
    for membership in (WHOLE, WHOLE.drain(B), WHOLE.missed([C], 5.0), retired(B)):
        assert merge([copy(name, membership) for name in membership.members]) == membership
    assert merge([]) == Membership()


@pytest.mark.parametrize("told", [(A,), (A, C), (A, C, D), (C,)])
def test_a_retirement_that_one_member_knows_of_is_finished(told: tuple[str, ...]) -> None:
    copies = [copy(name, retired(B) if name in told else WHOLE.drain(B)) for name in NAMES]
    assert merge(copies) == retired(B)


def test_a_drain_that_one_member_knows_of_counts_until_all_have_forgotten_it() -> None:
    assert merge([copy(A, WHOLE.drain(B)), copy(C)]).draining == {B}
    assert merge([copy(A), copy(C)]).draining == frozenset()


def test_what_a_retired_device_says_is_ignored() -> None:
    """B left first, then D: B still believes in D, and believes A gone."""
    stale = retired(A)
    assert merge([copy(A, retired(B, D)), copy(B, stale), copy(C, retired(B, D))]) == retired(B, D)


def test_a_device_that_knows_its_own_end_tells_those_that_missed_it() -> None:
    own = copy(B, retired(B))
    assert merge([own, copy(C)]) == retired(B)
    with pytest.raises(ConfigError, match="nothing but retired devices"):
        merge([own])


def test_two_parts_that_retired_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="retired each other"):
        merge([copy(A, retired(B)), copy(B, retired(A))])


def test_the_part_that_nobody_accuses_wins() -> None:
    """A retired B and went away; B and C went on without A, and retired it."""
    assert merge([copy(A, retired(B)), copy(B, retired(A)), copy(C, retired(A))]) == retired(A)


def test_the_first_time_seen_missing_counts() -> None:
    merged = merge([copy(A, WHOLE.missed([C], 9.0)), copy(B, WHOLE.missed([C, D], 5.0))])
    assert merged.missing_since_unix_s == {C: 5.0, D: 5.0}
    assert WHOLE.missed([C], 5.0).missed([C], 9.0).missing_since_unix_s == {C: 5.0}
    assert merged.seen({C: "/c"}).missing_since_unix_s == {D: 5.0}
    assert retired(C, membership=merged).missing_since_unix_s == {D: 5.0}


@dataclass
class Disks:
    """What each device of a store holds while changes reach it one by one, as device_change.py makes them."""

    copies: dict[str, DiskId] = field(default_factory=lambda: {name: copy(name) for name in NAMES})
    finished: set[str] = field(default_factory=set[str])
    """Retired for sure: somebody was told so."""

    def change(self, action: str, name: str, reached: int) -> None:
        now = merge(list(self.copies.values()))
        staying = [each for each in now.members if each != name]
        if name not in now.members or not staying:
            return
        if action == "drain" or reached <= len(staying):
            self._write(now.drain(name), staying, reached)
            return
        self._write(now.drain(name), staying, len(staying))
        self._write(now.retire(name, record(name)), staying, reached - len(staying))
        if reached >= 2 * len(staying):
            self.finished.add(name)

    def _write(self, membership: Membership, names: list[str], count: int) -> None:
        for name in names[:count]:
            self.copies[name] = copy(name, membership)


CHANGES = st.lists(
    st.tuples(st.sampled_from(("drain", "retire")), st.sampled_from(NAMES), st.integers(0, 6)), max_size=5
)


@given(CHANGES, st.permutations(NAMES), st.sets(st.sampled_from(NAMES)))
def test_whatever_crashed_every_part_of_a_store_says_what_was_promised(
    changes: list[tuple[str, str, int]], order: list[str], hidden: set[str]
) -> None:
    disks = Disks()
    for action, name, reached in changes:
        disks.change(action, name, reached)
    whole = merge([disks.copies[name] for name in NAMES])
    assert merge([disks.copies[name] for name in order]) == whole, "the order does not matter"
    assert disks.finished <= whole.retired.keys()
    assert whole.members, "somebody is left"
    assert merge([copy(name, whole) for name in whole.members]) == whole, "written everywhere it is the same"
    part = [name for name in order if name not in hidden and name in whole.members]
    if part:
        seen = merge([disks.copies[name] for name in part])
        # Whoever sees a part writes nothing to a device that the whole calls retired.
        assert whole.retired.keys() <= seen.retired.keys() | seen.draining
        assert disks.finished <= seen.retired.keys()
        assert seen.retired.keys() <= whole.retired.keys()
