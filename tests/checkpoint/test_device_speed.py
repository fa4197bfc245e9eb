import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.device_speed import (
    BUSY_S_MIN,
    FORGET_AFTER_DEALS,
    HISTORY_S,
    MEASURED_BYTES_MIN,
    SAMPLE_S_MIN,
    SLOW_AFTER_S,
    SMALL_S_MIN,
    SpeedBook,
    SpeedChange,
    SpeedMeter,
)

MB = 10**6
SIZE = 100 * MB
assert SIZE > MEASURED_BYTES_MIN
IDLE_S = 1000.0
CLOCK = itertools.count(1)
"""Transfers far apart from each other."""


def run(
    meter: SpeedMeter, speed_mb: float, busy_s: float, peers_mb: tuple[float, ...] = ()
) -> list[SpeedChange]:
    """Let transfers of SIZE take that long altogether; return what they changed."""
    count = max(1, round(busy_s * speed_mb * MB / SIZE))
    each_s = SIZE / (speed_mb * MB)
    changes = [
        meter.add(SIZE, each_s, next(CLOCK) * IDLE_S, [peer * MB for peer in peers_mb]) for _ in range(count)
    ]
    return [change for change in changes if change is not None]


@given(st.floats(1, 10_000), st.integers(1, 20))
def test_a_steady_device_is_as_fast_as_it_is_and_never_slow(speed_mb: float, count: int) -> None:
    meter = SpeedMeter()
    assert meter.bytes_per_s is None
    for _ in range(count):
        assert meter.add(SIZE, SIZE / (speed_mb * MB), next(CLOCK) * IDLE_S, ()) is None
    assert meter.bytes_per_s == pytest.approx(speed_mb * MB)
    assert meter.slow_reason == ""


@given(st.integers(1, 4), st.floats(1, 1000))
def test_transfers_at_the_same_time_are_counted_as_one_device(lanes: int, speed_mb: float) -> None:
    """Each takes `lanes` times as long, and one ends every share of that."""
    meter = SpeedMeter()
    share_s = SIZE / (speed_mb * MB)
    for number in range(1, 60):
        meter.add(SIZE, min(number, lanes) * share_s, number * share_s, ())
    assert meter.bytes_per_s == pytest.approx(speed_mb * MB, rel=1e-3)


def test_what_tells_nothing_is_left_out() -> None:
    meter = SpeedMeter()
    assert meter.add(SIZE, 0.0, 1.0, ()) is None
    assert meter.add(0, 1.0, 1.0, ()) is None
    assert meter.bytes_per_s is None


@given(st.integers(1, MEASURED_BYTES_MIN - 1), st.floats(0.001, 10_000))
def test_small_transfers_count_when_they_are_enough_together(size: int, speed_mb: float) -> None:
    meter, moved, busy_s = SpeedMeter(), 0, 0.0
    each_s = max(size / (speed_mb * MB), BUSY_S_MIN)
    for _ in range(10_000):
        assert meter.bytes_per_s is None
        assert meter.at(size) == (pytest.approx(moved / busy_s) if moved else None)
        moved, busy_s = moved + size, busy_s + each_s
        meter.add(size, each_s, next(CLOCK) * IDLE_S, ())
        if moved >= MEASURED_BYTES_MIN or busy_s >= SMALL_S_MIN:
            break
    else:
        return  # bytes by bytes
    assert meter.bytes_per_s == pytest.approx(moved / busy_s)


def test_small_and_large_transfers_are_measured_apart() -> None:
    """A run of tiny states beside one of large states makes no drive slow, and hides none that is."""
    meter = SpeedMeter()
    assert run(meter, 2000, 60) == []
    for _ in range(300):
        assert meter.add(4096, 0.1, next(CLOCK) * IDLE_S, ()) is None
    assert meter.bytes_per_s == pytest.approx(40960)
    assert (meter.at(4096), meter.at(SIZE)) == (pytest.approx(40960), pytest.approx(2000 * MB))
    assert run(meter, 100, 20) == [SpeedChange.BECAME_SLOW]
    assert meter.add(4096, 0.1, next(CLOCK) * IDLE_S, ()) is None
    assert "its own past 2000 MB/s" in meter.slow_reason


def test_small_transfers_are_compared_with_those_of_peers() -> None:
    meter = SpeedMeter()
    changes = [meter.add(2 * MB, 2.0, next(CLOCK) * IDLE_S, (100.0 * MB, 90.0 * MB)) for _ in range(5)]
    assert changes == [None] * 4 + [SpeedChange.BECAME_SLOW]
    assert meter.slow_reason == "writes 1.0 MB/s, its peers 95 MB/s; it gets fewer segments"
    back = [meter.add(2 * MB, 0.02, next(CLOCK) * IDLE_S, (100.0 * MB,)) for _ in range(60)]
    assert [change for change in back if change] == [SpeedChange.RECOVERED]


def test_small_segments_are_dealt_alike_but_to_a_slow_device() -> None:
    """As soon as that is known, however little is known of the others."""
    book = SpeedBook(["a", "b", "c"])
    assert book.at("a", MB) is None
    book.measured("a", MB, 0.01, 1.0)
    book.measured("b", MB, 0.02, 2.0)
    assert [book.at(each, MB) for each in "abc"] == [pytest.approx(75 * MB)] * 3
    book.measured("c", 4096, 0.9, 4.0)
    assert [book.at(each, MB) for each in "abc"] == [50 * MB] * 3, (
        "one that took long may have waited for a core"
    )
    book.measured("c", MB, 2.0, 7.0)
    assert [book.at(each, MB) for each in "abc"] == [50 * MB, 50 * MB, pytest.approx((MB + 4096) / 2.9)]
    assert [book.at(each, SIZE) for each in "abc"] == [None] * 3


def test_one_that_gets_nothing_because_it_seems_slow_is_asked_again_and_then_slow_or_not() -> None:
    """It would take for ever to be busy for ten seconds."""
    for again_s, changed in ((2.0, SpeedChange.BECAME_SLOW), (0.02, None)):
        meter, peers = SpeedMeter(), (100.0 * MB,)
        assert meter.add(2 * MB, 2.0, 100.0, peers) is None
        meter.dealt(2 * MB, 100.0 + SLOW_AFTER_S - 0.1, peers, got_some=False)
        assert meter.bytes_per_s == MB, "it might only have paused"
        meter.dealt(2 * MB, 100.0 + SLOW_AFTER_S, peers, got_some=False)
        assert meter.bytes_per_s is None
        sizes = (2 * MB, 3 * MB) if changed is None else (2 * MB,)
        assert [meter.add(size, again_s, 200.0 + size, peers) for size in sizes][-1] is changed
        assert ("its peers 100 MB/s" in meter.slow_reason) == (changed is not None)
        meter.dealt(2 * MB, 9999999.0, peers, got_some=False)
        assert meter.bytes_per_s is not None, "from now on it is tried again by the count of deals"


def test_a_device_that_falls_below_a_third_of_its_past_is_slow_after_ten_seconds() -> None:
    meter = SpeedMeter()
    assert run(meter, 200, 60) == []
    assert run(meter, 50, SLOW_AFTER_S - 2) == []
    assert run(meter, 50, 10) == [SpeedChange.BECAME_SLOW]
    assert "its own past" in meter.slow_reason
    assert run(meter, 50, 30) == []
    assert run(meter, 190, 10) == [SpeedChange.RECOVERED]
    assert meter.slow_reason == ""


def falling(meter: SpeedMeter, speed_mb: float, size: int, limit_s: float) -> float | None:
    """Return after how long at this speed a device is called slow, or None within the limit."""
    busy_s = 0.0
    while busy_s < limit_s:
        each_s = size / (speed_mb * MB)
        busy_s += each_s
        if meter.add(size, each_s, next(CLOCK) * IDLE_S, ()) is SpeedChange.BECAME_SLOW:
            return busy_s
    return None


@settings(deadline=None)
@given(
    past_s=st.floats(SLOW_AFTER_S, 900),
    factor=st.floats(3.2, 50),
    sizes_mb=st.tuples(st.integers(50, 400), st.integers(50, 400)),
    slow_mb=st.floats(20, 300),
)
def test_whoever_turns_slow_is_called_so_in_ten_seconds_and_well_again_later(
    past_s: float, factor: float, sizes_mb: tuple[int, int], slow_mb: float
) -> None:
    """However short or long its past was."""
    meter, before, after = SpeedMeter(), sizes_mb[0] * MB, sizes_mb[1] * MB
    fast_mb = factor * slow_mb
    assert falling(meter, fast_mb, before, past_s) is None
    found_s = falling(meter, slow_mb, after, 3 * SLOW_AFTER_S + 60)
    assert found_s is not None
    one_s = after / (slow_mb * MB)
    assert -SAMPLE_S_MIN <= found_s - SLOW_AFTER_S <= one_s + 1e-6, (
        "the first sample may hold the end of the past"
    )
    assert "its own past" in meter.slow_reason
    assert run(meter, fast_mb, 3 * SLOW_AFTER_S) == [SpeedChange.RECOVERED]


@pytest.mark.parametrize("factor", [3.2, 5, 20])
def test_one_that_is_slow_for_good_stays_slow(factor: float) -> None:
    """Not until it looks normal to itself: a restart gives it a new past."""
    meter = SpeedMeter()
    run(meter, 200, 60)
    assert run(meter, 200 / factor, 3 * HISTORY_S) == [SpeedChange.BECAME_SLOW]
    assert meter.slow_reason
    assert run(SpeedMeter(), 200 / factor, 3 * HISTORY_S) == []


@given(st.lists(st.floats(70, 200), min_size=1, max_size=200))
def test_what_stays_within_a_factor_of_three_is_never_slow(speeds_mb: list[float]) -> None:
    meter = SpeedMeter()
    assert [change for speed in speeds_mb for change in run(meter, speed, 1)] == []


@given(st.floats(0.5, SLOW_AFTER_S - 0.5))
def test_a_transfer_that_hangs_for_less_than_ten_seconds_makes_no_device_slow(hang_s: float) -> None:
    meter = SpeedMeter()
    run(meter, 200, 60)
    assert meter.add(SIZE, hang_s, next(CLOCK) * IDLE_S, ()) is None
    assert run(meter, 200, 3 * SLOW_AFTER_S) == []


def test_many_small_transfers_are_judged_like_few_large_ones() -> None:
    """Of 4 MiB, two at a time: every second one ends right after another."""
    meter, end_s = SpeedMeter(), 0.0

    def pairs(speed_mb: float, busy_s: float) -> list[SpeedChange]:
        nonlocal end_s
        changes: list[SpeedChange | None] = []
        pair_s = 2 * MEASURED_BYTES_MIN / (speed_mb * MB)
        for _ in range(round(busy_s / pair_s)):
            end_s += pair_s
            changes += [meter.add(MEASURED_BYTES_MIN, pair_s, end_s + late, ()) for late in (0.0, 1e-5)]
        return [change for change in changes if change is not None]

    assert pairs(3000, 20) == []
    assert pairs(600, SLOW_AFTER_S - 0.1) == []
    assert pairs(600, 0.5) == [SpeedChange.BECAME_SLOW]
    assert pairs(3000, 5) == [SpeedChange.RECOVERED]


def test_a_device_that_was_always_slower_than_its_peers_is_slow() -> None:
    meter = SpeedMeter()
    assert run(meter, 40, 12, peers_mb=(200, 210, 10)) == [SpeedChange.BECAME_SLOW]
    assert meter.slow_reason == "writes 40 MB/s, its peers 200 MB/s; it gets fewer segments"
    assert run(SpeedMeter(), 100, 60, peers_mb=(200, 210)) == []


def test_a_short_pause_is_no_verdict_and_starts_anew() -> None:
    meter = SpeedMeter()
    run(meter, 200, 60)
    for _ in range(3):
        assert run(meter, 20, 6) == []
        assert run(meter, 200, 10) == []


def test_the_average_follows_a_change_within_few_transfers() -> None:
    meter = SpeedMeter()
    run(meter, 1000, 60)
    run(meter, 200, 1)
    assert meter.bytes_per_s is not None
    assert meter.bytes_per_s < 400 * MB


def test_a_device_that_gets_nothing_is_tried_again_one_day() -> None:
    meter = SpeedMeter()
    run(meter, 40, 12, peers_mb=(200,))
    for _ in range(FORGET_AFTER_DEALS - 1):
        meter.dealt(SIZE, 0.0, (), got_some=False)
    assert meter.bytes_per_s is not None
    meter.dealt(SIZE, 0.0, (), got_some=True)
    for _ in range(FORGET_AFTER_DEALS):
        meter.dealt(SIZE, 0.0, (), got_some=False)
    assert meter.bytes_per_s is None
    assert meter.slow_reason


def test_a_book_knows_each_device_and_what_waits_for_it() -> None:
    book = SpeedBook(["a", "b", "c"])
    book.measured("a", SIZE, 1.0, 1.0)
    book.measured("b", SIZE, 1.0, 1.0)
    assert (book.reading("a").bytes_per_s, book.reading("c").bytes_per_s) == (SIZE, None)
    changes = [book.measured("c", SIZE, 5.0, 5.0 * number) for number in (1, 2, 3)]
    assert SpeedChange.BECAME_SLOW in changes
    assert "its peers" in book.reading("c").slow_reason
    book.queue("a", 70)
    book.queue("a", -30)
    assert (book.backlog_bytes("a"), book.backlog_bytes("b")) == (40, 0)
    for _ in range(FORGET_AFTER_DEALS):
        book.dealt({"a": 1, "c": 0}, SIZE, 0.0)
    assert book.reading("a").bytes_per_s == SIZE
    assert book.reading("c").bytes_per_s is None
