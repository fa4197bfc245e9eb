"""Bringing a run back: all ranks agree on the newest checkpoint, verify it, and only then change anything."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from ..checkpoint.manifest_format import decode_manifest
from ..checkpoint.manifest_types import Manifest
from ..core.errors import (
    CorruptDataError,
    DataError,
    EverstepError,
    NotFoundError,
    UsageError,
    error_from_code,
)
from ..core.ids import CheckpointId
from ..proto import frames
from .link import Link
from .mapped_arena import MappedArena
from .ranks import Ranks
from .restore_plan import Choice, check_replicated, newest_common, restorable
from .state_protocol import Component
from .stored_state import StoredState

logger = logging.getLogger(__name__)

FETCH_DEADLINE_S = 3600.0
"""Reading a shard takes as long as the devices take; a dead daemon is noticed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `run.restore()` brought back."""

    attempt: int
    step: int
    epoch: int
    source: str
    """"memory" or "disk"."""
    restore_s: float
    """From the call to the last byte in the tensors."""
    world_size: int
    """Of the ranks that took the checkpoint."""
    skipped: tuple[str, ...]
    """Newer checkpoints that could not be restored, with the reason."""

    @property
    def checkpoint(self) -> CheckpointId:
        """Identity of the checkpoint."""
        return CheckpointId(self.attempt, self.step)


@dataclass(slots=True, kw_only=True)
class Fetched:
    """A verified shard in shared memory, not yet applied."""

    choice: Choice
    manifest: Manifest
    source: frames.Source
    stored: StoredState
    arena: MappedArena
    keeps_arena: bool
    """It came from memory: its arena goes on being used for snapshots."""


@dataclass(slots=True, kw_only=True)
class RestoreSearch:
    """One `restore()` call: looks from the newest checkpoint to older ones until one holds on all ranks."""

    link: Link
    ranks: Ranks
    components: Sequence[Component]
    attempt: int
    skipped: list[str] = field(default_factory=list[str])

    def run(self) -> Fetched | None:
        """Return the shard to apply, or None when there is nothing to restore.

        Raises:
            CorruptDataError: there are checkpoints, but none can be restored.
            StateMismatchError: the newest does not fit the objects given; nothing was changed.
        """
        offers = self._offers()
        choices = restorable(offers, self.ranks.rank, self.ranks.world_size)
        self.skipped += [
            f"{offer.attempt}.{offer.step}: {offer.problem}" for offer in offers if offer.problem
        ]
        while True:
            offered = self.ranks.gather("offer", [str(checkpoint) for checkpoint in choices])
            newest = newest_common(cast("list[list[str]]", offered))
            if newest is None:
                self._refuse_if_lost(offers)
                return None
            found = self._try(choices[newest])
            if found is not None:
                return found
            del choices[newest]

    def _offers(self) -> list[frames.Offer]:
        reply, _ = self.link.client.request(
            lambda number: frames.ListOffers(request_id=number), FETCH_DEADLINE_S
        )
        assert isinstance(reply, frames.Offers)
        return reply.items

    def _refuse_if_lost(self, offers: list[frames.Offer]) -> None:
        """Starting from nothing beside checkpoints that exist would sooner or later delete them: ask the user."""
        if offers:
            raise CorruptDataError(
                f"none of the {len(offers)} checkpoints of this run can be restored by all ranks: "
                + "; ".join(self.skipped[:5] or ["no rank set has all shards"]),
                hint="mount missing devices, start as many ranks as took them, or attach(..., fresh=True)",
            )

    def _try(self, choice: Choice) -> Fetched | None:
        """Return the shard when every rank could fetch and check its own, else None; a misfit is raised by all."""
        found, error = self._fetch_checked(choice)
        said = self.ranks.gather(
            "restore",
            None if error is None else {"code": error.code, "message": error.message, "hint": error.hint},
        )
        failures = [cast("dict[str, str]", item) for item in said if item is not None]
        if not failures:
            return found
        if found is not None:
            self.give_back(found)
        first = error or error_from_code(failures[0]["code"], failures[0]["message"], failures[0]["hint"])
        if not isinstance(first, DataError | NotFoundError):
            raise first
        reason = f"{choice.checkpoint}: {first.message}"
        logger.error("checkpoint_not_restorable %s", reason)
        self.skipped.append(reason)
        return None

    def _fetch_checked(self, choice: Choice) -> tuple[Fetched | None, EverstepError | None]:
        found: Fetched | None = None
        try:
            found = self._fetch(choice)
            check_replicated(found.manifest, self.ranks.world_size)
            for component in self.components:
                component.check(found.stored)
        except EverstepError as error:
            if found is not None:
                self.give_back(found)
            return None, error
        return found, None

    def _fetch(self, choice: Choice) -> Fetched:
        wanted = choice.checkpoint
        reply, fd = self.link.client.request(
            lambda number: frames.Fetch(
                request_id=number, attempt=wanted.attempt, step=wanted.step, rank=choice.shard
            ),
            FETCH_DEADLINE_S,
        )
        assert isinstance(reply, frames.Fetched)
        assert fd is not None
        arena = MappedArena(reply.arena, fd, reply.slot_size_bytes, reply.slot_count, reply.layout_digest)
        arena.free = set(reply.free_slots)
        manifest = decode_manifest(reply.manifest)
        offsets = {
            segment.segment: offset
            for segment, offset in zip(manifest.segments, reply.segment_offsets_bytes, strict=True)
        }
        return Fetched(
            choice=choice,
            manifest=manifest,
            source=reply.source,
            stored=StoredState(manifest, arena.view(0, reply.arena_size_bytes), offsets),
            arena=arena,
            keeps_arena=reply.source is frames.Source.MEMORY,
        )

    def give_back(self, found: Fetched) -> None:
        """Unmap an arena that is not needed; one made for the restore is released."""
        found.stored.close()
        found.arena.close()
        if not found.keeps_arena:
            self.link.tell(frames.Release(arena=found.arena.number))

    def other_manifests(self, found: Fetched) -> list[Manifest]:
        """Return the manifests of the other shards of a checkpoint that is being restored at another world size."""
        wanted, manifests = found.choice.checkpoint, list[Manifest]()
        for rank in range(found.choice.world_size):
            if rank != found.choice.shard:
                reply, _ = self.link.client.request(
                    lambda number, shard=rank: frames.GetManifest(
                        request_id=number, attempt=wanted.attempt, step=wanted.step, rank=shard
                    )
                )
                assert isinstance(reply, frames.ManifestBytes)
                manifests.append(decode_manifest(reply.manifest))
        return manifests


def check_may_restore(*, started: bool, restored: bool) -> None:
    """Raise UsageError when it is too late to restore."""
    if started or restored:
        raise UsageError(
            "restore() comes once, before the first step() or epochs()",
            hint="attach, restore, then train",
        )
