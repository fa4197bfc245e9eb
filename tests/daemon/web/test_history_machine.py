"""Speed and stalls from what trainers tell."""

from everstep.daemon.web.history_machine import RECENT_S, RUNS_MAX, SAMPLES_MAX, History, RunHistory, Sums


def sums(steps: int, train_s: float, stall_s: float = 0.0, data_s: float = 0.0) -> Sums:
    return Sums(steps=steps, train_s=train_s, stall_s=stall_s, data_s=data_s)


def test_the_last_minute_counts() -> None:
    history = RunHistory()
    for second in range(0, 400, 5):  # 1 step per second, from 300 s on 4, of which a quarter waits for data
        late = max(0, second - 300)
        history.add(
            float(second), sums(min(second, 300) + 4 * late, second + 1e-9, 0.01 * second, 0.25 * late)
        )
    found = history.recent(396.0)
    assert found is not None
    speed, stall, data = found
    assert (round(speed, 6), round(stall, 6), round(data, 6)) == (4.0, 0.01, 0.25)


def test_nothing_is_said_without_news_or_of_too_little() -> None:
    history = RunHistory()
    assert history.recent(0.0) is None
    history.add(0.0, sums(1, 0.2, 0.2))
    assert history.recent(1.0) is None, "the first boundary alone is all stall"
    history.add(5.0, sums(100, 10.0, 0.5))
    assert history.recent(6.0) == (99 / 9.8, 0.3 / 9.8, 0.0)
    assert history.recent(6.0 + RECENT_S) is None


def test_a_trainer_that_starts_again_begins_anew() -> None:
    history = RunHistory()
    history.add(0.0, sums(1000, 500.0, 100.0))
    history.add(5.0, sums(10, 10.0, 0.1))
    found = history.recent(6.0)
    assert found is not None
    assert found[:2] == (1.0, 0.01)
    assert [share.stall for share in history.shares()] == []
    history.add(10.0, sums(20, 20.0, 0.3))
    assert [(share.at_unix_s, share.stall) for share in history.shares()] == [(10.0, 0.02)]


def test_it_is_bounded() -> None:
    history = History()
    for number in range(RUNS_MAX + 3):
        history.add((0, str(number)), 0.0, sums(1, 6.0))
    assert history.of((0, "0")).recent(1.0) is None
    assert history.of((0, "3")).recent(1.0) is not None
    run = history.of((0, "5"))
    for number in range(2 * SAMPLES_MAX):
        run.add(float(number), sums(number, float(number)))
    assert len(run.shares()) == SAMPLES_MAX - 1
