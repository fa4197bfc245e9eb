from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.store_format import ScrubMark, ScrubPlace
from everstep.core.ids import CheckpointId
from everstep.daemon.devices.scrub_plan import (
    GIVE_WAY_S_MAX,
    NEWEST_WITHIN_S,
    Scrub,
    ScrubPace,
    first_mark,
    is_behind,
    is_due,
    is_newest_due,
    late_s,
    patience_s,
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
    store_id = f"{store:032x}"
    mark = first_mark(min(days) * 86400, store_id)
    scrubbed: set[int] = set()
    for day in sorted(days):
        now_unix_s = day * 86400
        if is_due(mark, now_unix_s, WEEK_S, store_id):
            mark = ScrubMark(store_id=store_id, started_unix_s=now_unix_s, ended_unix_s=now_unix_s)
            assert scrub_period(now_unix_s, WEEK_S, store_id) not in scrubbed
            scrubbed.add(scrub_period(now_unix_s, WEEK_S, store_id))
    first = scrub_period(min(days) * 86400, WEEK_S, store_id)
    assert scrubbed == {scrub_period(day * 86400, WEEK_S, store_id) for day in days} - {first}


@given(st.integers(0, 1000), st.floats(0, 1e10))
def test_nodes_that_start_for_the_first_time_together_do_not_read_together(
    seed: int, now_unix_s: float
) -> None:
    """Each waits for its own time of the week."""
    random, waits_s = Random(seed), list[float]()
    for _ in range(100):
        store_id = random.randbytes(16).hex()
        mark = first_mark(now_unix_s, store_id)
        assert not is_due(mark, now_unix_s, WEEK_S, store_id)
        begin_unix_s = period_begin_unix_s(scrub_period(now_unix_s, WEEK_S, store_id) + 1, WEEK_S, store_id)
        assert is_due(mark, begin_unix_s + 1, WEEK_S, store_id)
        waits_s.append(begin_unix_s - now_unix_s)
    days = Counter(int(wait_s // 86400) for wait_s in waits_s)
    assert max(days.values()) < len(waits_s) / 2


def test_a_scrub_that_was_cut_off_is_due_whenever_it_began() -> None:
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


CHUNK = 16 << 20


@given(st.integers(1, 300), st.floats(1, 1e5), st.floats(0.001, 10))
def test_what_waits_as_long_as_it_may_is_read_in_time(chunks: int, promised_s: float, own_s: float) -> None:
    """Somebody writes without a pause, so each chunk waits its whole patience, then moves and rests."""
    now_s = 0.0
    for done in range(chunks):
        left = (chunks - done) * CHUNK
        wait = patience_s(CHUNK, left, promised_s - now_s, own_s)
        assert 0 <= wait <= GIVE_WAY_S_MAX
        now_s += wait + own_s
    assert now_s <= max(promised_s, chunks * own_s) * (1 + 1e-9)
    # What cannot be in time is known before the first byte is late, by how much.
    late = late_s(chunks * CHUNK, own_s / CHUNK, promised_s)
    assert abs(late - max(chunks * own_s - promised_s, 0.0)) <= 1e-6 * chunks * own_s


def test_nobody_hurries_who_has_promised_nothing() -> None:
    assert patience_s(CHUNK, 1 << 50, None, 100.0) == GIVE_WAY_S_MAX
    assert late_s(1 << 50, 1.0, None) == 0.0


def test_the_pace_of_a_scrub_is_that_of_its_slowest_device() -> None:
    pace = ScrubPace([{"a": 4 * CHUNK, "b": 2 * CHUNK}, {"a": 2 * CHUNK}], due_unix_s=1000.0)
    assert (pace.late_s(990.0), pace.patience_s("a", CHUNK, 940.0)) == (0.0, 10.0)
    pace.moved("a", CHUNK, 4.0)
    pace.moved("b", CHUNK, 1.0)
    assert pace.late_s(990.0) == 5 * 4.0 - 10.0
    assert pace.patience_s("a", CHUNK, 950.0) == 50.0 / 5 - 4.0
    pace.passed()  # damaged after its first chunk: the rest was not read
    assert pace.late_s(990.0) == 0.0
    assert pace.late_s(995.0) == 2 * 4.0 - 5.0
    pace.passed()
    assert pace.late_s(2000.0) == 0.0


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


@given(st.lists(st.floats(0, 7200), min_size=1, max_size=60))
def test_a_newest_checkpoint_has_half_of_its_hour_left_when_it_is_begun(gaps_s: list[float]) -> None:
    """Saved at any times, looked at once a minute: whatever stays the newest is begun in time, one in half an hour."""
    commits = [sum(gaps_s[: end + 1]) for end in range(len(gaps_s))]
    began_s, read = 0.0, -1
    for minute in range(int(commits[-1] // 60) + 62):
        now_s = 60.0 * minute
        newest = sum(commit_s <= now_s for commit_s in commits) - 1
        if newest > read and is_newest_due(began_s, now_s):
            assert now_s - began_s >= NEWEST_WITHIN_S / 2
            began_s, read = now_s, newest
        if newest >= 0 and now_s >= commits[newest] + NEWEST_WITHIN_S / 2 + 60:
            assert read == newest


def test_a_newest_checkpoint_is_due_where_none_was_read_or_the_clock_was_set_back() -> None:
    assert is_newest_due(None, 0.0)
    assert is_newest_due(1000.0, 999.0)
    assert not is_newest_due(1000.0, 1000.0)
