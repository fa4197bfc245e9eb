"""Which checkpoint is restored: the newest that every rank can have, and which shard each rank takes. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..checkpoint.manifest_types import Manifest
from ..checkpoint.value_format import load_documents
from ..core.errors import StateMismatchError
from ..core.ids import CheckpointId
from ..proto.frames import Offer

PER_RANK_PREFIXES = ("rng.", "log.")
"""Each rank's own. At another world size generators are left as the script set them, histories are rank 0's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A checkpoint and the shard that this rank takes of it."""

    checkpoint: CheckpointId
    shard: int
    world_size: int


def restorable(offers: Iterable[Offer], rank: int, world_size: int) -> dict[CheckpointId, Choice]:
    """Return what this rank can restore: its own shard at the same world size, else rank 0's where all have theirs."""
    choices: dict[CheckpointId, Choice] = {}
    for offer in offers:
        if offer.world_size == world_size:
            shard, is_here = rank, rank in offer.shards or offer.in_memory
        else:
            shard, is_here = 0, set(offer.shards) >= set(range(offer.world_size))
        if is_here and not offer.problem:
            checkpoint = CheckpointId(offer.attempt, offer.step)
            choices[checkpoint] = Choice(checkpoint=checkpoint, shard=shard, world_size=offer.world_size)
    return choices


def newest_common(offered: Sequence[Iterable[str]]) -> CheckpointId | None:
    """Return the newest checkpoint that is in every rank's offer, or None."""
    common = set(offered[0]).intersection(*offered[1:])
    return max((CheckpointId.parse(text) for text in common), default=None)


def check_replicated(manifest: Manifest, world_size: int) -> None:
    """Raise StateMismatchError unless the checkpoint's tensors are the same on all its ranks.

    Only then does one rank's shard hold all there is, and restores at another world size.
    """
    if manifest.world_size in (1, world_size):
        return
    for leaf in manifest.leaves:
        own = leaf.replicas != manifest.world_size and not leaf.name.startswith(PER_RANK_PREFIXES)
        if own:
            raise StateMismatchError(
                f"checkpoint {manifest.checkpoint} was taken by {manifest.world_size} ranks and {leaf.name!r} is "
                f"different on each; it cannot be restored by {world_size}",
                hint=f"start {manifest.world_size} ranks; attach(..., replicated=True) says that all hold the same",
            )


def check_same(manifests: Sequence[Manifest], world_size: int) -> None:
    """Raise StateMismatchError unless all shards of a checkpoint, rank 0's first, have what one of them stands for."""
    first, *others = manifests
    for other in others:
        check_replicated(other, world_size)
        ours, theirs = _outline(first), _outline(other)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise StateMismatchError(
                    f"checkpoint {first.checkpoint} was taken by {first.world_size} ranks, and {name!r} is "
                    f"{ours.get(name, 'missing')} on rank {first.rank}, {theirs.get(name, 'missing')} on rank "
                    f"{other.rank}; it cannot be restored by {world_size}",
                    hint=f"start {first.world_size} ranks",
                )


def _outline(manifest: Manifest) -> dict[str, str]:
    """Return dtype and shape of each tensor that all ranks have to have alike, and which components there are."""
    tensors = {
        leaf.name: f"{leaf.dtype} {list(leaf.shape)}"
        for leaf in manifest.leaves
        if not leaf.name.startswith(PER_RANK_PREFIXES)
    }
    return tensors | dict.fromkeys(load_documents(manifest.values), "attached")


def differing(manifests: Sequence[Manifest], besides: Collection[str]) -> list[str]:
    """Return the components, but for some, of which not all shards hold the same values that are no tensors."""
    if len(manifests) == 1:
        return []
    first, *others = (load_documents(manifest.values) for manifest in manifests)
    own = {name for other in others for name in first if other.get(name) != first[name]}
    return sorted(own - set(besides))
