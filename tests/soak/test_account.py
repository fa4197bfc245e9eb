"""The oracle's account finds each thing that must not happen, and nothing else."""

from typing import Any

import pytest
from account import Account

SAMPLES = 4


class Told:
    """An account, and a run of one or two ranks that talks to it; two samples a step over all ranks."""

    def __init__(self, world_size: int = 1) -> None:
        self.account = Account()
        self.world_size = world_size
        self.found: list[str] = []

    def say(self, what: str, **facts: Any) -> None:
        self.found += self.account.take({"what": what, "run": "r", **facts})

    def begin(self, attempt: int, restored: tuple[int, int] | None = None, /, **changes: Any) -> None:
        for rank in range(self.world_size):
            digest = f"{restored} {rank}" if restored else "new"
            facts = {"restored": list(restored) if restored else None, "digest": digest}
            facts |= {"samples": SAMPLES, "source": "disk"} | (changes if rank == self.world_size - 1 else {})
            self.say("begun", rank=rank, world_size=self.world_size, attempt=attempt, **facts)

    def steps(self, attempt: int, first: int, last: int) -> None:
        """Each epoch has two steps."""
        for step in range(first, last + 1):
            epoch, half = divmod(step - 1, 2)
            for rank in range(self.world_size):
                ids = [half * 2, half * 2 + 1][rank :: self.world_size]
                digest = f"{(attempt, step)} {rank}"
                self.say("state", rank=rank, attempt=attempt, step=step, digest=digest, epoch=epoch, ids=ids)

    def acknowledge(self, attempt: int, step: int) -> None:
        self.say("acknowledged", rank=0, attempt=attempt, step=step)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_killed_and_goes_on_is_right(world_size: int) -> None:
    told = Told(world_size)
    told.begin(1)
    told.steps(1, 1, 5)
    told.acknowledge(1, 3)
    told.begin(2, (1, 3))
    told.steps(2, 4, 9)
    told.acknowledge(2, 8)
    told.say("listing")
    told.say("listed", complete=[[1, 3], [2, 8]])
    told.begin(3, (2, 8))
    told.found += told.account.on_end()
    assert told.found == []
    assert told.account.lineage("r") == [*((1, n) for n in (1, 2, 3)), *((2, n) for n in range(4, 9))]
    assert told.account.counts["checkpoints acknowledged"] == 2


def test_what_is_older_than_acknowledged_is_found() -> None:
    for restored in ((1, 2), None):
        told = Told()
        told.begin(1)
        told.steps(1, 1, 5)
        told.acknowledge(1, 4)
        told.begin(2, restored)
        assert told.found == [f"r rank 0 attempt 2: (1, 4) was acknowledged, and it restored {restored}"]


def test_other_bytes_are_found() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 2)
    told.begin(2, (1, 2), digest="other")
    assert told.found == ["r rank 0: (1, 2) came back with other bytes"]


def test_a_state_that_nobody_had_is_found() -> None:
    told = Told()
    told.begin(1)
    told.begin(2, (1, 9))
    assert told.found[0] == "r rank 0: (1, 9) came back, a state that it never said it had"


def test_a_mixture_is_found() -> None:
    told = Told(2)
    told.begin(1)
    told.steps(1, 1, 4)
    told.begin(2, (1, 2), restored=[1, 4], digest="(1, 4) 1")
    assert told.found == ["r rank 1 attempt 2: a mixture, it restored (1, 4) and another rank (1, 2)"]


def test_an_attempt_that_was_there_before_is_found() -> None:
    told = Told()
    told.begin(2)
    told.begin(1)
    assert told.found == ["r rank 0 attempt 1: not a new attempt, 2 was there before"]


def test_a_checkpoint_that_a_rank_never_had_is_found() -> None:
    told = Told(2)
    told.begin(1)
    told.say("state", rank=0, attempt=1, step=1, digest="d", epoch=0, ids=[0])
    told.acknowledge(1, 1)
    assert told.found == ["r rank 0: (1, 1) is complete, but ranks [1] never had such a state"]


def test_a_sample_that_came_twice_or_never_is_found() -> None:
    told = Told()
    told.begin(1)
    for step, epoch, ids in ((1, 0, [0, 1]), (2, 0, [1, 3]), (3, 1, [0, 1])):
        told.say("state", rank=0, attempt=1, step=step, digest="d", epoch=epoch, ids=ids)
    assert told.account.on_end() == [
        "r: epoch 0 of the lineage has 1 samples missing [2] and 1 more than once [1]"
    ]


def test_samples_of_steps_that_were_undone_do_not_count() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 6)
    told.begin(2, (1, 1))
    told.steps(2, 2, 5)
    assert told.account.on_end() == told.found == []


def test_a_boundary_that_is_missing_is_found() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 1)
    told.steps(1, 3, 5)
    assert told.account.on_end() == ["r: boundary (1, 2) of the lineage is not known of ranks [0]"]


def test_a_list_without_what_was_acknowledged_is_found() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 4)
    told.acknowledge(1, 2)
    told.say("listing")
    told.acknowledge(1, 4)  # meanwhile: the list may be older
    told.say("listed", complete=[[1, 2]])
    assert told.found == []
    told.say("listing")
    told.say("listed", complete=[[1, 2]])
    assert told.found == ["r: (1, 4) was acknowledged, and the newest of the list is (1, 2)"]


def test_metrics_that_count_less_than_was_acknowledged_are_found() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 9)
    for step in (2, 4, 6):
        told.acknowledge(1, step)
    assert told.account.on_metrics(shards_persisted=3, shards_counted=3) == []
    assert len(told.account.on_metrics(shards_persisted=1, shards_counted=2)) == 2
    told.account.on_daemon_started()
    assert told.account.on_metrics(shards_persisted=0, shards_counted=0) == []


def test_a_cost_above_the_budget_is_found() -> None:
    account = Account()
    assert account.on_cost(run="r", share=0.03, budget=0.035, steps=400) == []
    assert account.on_cost(run="r", share=0.04, budget=0.035, steps=400) != []


def test_each_complete_checkpoint_has_one_event() -> None:
    told = Told()
    told.begin(1)
    told.steps(1, 1, 8)
    for step in (2, 4, 6):
        told.acknowledge(1, step)
    assert told.account.expected_events() == {"r": [(1, 4), (1, 6)]}, "the first may be of the daemon before"
    expected = [[1, 4], [1, 6]]
    told.say("events", expected=expected, complete=[[1, 2], [1, 4], [1, 6], [1, 8]], is_whole=True)
    told.say("events", expected=expected, complete=[[1, 6]], is_whole=False)
    assert told.found == []
    told.say("events", expected=expected, complete=[[1, 6]], is_whole=True)
    told.say("events", expected=expected, complete=[[1, 2], [1, 6]], is_whole=False)
    told.say("events", expected=[], complete=[[1, 6], [1, 6]], is_whole=True)
    assert told.found == [
        "r: (1, 4) was acknowledged, and no event says that it is complete",  # once, however often one looks
        "r: (1, 6) has 2 events of being complete",
    ]
    told.account.on_daemon_started()
    assert told.account.expected_events() == {"r": []}
