from oracle import Oracle

from everstep.core.ids import CheckpointId

ONE, TWO, THREE, FOUR = (CheckpointId(1, step) for step in range(1, 5))


def shards(*checkpoints: CheckpointId) -> set[tuple[CheckpointId, int]]:
    return {(checkpoint, rank) for checkpoint in checkpoints for rank in (0, 1)}


def heard(*lines: str) -> Oracle:
    oracle = Oracle(2)
    for line in lines:
        oracle.hear(line)
    return oracle


def test_without_a_floor_everything_stays() -> None:
    oracle = heard("attempt 1", "shard 1.1 0", "shard 1.2 0", "shard 1.2 1")
    assert oracle.acknowledged_count == 4
    assert oracle.lost({(ONE, 0), *shards(TWO)}) == []
    assert oracle.lost(shards(TWO)) == ["rank 0 of checkpoint 1.1 was acknowledged and is lost"]


def test_a_floor_that_may_be_there_stays_with_all_newer_and_a_complete_one_before() -> None:
    oracle = heard(
        *("shard 1.1 0", "shard 1.1 1", "telling 1.1", "floor 1.1"),
        *("shard 1.2 0",),
        *("shard 1.3 0", "shard 1.3 1", "telling 1.3"),
        *("shard 1.4 1",),
    )
    assert oracle.lost(shards(ONE, THREE, FOUR)) == []
    assert oracle.lost(shards(TWO, THREE, FOUR)) == []  # rank 1 of it was committed, and nobody heard of it
    assert oracle.lost({(TWO, 0), *shards(THREE, FOUR)}) == [
        "checkpoint 1.1, complete before 1.3, is lost, and no newer one is there"
    ]
    assert oracle.lost({*shards(ONE), (THREE, 0)}) == [
        "rank 1 of checkpoint 1.3 was acknowledged and is lost",
        "rank 1 of checkpoint 1.4 was acknowledged and is lost",
    ]


def test_a_floor_that_nobody_committed_lets_nothing_go() -> None:
    oracle = heard(*("shard 1.1 0", "shard 1.1 1", "telling 1.1"), "telling 1.2")
    assert oracle.lost(set()) == [
        "rank 0 of checkpoint 1.1 was acknowledged and is lost",
        "rank 1 of checkpoint 1.1 was acknowledged and is lost",
    ]
    assert oracle.lost(shards(TWO)) == [
        "checkpoint 1.1, complete before 1.2, is lost, and no newer one is there"
    ]
    assert oracle.lost(shards(ONE)) == []


def test_what_was_removed_stays_away_and_attempt_and_floor_never_fall_back() -> None:
    oracle = heard("attempt 2", "telling 1.2", "floor 1.2", "gone 1.1")
    assert oracle.problems(attempt=2, floor=THREE, listed=[TWO], intact=set()) == []
    assert oracle.problems(attempt=1, floor=ONE, listed=[ONE], intact=set()) == [
        "checkpoint 1.1 was removed and is back",
        "attempt 2 was acknowledged, the store knows 1",
        "floor 1.2 was acknowledged, the store knows 1.1",
    ]


def test_a_device_that_is_absent_takes_what_is_on_it_along_and_nothing_else() -> None:
    oracle = heard(
        *("shard 1.1 0 0,1 3", "shard 1.1 1 0,1 3"),
        *("shard 1.2 0 1,2 3", "shard 1.2 1 1 1"),
        *("shard 1.3 0 0 3", "shard 1.3 0 1 2"),  # written again
    )
    assert (oracle.again_count, oracle.lost(set(), absent={1})) == (1, [])
    assert oracle.lost(set(), absent={0}) == [
        "rank 0 of checkpoint 1.2 was acknowledged and is lost",
        "rank 0 of checkpoint 1.3 was acknowledged and is lost",
    ]  # the one copy of the other manifest may be on it
    assert oracle.lost(set(), absent={2}) == [
        "rank 0 of checkpoint 1.1 was acknowledged and is lost",
        "rank 1 of checkpoint 1.1 was acknowledged and is lost",
        "rank 0 of checkpoint 1.3 was acknowledged and is lost",
    ]
    oracle.settle(out=(), draining=(), device_count=3)
    assert len(oracle.lost(set(), absent={0})) == 3  # recovery has made the other copies


def test_what_is_being_written_again_may_be_on_any_device_until_that_is_acknowledged() -> None:
    oracle = heard("shard 1.1 0 0,1 3", "again 1.1 0 0,1,2")
    assert oracle.settle(out=(), draining=(), device_count=3) == []
    assert oracle.lost(set(), absent={2}) == []
    assert oracle.lost(set()) == ["rank 0 of checkpoint 1.1 was acknowledged and is lost"]
    oracle.hear("shard 1.1 0 0,1 3")
    assert oracle.lost(set(), absent={2}) == ["rank 0 of checkpoint 1.1 was acknowledged and is lost"]


def test_what_is_on_a_device_that_leaves_is_promised_again_only_if_it_stays() -> None:
    lines = ("shard 1.1 0 0,1 3", "shard 1.2 0 1,2 3", "changing retire 0")
    oracle = heard(*lines)
    assert oracle.lost({(TWO, 0)}) == []
    assert oracle.settle(out=(), draining=[0], device_count=3) == []
    assert oracle.lost({(TWO, 0)}) == ["rank 0 of checkpoint 1.1 was acknowledged and is lost"]
    oracle = heard(*lines)
    assert oracle.settle(out=[0], draining=(), device_count=3) == []
    assert (oracle.lost({(TWO, 0)}), oracle.members.out) == ([], {0})
    for line in ("shard 1.1 0 2 2", "changing readmit 0", "changed readmit 0"):
        oracle.hear(line)
    assert oracle.lost({(TWO, 0)}) == ["rank 0 of checkpoint 1.1 was acknowledged and is lost"]


def test_a_complete_one_that_left_with_its_device_had_taken_the_place_of_older_ones() -> None:
    oracle = heard(
        *("shard 1.1 0 0,1 3", "shard 1.1 1 0,1 3", "shard 1.2 0 2 3", "shard 1.2 1 2 3"),
        *("shard 1.3 0 0,1 3", "shard 1.3 1 0,1 3", "telling 1.3"),
    )
    oracle.hear("changing retire 2")
    assert oracle.lost(shards(THREE)) == []


def test_changes_of_the_members_hold_once_acknowledged() -> None:
    oracle = heard("changing drain 0", "changed drain 0", "changing retire 1", "changed retire 1")
    assert oracle.change_count == 2
    assert oracle.members.problems(out={1}, draining={0}) == []
    assert oracle.members.problems(out={2}, draining={1}) == [
        "device 1 was retired and is a member",
        "device 2 is retired",
        "device 0 was drained and does not drain",
        "device 1 drains",
    ]
    for line in ("changing cancel 0", "changing readmit 1", "changing retire 2"):
        oracle.hear(line)
    for draining in ((), (0,)):
        for out in ((), (1,), (2,), (1, 2)):
            assert oracle.members.problems(out, draining) == []


def test_a_floor_that_one_device_may_have_alone_is_promised_where_all_are() -> None:
    """The others failed while it was recorded, and then this one is away."""
    oracle = heard("attempt 1", "telling 1.1", "floor 1.1")
    assert oracle.settle(out=(), draining=(), device_count=3) == []
    oracle.hear("floor 1.2")
    assert oracle.problems(attempt=1, floor=ONE, listed=[], intact=set(), absent={0}) == []
    assert oracle.problems(attempt=1, floor=None, listed=[], intact=set(), absent={0}) == [
        "floor 1.1 was acknowledged, the store knows None"
    ]
    assert oracle.problems(attempt=1, floor=ONE, listed=[], intact=set()) == [
        "floor 1.2 was acknowledged, the store knows 1.1"
    ]
