from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.scrub_plan import Scrub, period_begin_unix_s, rest_s, scrub_period

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
