"""A run of one process: what it does is done everywhere, and told once."""

from everstep.checkpoint.frequency_types import Limits
from everstep.core.ids import CheckpointId
from everstep.hook.pace import Pace
from everstep.hook.ranks import OneRank


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[str, CheckpointId]] = []

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        self.said.append(("sealed", checkpoint))

    def complete(self, checkpoint: CheckpointId) -> None:
        self.said.append(("complete", checkpoint))

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        assert in_memory
        self.said.append((reason, checkpoint))


def test_a_failure_that_two_threads_notice_is_told_once() -> None:
    ranks, heard = OneRank(Pace(every=1, limits=Limits())), Heard()
    ranks.start(0, heard)
    one, two = CheckpointId(1, 1), CheckpointId(1, 2)
    ranks.failed(one, "the daemon went away")
    ranks.failed(one, "the copy noticed it, too")
    ranks.failed(two, "a device failed")
    assert heard.said == [("the daemon went away", one), ("a device failed", two)]
