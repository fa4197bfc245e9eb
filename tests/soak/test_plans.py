"""The schedule of faults is the seed's, and what grows is found."""

import os
from itertools import pairwise

import pytest
from fault_plan import CALM_S, GAP_S, NEEDS_DRIVES, FaultKind, gap_s, plan_faults
from holdings import read_holding
from leak_plan import BOUND, MIB, SLACK, Holding, growth_per_hour, held_throughout, leaks
from soak_record import SoakRecord

from everstep.core.mapping import map_shared


@pytest.mark.parametrize("duration_s", [300.0, 3600.0, 259_200.0])
def test_a_seed_repeats_its_faults_and_each_kind_comes_before_any_comes_again(duration_s: float) -> None:
    faults = plan_faults(5, duration_s)
    assert faults == plan_faults(5, duration_s)
    assert faults != plan_faults(6, duration_s)
    kinds = [fault.kind for fault in faults]
    for begin in range(0, len(kinds) - len(FaultKind), len(FaultKind)):
        assert set(kinds[begin : begin + len(FaultKind)]) == set(FaultKind)
    least_s, most_s = gap_s(duration_s)
    for before, after in pairwise(faults):
        assert least_s <= after.at_s - before.at_s - before.hold_s <= most_s
    assert faults[0].at_s == CALM_S
    assert faults[-1].at_s + faults[-1].hold_s <= duration_s - CALM_S


def test_five_minutes_have_each_kind_whatever_the_seed() -> None:
    for seed in range(200):
        assert {fault.kind for fault in plan_faults(seed, 300.0)} == set(FaultKind), seed


def test_an_hour_has_faults_as_far_apart_as_promised() -> None:
    assert gap_s(3600.0) == GAP_S


def test_what_a_machine_cannot_be_given_does_not_come() -> None:
    kinds = [kind for kind in FaultKind if kind not in NEEDS_DRIVES]
    assert {fault.kind for fault in plan_faults(1, 3600.0, kinds)} == set(kinds)


def holding(at_s: float, pid: int = 1, **more: int) -> Holding:
    base = {"memory_bytes": 60 * MIB, "descriptors": 50, "threads": 20, "memfds": 20, "aio_contexts": 8}
    base |= {"stagings": 2, "shared_batches": 0}
    return Holding(at_s=at_s, pid=pid, **{name: base[name] + more.get(name, 0) for name in base})


@pytest.mark.parametrize("name", SLACK)
def test_what_grows_beyond_its_slack_is_found_in_the_life_where_it_grew(name: str) -> None:
    assert leaks([holding(1), holding(9, **{name: SLACK[name]})]) == []
    (found,) = leaks([holding(1), holding(9, **{name: SLACK[name] + 1})])
    assert name in found
    assert leaks([holding(1), holding(9, pid=2, **{name: SLACK[name] + 1})]) == [], (
        "another daemon has its own"
    )


@pytest.mark.parametrize("name", BOUND)
def test_what_comes_and_goes_has_a_bound_and_no_base(name: str) -> None:
    most = BOUND[name] - getattr(holding(1), name)
    assert leaks([holding(1), holding(9, **{name: most})]) == []
    (found,) = leaks([holding(1, **{name: most + 1})])
    assert name in found


def test_memory_counts_once_however_it_is_held() -> None:
    """What is mapped only, a duplicate, a shared batch, and a staging: of this process."""
    before = read_holding(os.getpid(), 0.0)
    mapped, staging, batch = (
        os.memfd_create(f"everstep-{name}") for name in ("arena", "share-staging", "share-batch")
    )
    os.ftruncate(mapped, 4096)
    view = map_shared(mapped, 4096)
    held = [os.dup(staging), staging, batch]
    os.close(mapped)
    during = read_holding(os.getpid(), 1.0)
    view.release()
    for fd in held:
        os.close(fd)
    after = read_holding(os.getpid(), 2.0)
    assert (during.memfds, during.stagings, during.shared_batches) == (
        before.memfds + 1,
        before.stagings + 1,
        before.shared_batches + 1,
    )
    assert during.descriptors == before.descriptors
    assert (after.memfds, after.stagings, after.shared_batches) == (
        before.memfds,
        before.stagings,
        before.shared_batches,
    )


def test_what_is_held_for_a_moment_only_is_no_holding() -> None:
    looks = [holding(1, threads=7), holding(2, descriptors=9), holding(3, threads=2, memfds=1)]
    assert held_throughout(looks) == holding(1)
    assert held_throughout([holding(1, threads=7), holding(2, threads=5)]).threads == holding(1).threads + 5


def test_growth_is_that_of_the_longest_life() -> None:
    assert growth_per_hour([holding(1), holding(9, pid=2)]) is None
    looks = [
        holding(0),
        holding(10, memory_bytes=5),
        holding(20, pid=2),
        holding(1820, pid=2, memory_bytes=MIB),
    ]
    assert growth_per_hour(looks) == 2 * MIB


def test_what_was_counted_is_said_in_words_that_a_reader_knows() -> None:
    counts = {"found": 17, "end": 1, "state": 16_147, "epochs checked": 571}
    record = SoakRecord(
        seed=1,
        duration_s=60.0,
        origin={"date": "today", "machine": "one", "commit": "0"},
        counts=counts,
    )
    lines = [
        line
        for line in record.as_markdown().splitlines()
        if line.endswith((" 17 |", "47 |", " 571 |", " 1 |"))
    ]
    assert lines == [
        "| boundaries whose state the oracle was told | 16,147 |",
        "| shards read back from the devices at the end | 17 |",
        "| epochs checked | 571 |",
    ]
