"""The window of a group: whatever happens in whatever order, each job gets each batch once, within the budget."""

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.daemon.shared.share_machine import Outcome, ShareMachine

LEASE_S = 10.0
BATCHES = 40
EXAMPLES = int(os.environ.get("EVERSTEP_SHARE_EXAMPLES", "300"))


class Group:
    """Jobs that walk 0 … n - 1 as a loader does, and a daemon that copies what they publish."""

    def __init__(
        self, *, budget: int, lag: int = 4, ahead: int = 4, size: int = 10, n: int = BATCHES
    ) -> None:
        self.machine = ShareMachine(budget_bytes=budget, lag_max=lag, ahead_max=ahead)
        self.size, self.n, self.now_s = size, n, 0.0
        self.got: dict[int, list[int]] = {}
        self.next: dict[int, int] = {}
        self.until: dict[int, int] = {}
        self.leased: dict[int, list[int]] = {}
        self.prepared: Counter[int] = Counter()

    def join(self, job: int, position: int = 0) -> None:
        self.machine.join(job, position, self.size)
        self.got[job], self.next[job], self.until[job], self.leased[job] = [], position, 0, []

    def leave(self, job: int) -> None:
        self.machine.leave(job)
        for mine in (self.next, self.leased, self.until):
            mine.pop(job)

    def want(self, job: int) -> Outcome | None:
        """Let a job go one batch on if it can."""
        g = self.next[job]
        if g == self.n:
            return None
        if g < self.until[job]:
            outcome = Outcome.PRIVATE
        else:
            answer = self.machine.want(job, g)
            outcome, self.until[job] = answer.outcome, answer.until
            assert outcome is not Outcome.PRIVATE or answer.until > g
        if outcome is Outcome.WAIT:
            return outcome
        if outcome is Outcome.PRIVATE:
            self.prepared[g] += 1
        if outcome is Outcome.READY or g + 1 >= self.until[job]:
            self.machine.took(job, g)
        self.got[job].append(g)
        self.next[job] = g + 1
        return outcome

    def lease(self, job: int, count: int = 1) -> list[int]:
        granted = self.machine.lease(job, count, self.now_s, LEASE_S)
        assert len(granted) <= count
        self.leased[job] += granted
        return granted

    def publish(self, job: int, size: int | None = None) -> None:
        """Prepare and publish the oldest lease, which may have ended meanwhile."""
        if not self.leased[job]:
            return
        g = self.leased[job].pop(0)
        self.prepared[g] += 1
        if self.machine.publish(g, size or self.size):
            self.machine.published(g)

    def fail(self, job: int) -> None:
        if self.leased[job]:
            self.machine.failed(self.leased[job].pop(0))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.machine.expire(self.now_s)

    def finish(self) -> None:
        """All live jobs go on, each preparing what it is leased: they must come to the end."""
        for _ in range(4 * self.n * (len(self.next) + 1)):
            for job in self.next:
                self.lease(job)
                self.publish(job)
                self.want(job)
            self.pass_time(1.0)
            if all(each == self.n for each in self.next.values()):
                return
        raise AssertionError(f"stuck at {self.next}")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "want",
                "want",
                "want",
                "lease",
                "lease",
                "publish",
                "publish",
                "big",
                "fail",
                "time",
                "join",
                "leave",
            ]
        ),
        st.integers(0, 3),
        st.integers(1, 6),
    ),
    max_size=250,
)


def act(group: Group, action: str, job: int, amount: int) -> None:
    match action:
        case "want":
            group.want(job)
        case "lease":
            group.lease(job, amount)
        case "publish":
            group.publish(job)
        case "big":
            group.publish(job, amount * 15)
        case "fail":
            group.fail(job)
        case _:
            assert action == "leave"
            group.leave(job)


@settings(max_examples=EXAMPLES)
@given(steps=STEPS, budget=st.integers(0, 120), lag=st.integers(0, 5), ahead=st.integers(1, 5))
def test_any_interleaving_keeps_the_promises(
    steps: list[tuple[str, int, int]], budget: int, lag: int, ahead: int
) -> None:
    group = Group(budget=budget, lag=lag, ahead=ahead)
    begins: dict[int, int] = {}
    number = 0
    group.join(0)
    begins[0] = 0
    for action, which, amount in steps:
        live = sorted(group.next)
        if action == "join" and len(live) < 4:
            number += 1
            begins[number] = amount * which
            group.join(number, begins[number])
        elif action == "time":
            group.pass_time(amount * 3.0)
        elif live and action != "join":
            act(group, action, live[which % len(live)], amount)
        assert group.machine.used_bytes <= budget
        for g in group.machine.stored:
            assert group.machine.missing(g), "kept for nobody"
    group.finish()
    for job, got in group.got.items():
        expected = list(range(begins[job], BATCHES))
        assert got == (expected if job in group.next else expected[: len(got)])
    for job in list(group.next):
        group.leave(job)
    assert group.machine.used_bytes == 0


@given(k=st.integers(1, 8), order=st.randoms(use_true_random=False))
def test_each_batch_is_prepared_once_while_all_keep_up(k: int, order: "object") -> None:
    group = Group(budget=1000)
    for job in range(k):
        group.join(job)
    jobs = list(range(k))
    while any(at < BATCHES for at in group.next.values()):
        order.shuffle(jobs)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        slowest = min(group.next.values())
        for job in jobs:
            group.lease(job)
            group.publish(job)
            if group.next[job] <= slowest + 3:
                group.want(job)
    assert set(group.prepared.values()) == {1}
    assert set(group.prepared) >= set(range(BATCHES))


def test_a_batch_stays_until_each_live_job_took_it() -> None:
    group = Group(budget=1000)
    for job in range(3):
        group.join(job)
    assert group.lease(0) == [0]
    group.publish(0)
    for job in (1, 2):
        assert group.machine.stored == {0}
        assert group.want(job) is Outcome.READY
    assert group.machine.missing(0) == {0}
    assert group.want(0) is Outcome.READY
    assert group.machine.stored == frozenset()
    assert group.machine.used_bytes == 0


def test_a_dead_consumer_is_out_of_every_set_at_once() -> None:
    group = Group(budget=1000)
    for job in range(2):
        group.join(job)
    group.lease(0, 3)
    for _ in range(3):
        group.publish(0)
        group.want(0)
    assert group.machine.stored == {0, 1, 2}
    group.leave(1)
    assert group.machine.used_bytes == 0


def test_the_lease_of_a_dead_producer_is_free_at_once() -> None:
    group = Group(budget=1000)
    for job in range(2):
        group.join(job)
    assert group.lease(0) == [0]
    assert group.want(1) is Outcome.WAIT
    assert group.lease(1) == [1]
    group.leave(0)
    assert group.lease(1) == [0]


def test_a_hung_producer_costs_one_lease() -> None:
    group = Group(budget=1000)
    for job in range(2):
        group.join(job)
    assert group.lease(0) == [0]
    group.pass_time(LEASE_S - 1)
    assert group.machine.next_deadline_s == LEASE_S
    assert group.want(1) is Outcome.WAIT
    assert group.lease(1) == [1]
    group.pass_time(1)
    assert group.lease(1) == [0]
    group.publish(1)
    group.publish(1)
    assert group.want(1) is Outcome.READY
    group.publish(0)  # it wakes up: the first result counted
    assert group.prepared[0] == 2
    assert [group.want(1), group.want(0), group.want(0)] == [Outcome.READY] * 3


def test_a_slow_job_falls_behind_and_the_others_go_on() -> None:
    group = Group(budget=1000, lag=4)
    for job in range(2):
        group.join(job)
    for _ in range(20):
        group.lease(0)
        group.publish(0)
        assert group.want(0) is Outcome.READY
    assert not group.machine.is_inside(1)
    assert group.machine.used_bytes <= 10, "nothing is kept for it"
    assert group.want(1) is Outcome.PRIVATE
    assert group.until[1] == group.machine.floor == 16


def test_a_job_behind_meets_the_window_and_takes_part_again() -> None:
    group = Group(budget=1000, lag=4)
    group.join(0)
    for _ in range(20):
        group.lease(0)
        group.publish(0)
        group.want(0)
    group.join(1, 10)
    while group.next[1] < 20:
        assert group.want(1) is Outcome.PRIVATE  # also from 16 on: job 0 has taken those alone
    group.lease(0)
    group.publish(0)
    assert group.want(1) is Outcome.READY
    assert group.machine.stored == {20}
    assert group.prepared[20] == 1


def test_a_job_ahead_does_not_take_the_window_with_it() -> None:
    group = Group(budget=1000, lag=4)
    group.join(0)
    group.lease(0)
    group.join(1, 30)
    assert group.want(1) is Outcome.PRIVATE
    assert group.machine.is_inside(0)
    group.leave(0)
    group.want(1)
    group.until[1] = 0
    assert group.want(1) is Outcome.WAIT
    assert group.machine.is_inside(1)


def test_bytes_that_are_read_count_after_their_batch_was_dropped() -> None:
    group = Group(budget=1000, lag=1)
    for job in range(2):
        group.join(job)
    group.lease(0)
    group.publish(0)
    assert group.machine.want(1, 0).outcome is Outcome.READY  # and reads it, slowly
    for _ in range(4):
        group.want(0)
        group.lease(0)
        group.publish(0)
    assert 0 not in group.machine.stored
    used = group.machine.used_bytes
    group.machine.took(1, 0)
    assert group.machine.used_bytes == used - 10


@pytest.mark.parametrize("budget", [0, 9])
def test_a_budget_below_one_batch_means_everybody_for_himself(budget: int) -> None:
    group = Group(budget=budget)
    for job in range(2):
        group.join(job)
        assert group.lease(job) == []
    group.finish()
    assert group.prepared == Counter(dict.fromkeys(range(BATCHES), 2))


def test_a_batch_too_large_for_the_budget_is_prepared_by_each() -> None:
    group = Group(budget=40)
    for job in range(2):
        group.join(job)
    group.lease(0)
    group.publish(0, size=41)
    assert [group.want(0), group.want(1)] == [Outcome.PRIVATE] * 2


def test_nobody_publishes_beyond_the_window() -> None:
    group = Group(budget=1000)
    group.join(0)
    assert not group.machine.publish(10**9, 10)
    assert not group.machine.publish(-1, 10)
