"""Events in, steps out."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.recorder_machine import STEPS_MIN, Budget, Recorder, Step, warmup_for


def run_epoch(recorder: Recorder, steps: list[tuple[float, float]], now_s: float = 0.0) -> float:
    """Let a loop of (wait, body) pass; return when it ended."""
    recorder.began()
    for wait_s, body_s in steps:
        recorder.asked(now_s)
        recorder.handed(now_s + wait_s)
        now_s += wait_s + body_s
    recorder.asked(now_s)
    recorder.ended()
    return now_s


def test_warmup_does_not_count_and_the_wait_for_the_end_belongs_to_nothing() -> None:
    recorder = Recorder(Budget(steps=10, warmup=2))
    run_epoch(recorder, [(9.0, 9.0), (8.0, 8.0), (0.5, 1.0), (0.25, 2.0)])
    assert recorder.steps == [Step(0.5, 1.0), Step(0.25, 2.0)]
    assert (recorder.enough, recorder.usable, recorder.longest_epoch) == (False, False, 4)


def test_epochs_add_up_and_each_warms_up_again() -> None:
    recorder = Recorder(Budget(steps=6, warmup=1))
    end_s = run_epoch(recorder, [(1.0, 1.0)] * 4)
    assert len(recorder.steps) == 3
    run_epoch(recorder, [(1.0, 1.0)] * 9, end_s)
    assert len(recorder.steps) == 6
    assert recorder.enough


def test_seconds_are_enough_once_there_are_a_few_steps() -> None:
    recorder = Recorder(Budget(steps=100, warmup=0, seconds=5.0))
    run_epoch(recorder, [(1.0, 2.0)] * 3)
    assert not recorder.enough
    run_epoch(recorder, [(1.0, 2.0)] * 9)
    assert recorder.enough
    assert len(recorder.steps) == STEPS_MIN


def test_a_loop_that_was_left_drops_its_last_step() -> None:
    recorder = Recorder(Budget(steps=10, warmup=0))
    recorder.began()
    recorder.asked(0.0)
    recorder.handed(1.0)
    recorder.began()
    assert recorder.steps == []


@given(st.integers(0, 5), st.lists(st.integers(0, 12), max_size=6), st.integers(STEPS_MIN, 20))
def test_each_epoch_gives_what_is_beyond_its_warmup(warmup: int, epochs: list[int], steps: int) -> None:
    recorder = Recorder(Budget(steps=steps, warmup=warmup))
    firsts = 0
    now_s = 0.0
    for length in epochs:
        recorder.began()
        for _ in range(length):
            firsts += recorder.next_is_first
            recorder.asked(now_s)
            recorder.handed(now_s)
            now_s += 1.0
        recorder.asked(now_s)
        recorder.ended()
    assert len(recorder.steps) == min(steps, sum(max(0, length - warmup) for length in epochs))
    assert firsts == sum(length > warmup for length in epochs)


def test_warmup_is_what_may_be_prepared_ahead_and_at_most_a_third_of_the_epoch() -> None:
    assert warmup_for(workers=0, prefetched=0, epoch_batches=None) == 3
    assert warmup_for(workers=4, prefetched=8, epoch_batches=1000) == 15
    assert warmup_for(workers=4, prefetched=8, epoch_batches=12) == 4
    assert warmup_for(workers=64, prefetched=512, epoch_batches=None) == 67
