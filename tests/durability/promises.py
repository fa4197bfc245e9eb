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
    tags: frozenset[tuple[str, CheckpointId]] = frozenset()
    """There for sure, on every device."""
    tags_may: frozenset[tuple[str, CheckpointId]] = frozenset()
    """Being added or removed."""

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
        gone = {shard for shard in self.shards() if shard[0] in set(checkpoints)}
        left = frozenset(each for each in self.must if each[0] not in gone)
        return replace(self, must=left, may=self.may | gone)

    def removed(self, checkpoints: Iterable[CheckpointId]) -> "Promise":
        """Their removal was acknowledged: they never come back."""
        gone = set(checkpoints)
        return replace(self, may=frozenset(shard for shard in self.may if shard[0] not in gone))

    def beginning(self, attempt: int, *, fresh: bool) -> "Promise":
        """An attempt is being made durable."""
        return replace(self, attempt_max=attempt, fresh_max=attempt if fresh else self.fresh_max)

    def begun(self) -> "Promise":
        """It was acknowledged."""
        return replace(self, attempt=self.attempt_max, fresh=self.fresh_max)

    def completing(self, checkpoint: CheckpointId) -> "Promise":
        """A checkpoint is being recorded as complete on all ranks; an older one than is known changes nothing."""
        return replace(self, floor_max=max(checkpoint, self.floor_max or checkpoint))

    def completed(self, checkpoint: CheckpointId) -> "Promise":
        """It was acknowledged."""
        return replace(self, floor=max(checkpoint, self.floor or checkpoint))

    def tag_changing(self, name: str, checkpoint: CheckpointId) -> "Promise":
        """A tag is being added or removed."""
        tag = (name, checkpoint)
        return replace(self, tags=self.tags - {tag}, tags_may=self.tags_may | {tag})

    def tag_settled(self, name: str, checkpoint: CheckpointId, *, is_there: bool) -> "Promise":
        """That was acknowledged."""
        tag = (name, checkpoint)
        tags = self.tags | {tag} if is_there else self.tags
        return replace(self, tags=tags, tags_may=self.tags_may - {tag})

    def mended(self, device_count: int) -> "Promise":
        """A recovery ended: every shard has its copies again."""
        return replace(self, must=frozenset((shard, device_count) for shard in self.shards()))

    def offered(
        self,
        found: Iterable[Shard],
        device_count: int,
        attempt: int,
        floor: CheckpointId | None,
        tags: Iterable[tuple[str, CheckpointId]],
    ) -> "Promise":
        """A recovery ended and a trainer was told of these: what it builds on that must not vanish any more."""
        told = frozenset(found)
        return replace(
            self,
            must=frozenset((shard, device_count) for shard in told),
            may=frozenset(),
            attempt=max(self.attempt, attempt),
            floor=floor,
            fresh_max=self.fresh_max,
            tags=frozenset(tags),
            tags_may=frozenset(),
        )


@dataclass(slots=True)
class Witness:
    """What was really saved, kept outside the product."""

    content: dict[Shard, Mapping[str, bytes]] = field(default_factory=dict[Shard, Mapping[str, bytes]])
    manifests: dict[Shard, bytes] = field(default_factory=dict[Shard, bytes])

    def expect(self, shard: Shard, content: Mapping[str, bytes]) -> None:
        """Take the bytes of a shard about to be saved, by leaf."""
        self.content[shard] = content

    def committed(self, shard: Shard, storage: ModelStorage, copies: int) -> None:
        """Take the manifest of an acknowledged shard, as it stands on the devices."""
        found = set(manifest_copies(storage, shard))
        assert len(found) == 1, (
            f"{shard}: manifests differ, or there is none, after {copies} were acknowledged"
        )
        (self.manifests[shard],) = found

    def copy_count(self, storage: ModelStorage, shard: Shard) -> int:
        """Return the number of devices that have the shard's manifest, whole and under its name.

        Of a shard that a recovery offered although nobody had acknowledged it, any manifest that can be read counts.
        """
        expected = self.manifests.get(shard)
        return sum(
            content == expected if expected else _is_whole(content)
            for content in manifest_copies(storage, shard)
        )


def _is_whole(content: bytes) -> bool:
    try:
        decode_manifest_head(content)
    except DataError:
        return False
    return True


def manifest_copies(storage: ModelStorage, shard: Shard) -> list[bytes]:
    """Return the content of every file under the shard's manifest name, by device."""
    names = ("runs", str(HOLDER.uid), RUN_ID, "commits", manifest_name(*shard))
    found = (storage.content_at(device, *names) for device in range(len(storage.roots)))
    return [content for content in found if content is not None]


def digest(content: bytes) -> str:
    """Return a short name of some bytes for messages."""
    return hashlib.sha256(content).hexdigest()[:8]
