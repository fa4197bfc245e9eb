"""A rank of two that leaves a boundary by an exception before its checkpoint, which the other one has begun."""

import sys
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from interrupting import Interrupting
from pausing import wait_until
from rank_pairs import NEVER, DeafListener, own_server, ranks_of_two

from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId
from everstep.hook.end_machine import Ask
from everstep.hook.ranks import StoreRanks

DUE = 3
STRIDE = 3
"""Lines between two that are interrupted."""


class Listener(DeafListener):
    """Writes down what will never be complete."""

    def __init__(self) -> None:
        self.incomplete_ones = SimpleQueue[tuple[CheckpointId, str]]()

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        assert not in_memory
        self.incomplete_ones.put((checkpoint, reason))


@pytest.fixture
def pair(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[list[StoreRanks], list[Listener]]]:
    """With a checkpoint every so many boundaries."""
    server = own_server()
    made, heard = list[StoreRanks](), [Listener(), Listener()]
    with ranks_of_two(monkeypatch, server.port) as make:
        for number, listener in enumerate(heard):
            made.append(make(number, getattr(request, "param", DUE)))
            made[-1].start(0, listener)
        yield made, heard
        made.clear()  # a Store's client ends with its last reference


def test_the_next_boundary_knows_it_and_what_is_said_ends_it_for_all(
    pair: tuple[list[StoreRanks], list[Listener]],
) -> None:
    (zero, one), heard = pair
    for step in range(1, DUE):
        assert [each.is_due(step) for each in (zero, one)] == [False, False]
    assert zero.is_due(DUE)  # the other one is interrupted
    left, checkpoint = DUE + 1, CheckpointId(1, DUE)
    assert [each.is_due(left) for each in (zero, one)] == [False, False]
    assert [each.passed(left) for each in (zero, one)] == [
        (DUE,),
        (DUE,),
    ]  # rank 0 knows that it has begun it
    assert one.passed(left) == ()
    zero.sealed(checkpoint)
    one.failed(checkpoint, "left")
    for listener in heard:
        assert listener.incomplete_ones.get(timeout=20) == (checkpoint, "rank 1: left")


@pytest.mark.parametrize("pair", [1], indirect=True)
def test_what_is_passed_moves_nothing_back_with_a_checkpoint_at_each_boundary(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[list[StoreRanks], list[Listener]]
) -> None:
    """One rank commits before the next boundary, the other one after it: both say it of this one, none of its last."""
    (zero, one), heard = pair
    complete = [SimpleQueue[CheckpointId](), SimpleQueue[CheckpointId]()]
    for listener, queue in zip(heard, complete, strict=True):
        monkeypatch.setattr(listener, "complete", queue.put)
    for step in range(1, 6):
        for each in (zero, one):
            assert each.is_due(step)
            assert each.passed(step) == ((step - 1,) if step > 1 else ())
            if step > 1 and each is one:
                one.committed(CheckpointId(1, step - 1))
        zero.committed(CheckpointId(1, step))
        for queue in complete if step > 1 else ():
            assert queue.get(timeout=20) == CheckpointId(1, step - 1)


@pytest.mark.parametrize("pair", [NEVER], indirect=True)
def test_rank_0_may_be_interrupted_at_any_line_as_it_plans(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[list[StoreRanks], list[Listener]]
) -> None:
    """What was asked for comes all the same, and all take the same boundaries."""
    (zero, one), heard = pair
    for listener in heard:
        monkeypatch.setattr(listener, "complete", lambda _: None)
    step, number, interrupts = 0, 1, 0
    while True:
        asked = zero._request_count
        one.ask_for_checkpoint(Ask())
        wait_until(lambda asked=asked: zero._request_count > asked)
        tracer = Interrupting(number)
        sys.settrace(tracer)
        try:
            zero.is_due(step + 1)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
        one.is_due(step + 1)
        for each in (step + 2, step + 3):
            for rank in (zero, one):
                rank.is_due(each)
        step += 3
        due, same = (rank.passed(step + 1) for rank in (zero, one))
        assert due == same != ()
        for each in due:
            for rank in (zero, one):
                rank.committed(CheckpointId(1, each))
        if not tracer.is_done:
            break  # it came to the end
        number += STRIDE
    assert interrupts > 15


def test_what_is_said_before_the_next_boundary_is_of_the_one_that_was_left(
    pair: tuple[list[StoreRanks], list[Listener]],
) -> None:
    """By `run.wait()` or `run.close()`; others looked for it under another name, for ever."""
    (zero, one), heard = pair
    for step in range(1, DUE):
        assert [each.is_due(step) for each in (zero, one)] == [False, False]
    assert zero.is_due(DUE)
    wait_until(lambda: one._horizon.knows(DUE))  # it is interrupted as it waits for the plan
    checkpoint = CheckpointId(1, DUE)
    assert one.passed(DUE + 1) == (DUE,)
    zero.sealed(checkpoint)
    one.failed(checkpoint, "left")
    for listener in heard:
        assert listener.incomplete_ones.get(timeout=20) == (checkpoint, "rank 1: left")


def test_ranks_that_are_lost_end_with_the_boundary_after_sigterm_each_by_itself(
    pair: tuple[list[StoreRanks], list[Listener]],
) -> None:
    (_, one), heard = pair
    heard[1].ranks_lost = SimpleQueue[EverstepError]().put  # pyright: ignore[reportAttributeAccessIssue]
    one._lose("for this test")
    assert not one.is_due(1)
    assert one.end_after(1) == ""
    one.confirm_end(Ask(end="SIGTERM"))
    assert not one.is_due(2)
    assert one.end_after(2) == "SIGTERM"


def test_without_agreement_nothing_is_said(pair: tuple[list[StoreRanks], list[Listener]]) -> None:
    (zero, one), heard = pair
    lost = SimpleQueue[EverstepError]()
    heard[1].ranks_lost = lost.put  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(1, DUE):
        assert [each.is_due(step) for each in (zero, one)] == [False, False]
    one._lose("for this test")
    assert not lost.empty()
    assert not one.is_due(DUE)
    assert one.passed(DUE + 1) == ()
    assert zero.is_due(DUE)
