"""Whatever is announced to whom and when, all ranks end with the same boundary, once, or all go on."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from everstep.checkpoint.frequency_machine import FixedInterval
from everstep.checkpoint.frequency_plan import DEADLINE_STEPS
from everstep.hook.end_machine import (
    AGREE_S,
    ASK_AGAIN_S,
    ASK_AGAIN_SHARE,
    GRACE_S,
    LEASE_ENDS,
    SIGTERM,
    Ask,
    Boundary,
    EndMachine,
    Notice,
    Progress,
    Requests,
)
from everstep.hook.horizon_machine import LOOKAHEAD_BOUNDARIES, Horizon, Plan, Planner

SPOT = "the notice"


def boundary(
    at_s: float,
    *,
    step: int = 10,
    saved: int = 9,
    tried: int = 9,
    under_way: bool = False,
    is_busy: bool = False,
    needed_s: float | None = 1.0,
) -> Boundary:
    """By default the boundary before this one is saved."""
    progress = Progress(
        step=step, saved=saved, tried=tried, under_way=under_way, is_busy=is_busy or under_way
    )
    return Boundary(progress=progress, at_s=at_s, step_s=0.1, needed_s=needed_s)


def notice(until_s: float, *, reason: str = SPOT, ends: bool = True) -> Notice:
    return Notice(reason=reason, until_s=until_s, ends=ends)


def alone() -> EndMachine:
    return EndMachine(rank=0, world_size=1)


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_the_last_checkpoint_is_asked_for_as_late_as_it_fits_and_once() -> None:
    machine = alone()
    machine.noticed(notice(100.0))
    latest_s = 100.0 - 1.0 - DEADLINE_STEPS * 0.1
    assert machine.at_boundary(boundary(latest_s - 0.01)) is None
    assert machine.at_boundary(boundary(latest_s)) == Ask(end=SPOT)
    assert machine.at_boundary(boundary(latest_s + 0.1)) is None


def test_several_ranks_need_time_to_agree() -> None:
    machine = EndMachine(rank=1, world_size=2)
    machine.noticed(notice(100.0))
    assert machine.at_boundary(boundary(100.0 - 1.0 - AGREE_S - 0.01)) is None
    assert machine.at_boundary(boundary(100.0 - 1.0 - AGREE_S)) == Ask(end=SPOT)


def test_a_lease_is_minded_by_rank_0_and_a_new_one_takes_its_place() -> None:
    first, second = (EndMachine(rank=rank, world_size=2) for rank in (0, 1))
    for machine in (first, second):
        machine.leased(notice(10.0, reason=LEASE_ENDS))
        machine.leased(notice(100.0, reason=LEASE_ENDS))
        assert machine.at_boundary(boundary(50.0)) is None
    assert first.at_boundary(boundary(99.0)) == Ask(end=LEASE_ENDS)
    assert second.at_boundary(boundary(99.0)) is None


def test_who_is_not_to_end_asks_for_a_checkpoint_and_goes_on() -> None:
    machine = alone()
    machine.leased(notice(10.0, reason=LEASE_ENDS, ends=False))
    assert machine.at_boundary(boundary(9.9)) == Ask()
    assert machine.until_s(9.9) == 9.9 + GRACE_S, "nobody ends this process then"


def test_a_late_checkpoint_that_came_to_nothing_is_asked_for_again_where_the_run_goes_on() -> None:
    """Who ends waits for room itself; here it is seen at the boundaries that follow."""
    machine = alone()
    machine.leased(notice(10.0, reason=LEASE_ENDS, ends=False))
    assert machine.at_boundary(boundary(8.7, step=10, saved=0, tried=0)) == Ask()
    assert machine.at_boundary(boundary(8.8, step=11, saved=0, tried=10)) is None
    assert machine.at_boundary(boundary(8.95, step=12, saved=0, tried=10)) == Ask()
    assert machine.at_boundary(boundary(9.05, step=13, saved=12, tried=12, under_way=True)) is None
    assert machine.at_boundary(boundary(9.5, step=17, saved=0, tried=12)) == Ask(), "it has failed"
    assert machine.at_boundary(boundary(10.5, step=27, saved=17, tried=17)) is None


def test_while_nobody_knows_what_a_checkpoint_takes_one_is_asked_for_until_one_has_begun() -> None:
    machine = alone()
    machine.leased(notice(1000.0, reason=LEASE_ENDS))
    assert machine.at_boundary(boundary(1.0, needed_s=None)) == Ask()
    assert machine.at_boundary(boundary(2.0, step=11, needed_s=None)) is None, "it has not come yet"
    soon_s = 1.0 + ASK_AGAIN_S / 2
    assert machine.at_boundary(boundary(soon_s, step=12, tried=11, needed_s=None)) is None, "it could not"
    busy = boundary(2.0, step=12, tried=11, needed_s=None, under_way=True)
    assert machine.at_boundary(busy) is None
    assert machine.at_boundary(boundary(2.0, step=12, tried=11, needed_s=None)) == Ask()
    assert machine.at_boundary(boundary(500.0, step=99, tried=98)) is None, "now it is known"


def test_a_notice_makes_a_checkpoint_at_once_and_one_as_late_as_it_fits() -> None:
    machine = alone()
    machine.noticed(notice(100.0))
    assert machine.at_boundary(boundary(1.0, step=10, saved=5)) == Ask()
    assert machine.at_boundary(boundary(2.0, step=11, saved=10, tried=10, under_way=True)) is None
    assert machine.at_boundary(boundary(50.0, step=400, saved=10, tried=10)) is None
    assert machine.at_boundary(boundary(99.0, step=700, saved=10, tried=10)) == Ask(end=SPOT)


def test_where_both_do_not_fit_there_is_one() -> None:
    machine = alone()
    machine.noticed(notice(1.0))
    assert machine.at_boundary(boundary(0.1, saved=0)) == Ask(end=SPOT)


@pytest.mark.parametrize("saved", [9, 10])
def test_what_is_saved_up_to_the_last_boundary_is_not_saved_at_once_again(saved: int) -> None:
    machine = alone()
    machine.noticed(notice(100.0))
    assert machine.at_boundary(boundary(1.0, step=10, saved=saved)) is None
    assert machine.at_boundary(boundary(50.0, step=400, saved=saved)) is None


def test_what_is_under_way_when_a_notice_comes_will_do_unless_it_fails() -> None:
    machine = alone()
    machine.noticed(notice(100.0))
    assert machine.at_boundary(boundary(1.0, step=10, saved=5, tried=5, under_way=True)) is None
    assert machine.at_boundary(boundary(2.0, step=11, saved=5, tried=5)) is None, "it is complete"
    assert machine.at_boundary(boundary(3.0, step=12, saved=2, tried=5)) == Ask(), "it has failed"


def test_what_could_not_be_begun_is_asked_for_again_and_not_at_each_boundary() -> None:
    """Nor while something is under way, such as memory: it could not be begun."""
    machine = alone()
    machine.noticed(notice(100.0))
    assert machine.at_boundary(boundary(0.9, step=9, saved=5, is_busy=True)) is None
    assert machine.at_boundary(boundary(1.0, step=10, saved=5)) == Ask()
    assert machine.at_boundary(boundary(9.0, step=11, saved=5, tried=9)) is None, "ranks have not agreed yet"
    assert machine.at_boundary(boundary(1.0 + ASK_AGAIN_S / 2, step=12, saved=5, tried=11)) is None
    assert machine.at_boundary(boundary(9.0, step=13, saved=5, tried=11)) == Ask()


@pytest.mark.parametrize("is_lease", [True, False])
def test_what_fails_again_and_again_is_tried_ever_less_often(is_lease: bool) -> None:
    """Else it would be copied without a pause for as long as the end is away, a day or for ever."""
    machine, until_s = alone(), 3600.0
    if is_lease:
        machine.leased(notice(until_s, reason=LEASE_ENDS))
    else:
        machine.noticed(notice(until_s, ends=False))
    asked_s: list[float] = []
    for step in range(10, int(until_s / 0.1) - 50):
        at_s = 0.1 * (step - 10)
        if machine.at_boundary(boundary(at_s, step=step, saved=5, tried=step - 1, needed_s=None)) == Ask():
            asked_s.append(at_s)
    assert 12 <= len(asked_s) <= 100, "without a pause 18,000"
    for before_s, after_s in itertools.pairwise(asked_s):
        most_s = max(ASK_AGAIN_S, ASK_AGAIN_SHARE * (until_s - before_s))
        assert ASK_AGAIN_S - 0.01 <= after_s - before_s <= most_s + 0.11


@pytest.mark.parametrize(
    ("left_s", "under_way", "needed_s", "saves"),
    [
        (10.0, False, 1.0, True),
        (10.0, True, 1.0, True),
        (0.5, True, 1.0, False),
        (0.5, False, 1.0, True),  # nothing else is left to hope for
        (10.0, True, None, False),
    ],
)
def test_the_last_boundary_is_saved_if_it_fits_beside_what_is_under_way(
    left_s: float, under_way: bool, needed_s: float | None, saves: bool
) -> None:
    machine = alone()
    machine.noticed(notice(100.0, reason=SIGTERM))
    assert machine.until_s(0.0) == 100.0
    now = boundary(100.0 - left_s, needed_s=needed_s, under_way=under_way)
    assert machine.saves_last(now) is saves


def test_the_earliest_end_counts() -> None:
    machine = alone()
    for until_s in (100.0, 50.0, 80.0):
        machine.noticed(notice(until_s))
    assert machine.until_s(0.0) == 50.0


def test_the_end_of_another_rank_counts_like_an_own_one() -> None:
    machine = EndMachine(rank=0, world_size=2)
    assert machine.known_until_s is None
    machine.others_end_by(50.0)
    assert machine.until_s(0.0) == machine.known_until_s == 50.0
    assert not machine.saves_last(boundary(49.5, under_way=True)), "half a second is left, and one is needed"
    machine.noticed(notice(40.0))
    machine.others_end_by(45.0)
    assert machine.until_s(0.0) == 40.0


def test_only_sigterm_that_is_not_confirmed_ends_a_rank_alone() -> None:
    machine = EndMachine(rank=1, world_size=2)
    machine.noticed(notice(100.0))
    assert not machine.is_alone
    machine.noticed(notice(30.0, reason=SIGTERM))
    assert machine.is_alone
    machine.confirmed()
    assert not machine.is_alone
    one = alone()
    one.noticed(notice(30.0, reason=SIGTERM))
    assert not one.is_alone


def test_requests_between_two_plans_are_one_and_an_end_is_answered_once() -> None:
    requests = Requests()
    assert requests.open is None
    for ask in (Ask(), Ask(end="first"), Ask(end="second"), Ask()):
        requests.add(ask)
    planned = requests.open
    assert planned == Ask(end="first")
    assert requests.open == planned, "until its plan is out"
    requests.answered(planned)
    assert requests.open is None
    requests.add(Ask(end="third"))
    assert requests.open == Ask(), "the run is ending already"
    planned = requests.open
    requests.add(Ask())
    requests.answered(planned)
    assert requests.open == Ask(), "it came since"


# --- a job of several ranks -------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One rank's machines, and how far it is."""

    machine: EndMachine
    horizon: Horizon = field(default_factory=Horizon)
    step: int = 0
    complete: int = 0
    tried: int = 0
    under_way: list[int] = field(default_factory=list[int])
    ended: str = ""
    """Why, and whether that boundary was saved, once it has."""
    reasons_to_ask: int = 1
    """Announcements, and checkpoints that failed or could not be begun; one more where nobody knows what one takes."""
    asked: int = 0
    """For checkpoints with which the run goes on."""

    @property
    def saved(self) -> int:
        return max([self.complete, *self.under_way])


class Job:
    """All ranks; messages to rank 0 and plans from it, delivered as a caller says."""

    def __init__(self, world_size: int, *, every: int, step_s: float, needed_s: float) -> None:
        self.now_s, self.step_s, self.true_needed_s = 0.0, step_s, needed_s
        self.is_alone = world_size == 1
        self.needed_s: float | None = None
        self.ranks = [Rank(EndMachine(rank=rank, world_size=world_size)) for rank in range(world_size)]
        self.requests, self.planner = Requests(), Planner(due=FixedInterval(every).due)
        self.plans = [self.planner.first(0)]
        self.mail: list[Ask] = []
        self.told, self.failed = set[int](), set[int]()
        self.taken: list[tuple[int, float]] = []
        """Of rank 0: which boundaries were saved, and when they were begun."""

    def facts(self, rank: Rank) -> Boundary:
        under_way = bool(rank.under_way)
        return Boundary(
            progress=Progress(
                step=rank.step, saved=rank.saved, tried=rank.tried, under_way=under_way, is_busy=under_way
            ),
            at_s=self.now_s,
            step_s=self.step_s,
            needed_s=self.needed_s,
        )

    def deliver(self) -> None:
        for ask in self.mail:
            self.requests.add(ask)
        self.mail.clear()
        if len(self.told) == len(self.ranks):
            self.requests.add(Ask(end=SIGTERM))
            self.told.clear()
            for rank in self.ranks:
                rank.machine.confirmed()

    def sigterm(self, number: int, until_s: float) -> None:
        self.ranks[number].machine.noticed(notice(until_s, reason=SIGTERM))
        self.told.add(number)

    def boundary(self, number: int) -> None:
        """Let a rank come to its next boundary, if it may; the same order as in `Run.step`."""
        rank = self.ranks[number]
        for plan in self.plans[rank.horizon.next_number :]:
            rank.horizon.receive(plan)
        if rank.ended or not (self.is_alone or rank.horizon.knows(rank.step + 1)):
            return
        rank.step += 1
        self._ask(rank)
        due, end = self._of_one(rank) if self.is_alone else self._of_many(rank)
        if due:
            rank.tried = rank.step
            if rank.step in self.failed:
                rank.reasons_to_ask += 1
            else:
                rank.under_way.append(rank.step)
            if number == 0:
                self.taken.append((rank.step, self.now_s))
        if end:
            rank.ended = f"{end}, saved: {due}"

    def _ask(self, rank: Rank) -> None:
        facts = self.facts(rank)
        is_last_chance = any(rank.machine._is_last_chance(each, facts) for each in rank.machine._standing())
        ask = rank.machine.at_boundary(facts)
        if ask is None:
            return
        self.mail.append(ask)
        rank.asked += not ask.end
        if not is_last_chance and self.needed_s is not None:
            assert rank.saved < rank.step - 1, "needless"

    def fail(self, step: int) -> None:
        """A checkpoint fails on all ranks, also on those that have not come to it yet."""
        self.failed.add(step)
        for rank in self.ranks:
            if step in rank.under_way:
                rank.under_way.remove(step)
                rank.reasons_to_ask += 1

    def _of_one(self, rank: Rank) -> tuple[bool, str]:
        """As `OneRank` decides."""
        self.deliver()
        ask = self._take()
        if ask is not None and ask.end:
            return rank.machine.saves_last(self.facts(rank)), ask.end
        return ask is not None, ""

    def _of_many(self, rank: Rank) -> tuple[bool, str]:
        """As `StoreRanks` does."""
        if rank is self.ranks[0] and self.planner.wants_next(self.plans[-1], rank.step):
            self.plans.append(self._next_plan(rank))
        return rank.horizon.is_due(rank.step), rank.horizon.end_after(rank.step)

    def _take(self) -> Ask | None:
        ask = self.requests.open
        self.requests.answered(ask)
        return ask

    def _next_plan(self, rank: Rank) -> Plan:
        ask = self._take()
        end = ask.end if ask is not None else ""
        requested = rank.machine.saves_last(self.facts(rank)) if end else ask is not None
        return self.planner.next(self.plans[-1], requested=requested, end=end, step_s=self.step_s)

    def settle(self) -> None:
        """All that is under way becomes durable: now everybody knows what it takes."""
        if any(rank.under_way for rank in self.ranks):
            self.needed_s = self.true_needed_s
        for rank in self.ranks:
            rank.complete = rank.saved
            rank.under_way.clear()


class Ends(RuleBasedStateMachine):
    """Announcements to any rank, in any order, between any boundaries."""

    @initialize(
        world_size=st.integers(1, 3),
        every=st.integers(1, 40),
        step_s=st.sampled_from([0.01, 0.1, 1.0, 20.0]),
        needed_s=st.sampled_from([0.05, 2.0, 60.0]),
    )
    def begin(self, world_size: int, every: int, step_s: float, needed_s: float) -> None:
        self.job = Job(world_size, every=every, step_s=step_s, needed_s=needed_s)
        self.must_end = False

    @rule(rank=st.integers(0, 2), left_s=st.floats(0.1, 300.0), ends=st.booleans())
    def notice(self, rank: int, left_s: float, ends: bool) -> None:
        if rank < len(self.job.ranks):
            self.job.ranks[rank].machine.noticed(notice(self.job.now_s + left_s, ends=ends))
            self.job.ranks[rank].reasons_to_ask += 1 + (not ends)

    @rule(left_s=st.floats(0.1, 300.0), ends=st.booleans())
    def lease(self, left_s: float, ends: bool) -> None:
        for rank in self.job.ranks:
            rank.machine.leased(notice(self.job.now_s + left_s, reason=LEASE_ENDS, ends=ends))
            rank.reasons_to_ask += not ends

    @rule(rank=st.integers(0, 2))
    def sigterm(self, rank: int) -> None:
        if rank < len(self.job.ranks):
            self.job.sigterm(rank, self.job.now_s + GRACE_S)

    @rule(rank=st.integers(0, 2), count=st.integers(1, 12))
    def boundaries(self, rank: int, count: int) -> None:
        for _ in range(count):
            if rank < len(self.job.ranks):
                self.job.boundary(rank)
            self.job.now_s += self.job.step_s

    @rule()
    def deliver(self) -> None:
        self.job.deliver()

    @rule()
    def settle(self) -> None:
        self.job.settle()

    @rule()
    def fail(self) -> None:
        steps = [rank.under_way[-1] for rank in self.job.ranks if rank.under_way]
        if steps:
            self.job.fail(max(steps))

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.job.now_s += seconds

    @invariant()
    def nobody_goes_on_where_another_has_ended(self) -> None:
        ranks = self.job.ranks
        ended = [rank for rank in ranks if rank.ended]
        assert len({(rank.step, rank.ended) for rank in ended}) <= 1
        if ended:
            assert all(rank.step <= ended[0].step for rank in ranks)

    @invariant()
    def each_announcement_is_answered_once(self) -> None:
        for rank in self.job.ranks:
            assert rank.asked <= rank.reasons_to_ask

    @invariant()
    def at_most_one_plan_ends_the_run(self) -> None:
        assert sum(bool(plan.end) for plan in self.job.plans) <= 1

    def teardown(self) -> None:
        """Train on until all announced times are over: all have ended, or all go on."""
        if not hasattr(self, "job"):
            return
        job = self.job
        wanted = any(rank.ended for rank in job.ranks) or any(plan.end for plan in job.plans)
        wanted = wanted or any(ask.end for ask in job.mail)
        wanted = wanted or (job.requests.open or Ask()).end != "" or len(job.told) == len(job.ranks)
        wanted = wanted or any(_will_end(rank.machine) for rank in job.ranks)
        job.now_s += 1000.0
        lag = max(rank.step for rank in job.ranks) - min(rank.step for rank in job.ranks)
        for _ in range(lag + 6 * LOOKAHEAD_BOUNDARIES):
            job.deliver()
            for number in range(len(job.ranks)):
                job.boundary(number)
            job.settle()
        assert {bool(rank.ended) for rank in job.ranks} == {wanted}
        self.nobody_goes_on_where_another_has_ended()
        self.at_most_one_plan_ends_the_run()


def _will_end(machine: EndMachine) -> bool:
    return any(standing.ends for standing in machine._standing())


Ends.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEnds = Ends.TestCase


# --- time -------------------------------------------------------------------------------------------------------------


def run_until_ended(job: Job, *, announce: Callable[[Job], None], at_s: float) -> None:
    """All ranks abreast, each message delivered before the next boundary."""
    announced = False
    while not all(rank.ended for rank in job.ranks):
        job.now_s += job.step_s
        if not announced and job.now_s >= at_s:
            announce(job)
            announced = True
        job.deliver()
        for number in range(len(job.ranks)):
            job.boundary(number)
        if job.taken and job.now_s - job.taken[-1][1] >= job.true_needed_s:
            job.settle()
        assert job.now_s < 10_000


@given(
    world_size=st.integers(1, 3),
    step_s=st.floats(0.01, 5.0),
    needed_s=st.floats(0.01, 20.0),
    spare_s=st.floats(0.0, 100.0),
    reason=st.sampled_from([SPOT, LEASE_ENDS]),
)
def test_no_deadline_is_passed_where_the_time_that_a_checkpoint_needs_is_true(
    world_size: int, step_s: float, needed_s: float, spare_s: float, reason: str
) -> None:
    """And the boundary that is saved last is a recent one: what follows it is lost."""
    job = Job(world_size, every=10**9, step_s=step_s, needed_s=needed_s)
    job.needed_s = needed_s
    agree_s = max(DEADLINE_STEPS * step_s, AGREE_S if world_size > 1 else 0.0)
    at_s = 20 * step_s
    until_s = at_s + needed_s + agree_s + step_s + spare_s

    def announce(job: Job) -> None:
        for rank in job.ranks:
            heard = notice(until_s, reason=reason)
            rank.machine.noticed(heard) if reason == SPOT else rank.machine.leased(heard)

    run_until_ended(job, announce=announce, at_s=at_s)
    if reason == SPOT:
        assert job.taken[0][1] <= at_s + 2 * step_s + agree_s + 1e-6, "at once"
    step, begun_s = job.taken[-1]
    assert {rank.ended for rank in job.ranks} == {f"{reason}, saved: True"}
    assert step == job.ranks[0].step
    assert begun_s + needed_s <= until_s + 1e-6
    assert begun_s + needed_s >= until_s - agree_s - 1e-6, "as late as it fits"
