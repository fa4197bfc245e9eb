"""What the product has promised at a point of a trace, and what every shard must read back as."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from model_storage import ModelStorage

from everstep.checkpoint.manifest_format import decode_manifest_head, manifest_name
from everstep.checkpoint.testing import HOLDER
from everstep.core.errors import DataError
from everstep.core.ids import CheckpointId, run_id_of

RUN_NAME = "explored"
RUN_ID = run_id_of(RUN_NAME)
ALARM = "a false alarm"
"""What is wrong with a shard that a workload says to be damaged; its bytes are what was saved."""

Shard = tuple[CheckpointId, int]
"""(checkpoint, rank)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What must hold of a store that is opened after a crash here. A value; each method returns the next one."""

    must: frozenset[tuple[Shard, int]] = frozenset()
    """Acknowledged shards, each with the number of devices that have its manifest for sure."""
    may: frozenset[Shard] = frozenset()
    """Shards that may be there or not: being written or removed, or with an unknown outcome."""
    attempt: int = 0
    """Begun for sure, on every device."""
    attempt_max: int = 0
    fresh: int = 0
    """Newest attempt that started anew for sure."""
    fresh_max: int = 0
    floor: CheckpointId | None = None
    floor_max: CheckpointId | None = None
    dispensable: frozenset[tuple[Shard, int]] = frozenset()
    """Shards that must be there also while this device is absent."""
    tags: frozenset[tuple[str, CheckpointId]] = frozenset()
    """There for sure, on every device."""
    tags_may: frozenset[tuple[str, CheckpointId]] = frozenset()
    """Being added or removed."""
    scrub: int = 0
    """So many checkpoints are read by the scrub, as every device that is well knows for sure."""
    scrub_max: int = 0
    lost: frozenset[Shard] = frozenset()
    """Shards with a part on a device that was retired: there but never offered, or collected by now."""
    losing: frozenset[Shard] = frozenset()
    """Shards with a part on a device that is being retired: acknowledged, and whole as long as it is a member."""
    out: frozenset[int] = frozenset()
    """Devices, by number, that are no members for sure."""
    maybe_out: frozenset[int] = frozenset()
    """Devices that are members or not: being retired or readmitted."""
    away: frozenset[int] = frozenset()
    """Members that are not plugged in, and know nothing of what happens meanwhile."""
    behind: frozenset[int] = frozenset()
    """Members of which a call has failed: newer attempts and floors are on the others, until the next recovery."""
    draining: frozenset[int] = frozenset()
    """Devices that drain for sure, as long as they are members."""
    damaged: frozenset[Shard] = frozenset()
    """Shards that reading has shown to be damaged, while they are there; all others are not marked."""
    damaged_may: frozenset[Shard] = frozenset()
    """Being marked, or being found intact after all."""
    damage_copies: int = 0
    """So many devices that stay know what is damaged."""

    def staying(self, device_count: int) -> list[int]:
        """Return the devices that everything acknowledged is on."""
        unsure = self.out | self.maybe_out | self.away
        return [number for number in range(device_count) if number not in unsure]

    def shards(self) -> set[Shard]:
        """Return the shards that must be there."""
        return {shard for shard, _ in self.must}

    def trying(self, shard: Shard) -> "Promise":
        """A shard is being written."""
        return replace(self, may=self.may | {shard})

    def refused(self, shard: Shard) -> "Promise":
        """Writing it failed for good."""
        return replace(self, may=self.may - {shard})

    def kept(self, shard: Shard, copies: int) -> "Promise":
        """It was acknowledged."""
        return replace(self, may=self.may - {shard}, must=self.must | {(shard, copies)})

    def removing(self, checkpoints: Iterable[CheckpointId]) -> "Promise":
        """These are being removed."""
        named = set(checkpoints)
        gone = {shard for shard in self.shards() | self.lost if shard[0] in named}
        left = frozenset(each for each in self.must if each[0] not in gone)
        dispensable = frozenset(each for each in self.dispensable if each[0] not in gone)
        return replace(self, must=left, may=self.may | gone, dispensable=dispensable)

    def without(self, shard: Shard, devices: Iterable[int]) -> "Promise":
        """It was written again so that it does without these devices."""
        return replace(self, dispensable=self.dispensable | {(shard, device) for device in devices})

    def removed(self, checkpoints: Iterable[CheckpointId]) -> "Promise":
        """Their removal was acknowledged: they never come back."""
        gone = set(checkpoints)
        return replace(
            self,
            may=frozenset(shard for shard in self.may if shard[0] not in gone),
            lost=frozenset(shard for shard in self.lost if shard[0] not in gone),
        )

    def beginning(self, attempt: int, *, fresh: bool) -> "Promise":
        """An attempt is being made durable."""
        return replace(self, attempt_max=attempt, fresh_max=attempt if fresh else self.fresh_max)

    def begun(self, *, behind: Iterable[int] = ()) -> "Promise":
        """It was acknowledged; these devices have failed by then."""
        return replace(
            self, attempt=self.attempt_max, fresh=self.fresh_max, behind=self.behind | frozenset(behind)
        )

    def completing(self, checkpoint: CheckpointId) -> "Promise":
        """A checkpoint is being recorded as complete on all ranks; an older one than is known changes nothing."""
        return replace(self, floor_max=max(checkpoint, self.floor_max or checkpoint))

    def completed(self, checkpoint: CheckpointId, *, behind: Iterable[int] = ()) -> "Promise":
        """It was acknowledged; these devices have failed by then."""
        floor = max(checkpoint, self.floor or checkpoint)
        return replace(self, floor=floor, behind=self.behind | frozenset(behind))

    def tag_changing(self, name: str, checkpoint: CheckpointId) -> "Promise":
        """A tag is being added or removed."""
        tag = (name, checkpoint)
        return replace(self, tags=self.tags - {tag}, tags_may=self.tags_may | {tag})

    def tag_settled(self, name: str, checkpoint: CheckpointId, *, is_there: bool) -> "Promise":
        """That was acknowledged."""
        tag = (name, checkpoint)
        tags = self.tags | {tag} if is_there else self.tags
        return replace(self, tags=tags, tags_may=self.tags_may - {tag})

    def scrubbing(self, count: int) -> "Promise":
        """How far the scrub is, is being kept."""
        return replace(self, scrub_max=count)

    def scrubbed(self) -> "Promise":
        """It was kept."""
        return replace(self, scrub=self.scrub_max)

    def marking(self, shard: Shard) -> "Promise":
        """What reading a shard has shown is being kept."""
        return replace(self, damaged=self.damaged - {shard}, damaged_may=self.damaged_may | {shard})

    def marked(self, shard: Shard, copies: int, *, is_damaged: bool) -> "Promise":
        """It was kept, on so many devices."""
        damaged = self.damaged | {shard} if is_damaged else self.damaged
        may = self.damaged_may - {shard}
        return replace(self, damaged=damaged, damaged_may=may, damage_copies=copies)

    def mended(self, device_count: int) -> "Promise":
        """A recovery ended: every shard has its copies again."""
        return replace(self, must=frozenset((shard, device_count) for shard in self.shards()))

    def unplugged(self, devices: Iterable[int]) -> "Promise":
        """These are not plugged in from now on; those that were and are again know less than the others."""
        away = frozenset(devices) - self.out
        fewer = len(away - self.away)
        must = frozenset((shard, max(copies - fewer, 0)) for shard, copies in self.must)
        damage_copies = max(self.damage_copies - fewer, 0)
        return replace(self, must=must, away=away, damage_copies=damage_copies)

    def decided(self, out: Iterable[int], device_count: int) -> "Promise":
        """A recovery ended: what was under way has happened to these devices, or not at all."""
        gone = frozenset(out)
        is_lost = bool(self.maybe_out & gone)
        kept = frozenset[Shard]() if is_lost else self.losing
        done = replace(
            self,
            must=self.must | {(shard, 0) for shard in kept},
            lost=self.lost | self.losing if is_lost else self.lost,
            losing=frozenset(),
            out=gone,
            maybe_out=frozenset(),
            behind=frozenset(),
            draining=self.draining - gone,
        )
        return done.mended(len(done.staying(device_count)))

    def drained(self, device: int, *, is_cancelled: bool = False) -> "Promise":
        """It was acknowledged that a device gets no new segments; or it is being taken back."""
        return replace(self, draining=self.draining - {device} if is_cancelled else self.draining | {device})

    def retiring(self, device: int, shards: Iterable[Shard]) -> "Promise":
        """A device that holds a part of these shards is being retired."""
        going = frozenset(shards)
        return replace(
            self,
            must=frozenset((shard, max(copies - 1, 0)) for shard, copies in self.must if shard not in going),
            losing=going & (self.shards() | self.may),
            may=self.may - going,
            maybe_out=self.maybe_out | {device},
        )

    def retired(self, device: int, device_count: int) -> "Promise":
        """It was acknowledged: what it held is lost, everything else has its manifest on all that stay."""
        done = replace(
            self,
            lost=self.lost | self.losing,
            losing=frozenset(),
            maybe_out=self.maybe_out - {device},
            out=self.out | {device},
            away=self.away - {device},
            draining=self.draining - {device},
        )
        return done.mended(len(done.staying(device_count)))

    def readmitting(self, device: int) -> "Promise":
        """A retired device is being made a new one."""
        return replace(self, out=self.out - {device}, maybe_out=self.maybe_out | {device})

    def readmitted(self, device: int, device_count: int) -> "Promise":
        """It is a member again, with a copy of everything."""
        done = replace(self, maybe_out=self.maybe_out - {device})
        return done.mended(len(done.staying(device_count)))

    def offered(
        self,
        found: Iterable[Shard],
        lost: Iterable[Shard],
        *,
        device_count: int,
        out: Iterable[int],
        attempt: int,
        floor: CheckpointId | None,
        tags: Iterable[tuple[str, CheckpointId]],
        damaged: Iterable[Shard],
    ) -> "Promise":
        """A recovery ended and a trainer was told of these: what it builds on that must not vanish any more."""
        told, left = frozenset(found), frozenset(out)
        return replace(
            self,
            must=frozenset((shard, device_count - len(left)) for shard in told),
            may=frozenset(),
            lost=frozenset(lost),
            losing=frozenset(),
            out=left,
            maybe_out=frozenset(),
            away=frozenset(),
            attempt=max(self.attempt, attempt),
            floor=floor,
            fresh_max=self.fresh_max,
            tags=frozenset(tags),
            tags_may=frozenset(),
            damaged=frozenset(damaged),
            damaged_may=frozenset(),
            damage_copies=0,
            dispensable=frozenset(each for each in self.dispensable if each[0] in told),
        )


@dataclass(slots=True)
class Witness:
    """What was really saved, kept outside the product."""

    content: dict[Shard, Mapping[str, bytes]] = field(default_factory=dict[Shard, Mapping[str, bytes]])
    manifests: dict[Shard, list[bytes]] = field(default_factory=dict[Shard, list[bytes]])
    """The newest last: a shard that was written again has several, each of which brings it back."""

    def expect(self, shard: Shard, content: Mapping[str, bytes]) -> None:
        """Take the bytes of a shard about to be saved, by leaf."""
        self.content[shard] = content

    def committed(self, shard: Shard, storage: ModelStorage, copies: int) -> None:
        """Take the manifest of an acknowledged shard, as it stands on the devices."""
        found = set(manifest_copies(storage, shard, range(len(storage.roots))))
        assert len(found) == 1, (
            f"{shard}: manifests differ, or there is none, after {copies} were acknowledged"
        )
        self.manifests[shard] = list(found)

    def committed_again(self, shard: Shard, storage: ModelStorage) -> None:
        """Take the manifest of a shard that was written again."""
        (new,) = set(manifest_copies(storage, shard, range(len(storage.roots)))) - set(self.manifests[shard])
        self.manifests[shard].append(new)

    def copy_count(self, storage: ModelStorage, shard: Shard, devices: Iterable[int]) -> int:
        """Return how many of these devices have the shard's manifest, whole and under its name.

        Of a shard that a recovery offered although nobody had acknowledged it, any manifest that can be read counts.
        """
        expected = self.manifests.get(shard)
        return sum(
            content in expected if expected else _is_whole(content)
            for content in manifest_copies(storage, shard, devices)
        )


def _is_whole(content: bytes) -> bool:
    try:
        decode_manifest_head(content)
    except DataError:
        return False
    return True


def manifest_copies(storage: ModelStorage, shard: Shard, devices: Iterable[int]) -> list[bytes]:
    """Return the content of every file under the shard's manifest name on these devices."""
    names = ("runs", str(HOLDER.uid), RUN_ID, "commits", manifest_name(*shard))
    found = (storage.content_at(device, *names) for device in devices)
    return [content for content in found if content is not None]


def digest(content: bytes) -> str:
    """Return a short name of some bytes for messages."""
    return hashlib.sha256(content).hexdigest()[:8]
