"""A run of one process: what it does is done everywhere, and told once."""

import pytest

from everstep.checkpoint.frequency_types import Limits
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId
from everstep.hook import one_rank
from everstep.hook.end_machine import Ask, Requests
from everstep.hook.one_rank import OneRank
from everstep.hook.pace import Pace


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[str, CheckpointId]] = []
        self.has_time = True

    def end_heard(self, left_s: float) -> None:
        raise AssertionError(left_s)

    def end_confirmed(self) -> None:
        raise AssertionError("one rank is all")

    def ranks_lost(self, error: EverstepError) -> None:
        raise AssertionError(error)

    def saves_last_boundary(self) -> bool:
        return self.has_time

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        self.said.append(("sealed", checkpoint))

    def complete(self, checkpoint: CheckpointId) -> None:
        self.said.append(("complete", checkpoint))

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        assert in_memory
        self.said.append((reason, checkpoint))


def test_a_failure_that_two_threads_notice_is_told_once() -> None:
    ranks, heard = OneRank(Pace(every=1, limits=Limits())), Heard()
    ranks.start(0, heard)
    one, two = CheckpointId(1, 1), CheckpointId(1, 2)
    ranks.failed(one, "the daemon went away")
    ranks.failed(one, "the copy noticed it, too")
    ranks.failed(two, "a device failed")
    assert heard.said == [("the daemon went away", one), ("a device failed", two)]


def test_the_boundary_after_an_announcement_is_the_last_one_saved_or_not() -> None:
    for has_time in (True, False):
        ranks, heard = OneRank(Pace(every=1, limits=Limits())), Heard()
        heard.has_time = has_time
        ranks.start(0, heard)
        assert (ranks.is_due(1), ranks.end_after(1)) == (True, "")
        ranks.ask_for_checkpoint(Ask(end="SIGTERM"))
        assert ranks.end_after(1) == ""  # it was not asked about this one
        assert (ranks.is_due(2), ranks.end_after(2)) == (has_time, "SIGTERM")


def test_who_leaves_its_last_boundary_by_an_exception_ends_with_the_next_one() -> None:
    """Until the end had come training went on, was ended in the middle, and had saved nothing since."""
    ranks = OneRank(Pace(every=10**9, limits=Limits()))
    ranks.start(0, Heard())
    ranks.ask_for_checkpoint(Ask(end="SIGTERM"))
    assert (ranks.is_due(1), ranks.end_after(1)) == (True, "SIGTERM")
    assert (ranks.is_due(2), ranks.end_after(2)) == (True, "SIGTERM")


@pytest.mark.parametrize("end", ["", "SIGTERM"])
def test_what_was_asked_for_is_not_lost_where_its_boundary_is_left_before_it_is_decided(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    pace = Pace(every=10**9, limits=Limits())
    ranks = OneRank(pace)
    ranks.start(0, Heard())
    ranks.ask_for_checkpoint(Ask(end=end))

    def interrupted(start: int, horizon: int) -> tuple[int, ...]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pace, "due", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.is_due(1)
    assert (ranks.is_due(2), ranks.end_after(2)) == (True, end)


def test_a_handler_of_a_signal_may_ask_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the boundary that it interrupts takes what was asked before: on one thread a lock would never open."""

    class Interrupted(Requests):
        @property
        def open(self) -> Ask | None:
            if ranks.is_interrupted:
                ranks.is_interrupted = False
                ranks.ask_for_checkpoint(Ask())
            return super().open

    class Ranks(OneRank):
        is_interrupted = True

    monkeypatch.setattr(one_rank, "Requests", Interrupted)
    ranks = Ranks(Pace(every=10**9, limits=Limits()))
    assert [ranks.is_due(step) for step in (1, 2, 3)] == [False, True, False]
