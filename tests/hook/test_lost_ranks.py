"""What an operator hears of a run whose ranks cannot agree any more, over a real Store."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import cast

import pytest
from rank_pairs import NEVER, DeafListener, own_server, ranks_of_two

from everstep.checkpoint.frequency_types import BoundKind, Limits
from everstep.core.errors import EverstepError, RanksLostError
from everstep.hook.link import Link
from everstep.hook.notice import Preemption
from everstep.hook.pace import Pace
from everstep.hook.ranks import StoreRanks
from everstep.hook.report import CostBook
from everstep.hook.run_checkpoints import RunCheckpoints, RunParts
from everstep.hook.run_end import RunEnd
from everstep.hook.run_state import RunState
from everstep.hook.snapshot import Snapshotter
from everstep.hook.steering_machine import Steering
from everstep.proto import frames

DEADLINE_S = 60.0


class ToldLink:
    """Keeps what the daemon is told."""

    def __init__(self) -> None:
        self.told: list[frames.Request] = []

    def tell(self, frame: frames.Request) -> bool:
        self.told.append(frame)
        return True


class LostListener(DeafListener):
    """Hears that the ranks are lost."""

    def __init__(self) -> None:
        self.lost = SimpleQueue[EverstepError]()

    def ranks_lost(self, error: EverstepError) -> None:
        self.lost.put(error)


@contextmanager
def lost(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[StoreRanks, RunCheckpoints, ToldLink]]:
    """A rank that has trained on for a while since the Store went."""
    server, link = [own_server()], ToldLink()
    with ranks_of_two(monkeypatch, server[0].port) as make:
        ranks, pace, state = make(1, NEVER), Pace(every=NEVER, limits=Limits()), RunState(lambda: None)
        state.step = 7
        end = RunEnd("small", ranks, pace, Preemption(sigterm=False))
        parts = RunParts(
            name="small",
            attempt=3,
            link=cast("Link", link),
            ranks=ranks,
            pace=pace,
            end=end,
            costs=CostBook(),
            state=state,
            snapshotter=cast("Snapshotter", None),
        )
        checkpoints, heard = RunCheckpoints(parts, dict[str, str]), LostListener()
        ranks.start(0, heard)
        server.clear()
        error = heard.lost.get(timeout=DEADLINE_S)
        checkpoints.start()
        checkpoints.ranks_lost(error)
        yield ranks, checkpoints, link
        end.close()


def test_who_asks_for_a_checkpoint_hears_at_once_that_there_will_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for its whole deadline: the ranks are not asked any more."""
    with lost(monkeypatch) as (ranks, checkpoints, link):
        checkpoints.force(frames.Force(number=1))
        text = str(ranks.lost)[: frames.SHORT_TEXT_MAX]
        skipped = frames.Skipped(attempt=3, step=8, reason=frames.SkipReason.ERROR, text=text)
        asked_before, heard, asked_now = link.told
    assert asked_before == skipped, "whoever waits already"
    assert heard == frames.ForceHeard(number=1, attempt=3, step=8)
    assert asked_now == skipped


def test_the_decision_says_that_no_checkpoint_is_taken_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with lost(monkeypatch) as (ranks, *_):
        assert isinstance(ranks.lost, RanksLostError)
        assert ranks.decision.reason == f"no checkpoint is taken: {ranks.lost.message}"
        assert ranks.decision.cost_share is None


def test_ranks_that_are_lost_while_they_are_paused_are_not_paused_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No time ends that: an operator would wait for the end of the pause, and no age of checkpoints would alert."""
    server, heard, now_unix_s = [own_server()], LostListener(), time.time()
    with ranks_of_two(monkeypatch, server[0].port) as make:
        ranks = make(0, NEVER)
        ranks.steer(Steering(paused_until_unix_s=now_unix_s + 86400, pause_asked_unix_s=now_unix_s))
        ranks.start(0, heard)
        assert not any(ranks.is_due(step) for step in range(1, 100))
        assert ranks.decision.kind is BoundKind.PAUSED
        server.clear()
        heard.lost.get(timeout=DEADLINE_S)
        decision = ranks.decision
    assert (decision.kind, decision.paused_until_unix_s) == (BoundKind.LOST, 0.0)
    assert decision.pause_asked_unix_s == 0.0, "this ends no pause: it holds for the next attempt"
