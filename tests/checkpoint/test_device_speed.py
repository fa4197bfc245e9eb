import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.device_speed import (
    FORGET_AFTER_DEALS,
    MEASURED_BYTES_MIN,
    SLOW_AFTER_S,
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


def test_what_is_too_small_to_measure_is_left_out() -> None:
    meter = SpeedMeter()
    assert meter.add(MEASURED_BYTES_MIN - 1, 1.0, 1.0, ()) is None
    assert meter.add(SIZE, 0.0, 1.0, ()) is None
    assert meter.bytes_per_s is None


def test_a_device_that_falls_below_a_third_of_its_past_is_slow_after_ten_seconds() -> None:
    meter = SpeedMeter()
    assert run(meter, 200, 60) == []
    assert run(meter, 50, SLOW_AFTER_S - 2) == []
    assert run(meter, 50, 10) == [SpeedChange.BECAME_SLOW]
    assert "its own past" in meter.slow_reason
    assert run(meter, 50, 30) == []
    assert run(meter, 190, 10) == [SpeedChange.RECOVERED]
    assert meter.slow_reason == ""


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
        meter.dealt(got_some=False)
    assert meter.bytes_per_s is not None
    meter.dealt(got_some=True)
    for _ in range(FORGET_AFTER_DEALS):
        meter.dealt(got_some=False)
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
        book.dealt({"a": 1, "c": 0})
    assert book.reading("a").bytes_per_s == SIZE
    assert book.reading("c").bytes_per_s is None
