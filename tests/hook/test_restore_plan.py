"""Which checkpoint is restored, and from which shard."""

from everstep.core.ids import CheckpointId
from everstep.hook.restore_plan import newest_common, restorable
from everstep.proto.frames import Offer


def offer(
    attempt: int,
    step: int,
    shards: list[int],
    *,
    world_size: int = 2,
    in_memory: bool = False,
    problem: str = "",
) -> Offer:
    return Offer(
        attempt=attempt, step=step, world_size=world_size, shards=shards, in_memory=in_memory, problem=problem
    )


def test_a_rank_takes_its_own_shard_at_the_same_world_size() -> None:
    choices = restorable([offer(1, 10, [0]), offer(1, 20, [0, 1])], rank=1, world_size=2)
    assert {str(c): choice.shard for c, choice in choices.items()} == {"1.20": 1}


def test_memory_counts_for_the_rank_that_has_it() -> None:
    assert list(restorable([offer(1, 10, [], in_memory=True)], rank=1, world_size=2)) == [CheckpointId(1, 10)]


def test_another_world_size_takes_the_shard_of_rank_0() -> None:
    choices = restorable([offer(1, 10, [0, 1])], rank=2, world_size=3)
    assert choices[CheckpointId(1, 10)].shard == 0


def test_another_world_size_takes_what_is_whole_only() -> None:
    half = [offer(1, 20, [0]), offer(1, 30, [0], in_memory=True), offer(1, 10, [0, 1])]
    assert list(restorable(half, rank=0, world_size=1)) == [CheckpointId(1, 10)]


def test_what_is_damaged_is_not_taken() -> None:
    assert restorable([offer(1, 10, [0, 1], problem="block 3")], rank=0, world_size=2) == {}


def test_the_newest_attempt_wins_over_the_largest_step() -> None:
    assert newest_common([["1.100", "2.5"], ["2.5", "1.100"]]) == CheckpointId(2, 5)


def test_what_one_rank_lacks_is_not_taken() -> None:
    assert newest_common([["1.20", "1.10"], ["1.10"]]) == CheckpointId(1, 10)
    assert newest_common([["1.20"], ["1.10"]]) is None
