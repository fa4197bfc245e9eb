"""The choice between copying on the device first and at once to the host: need, room, and few changes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.hook.device_first_machine import (
    EARLY,
    ENTRY_ROOM,
    LATE,
    REST_REFUSED,
    REST_SHORT,
    STREAK,
    STREAK_MAX,
    WORTH_S,
    CopyTimes,
    DeviceFirstMachine,
    Way,
)

GIB = 1024**3
LATE_TIMES = CopyTimes(copy_s=0.31, window_s=0.12)
EARLY_TIMES = CopyTimes(copy_s=0.05, window_s=0.12)

seconds = st.floats(1e-6, 10.0)
sizes = st.integers(1, 2**40)
times = st.builds(lambda copy_s, window_s: CopyTimes(copy_s=copy_s, window_s=window_s), seconds, seconds)


def take(
    machine: DeviceFirstMachine, times: CopyTimes | None = None, *, free_bytes: int = 2 * GIB, count: int = 1
) -> list[Way]:
    """Take so many snapshots of 1 GiB; each is measured to take `times`."""
    ways: list[Way] = []
    for _ in range(count):
        free = free_bytes if machine.wants_room else 0
        ways.append(machine.choose(needed_bytes=GIB, free_bytes=free))
        if times is not None:
            machine.measured(times)
    return ways


def on_device() -> DeviceFirstMachine:
    machine = DeviceFirstMachine()
    assert take(machine, LATE_TIMES, count=STREAK + 1)[-1] is Way.DEVICE
    return machine


class TestChoice:
    def test_the_first_snapshots_go_to_the_host_until_lateness_is_proved(self) -> None:
        machine = DeviceFirstMachine()
        assert take(machine, count=5) == [Way.HOST] * 5  # nothing was measured
        assert take(machine, LATE_TIMES, count=STREAK + 1) == [Way.HOST] * STREAK + [Way.DEVICE]

    def test_memory_is_asked_for_only_where_it_would_be_used(self) -> None:
        machine = DeviceFirstMachine()
        assert not machine.wants_room
        take(machine, EARLY_TIMES, count=9)
        assert not machine.wants_room
        take(machine, LATE_TIMES, count=STREAK)
        assert machine.wants_room

    def test_one_disturbed_copy_changes_nothing(self) -> None:
        machine = DeviceFirstMachine()
        for _ in range(10):
            assert take(machine, LATE_TIMES, count=STREAK - 1) == [Way.HOST] * (STREAK - 1)
            assert take(machine, EARLY_TIMES) == [Way.HOST]
        machine = on_device()
        for _ in range(10):
            assert take(machine, EARLY_TIMES, count=STREAK - 1) == [Way.DEVICE] * (STREAK - 1)
            assert take(machine, LATE_TIMES) == [Way.DEVICE]

    def test_a_wait_that_is_hardly_one_is_worth_no_memory(self) -> None:
        short = CopyTimes(copy_s=0.9 * WORTH_S, window_s=1e-6)
        assert Way.DEVICE not in take(DeviceFirstMachine(), short, count=50)
        close = CopyTimes(copy_s=10.0, window_s=10.0 / (LATE - 0.01))
        assert Way.DEVICE not in take(DeviceFirstMachine(), close, count=50)

    def test_beginning_needs_more_room_than_going_on(self) -> None:
        machine = DeviceFirstMachine()
        tight = int(ENTRY_ROOM * GIB) - 1
        assert Way.DEVICE not in take(machine, LATE_TIMES, free_bytes=tight, count=20)
        assert take(machine, LATE_TIMES, free_bytes=tight + 1) == [Way.DEVICE]
        assert take(machine, LATE_TIMES, free_bytes=GIB, count=20) == [Way.DEVICE] * 20

    def test_short_memory_ends_it_at_once_and_for_some_snapshots(self) -> None:
        machine = on_device()
        assert take(machine, LATE_TIMES, free_bytes=GIB - 1) == [Way.HOST]
        assert take(machine, LATE_TIMES, count=REST_SHORT + 1) == [Way.HOST] * REST_SHORT + [Way.DEVICE]

    def test_refused_memory_ends_it_for_long(self) -> None:
        machine = on_device()
        machine.refused()
        assert machine.way is Way.HOST
        ways = take(machine, LATE_TIMES, count=REST_REFUSED + 1)
        assert ways == [Way.HOST] * REST_REFUSED + [Way.DEVICE]


class TestReason:
    def test_is_empty_where_there_is_nothing_to_say(self) -> None:
        machine = DeviceFirstMachine()
        assert machine.reason == ""
        take(machine, EARLY_TIMES, count=5)
        assert machine.reason == ""

    def test_tells_the_figures_of_a_copy_on_the_device(self) -> None:
        assert on_device().reason == (
            "copied on the device first: 310 ms to the host do not fit in 120 ms between boundary and "
            "optimizer step; 1.0 GiB of GPU memory"
        )

    def test_tells_the_newest_times_that_did_not_fit(self) -> None:
        """Single copies that fit, as from a clone, are no reason to take memory."""
        machine = on_device()
        take(machine, CopyTimes(copy_s=0.4, window_s=0.1))
        take(machine, EARLY_TIMES, count=STREAK - 1)
        assert ": 400 ms to the host do not fit in 100 ms between" in machine.reason

    def test_tells_what_memory_is_missing(self) -> None:
        machine = on_device()
        take(machine, free_bytes=0)
        assert machine.reason == (
            "copied to the host: 310 ms do not fit in 120 ms between boundary and optimizer step, "
            "but 1.0 GiB of GPU memory are not free"
        )


@given(st.lists(st.one_of(times, st.none(), st.just("refused")), max_size=60), st.data())
def test_never_on_the_device_without_room_or_need_or_during_a_rest(
    events: list[CopyTimes | str | None], data: st.DataObject
) -> None:
    machine = DeviceFirstMachine()
    proved_late, rests = False, 0
    for event in events:
        if isinstance(event, CopyTimes):
            machine.measured(event)
            proved_late |= event.is_late
        elif event == "refused":
            machine.refused()
            rests = REST_REFUSED
        else:
            needed, free = data.draw(sizes), data.draw(st.integers(-(2**40), 2**41))
            way = machine.choose(needed_bytes=needed, free_bytes=free)
            if way is Way.DEVICE:
                assert free >= needed
                assert proved_late
                assert rests == 0
            rests = max(0, rests - 1)


@given(times, sizes, st.integers(-(2**40), 2**41))
def test_a_world_that_stays_as_it_is_sees_one_change_at_most(
    times: CopyTimes, needed_bytes: int, free_bytes: int
) -> None:
    machine, ways = DeviceFirstMachine(), list[Way]()
    for _ in range(3 * REST_REFUSED):
        ways.append(machine.choose(needed_bytes=needed_bytes, free_bytes=free_bytes))
        machine.measured(times)
    changes = sum(one is not other for one, other in pairwise(ways))
    assert changes <= 1
    if times.is_late and free_bytes >= ENTRY_ROOM * needed_bytes:
        assert ways[-1] is Way.DEVICE


@given(st.lists(times, max_size=40), seconds, st.floats(0.0, EARLY * 0.999))
def test_a_copy_that_fits_by_the_margin_always_ends_on_the_host(
    before: list[CopyTimes], window_s: float, share: float
) -> None:
    machine = DeviceFirstMachine()
    for each in before:
        take(machine, each)
    take(machine, CopyTimes(copy_s=share * window_s, window_s=window_s), count=STREAK_MAX)
    assert take(machine, count=3) == [Way.HOST] * 3


@pytest.mark.parametrize("snapshots", [100, 1000, 10_000])
def test_where_only_the_copy_from_a_clone_fits_changes_become_rare(snapshots: int) -> None:
    """Many small tensors: to the host late, but as one clone early, so that each way speaks for the other."""
    machine, ways = DeviceFirstMachine(), list[Way]()
    for _ in range(snapshots):
        (way,) = take(machine)
        ways.append(way)
        machine.measured(EARLY_TIMES if way is Way.DEVICE else LATE_TIMES)
    assert sum(way is Way.HOST for way in ways) <= STREAK * (8 + snapshots / STREAK_MAX)
    assert ways.count(Way.DEVICE) > 0.6 * snapshots


def test_times_between_late_and_early_are_neither() -> None:
    between = CopyTimes(copy_s=1.0, window_s=1.0)
    assert (between.is_late, between.is_early) == (False, False)
