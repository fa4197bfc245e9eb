"""The searches take their turns, and what a run says of them is what they did."""

import pytest
from soaking import CUT_OFF, FOUND, TURN_MOST_S, Search, Soak
from summary import Summary


class Turns:
    """A search that notes its turns."""

    def __init__(self, *, fails_at: int = -1, error: BaseException | None = None) -> None:
        self.made: list[tuple[float, int]] = []
        self._fails_at, self._error = fails_at, error

    def __call__(self, seconds: float, seed: int) -> Summary:
        self.made.append((seconds, seed))
        if len(self.made) - 1 == self._fails_at:
            if self._error is not None:
                raise self._error
            return Summary(what="turns", count=2, failures=("lost",), seed=seed)
        return Summary(
            what="turns", count=2, failures=(), seed=seed, counted={"seen": 3}, spent_s={"waiting": 0.5}
        )


def soak(*searches: Turns, duration_s: float) -> tuple[Soak, list[str], int]:
    lines: list[str] = []
    made = Soak([Search(f"s{each}", each + 1, run) for each, run in enumerate(searches)], duration_s, seed=7)
    return made, lines, made.run(lines.append)


def test_each_has_its_share_of_the_time() -> None:
    first, second = Turns(), Turns()
    made, lines, status = soak(first, second, duration_s=300)
    assert (first.made, second.made) == ([(100, 7)], [(200, 7)])
    assert (status, made.failures(), made.unfinished()) == (0, [], [])
    assert len(lines) == 2


def test_a_long_run_goes_round_and_never_with_one_seed_twice() -> None:
    first, second = Turns(), Turns()
    made, _, status = soak(first, second, duration_s=10 * TURN_MOST_S)
    assert status == 0
    assert made.rounds == len(first.made) == len(second.made) > 1
    for turns, share in ((first, 1), (second, 2)):
        assert sum(seconds for seconds, _ in turns.made) == pytest.approx(10 * TURN_MOST_S * share / 3)
        assert max(seconds for seconds, _ in turns.made) <= TURN_MOST_S
        assert len({seed for _, seed in turns.made}) == made.rounds
    summary = made.progress[0].summary
    assert summary is not None
    assert (summary.count, summary.seed) == (2 * made.rounds, 7)
    assert summary.notes == f"{3 * made.rounds} seen, {0.5 * made.rounds:.1f} s waiting"


def test_a_search_of_one_turn_has_all_of_its_time_in_it() -> None:
    short, long = Turns(), Turns()
    made = Soak([Search("s", 1, short), Search("l", 1, long, is_one_turn=True)], 4 * TURN_MOST_S, seed=7)
    assert made.run(lambda _: None) == 0
    assert long.made == [(2 * TURN_MOST_S, 7)]
    assert [seconds for seconds, _ in short.made] == [TURN_MOST_S, TURN_MOST_S]
    alone = Turns()
    assert Soak([Search("l", 1, alone, is_one_turn=True)], 3600, seed=7).run(lambda _: None) == 0
    assert alone.made == [(3600, 7)]


def test_what_is_found_is_told_and_the_others_go_on() -> None:
    made, _, status = soak(
        Turns(fails_at=0), Turns(fails_at=0, error=ValueError("odd")), Turns(), duration_s=3
    )
    assert status == FOUND
    assert made.failures()[0] == "s0: lost"
    assert "it broke" in made.failures()[1]
    assert "ValueError: odd" in made.failures()[1]
    assert made.unfinished() == []


def test_an_interrupted_run_says_what_it_had_done() -> None:
    searches = Turns(), Turns(fails_at=0, error=KeyboardInterrupt()), Turns()
    made, lines, status = soak(*searches, duration_s=3)
    assert status == CUT_OFF
    assert len(lines) == 1
    assert [each.summary is not None for each in made.progress] == [True, False, False]
    assert [line.split(":")[0] for line in made.unfinished()] == ["s1", "s2"]
    assert "cut off" in made.unfinished()[0]


def test_what_was_found_before_an_interrupt_decides_the_exit_code() -> None:
    _, _, status = soak(Turns(fails_at=0), Turns(fails_at=0, error=KeyboardInterrupt()), duration_s=3)
    assert status == FOUND
