"""Any order of completions and deaths: each ticket is handed once and in order, and nothing is waited for in vain."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.workers.phase import Phase
from everstep.dataloader.workers.pool_machine import (
    BARREN_DEATHS_MAX,
    DEATHS_PER_STREAM_BATCH,
    QUARANTINED_MAX,
    START_DEATHS_MAX,
    Assign,
    Command,
    GiveUp,
    Hopeless,
    PoolMachine,
    Quarantine,
    Replace,
)


@dataclass
class World:
    """Workers as the machine should see them: each has a queue of what it was sent and makes it in that order."""

    machine: PoolMachine
    tickets: list[list[int]]
    worker_count: int
    handed: list[int] = field(default_factory=list[int])
    sent: list[list[Assign]] = field(default_factory=list[list[Assign]])
    quarantined: list[int] = field(default_factory=list[int])
    gave_up: GiveUp | None = None
    added: int = 0

    def __post_init__(self) -> None:
        self.sent = [[] for _ in range(self.worker_count)]
        self.machine.begin()
        for worker in range(self.worker_count):
            self.machine.ready(worker)

    def refill(self) -> None:
        while self.added < len(self.tickets) and self.machine.has_room:
            self.do([self.machine.add(self.tickets[self.added])])
            self.added += 1

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Assign():
                    self.sent[command.worker].append(command)
                case Replace(worker):
                    assert self.sent[worker] == []
                    self.machine.ready(worker)
                case Quarantine(sample, _):
                    self.quarantined.append(sample)
                case GiveUp():
                    self.gave_up = command

    def make(self, worker: int) -> None:
        if self.sent[worker]:
            assert self.machine.made(worker, self.sent[worker].pop(0).number)

    def kill(self, worker: int, place: int, *, is_blamed: bool) -> None:
        lost, self.sent[worker] = self.sent[worker], []
        if lost:
            self.do(self.machine.died(worker, lost[0].number, place, is_blamed=is_blamed))
        else:
            self.do(self.machine.died(worker, -1, Phase.IDLE, is_blamed=is_blamed))

    def hand(self) -> None:
        while self.machine.is_made(self.machine.head):
            self.handed.append(self.machine.head)
            self.machine.hand(self.machine.head)
            self.refill()

    def hand_any(self, choose: Callable[[int], int]) -> None:
        """Hand tickets out as they were made, not in their order."""
        made = [number for number in range(self.added) if self.machine.is_made(number)]
        if made:
            number = made[choose(len(made))]
            self.handed.append(number)
            self.machine.hand(number)
            self.refill()


@given(
    worker_count=st.integers(1, 4),
    prefetch=st.integers(1, 3),
    ticket_count=st.integers(0, 25),
    is_fixed=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from("mkKh"), st.integers(0, 3), st.integers(-4, 2)), max_size=80),
)
def test_each_ticket_once_and_in_order(
    worker_count: int, prefetch: int, ticket_count: int, is_fixed: bool, events: list[tuple[str, int, int]]
) -> None:
    tickets = [[10 * number + place for place in range(3)] for number in range(ticket_count)]
    machine = PoolMachine(worker_count, prefetch, is_fixed=is_fixed)
    world = World(machine, tickets, worker_count)
    world.refill()
    for event, number, place in events:
        worker = number % worker_count
        if event == "m":
            world.make(worker)
        elif event == "h":
            world.hand()
        else:
            world.kill(worker, place, is_blamed=event == "K")
        if world.gave_up is not None:
            assert world.gave_up.reason in {Hopeless.COLLATE, Hopeless.BARREN}
            return
        out = [assign.number for queue in world.sent for assign in queue]
        assert len(out) == len(set(out)), "one ticket, two workers"
        assert world.added - machine.head <= prefetch * worker_count
        assert is_fixed is False or all(
            assign.number % worker_count == worker
            for worker, queue in enumerate(world.sent)
            for assign in queue
        )
    while not machine.is_idle:
        for worker in range(worker_count):
            world.make(worker)
        world.hand()
    assert world.handed == list(range(ticket_count))
    assert len(world.quarantined) == len(set(world.quarantined)) == len(machine.quarantined)


@given(
    worker_count=st.integers(1, 3),
    prefetch=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from("mhK"), st.integers(0, 9)), max_size=60),
)
def test_each_ticket_once_whoever_takes_them_as_they_come(
    worker_count: int, prefetch: int, events: list[tuple[str, int]]
) -> None:
    machine = PoolMachine(worker_count, prefetch, is_fixed=False)
    world = World(machine, [[number] for number in range(20)], worker_count)
    world.refill()
    for event, number in [*events, *[(event, step) for step in range(60) for event in "mh"]]:
        match event:
            case "m":
                world.make(number % worker_count)
            case "h":
                world.hand_any(lambda count, number=number: number % count)
            case _:
                world.kill(number % worker_count, Phase.IDLE, is_blamed=True)
        if world.gave_up is not None:
            return
        assert machine.count == world.added - len(world.handed) <= prefetch * worker_count
        assert machine.head == min(set(range(20)) - set(world.handed), default=20)
    assert machine.is_idle
    assert sorted(world.handed) == list(range(20))


def lone(ids: list[int], **more: bool) -> World:
    world = World(PoolMachine(1, 1, is_fixed=more.get("is_fixed", False)), [ids], 1)
    world.refill()
    return world


def test_two_deaths_on_one_sample_leave_it_out() -> None:
    world = lone([5, 6, 7])
    world.kill(0, 1, is_blamed=True)
    assert world.sent[0] == [Assign(0, 0, frozenset(), is_solo=False)]
    world.kill(0, 1, is_blamed=True)
    assert world.sent[0] == [Assign(0, 0, frozenset({6}), is_solo=False)]
    assert world.machine.quarantined == {6: 2}
    assert world.quarantined == [6]
    world.kill(0, 1, is_blamed=True)  # the place counts what was sent: now it is sample 7
    world.kill(0, 1, is_blamed=True)
    assert world.machine.quarantined == {6: 2, 7: 2}


def test_deaths_on_different_samples_condemn_none() -> None:
    world = lone([5, 6, 7])
    for place in range(3):
        world.kill(0, place, is_blamed=True)
    assert world.machine.quarantined == {}


def test_who_was_asked_to_end_blames_nobody() -> None:
    world = lone([5])
    for _ in range(5):
        world.kill(0, 0, is_blamed=False)
    assert world.machine.quarantined == {}
    assert world.sent[0] == [Assign(0, 0, frozenset(), is_solo=False)]


def test_a_ticket_read_as_a_whole_goes_sample_by_sample_after_two_deaths() -> None:
    world = lone([5, 6, 7])
    world.kill(0, Phase.READ_ALL, is_blamed=True)
    assert not world.sent[0][0].is_solo
    world.kill(0, Phase.READ_ALL, is_blamed=True)
    assert world.sent[0][0].is_solo
    world.kill(0, 2, is_blamed=True)
    assert world.machine.quarantined == {7: 3}
    assert world.sent[0] == [Assign(0, 0, frozenset({7}), is_solo=True)]


@pytest.mark.parametrize("phase", [Phase.COLLATE, Phase.SEND])
def test_a_batch_that_kills_when_it_is_collated_is_given_up(phase: Phase) -> None:
    world = lone([5, 6])
    world.kill(0, phase, is_blamed=True)
    assert world.gave_up is None
    world.kill(0, phase, is_blamed=True)
    assert world.gave_up == GiveUp(Hopeless.COLLATE, 2, (5, 6))


def test_a_worker_that_dies_before_it_is_ready_is_started_a_few_times() -> None:
    machine = PoolMachine(2, 1, is_fixed=False)
    machine.ready(1)
    for _ in range(START_DEATHS_MAX - 1):
        assert machine.died(0, -1, Phase.START, is_blamed=True) == [Replace(0)]
        machine.ready(1)
    assert machine.died(0, -1, Phase.START, is_blamed=True) == [GiveUp(Hopeless.START, START_DEATHS_MAX)]


def test_who_is_asked_to_end_while_it_starts_is_started_again() -> None:
    machine = PoolMachine(1, 2, is_fixed=False)
    machine.begin()
    for _ in range(START_DEATHS_MAX + 1):
        assert machine.died(0, -1, Phase.START, is_blamed=False) == [Replace(0)]


def test_a_start_in_between_forgives_the_deaths_before() -> None:
    machine = PoolMachine(1, 1, is_fixed=False)
    for _ in range(2):
        for _ in range(START_DEATHS_MAX - 1):
            assert machine.died(0, -1, Phase.START, is_blamed=True) == [Replace(0)]
        machine.ready(0)


def test_deaths_without_any_batch_between_them_end_the_pool() -> None:
    world = lone([5])
    for _ in range(BARREN_DEATHS_MAX):
        world.kill(0, Phase.IDLE, is_blamed=False)
    assert world.gave_up is None
    world.kill(0, Phase.IDLE, is_blamed=False)
    assert world.gave_up == GiveUp(Hopeless.BARREN, BARREN_DEATHS_MAX + 1)


def test_more_than_a_hundred_quarantined_samples_end_the_pool() -> None:
    world = World(PoolMachine(1, 1, is_fixed=True), [[number] for number in range(200)], 1)
    world.refill()
    while world.gave_up is None:
        world.kill(0, 0, is_blamed=True)
        world.kill(0, 0, is_blamed=True)
        world.make(0)
        world.hand()
    assert world.gave_up == GiveUp(Hopeless.QUARANTINED, QUARANTINED_MAX + 1)


def test_a_stand_in_can_be_blamed_too() -> None:
    world = lone([5])
    for _ in range(2):
        world.kill(0, 0, is_blamed=True)
    world.machine.stands_in(0, 99)
    for _ in range(2):
        world.kill(0, 0, is_blamed=True)
        world.machine.stands_in(0, 99)
    assert world.machine.quarantined == {5: 2, 99: 2}


def test_lost_tickets_go_to_who_lives() -> None:
    machine = PoolMachine(2, 2, is_fixed=False)
    machine.ready(0)
    machine.ready(1)
    assert [machine.add([number]).worker for number in range(4)] == [0, 1, 0, 1]
    commands = machine.died(0, 0, 0, is_blamed=True)
    assert commands == [Replace(0), Assign(1, 0, frozenset(), False), Assign(1, 2, frozenset(), False)]


def test_a_new_run_forgets_the_tickets_of_the_one_before() -> None:
    machine = PoolMachine(2, 2, is_fixed=True)
    for number in range(3):
        machine.add([number])
    assert machine.begin() == 3
    assert machine.is_idle
    assert not machine.made(0, 0), "an answer to a void ticket"
    assert machine.died(0, 2, 0, is_blamed=True) == [Replace(0)], "a void ticket blames no sample"
    assert [machine.add([7]).worker, machine.add([8]).worker] == [0, 1]


def test_an_answer_of_who_was_not_asked_is_refused() -> None:
    machine = PoolMachine(2, 1, is_fixed=True)
    machine.add([0])
    assert not machine.made(1, 0)
    assert machine.made(0, 0)
    assert not machine.made(0, 0)


def test_a_streams_tickets_stay_with_their_worker_and_the_third_death_over_one_is_the_last() -> None:
    machine = PoolMachine(2, 2, is_fixed=False)
    machine.begin()
    for worker in (0, 1):
        machine.ready(worker)
    out = [machine.add([], only=worker) for worker in (1, 1, 0, 1)]
    assert [assign.worker for assign in out] == [1, 1, 0, 1]
    for _ in range(DEATHS_PER_STREAM_BATCH - 1):
        replace, *again = machine.died(1, 0, 17, is_blamed=True)
        assert replace == Replace(1)
        assert [(each.worker, each.number) for each in again if isinstance(each, Assign)] == [
            (1, 0),
            (1, 1),
            (1, 3),
        ]
        machine.ready(1)
    assert machine.died(1, 0, 17, is_blamed=True) == [GiveUp(Hopeless.STREAM, DEATHS_PER_STREAM_BATCH)]


def test_deaths_over_other_batches_of_a_stream_do_not_add_up() -> None:
    machine = PoolMachine(1, 3, is_fixed=False)
    machine.begin()
    machine.ready(0)
    for number in range(3):
        machine.add([], only=0)
        for place in (5, Phase.SEND):
            assert machine.died(0, number, place, is_blamed=True)[0] == Replace(0)
            machine.ready(0)
        assert machine.made(0, number)
        machine.hand(number)
    assert not machine.quarantined
