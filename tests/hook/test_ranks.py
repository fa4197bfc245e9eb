"""How the ranks of one run agree over a real Store: two of them in one process."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol, cast

import pytest
import torch.distributed as dist
from pausing import wait_until
from rank_pairs import NEVER, DeafListener, own_server, ranks_of_two
from torch._C._distributed_c10d import Store, TCPStore

from everstep.checkpoint.frequency_plan import DEADLINE_ROOM
from everstep.checkpoint.frequency_types import BoundKind, Limits
from everstep.core.errors import ConfigError, EverstepError, RanksLostError
from everstep.core.ids import CheckpointId
from everstep.hook import notice as notice_module
from everstep.hook import rank_beats, run_end, silence_machine, sweep_machine
from everstep.hook import ranks as ranks_module
from everstep.hook.end_machine import Ask, Notice, Progress
from everstep.hook.notice import CONFIRM_S, Preemption
from everstep.hook.pace import Pace
from everstep.hook.ranks import LOOK_S, StoreRanks
from everstep.hook.run_end import RunEnd
from everstep.hook.steering_machine import Steering

DEADLINE_S = 20.0


class Make(Protocol):
    """Makes one rank of two."""

    def __call__(self, number: int, *, every: int = NEVER) -> StoreRanks: ...


class Listener(DeafListener):
    """Has time for a last checkpoint, or not; nothing of these tests is ever sealed."""

    def __init__(
        self,
        *,
        has_time: bool = True,
        on_confirmed: Callable[[], None] = lambda: None,
        on_end: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._has_time, self._on_confirmed, self._on_end = has_time, on_confirmed, on_end
        self.confirmed, self.lost = threading.Event(), SimpleQueue[EverstepError]()
        self.left_s: list[float] = []
        self.known_when_asked: list[float] = []

    def ranks_lost(self, error: EverstepError) -> None:
        self.lost.put(error)

    def end_heard(self, left_s: float) -> None:
        self.left_s.append(left_s)
        self._on_end(left_s)

    def end_confirmed(self) -> None:
        self._on_confirmed()
        self.confirmed.set()

    def saves_last_boundary(self) -> bool:
        self.known_when_asked = list(self.left_s)
        return self._has_time


@pytest.fixture
def server() -> Iterator[list[TCPStore]]:
    """The Store that torchrun's agent would serve; who empties the list ends it."""
    made = [own_server()]
    yield made
    made.clear()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, server: list[TCPStore]) -> Iterator[Make]:
    """Make one rank of two."""
    with ranks_of_two(monkeypatch, server[0].port) as make:
        yield lambda number, *, every=NEVER: make(number, every)


def both(rank: Make) -> tuple[list[StoreRanks], list[Listener]]:
    pair, heard = [rank(0), rank(1)], [Listener(), Listener()]
    for each, listener in zip(pair, heard, strict=True):
        each.start(0, listener)
    return pair, heard


def last_boundary(pair: list[StoreRanks]) -> tuple[str, bool]:
    """Pass boundaries until one is the last: return why, and whether it is saved, the same for both ranks."""
    until_s, step = time.monotonic() + DEADLINE_S, 0
    while time.monotonic() < until_s:
        step += 1
        saved = {each.is_due(step) for each in pair}
        ends = {each.end_after(step) for each in pair}
        if ends != {""}:
            assert len(ends) == len(saved) == 1
            return ends.pop(), saved.pop()
    raise AssertionError("no boundary is the last one")


def test_ranks_that_are_all_told_end_with_the_same_boundary(rank: Make) -> None:
    pair, heard = both(rank)
    for each in pair:
        each.confirm_end(Ask(end="SIGTERM"))
    assert last_boundary(pair) == ("SIGTERM", True)
    assert all(listener.confirmed.wait(DEADLINE_S) for listener in heard)


def test_all_that_were_told_end_though_the_store_goes(rank: Make, server: list[TCPStore]) -> None:
    pair, heard = both(rank)
    for each in pair:
        each.confirm_end(Ask(end="SIGTERM"))
    assert all(listener.confirmed.wait(DEADLINE_S) for listener in heard)
    server.clear()
    assert all(listener.lost.get(timeout=DEADLINE_S) for listener in heard)
    assert {each.end_after(1) for each in pair} == {"SIGTERM"}


def test_one_that_is_told_alone_hears_no_confirmation_and_all_go_on(rank: Make) -> None:
    pair, heard = both(rank)
    pair[1].confirm_end(Ask(end="SIGTERM"))
    for step in range(1, 50):
        assert {each.is_due(step) for each in pair} == {False}
        assert {each.end_after(step) for each in pair} == {""}
    assert not any(listener.confirmed.is_set() for listener in heard)


@pytest.mark.parametrize("has_time", [True, False])
def test_rank_0_says_for_all_whether_the_last_boundary_is_saved(rank: Make, has_time: bool) -> None:
    pair = [rank(0), rank(1)]
    for each, believes in zip(pair, (has_time, not has_time), strict=True):
        each.start(0, Listener(has_time=believes))
    pair[1].ask_for_checkpoint(Ask(end="the notice"))
    assert last_boundary(pair) == ("the notice", has_time)


@pytest.mark.parametrize("has_time", [True, False])
def test_rank_0_says_for_all_whether_it_is_saved_after_all(rank: Make, has_time: bool) -> None:
    pair, until_s = [rank(0), rank(1)], time.monotonic() + DEADLINE_S
    for each in pair:
        each.start(0, Listener())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(pair[1].saves_after_all, not has_time, until_s)
        assert pair[0].saves_after_all(has_time, until_s) is has_time
        assert waiting.result() is has_time
    assert time.monotonic() < until_s


def test_who_hears_nothing_from_rank_0_in_time_saves_nothing_after_all(rank: Make) -> None:
    pair, _ = both(rank)
    until_s = time.monotonic() + 0.3
    assert pair[1].saves_after_all(True, until_s) is False
    assert until_s <= time.monotonic() < until_s + LOOK_S
    assert pair[1].saves_after_all(True, until_s) is False, "nothing is left"
    pair[0].close()
    until_s = time.monotonic() + 600
    assert pair[1].saves_after_all(True, until_s) is False, "nobody is there who would say it"


def test_a_request_after_a_notice_leaves_the_notice(rank: Make) -> None:
    """Of any rank, in the same moment."""
    pair = [rank(0), rank(1)]
    pair[1].ask_for_checkpoint(Ask(end="the notice"))
    pair[0].ask_for_checkpoint(Ask())
    pair[1].ask_for_checkpoint(Ask())
    for each in pair:
        each.start(0, Listener())
    assert last_boundary(pair) == ("the notice", True)


# -- how long is left


@pytest.mark.parametrize("by_signal", [False, True])
def test_rank_0_knows_the_least_time_left_when_it_decides(rank: Make, by_signal: bool) -> None:
    """It came to another rank: a notice of its node, or the shorter grace of its SIGTERM."""
    pair, heard = both(rank)
    began_s = time.monotonic()
    if by_signal:
        pair[0].ends_in(3000.0)
        pair[0].confirm_end(Ask(end="SIGTERM"))
    pair[1].ends_in(1000.0)
    pair[1].confirm_end(Ask(end="SIGTERM")) if by_signal else pair[1].ask_for_checkpoint(
        Ask(end="the notice")
    )
    last_boundary(pair)
    (left_s,) = heard[0].known_when_asked
    assert 1000.0 - (time.monotonic() - began_s) <= left_s <= 1000.0


@pytest.mark.parametrize("first_s", [3000.0, 500.0])
def test_every_rank_knows_the_least_time_left_when_it_ends(rank: Make, first_s: float) -> None:
    pair, heard = [rank(0), rank(1)], [Listener(), Listener()]
    for each, listener, left_s in zip(pair, heard, (first_s, 3500.0 - first_s), strict=True):
        each.start(0, listener)
        each.ends_in(left_s)
        each.confirm_end(Ask(end="SIGTERM"))
    last_boundary(pair)
    assert 400.0 < min(heard[1].left_s) <= 500.0


def test_the_time_left_of_a_rank_that_waits_to_begin_grows_less(rank: Make) -> None:
    """A notice may come while data are loaded: long before there is anybody to tell."""
    pair, heard = [rank(0), rank(1)], [Listener(), Listener()]
    pair[1].ends_in(5.0)
    pair[1].ask_for_checkpoint(Ask(end="the notice"))
    time.sleep(0.5)
    for each, listener in zip(pair, heard, strict=True):
        each.start(0, listener)
    last_boundary(pair)
    assert heard[0].known_when_asked[0] <= 4.5


class AsksMeanwhile:
    """The Store as rank 0 sees it: another rank asks between any two of its calls."""

    def __init__(self, store: Store, ask: Callable[[], None]) -> None:
        self._store, self._ask = store, ask

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self._store, name)

        def and_ask(*arguments: object) -> object:
            found = call(*arguments)
            self._ask()
            return found

        return and_ask


def test_no_request_is_lost_that_comes_while_rank_0_reads_another(rank: Make) -> None:
    first, second = rank(0), rank(1)
    asked = [Ask(), Ask(end="the notice")]

    def ask() -> None:
        if asked:
            second.ask_for_checkpoint(asked.pop(0))
            second._send(second._outbox)
            second._outbox.clear()

    ask()
    real = first._store
    first._store = cast("Store", AsksMeanwhile(real, ask))
    first._receive_requests()
    first._store = real
    first._receive_requests()
    assert first._requests.open == Ask(end="the notice")


@pytest.mark.parametrize("slow", [0, 1])
def test_every_rank_reckons_with_the_time_that_the_slowest_one_needs(
    rank: Make, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    monkeypatch.setattr(ranks_module, "FIGURES_S", 0.01)
    pair = [rank(0), rank(1)]
    for number, each in enumerate(pair):
        each._pace._held_s = 100.0 if number == slow else 1.0
        each.start(0, Listener())
    for step in itertools.count(1):
        if {each._pace.needed_s for each in pair} == {DEADLINE_ROOM * 100.0}:
            break
        assert step < 10_000
        for each in pair:
            assert not each.is_due(step)
    assert pair[1 - slow]._pace.own_needed_s == DEADLINE_ROOM * 1.0


# -- what operators ask


def test_a_run_is_called_paused_once_no_boundary_gets_a_checkpoint_any_more(rank: Make) -> None:
    """Those of a plan that is out already are taken before anybody hears of the pause."""
    pair = [rank(0, every=1), rank(1, every=1)]
    for each in pair:
        each.start(0, Completing())
        each._pace.step_s = 0.1  # eight boundaries a plan
    for step in range(1, 10):
        assert all(each.is_due(step) for each in pair)
    now_unix_s = time.time()
    pair[0].steer(Steering(paused_until_unix_s=now_unix_s + 600, pause_asked_unix_s=now_unix_s))
    passed: list[tuple[bool, bool]] = []
    for step in range(10, 40):
        due = {each.is_due(step) for each in pair}
        paused = {each.decision.kind is BoundKind.PAUSED for each in pair}
        passed.append((due.pop(), paused.pop()))
        assert not due | paused, "both ranks alike"
    assert passed[0] == (True, False), "its plan was out"
    assert passed[-1] == (False, True)
    assert {due is not paused for due, paused in passed} == {True}


# -- the Store's keys


class Completing(Listener):
    """Counts what is complete, and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.complete_count = self.incomplete_count = 0

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        pass

    def complete(self, checkpoint: CheckpointId) -> None:
        self.complete_count += 1

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        self.incomplete_count += 1


CHECKPOINTS, KEYS_MAX = 500, 150


def test_the_keys_of_the_store_stay_few_over_many_checkpoints(
    rank: Make, server: list[TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has four keys, or five where a rank fails, and a plan comes with every eighth boundary."""
    monkeypatch.setattr(ranks_module, "FIGURES_S", 0.05)
    pair, heard = [rank(0, every=1), rank(1, every=1)], [Completing(), Completing()]
    for each, listener in zip(pair, heard, strict=True):
        each.start(0, listener)
    most = 0
    for step in range(1, CHECKPOINTS + 1):
        checkpoint = CheckpointId(1, step)
        for each in pair:
            assert each.is_due(step)
            each.passed(step)
            each.sealed(checkpoint)
            if step % 10 == 0:
                each.failed(checkpoint, "no room")
            else:
                each.committed(checkpoint)
        wait_until(lambda step=step: all(one.complete_count + one.incomplete_count == step for one in heard))
        most = max(most, server[0].num_keys())
    assert most <= KEYS_MAX
    assert [one.incomplete_count for one in heard] == [CHECKPOINTS // 10] * 2


def test_what_a_slow_rank_has_not_read_stays(
    rank: Make, server: list[TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is done with all of it, and rank 1 comes to the first boundary."""
    monkeypatch.setattr(ranks_module, "FIGURES_S", 0.01)
    fast, slow = rank(0, every=1), rank(1, every=1)
    heard = Completing()
    fast.start(0, Completing())
    slow.start(0, heard)
    assert slow.is_due(1)  # from here on rank 0 hears of it
    for step in range(1, 41):
        assert fast.is_due(step)
        fast.failed(CheckpointId(1, step), "no room")
    wait_until(lambda: not fast._results.are_open)
    keys = server[0].num_keys()
    assert keys >= 40
    for step in range(1, 41):
        assert step == 1 or slow.is_due(step)
        slow.sealed(CheckpointId(1, step))
    wait_until(lambda: heard.incomplete_count == 40)
    slow._figures_at_s = 0.0
    assert slow.is_due(41)
    wait_until(lambda: server[0].num_keys() < 40)


@pytest.mark.parametrize("says_something", [True, False])
def test_the_keys_of_the_store_stay_few_beside_a_rank_that_is_lost(
    rank: Make, server: list[TCPStore], monkeypatch: pytest.MonkeyPatch, says_something: bool
) -> None:
    """It reads no more plans, and ends no checkpoint: after its first boundary, or before."""
    monkeypatch.setattr(ranks_module, "FIGURES_S", 0.01)
    monkeypatch.setattr(sweep_machine, "KEPT_MAX", 8)
    lives, dies = rank(0, every=1), rank(1, every=1)
    for each in (lives, dies):
        each.start(0, Completing())
    assert not says_something or dies.is_due(1)
    dies.close()
    for step in range(1, 201):
        assert lives.is_due(step)
        lives.failed(CheckpointId(1, step), "no slot")
    wait_until(lambda: not lives._results.are_open)
    wait_until(lambda: server[0].num_keys() < 80)


# -- a Store that is gone


def test_a_lost_store_is_named_and_each_rank_ends_for_what_it_has_heard(
    rank: Make, server: list[TCPStore]
) -> None:
    survivor, heard, port = rank(1), Listener(), server[0].port
    survivor.start(0, heard)
    server.clear()
    error = heard.lost.get(timeout=DEADLINE_S)
    assert isinstance(error, RanksLostError)
    assert f"the TCPStore of torch.distributed at 127.0.0.1:{port}" in error.message
    assert "restart the job" in error.hint
    assert survivor.lost is error
    assert (survivor.is_due(1), survivor.end_after(1)) == (False, "")
    survivor.ask_for_checkpoint(Ask(end="the notice"))
    assert (survivor.is_due(2), survivor.end_after(2)) == (False, "the notice")


def test_what_was_asked_for_before_the_store_was_lost_ends_the_rank_too(
    rank: Make, server: list[TCPStore]
) -> None:
    survivor, heard = rank(1), Listener()
    survivor.start(0, heard)
    survivor.ask_for_checkpoint(Ask(end="the notice"))
    server.clear()
    heard.lost.get(timeout=DEADLINE_S)
    assert survivor.end_after(1) == "the notice"
    assert heard.lost.empty(), "it is told once"


def test_a_plan_that_cannot_be_read_is_said(rank: Make) -> None:
    """As of a rank 0 of another version; the thread ended in silence, and the boundary waited a minute."""
    second, heard = rank(1), Listener()
    second.start(0, heard)
    second._store.set("plan/0", json.dumps({"plan": 1, "decision": {}}))
    error = heard.lost.get(timeout=DEADLINE_S)
    assert "what another rank said cannot be read" in str(error)
    assert second.is_due(1) is False


SERVE = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_that_hangs_is_noticed_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            monkeypatch.setattr(dist, "get_rank", lambda: 1)
            monkeypatch.setattr(dist, "get_world_size", lambda: 2)
            monkeypatch.setattr(ranks_module, "default_store", lambda: None)
            monkeypatch.setattr(
                ranks_module,
                "own_client",
                lambda: TCPStore("127.0.0.1", port, is_master=False, use_libuv=False),
            )
            monkeypatch.setattr(ranks_module, "STORE_DEADLINE_S", 0.5)
            monkeypatch.setattr(ranks_module, "RESUMED_S", 0.1)
            waiting, heard = StoreRanks("small", Pace(every=1, limits=Limits())), Listener()
            waiting.start(0, heard)
            thread = waiting._thread
            assert thread is not None
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: waiting.lost is not None)
            assert "it has not answered" in str(heard.lost.get(timeout=DEADLINE_S))
            monkeypatch.setattr(ranks_module, "STORE_DEADLINE_S", 600.0)
            began_s = time.monotonic()
            waiting.close()
            assert time.monotonic() - began_s < DEADLINE_S, "not as long as a Store may take that is not lost"
            assert thread.is_alive(), "the Store holds it"
            process.send_signal(signal.SIGCONT)
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        finally:
            process.kill()


STOPPED = """
import sys, time
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from everstep.checkpoint.frequency_types import Limits
from everstep.hook import ranks
from everstep.hook.pace import Pace
from everstep.hook.ranks import StoreRanks

class Listener:
    def ranks_lost(self, error): print(error, flush=True)

ranks.STORE_DEADLINE_S, ranks.PLAN_DEADLINE_S, ranks.LOOK_S = 0.5, 3.0, 0.1
ranks.own_client = lambda: TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, use_libuv=False)
ranks.default_store = lambda: None
dist.get_rank, dist.get_world_size = lambda: 1, lambda: 2
made = StoreRanks("small", Pace(every=1, limits=Limits()))
made.start(0, Listener())
print("waiting", flush=True)
print("due", made.is_due(1), made.lost, flush=True)
"""
STOPPED_S = 4.0
"""Longer than each of its deadlines."""


def test_a_rank_that_was_stopped_for_longer_than_any_deadline_goes_on(
    rank: Make, server: list[TCPStore]
) -> None:
    command = [sys.executable, "-c", STOPPED, str(server[0].port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
            rank(0, every=1).start(0, Listener())
            assert process.stdout.readline() == "due True None\n"
        finally:
            process.kill()


# -- the end


def closing(ranks: StoreRanks) -> threading.Thread:
    """Close it on a thread of its own, as a run that ends well."""
    thread = threading.Thread(target=ranks.close, kwargs={"stays": lambda: True})
    thread.start()
    return thread


def test_rank_0_stays_until_the_others_have_closed(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    three = [rank(number) for number in range(3)]
    for each in three:
        each.start(0, Listener())
    thread = closing(three[0])
    closing(three[1]).join(DEADLINE_S)
    three[0].gone(1)  # as the daemon says of each that has let go
    thread.join(0.3)
    assert thread.is_alive()
    closing(three[2]).join(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_rank_0_waits_for_none_that_is_gone(rank: Make) -> None:
    pair, _ = both(rank)
    thread = closing(pair[0])
    pair[0].gone(1)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_store_that_ends_while_a_rank_closes_that_needs_no_word_is_no_loss(
    rank: Make, server: list[TCPStore]
) -> None:
    second, heard = rank(1), Listener()
    second.start(0, heard)
    second._closing = True  # before its thread has had a turn
    server.clear()
    second.close(stays=lambda: True)
    assert heard.lost.empty()


def test_what_follows_the_last_boundary_of_one_rank_is_no_boundary_of_another(rank: Make) -> None:
    """They have the same number where one has passed a boundary less."""
    pair, heard = [rank(0, every=1), rank(1, every=1)], [Completing(), Completing()]
    for each, listener in zip(pair, heard, strict=True):
        each.start(0, listener)
    assert all(each.is_due(1) for each in pair)
    assert pair[1].is_due(2)
    two = CheckpointId(1, 2)
    pair[0].committed(two)
    pair[1].committed(two)
    pair[0].ends()
    assert until_silent(pair[1]) == "rank 0 ended after boundary 1, this one is at boundary 2"
    assert until_silent(pair[0]) == "rank 1 is at boundary 2, this one ended after boundary 1"
    pair[1].ends()
    wait_until(lambda: pair[0].silent == "rank 1 ended after boundary 2, this one ended after boundary 1")
    assert [each.complete_count for each in heard] == [0, 0]


# -- SIGTERM: together or alone


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where this process would end alone."""
    made = threading.Event()
    monkeypatch.setattr(run_end, "end_now", made.set)
    return made


@pytest.fixture
def end_of() -> Iterator[Callable[[StoreRanks], RunEnd]]:
    """Make the end of a rank's run, which hears SIGTERM."""
    made: list[RunEnd] = []

    def make(ranks: StoreRanks) -> RunEnd:
        made.append(RunEnd("small", ranks, Pace(every=1, limits=Limits()), Preemption()))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def test_who_is_told_before_its_first_boundary_ends_alone_unless_all_are(
    rank: Make, alone: threading.Event, end_of: Callable[[StoreRanks], RunEnd]
) -> None:
    """Its peer has died; the thread that reads the others' confirmations does not run yet."""
    end_of(rank(1))
    os.kill(os.getpid(), signal.SIGTERM)
    assert alone.wait(CONFIRM_S + DEADLINE_S)


def test_who_is_told_after_the_store_was_lost_ends_alone(
    rank: Make,
    server: list[TCPStore],
    alone: threading.Event,
    end_of: Callable[[StoreRanks], RunEnd],
) -> None:
    survivor = rank(1)
    survivor.start(0, Listener())
    server.clear()
    wait_until(lambda: survivor.lost is not None)
    end_of(survivor)
    os.kill(os.getpid(), signal.SIGTERM)
    assert alone.wait(CONFIRM_S + DEADLINE_S)


@pytest.mark.parametrize("has_another_run", [False, True])
def test_who_is_told_with_all_others_does_not_end_alone(
    has_another_run: bool,
    rank: Make,
    alone: threading.Event,
    end_of: Callable[[StoreRanks], RunEnd],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor for another run of the process, a teacher maybe, which passes no boundary and so hears of nobody."""
    monkeypatch.setattr(notice_module, "CONFIRM_S", 6.0)
    pair = [rank(0), rank(1)]
    end = end_of(pair[1])
    if has_another_run:
        end_of(rank(1))
    heard = Listener(on_confirmed=end.confirmed)
    pair[0].start(0, Listener())
    pair[1].start(0, heard)
    pair[0].confirm_end(Ask(end="SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.confirmed.wait(DEADLINE_S)
    assert not alone.wait(6.5)


def test_all_ranks_end_by_the_clock_of_the_one_that_is_ended_first(
    rank: Make, end_of: Callable[[StoreRanks], RunEnd]
) -> None:
    """Only one has heard of it, at a boundary of its own: so does the end of each run say it."""
    pair = [rank(0), rank(1)]
    ends = [end_of(each) for each in pair]
    for each, end in zip(pair, ends, strict=True):
        each.start(0, Listener(on_end=end.others_end_in))
    until_s = time.monotonic() + 7.0
    ends[1]._on_notice(Notice(reason="the notice", until_s=until_s, ends=True))
    pair[1].ask_for_checkpoint(Ask(end="the notice"))
    last_boundary(pair)
    for end in ends:
        assert until_s - 0.01 <= end.until_s < until_s + 2.0


def test_a_notice_file_may_have_a_name_that_is_no_text(
    rank: Make, end_of: Callable[[StoreRanks], RunEnd]
) -> None:
    pair = [rank(0), rank(1)]
    end = end_of(pair[1])
    for each in pair:
        each.start(0, Listener())
    end._on_notice(Notice(reason="/run/t\udce9l is there", until_s=time.monotonic(), ends=True))
    end.at_boundary(Progress(step=1, saved=0, tried=0, under_way=False, is_busy=False))
    assert last_boundary(pair) == ("/run/t\\udce9l is there", True)


# -- a rank that does not answer, while the Store does


def until_silent(each: StoreRanks) -> str:
    wait_until(lambda: bool(each.silent))
    return each.silent


def test_a_rank_that_beats_no_more_is_named_by_all_others(
    rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_beats, "BEAT_S", 0.02)
    monkeypatch.setattr(silence_machine, "_LOOK_COUNTS_S", 0.2)
    monkeypatch.setattr(rank_beats, "rank_deadline_s", lambda: 1.0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    three = [rank(number) for number in range(3)]
    for each in three:
        each.start(0, Listener())
    beaten = [each._beats for each in three]
    wait_until(lambda: all(beats._number > 15 for beats in beaten))
    assert [each.silent for each in three] == ["", "", ""], "who beats is heard"
    stand_still(monkeypatch, beaten[1])
    assert until_silent(three[0]).startswith("rank 1 does not answer")
    assert until_silent(three[2]).startswith("rank 1 does not answer"), "rank 0 has said it"
    stand_still(monkeypatch, beaten[0])
    wait_until(lambda: three[2].silent.startswith("ranks 0, 1 do not answer"))


def stand_still(monkeypatch: pytest.MonkeyPatch, beats: rank_beats.Beats) -> None:
    monkeypatch.setattr(beats, "exchange", lambda *_: None)


def test_a_rank_that_has_closed_is_waited_for_by_nobody(rank: Make) -> None:
    pair = [rank(0, every=1), rank(1, every=1)]
    for each in pair:
        each.start(0, Completing())
    pair[1].close()
    assert until_silent(pair[0]) == "rank 1 has closed the run"


def test_a_rank_that_waits_for_the_plan_of_one_that_has_ended_names_it(rank: Make) -> None:
    """It waited a minute, and called the Store silent."""
    pair, heard = both(rank)
    for each in pair:
        assert each.is_due(1) is False
    pair[0].close()
    began_s, step = time.monotonic(), 1
    while pair[1].lost is None:
        step += 1
        pair[1].is_due(step)
    assert time.monotonic() - began_s < DEADLINE_S
    error = heard[1].lost.get()
    assert "the ranks cannot agree any more: rank 0 has closed the run" in str(error)
    assert "process that served it" not in error.hint


def test_a_rank_that_the_daemon_calls_gone_is_silent_at_once(rank: Make) -> None:
    pair, _ = both(rank)
    began_s = time.monotonic()
    pair[0].gone(1)
    assert until_silent(pair[0]).startswith("rank 1 does not answer")
    assert time.monotonic() - began_s < 5.0


def test_what_a_rank_had_said_before_it_went_is_heard_before_it_counts_as_gone(rank: Make) -> None:
    pair, heard = [rank(0, every=1), rank(1, every=1)], [Completing(), Completing()]
    for each, listener in zip(pair, heard, strict=True):
        each.start(0, listener)
        assert each.is_due(1)
    one = CheckpointId(1, 1)
    pair[0].committed(one)
    pair[1].committed(one)
    wait_until(lambda: heard[1].complete_count == 1)
    pair[0].gone(1)
    until_silent(pair[0])
    assert heard[0].complete_count == 1


@pytest.mark.parametrize("text", ["soon", "-1", "9", "nan"])
def test_a_deadline_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_beats.DEADLINE_VARIABLE, text)
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        rank_beats.rank_deadline_s()


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("120", 120.0)])
def test_the_deadline_for_ranks(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_beats.DEADLINE_VARIABLE, text)
    assert rank_beats.rank_deadline_s() == seconds
