"""What ranks make of what each says of a checkpoint: all hear the same end of it."""

from typing import Any, cast

from torch._C._distributed_c10d import HashStore

from everstep.core.ids import CheckpointId
from everstep.hook.rank_results import RankResults

ONE = CheckpointId(1, 1)


class Hearing:
    """A listener that notes the end of a checkpoint."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        pass

    def complete(self, checkpoint: CheckpointId) -> None:
        self.ends.append("complete")

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        self.ends.append(f"incomplete: {reason}")


def test_of_both_ends_that_a_rank_may_see_of_its_part_it_says_the_first_alone() -> None:
    """Its daemon says that all is durable, and dies before that is read: the boundary finds the daemon gone."""
    for first, second in (("failed", "committed"), ("committed", "failed")):
        results = RankResults()
        results.decided(1, due=True)
        assert [results.name(ONE, what) for what in (first, "sealed", second, first)] == [
            "1.1",
            "1.1",
            None,
            "1.1",
        ]


def test_what_a_rank_has_heard_the_end_of_it_speaks_of_no_more() -> None:
    results, store, hearing = RankResults(), HashStore(), Hearing()
    results.decided(1, due=True)
    assert results.name(ONE, "failed") == "1.1"
    store.set("failed/1.1", "the drive")
    assert results.receive(cast(Any, store), cast(Any, hearing)) == [ONE]
    assert hearing.ends == ["incomplete: the drive"]
    assert results.name(ONE, "failed") is None
    assert not results.are_open
