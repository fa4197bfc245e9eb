"""What must hold after a crash: told by what was acknowledged before it, never by the store itself."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from oracle_members import READMIT, OracleMembers

from everstep.core.ids import CheckpointId

Shard = tuple[CheckpointId, int]
"""(checkpoint, rank)."""
NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an acknowledged shard is."""

    devices: frozenset[int] = NOBODY
    """Those that may have its segments."""
    copies: int = 2
    """Devices with its manifest; which ones, nobody said."""

    def survives(self, absent: Collection[int]) -> bool:
        """Tell whether it is there without these devices: of several copies, one is on another device than one."""
        return not self.devices & {*absent} and self.copies > len(absent)


class Oracle:
    """Everything that a writing process said, and what follows from it."""

    def __init__(self, world_size: int) -> None:
        self.acknowledged_count = 0
        self.again_count = 0
        """Shards that were written again."""
        self.change_count = 0
        """Changes of devices that were acknowledged."""
        self.recycled_bytes = 0
        """Written over files of deleted checkpoints; no promise, but the load should do it."""
        self.members = OracleMembers()
        self._world_size = world_size
        self._attempt = 0
        self._shards: dict[Shard, Place] = {}
        self._given_up: set[Shard] = set()
        """They had a part on a device that has left."""
        self._told: list[CheckpointId] = []
        """Floors that may have been recorded, in order."""
        self._floor: CheckpointId | None = None
        """The newest that was acknowledged."""
        self._settled: tuple[int, CheckpointId | None] = (0, None)
        """Attempt and floor that every device has; of newer ones one device may have the only copy."""
        self._gone: set[CheckpointId] = set()

    def attempt_began(self, attempt: int) -> None:
        """Take an attempt as acknowledged."""
        self._attempt = attempt
        self.acknowledged_count += 1

    def persisted(self, checkpoint: CheckpointId, rank: int, place: Place = Place()) -> None:
        """Take a shard as acknowledged, for the first time or written again."""
        self.again_count += (checkpoint, rank) in self._shards
        self._shards[checkpoint, rank] = place
        self._given_up.discard((checkpoint, rank))
        self.acknowledged_count += 1

    def begins_again(self, checkpoint: CheckpointId, rank: int, devices: frozenset[int]) -> None:
        """From now on its segments may be on some of these devices, too: who replaces it may die before he says so."""
        place = self._shards[checkpoint, rank]
        self._shards[checkpoint, rank] = Place(place.devices | devices, place.copies)

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

    def changed(self, verb: str, number: int) -> None:
        """Take a change of the devices as acknowledged; a device that is readmitted is a new one."""
        self.change_count += 1
        self.members.changed(verb, number)
        if verb == READMIT:
            self._give_up({number})

    def _give_up(self, devices: set[int]) -> None:
        self._given_up |= {shard for shard, place in self._shards.items() if place.devices & devices}

    def hear(self, line: str) -> None:
        """Take one line that the writing process printed (power_cut_writer.py)."""
        match line.split():
            case "attempt", number:
                self.attempt_began(int(number))
            case "shard", checkpoint, rank:
                self.persisted(CheckpointId.parse(checkpoint), int(rank))
            case "shard", checkpoint, rank, devices, copies:
                place = Place(_numbers(devices), int(copies))
                self.persisted(CheckpointId.parse(checkpoint), int(rank), place)
            case "again", checkpoint, rank, devices:
                self.begins_again(CheckpointId.parse(checkpoint), int(rank), _numbers(devices))
            case "telling", checkpoint:
                self.floor_begins(CheckpointId.parse(checkpoint))
            case "floor", checkpoint:
                self.floor_set(CheckpointId.parse(checkpoint))
            case "gone", checkpoint:
                self.removed(CheckpointId.parse(checkpoint))
            case "recycled", size_bytes:
                self.recycled_bytes += int(size_bytes)
            case "changing", verb, number:
                self.members.changing(verb, int(number))
            case "changed", verb, number:
                self.changed(verb, int(number))
            case "failed", *_:
                pass
            case _:
                raise AssertionError(f"the writing process said {line!r}")

    def lost(self, intact: set[Shard], absent: Collection[int] = NOBODY) -> list[str]:
        """Return what no rule lets anybody remove and is not among the shards that are offered and read back whole.

        The newest floor that may have been recorded stays, with everything newer. Of the older ones a complete one
        stays: the newest that was acknowledged, or a newer one that is complete without anybody having heard of it.
        What has a part on a device that is absent, that has left or is leaving, nobody promises; it was kept in place
        of older ones.
        """
        promised = self._promised(absent)
        acknowledged, present = self._complete(self._shards), self._complete(intact)
        floors = [each for each in self._told if each in acknowledged | present]
        newest = max(floors, default=CheckpointId(1, 0))
        found = [
            f"rank {rank} of checkpoint {checkpoint} was acknowledged and is lost"
            for checkpoint, rank in sorted(promised - intact)
            if checkpoint >= newest
        ]
        before = max((checkpoint for checkpoint in acknowledged if checkpoint < newest), default=None)
        stands = any(before is None or before <= checkpoint < newest for checkpoint in present)
        if before in self._complete(promised) and not stands:
            found.append(f"checkpoint {before}, complete before {newest}, is lost, and no newer one is there")
        return found

    def _promised(self, absent: Collection[int]) -> set[Shard]:
        without = self.members.out | self.members.leaving
        return {
            shard
            for shard, place in self._shards.items()
            if shard not in self._given_up and not place.devices & without and place.survives(absent)
        }

    def _complete(self, shards: Iterable[Shard]) -> set[CheckpointId]:
        ranks = Counter(checkpoint for checkpoint, _ in shards)
        return {checkpoint for checkpoint, count in ranks.items() if count == self._world_size}

    def problems(
        self,
        *,
        attempt: int,
        floor: CheckpointId | None,
        listed: Iterable[CheckpointId],
        intact: set[Shard],
        absent: Collection[int] = NOBODY,
    ) -> list[str]:
        """Return what a store that was recovered says against what was acknowledged."""
        found = self.lost(intact, absent)
        found += [
            f"checkpoint {checkpoint} was removed and is back"
            for checkpoint in listed
            if checkpoint in self._gone
        ]
        promised_attempt, promised_floor = self._settled if absent else (self._attempt, self._floor)
        if attempt < promised_attempt:
            found.append(f"attempt {promised_attempt} was acknowledged, the store knows {attempt}")
        if promised_floor is not None and (floor is None or floor < promised_floor):
            found.append(f"floor {promised_floor} was acknowledged, the store knows {floor}")
        return found

    def settle(self, *, out: Collection[int], draining: Collection[int], device_count: int) -> list[str]:
        """Take a recovery with every device there: return what is wrong with the members.

        From now on what was under way has happened or not, and every shard has all copies of its manifest.
        """
        self._settled = (self._attempt, self._floor)
        found = self.members.problems(out, draining)
        self._give_up(self.members.settle(out, draining))
        copies = device_count - len(out)
        self._shards = {shard: Place(place.devices, copies) for shard, place in self._shards.items()}
        return found


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(each) for each in text.split(","))
