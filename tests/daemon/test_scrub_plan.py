from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.store_format import ScrubMark, ScrubPlace
from everstep.core.ids import CheckpointId
from everstep.daemon.scrub_plan import (
    Scrub,
    is_behind,
    is_due,
    period_begin_unix_s,
    rest_s,
    scrub_period,
)

WEEK_S = 7 * 86400.0
STORE = "8" + 31 * "0"


def test_a_scrub_begins_at_a_time_of_the_week_that_the_store_decides() -> None:
    assert period_begin_unix_s(3, WEEK_S, STORE) == 3.5 * WEEK_S
    assert scrub_period(3.5 * WEEK_S - 1, WEEK_S, STORE) == 2
    assert scrub_period(3.5 * WEEK_S, WEEK_S, STORE) == 3
    assert period_begin_unix_s(3, WEEK_S, 32 * "0") == 3 * WEEK_S


@given(
    st.floats(0, 1e11), st.floats(1, 1e9), st.text("0123456789abcdef", min_size=32, max_size=32), st.data()
)
def test_every_moment_lies_in_its_period(
    now_unix_s: float, every_s: float, store_id: str, data: st.DataObject
) -> None:
    period = scrub_period(now_unix_s, every_s, store_id)
    rounding_s = 1e-3
    assert period_begin_unix_s(period, every_s, store_id) <= now_unix_s + rounding_s
    assert now_unix_s < period_begin_unix_s(period + 1, every_s, store_id) + rounding_s
    later = data.draw(st.floats(now_unix_s, 2e11))
    assert scrub_period(later, every_s, store_id) >= period


@given(st.lists(st.floats(0, 70), min_size=1), st.integers(0, 2**128 - 1))
def test_each_period_in_which_the_store_is_open_at_all_has_a_scrub(days: list[float], store: int) -> None:
    """Whenever it is opened, and for however short: asked once at the beginning of each life."""
    mark, store_id = None, f"{store:032x}"
    scrubbed: set[int] = set()
    for day in sorted(days):
        now_unix_s = day * 86400
        if is_due(mark, now_unix_s, WEEK_S, store_id):
            mark = ScrubMark(store_id=store_id, started_unix_s=now_unix_s, ended_unix_s=now_unix_s)
            assert scrub_period(now_unix_s, WEEK_S, store_id) not in scrubbed
            scrubbed.add(scrub_period(now_unix_s, WEEK_S, store_id))
    assert scrubbed == {scrub_period(day * 86400, WEEK_S, store_id) for day in days}


def test_a_scrub_that_was_cut_off_is_due_whenever_it_began() -> None:
    assert is_due(None, 0.0, WEEK_S, STORE)
    assert is_due(ScrubMark(store_id=STORE, started_unix_s=10.0), 11.0, WEEK_S, STORE)
    assert not is_due(ScrubMark(store_id=STORE, started_unix_s=10.0, ended_unix_s=11.0), 12.0, WEEK_S, STORE)


def test_a_clock_that_was_far_ahead_once_does_not_end_all_scrubs() -> None:
    ahead = ScrubMark(store_id=STORE, started_unix_s=1e10, ended_unix_s=1e10)
    assert is_due(ahead, 1.7e9, WEEK_S, STORE)


PLACES = st.builds(
    ScrubPlace,
    owner_uid=st.integers(0, 2),
    run_id=st.sampled_from(["a" * 32, "b" * 32]),
    checkpoint=st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 3)),
)


@given(st.lists(PLACES, unique_by=lambda each: each.order), st.integers(0))
def test_what_was_not_passed_is_read_once_however_often_it_is_cut_off(
    places: list[ScrubPlace], cut: int
) -> None:
    mark, read = ScrubMark(store_id=STORE, started_unix_s=0.0), list[ScrubPlace]()
    while rest := sorted((each for each in places if not is_behind(mark, each)), key=lambda each: each.order):
        for place in rest[: 1 + cut % len(rest)]:
            mark = ScrubMark(store_id=STORE, started_unix_s=0.0, place=place)
            read.append(place)
    assert read == sorted(places, key=lambda each: each.order)


def test_what_is_committed_meanwhile_is_left_to_the_next_scrub() -> None:
    place = ScrubPlace(owner_uid=0, run_id="a" * 32, checkpoint=CheckpointId(2, 5))
    mark = ScrubMark(store_id=STORE, started_unix_s=0.0, place=place)
    for checkpoint, behind in (
        (CheckpointId(2, 6), True),
        (CheckpointId(3, 0), True),
        (CheckpointId(2, 4), False),
    ):
        assert is_behind(mark, ScrubPlace(owner_uid=0, run_id="a" * 32, checkpoint=checkpoint)) is behind


@given(st.floats(0, 1e4), st.floats(0.001, 1))
def test_the_share_is_that_of_the_time(busy_s: float, share: float) -> None:
    rest = rest_s(busy_s, share)
    assert rest >= 0
    assert abs((busy_s + rest) * share - busy_s) <= 1e-6 * max(busy_s, 1)


def test_a_scrub_counts_what_was_read() -> None:
    scrub = Scrub(started_unix_s=5.0, planned_count=3)
    scrub = scrub.read("a@1.1", 10, is_intact=True).read("a@1.2", 20, is_intact=False).ended(9.0)
    assert scrub == Scrub(
        started_unix_s=5.0,
        planned_count=3,
        ended_unix_s=9.0,
        checkpoint_count=2,
        size_bytes=30,
        damaged=("a@1.2",),
    )
