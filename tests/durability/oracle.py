"""What must hold after a crash: told by what was acknowledged before it, never by the store itself."""

from collections import Counter
from collections.abc import Iterable

from everstep.core.ids import CheckpointId


class Oracle:
    """Everything that a writing process said, and what follows from it."""

    def __init__(self, world_size: int) -> None:
        self.acknowledged_count = 0
        self._world_size = world_size
        self._attempt = 0
        self._shards: set[tuple[CheckpointId, int]] = set()
        self._told: list[CheckpointId] = []
        """Floors that may have been recorded, in order."""
        self._floor: CheckpointId | None = None
        """The newest that was acknowledged."""
        self._gone: set[CheckpointId] = set()

    def attempt_began(self, attempt: int) -> None:
        """Take an attempt as acknowledged."""
        self._attempt = attempt
        self.acknowledged_count += 1

    def persisted(self, checkpoint: CheckpointId, rank: int) -> None:
        """Take a shard as acknowledged."""
        self._shards.add((checkpoint, rank))
        self.acknowledged_count += 1

    def floor_begins(self, checkpoint: CheckpointId) -> None:
        """From now on this checkpoint may be the complete floor, once it is committed on all ranks."""
        self._told.append(checkpoint)

    def floor_set(self, checkpoint: CheckpointId) -> None:
        """Take a floor as acknowledged."""
        self._floor = checkpoint
        self.acknowledged_count += 1

    def removed(self, checkpoint: CheckpointId) -> None:
        """Take a removal as acknowledged."""
        self._gone.add(checkpoint)
        self.acknowledged_count += 1

    def hear(self, line: str) -> None:
        """Take one line that the writing process printed (power_cut_writer.py)."""
        match line.split():
            case "attempt", number:
                self.attempt_began(int(number))
            case "shard", checkpoint, rank:
                self.persisted(CheckpointId.parse(checkpoint), int(rank))
            case "telling", checkpoint:
                self.floor_begins(CheckpointId.parse(checkpoint))
            case "floor", checkpoint:
                self.floor_set(CheckpointId.parse(checkpoint))
            case "gone", checkpoint:
                self.removed(CheckpointId.parse(checkpoint))
            case _:
                raise AssertionError(f"the writing process said {line!r}")

    def lost(self, intact: set[tuple[CheckpointId, int]]) -> list[str]:
        """Return what no rule lets anybody remove and is not among the shards that are offered and read back whole.

        The newest floor that may have been recorded stays, with everything newer. Of the older ones a complete one
        stays: the newest that was acknowledged, or a newer one that is complete without anybody having heard of it.
        """
        acknowledged, present = self._complete(self._shards), self._complete(intact)
        floors = [checkpoint for checkpoint in self._told if checkpoint in acknowledged | present]
        newest = max(floors, default=CheckpointId(1, 0))
        found = [
            f"rank {rank} of checkpoint {checkpoint} was acknowledged and is lost"
            for checkpoint, rank in sorted(self._shards - intact)
            if checkpoint >= newest
        ]
        before = max((checkpoint for checkpoint in acknowledged if checkpoint < newest), default=None)
        if before is not None and not any(before <= checkpoint < newest for checkpoint in present):
            found.append(f"checkpoint {before}, complete before {newest}, is lost, and no newer one is there")
        return found

    def _complete(self, shards: set[tuple[CheckpointId, int]]) -> set[CheckpointId]:
        ranks = Counter(checkpoint for checkpoint, _ in shards)
        return {checkpoint for checkpoint, count in ranks.items() if count == self._world_size}

    def problems(
        self,
        *,
        attempt: int,
        floor: CheckpointId | None,
        listed: Iterable[CheckpointId],
        intact: set[tuple[CheckpointId, int]],
    ) -> list[str]:
        """Return what a store that was recovered says against what was acknowledged."""
        found = self.lost(intact)
        found += [
            f"checkpoint {checkpoint} was removed and is back"
            for checkpoint in listed
            if checkpoint in self._gone
        ]
        if attempt < self._attempt:
            found.append(f"attempt {self._attempt} was acknowledged, the store knows {attempt}")
        if self._floor is not None and (floor is None or floor < self._floor):
            found.append(f"floor {self._floor} was acknowledged, the store knows {floor}")
        return found
