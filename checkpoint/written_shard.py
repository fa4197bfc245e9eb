"""What is durable of a shard that was written in several generations."""

from collections.abc import Iterable

from .manifest_types import SegmentRecord
from .shard_write import DeviceWrite, ShardWrite


class WrittenShard:
    """What is durable of a shard, in one generation or in several."""

    def __init__(self) -> None:
        self._parts: list[ShardWrite] = []
        self._records: dict[int, SegmentRecord] = {}

    def begin(self, write: ShardWrite) -> None:
        """A generation is going to be written."""
        self._parts.append(write)

    def add(self, records: Iterable[SegmentRecord]) -> None:
        """Take what it has, of segments that no other one has."""
        self._records |= {record.segment: record for record in records}

    @property
    def segments(self) -> frozenset[int]:
        """Numbers of the segments."""
        return frozenset(self._records)

    @property
    def records(self) -> tuple[SegmentRecord, ...]:
        """Of the segments, by their numbers."""
        return tuple(self._records[segment] for segment in sorted(self._records))

    @property
    def generation(self) -> str:
        """The newest one."""
        return self._parts[-1].generation

    @property
    def writes(self) -> tuple[DeviceWrite, ...]:
        """What the devices did for all of them."""
        return tuple(each for write in self._parts for each in write.writes)

    def abandon(self) -> None:
        """Remove all of it, see `ShardWrite.abandon`."""
        for write in self._parts:
            write.abandon()
