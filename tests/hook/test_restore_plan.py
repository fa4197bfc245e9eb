"""Which checkpoint is restored, and from which shard."""

import pytest
import torch
from msgspec import structs

from everstep.checkpoint.manifest_types import Manifest
from everstep.core.errors import StateMismatchError
from everstep.core.ids import CheckpointId
from everstep.hook.component import make_components
from everstep.hook.restore_plan import check_same, differing, newest_common, restorable
from everstep.hook.state_testing import store
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


class Counted:
    """An object of numbers and tensors."""

    def __init__(self, **state: object) -> None:
        self._state = state

    def state_dict(self) -> dict[str, object]:
        return self._state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._state = state


def shard(rank: int, **objects: object) -> Manifest:
    """Return the manifest of one of two ranks, that says of all tensors that both have them."""
    manifest = store(make_components(objects, world_size=2)).manifest
    leaves = tuple(structs.replace(leaf, replicas=2) for leaf in manifest.leaves)
    return structs.replace(manifest, rank=rank, world_size=2, leaves=leaves)


def test_another_world_size_is_refused_what_only_some_ranks_have() -> None:
    first = shard(0, a=Counted(x=torch.zeros(2)))
    check_same([first, shard(1, a=Counted(x=torch.ones(2)))], 3)
    more = shard(1, a=Counted(x=torch.zeros(2)), b=Counted(y=torch.zeros(3)))
    with pytest.raises(
        StateMismatchError, match="'b' is missing on rank 0, attached on rank 1; it cannot be restored"
    ):
        check_same([first, more], 3)
    wider = shard(1, a=Counted(x=torch.zeros(2, dtype=torch.float64)))
    with pytest.raises(
        StateMismatchError, match=r"'a\.x' is float32 \[2\] on rank 0, float64 \[2\] on rank 1"
    ):
        check_same([first, wider], 1)
    own = structs.replace(wider, leaves=tuple(structs.replace(leaf, replicas=1) for leaf in wider.leaves))
    with pytest.raises(StateMismatchError, match="different on each"):
        check_same([first, own], 1)


def test_values_that_each_rank_has_of_its_own_are_known() -> None:
    ranks = [shard(rank, a=Counted(offset=100 * rank), b=Counted(n=1), c=Counted(n=rank)) for rank in (0, 1)]
    assert differing(ranks, besides={"c"}) == ["a"]
    assert differing(ranks[:1], besides=()) == []
