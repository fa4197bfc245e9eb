"""Bringing a run back: all ranks agree on the newest checkpoint, check that it fits, then read, verify and copy it."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import torch

from ..checkpoint.catalogue import NEWEST_SHOWN
from ..checkpoint.leaf_runs_plan import leaf_runs
from ..checkpoint.lineage_plan import WENT_BACK_NOTE, Goal, turns_of
from ..checkpoint.manifest_format import decode_manifest
from ..checkpoint.manifest_types import Manifest
from ..core.errors import (
    CorruptDataError,
    DataError,
    DeadlineError,
    EverstepError,
    NotFoundError,
    StateMismatchError,
    UsageError,
)
from ..core.ids import CheckpointId
from ..proto import frames
from .component import check_components
from .history import NAME as HISTORY_NAME
from .link import Link
from .mapped_arena import MappedArena
from .module_state import ModuleState
from .plain_errors import with_plain_errors
from .rank_format import dump_error, load_error
from .rank_protocol import Ranks
from .received_leaves import ReceivedLeaves
from .restore_plan import Choice, check_replicated, check_same, newest_common, restorable
from .rng_state import NAME as RNG_NAME
from .run_state import RUN_COMPONENT, RunState
from .shard_memory import DamagedMemoryError, ShardMemory
from .shard_stream import ShardStream, StreamEvents
from .state_protocol import Component
from .stored_state import StoredState

logger = logging.getLogger(__name__)

OWN_COMPONENTS = frozenset({RUN_COMPONENT, RNG_NAME, HISTORY_NAME})
"""What every run has beside the objects that the script attaches."""

LOOKS_IN_MEMORY = 2
"""When a device fails, the daemon may write a snapshot again, with other headers, while it is read in memory: the
second look waits for that, and knows them."""

FETCH_DEADLINE_S = 3600.0
"""Reading a shard takes as long as the devices take, and others wait as long; a dead daemon is noticed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `run.restore()` brought back."""

    checkpoint: CheckpointId
    """Its identity: attempt and number. The last one of an attempt, after its last boundary, has a number beyond it."""
    step: int
    """Boundaries passed by then along the lineage: what `run.steps` goes on from."""
    epoch: int
    source: str
    """"memory" or "disk"."""
    restore_s: float
    """From the call to the last byte in the tensors."""
    world_size: int
    """Of the ranks that took the checkpoint."""
    skipped: tuple[str, ...]
    """Newer checkpoints that could not be restored, with the reason."""
    left_as_given: tuple[str, ...] = ()
    """Components that an imported checkpoint lacks: they are as the script made them."""
    not_attached: tuple[str, ...] = ()
    """Components that the checkpoint has and the script does not: the next checkpoint is without them."""

    @property
    def attempt(self) -> int:
        """Of the checkpoint."""
        return self.checkpoint.attempt


@dataclass(slots=True, kw_only=True)
class Fetched:
    """A shard that the daemon brings: it lies in shared memory, or is on its way there."""

    choice: Choice
    manifest: Manifest
    stored: StoredState
    arena: MappedArena
    bulk: ShardMemory | ShardStream
    """What lies in memory does so in an arena that goes on being used for snapshots."""
    others: Sequence[Manifest] = ()
    """Of the other shards, on rank 0 at another world size: what those ranks alone know of data is in them."""

    @property
    def is_in_memory(self) -> bool:
        """Tell whether it need not be read from the devices."""
        return isinstance(self.bulk, ShardMemory)

    def lacks(self, component: str) -> bool:
        """Tell whether the checkpoint was imported without this component, which then stays as it is.

        One that was taken by a run has all of them: a component that it lacks is a mismatch.
        """
        return self.stored.is_imported and component not in self.stored.components

    def check_common(self, components: Sequence[Component]) -> None:
        """Raise StateMismatchError for an imported checkpoint that has nothing of what the script attached."""
        attached = [each.name for each in components if each.name not in OWN_COMPONENTS]
        if all(self.lacks(name) for name in attached):
            stored = [name for name in self.stored.components if name not in OWN_COMPONENTS]
            raise StateMismatchError(
                f"the imported checkpoint {self.choice.checkpoint} holds {', '.join(stored) or 'nothing'}; this script "
                f"attaches {', '.join(attached)}",
                hint="import it into another run with --as NAME, or attach(...) by its name",
            )

    def present(self, components: Sequence[Component]) -> list[Component]:
        """Return the components that the checkpoint has, or must have."""
        return [component for component in components if not self.lacks(component.name)]


@dataclass(slots=True, kw_only=True)
class RestoreSearch:
    """One `restore()` call: looks from the newest checkpoint to older ones until one holds on all ranks."""

    link: Link
    ranks: Ranks
    components: Sequence[Component]
    attempt: int
    events: StreamEvents
    goal: Goal | None = None
    goes_back: bool = False
    """What is restored is the goal, and not what came since the run went there."""
    is_mixed: bool = False
    """Tensors of the components hold bytes of a checkpoint that could not be read to its end."""
    skipped: dict[CheckpointId, str] = field(default_factory=dict[CheckpointId, str])
    """What cannot be restored, newer or older than what can, with its name and the reason."""
    _damaged: Counter[CheckpointId] = field(default_factory=Counter[CheckpointId])
    """How often each was found damaged in memory."""

    @with_plain_errors
    def run(self) -> Fetched | None:
        """Return the shard to apply, or None when there is nothing to restore.

        Raises:
            CorruptDataError: there are checkpoints, but none can be restored.
            StateMismatchError: the newest does not fit the objects given; nothing was changed.
            NotFoundError: the goal is not there for all ranks; nothing was changed.
        """
        self.ranks.gather("search", None)  # from here on all are here, and each may have much to read
        offers = self._offers()
        choices = restorable(offers.items, self.ranks.rank, self.ranks.world_size)
        self.skipped |= {
            CheckpointId(offer.attempt, offer.step): f"{offer.attempt}.{offer.step}: {offer.problem}"
            for offer in offers.items
            if offer.problem
        }
        while True:
            offered = self._gather_offered([str(checkpoint) for checkpoint in choices])
            newest = newest_common(cast("list[list[str]]", offered))
            if self.goal is not None and not self._has_been_there(offers, newest):
                return self._go_back(self.goal.checkpoint, offers)
            if newest is None:
                self._refuse_if_lost(offers)
                return None
            found = self._try(choices[newest])
            if found is not None:
                _say_passed_over(offers, newest)
                return found
            del choices[newest]

    def _has_been_there(self, offers: frames.Offers, newest: CheckpointId | None) -> bool:
        """Tell whether the newest checkpoint came after the run went to the goal, and nowhere else since."""
        point = None if newest is None else (newest.attempt, newest.step)
        notes = next((each.turns for each in offers.items if (each.attempt, each.step) == point), "")
        turns = turns_of({WENT_BACK_NOTE: notes})
        return any(self.ranks.gather("been", bool(turns) and turns[-1].goal == self.goal))

    def _go_back(self, wanted: CheckpointId, offers: frames.Offers) -> Fetched:
        """Restore that checkpoint, which may be set aside, or none."""
        items = [*offers.items, *offers.set_aside]
        choices = restorable(items, self.ranks.rank, self.ranks.world_size)
        has_it = self.ranks.gather("goal", wanted in choices)
        if not all(has_it):
            known = ", ".join(map(str, sorted(choices, reverse=True)[:NEWEST_SHOWN])) or "none"
            problem = next(
                (each.problem for each in items if str(wanted) == f"{each.attempt}.{each.step}"), ""
            )
            raise NotFoundError(
                f"the run cannot go back to checkpoint {wanted}: rank {has_it.index(False)} has none that it can "
                "restore" + (f" ({problem})" if problem else ""),
                hint=f"the newest here are {known}; `everstep ls` lists them",
            )
        found = self._try(choices[wanted])
        if found is None:
            raise CorruptDataError(
                f"the run cannot go back to checkpoint {wanted}: {self.skipped[wanted]}",
                hint="go back to another one, `everstep ls` lists them, or leave back_to= out",
            )
        self.goes_back = True
        return found

    def _offers(self) -> frames.Offers:
        try:
            reply, _ = self.link.client.request(
                lambda number: frames.ListOffers(request_id=number), FETCH_DEADLINE_S
            )
        except EverstepError as error:
            # Else the others would wait for it.
            with suppress(DeadlineError):
                self.ranks.gather("offer", dump_error(error), deadline_s=FETCH_DEADLINE_S)
            raise
        assert isinstance(reply, frames.Offers)
        return reply

    def _gather_offered(self, offered: object) -> list[object]:
        """Return what all ranks offer, or raise what keeps another one from that."""
        said = self.ranks.gather("offer", offered, deadline_s=FETCH_DEADLINE_S)
        for rank, item in enumerate(said):
            error = load_error(item, rank) if rank != self.ranks.rank else None
            if error is not None:
                raise error
        return said

    def _refuse_if_lost(self, offers: frames.Offers) -> None:
        """Starting from nothing beside checkpoints that exist would sooner or later delete them: ask the user.

        What a crash left before any was ever complete is none.
        """
        names = [f"{each.attempt}.{each.step}" for each in offers.items]
        is_lost = bool(names) and (offers.had_complete or bool(self.skipped))
        if any(self.ranks.gather("lost", is_lost)):
            raise CorruptDataError(
                f"none of the {len(names)} checkpoints of this run here can be restored by all ranks: "
                + "; ".join(list(self.skipped.values())[:5] or ["no rank set has all shards"]),
                hint="mount missing devices, start as many ranks as took them, or attach(..., fresh=True)",
            )
        if names:
            logger.warning(
                "none_was_complete checkpoints=%s: the crash came before all ranks had saved theirs, and none before"
                " was complete; this run begins anew",
                ",".join(names),
            )

    def _try(self, choice: Choice) -> Fetched | None:
        """Return the shard when every rank could read and check its own, else None; a misfit is raised by all.

        Tensors are written only after every rank has found that everything fits, while the bulk is read.
        """
        found, error = self._fetch_checked(choice)
        if not self._all_well("fit", choice, found, error):
            return None
        while found is not None and isinstance(error := self._receive(found), DamagedMemoryError):
            self._pass_over(choice, found, error)
            found, error = self._fetch_checked(choice)
        if not self._all_well("restore", choice, found, error):
            return None
        assert found is not None
        self.is_mixed = False
        return found

    def _all_well(
        self, what: str, choice: Choice, found: Fetched | None, error: EverstepError | None
    ) -> bool:
        """Tell whether no rank has an error; else give the shard back, and raise what is no fault of its data."""
        said = self.ranks.gather(what, _account(found, error), deadline_s=FETCH_DEADLINE_S)
        failures = [
            error if rank == self.ranks.rank else load_error(item, rank) for rank, item in enumerate(said)
        ]
        failed = [each for each in failures if each is not None]
        steps = [cast("dict[str, object]", item).get("step") for item in said]
        if not failed and len(set(steps)) == 1:
            return True
        if found is not None:
            self.give_back(found)
        # All ranks have the same list, so that they do the same: an older one is of no use where objects do not fit.
        for each in failed:
            if not isinstance(each, DataError | NotFoundError):
                raise each
        apart = CorruptDataError(f"ranks saved it after different boundaries: {', '.join(map(str, steps))}")
        reason = f"{choice.checkpoint}: {(failed or [apart])[0].message}"
        logger.error("checkpoint_not_restorable %s", reason)
        self.skipped[choice.checkpoint] = reason
        return False

    def _fetch_checked(self, choice: Choice) -> tuple[Fetched | None, EverstepError | None]:
        while True:
            found: Fetched | None = None
            try:
                found = self._fetch(choice)
                check_replicated(found.manifest, self.ranks.world_size)
                self._check(found)
                found.others = self._other_manifests(choice)
                check_same([found.manifest, *found.others], self.ranks.world_size)
            except DamagedMemoryError as error:
                self._pass_over(choice, found, error)
            except EverstepError as error:
                if found is not None:
                    self.give_back(found)
                return None, error
            else:
                return found, None

    def _pass_over(self, choice: Choice, found: Fetched | None, error: DamagedMemoryError) -> None:
        """Memory was found damaged: look again, and from then on at the devices."""
        if found is not None:
            self.give_back(found)
        self._damaged[choice.checkpoint] += 1
        logger.error("memory_damaged checkpoint=%s reason=%s", choice.checkpoint, error)

    def _check(self, found: Fetched) -> None:
        found.check_common(self.components)
        check_components(found.present(self.components), found.stored, found.bulk.receive)

    def _receive(self, found: Fetched) -> EverstepError | None:
        """Let the bulk arrive, in the components' own tensors where it can, and return what went wrong."""
        leaves = found.bulk.leaves
        for component in found.present(self.components):
            if isinstance(component, ModuleState):
                for leaf, tensor in component.destinations(found.stored):
                    leaves.claim(leaf, tensor)
        self.is_mixed = self.is_mixed or leaves.has_claims
        try:
            found.bulk.receive()
        except EverstepError as error:
            return error
        return None

    def _fetch(self, choice: Choice) -> Fetched:
        wanted = choice.checkpoint
        reply, fd = self.link.client.request(
            lambda number: frames.Fetch(
                request_id=number,
                attempt=wanted.attempt,
                step=wanted.step,
                rank=choice.shard,
                from_devices=self._damaged[wanted] >= LOOKS_IN_MEMORY,
            ),
            FETCH_DEADLINE_S,
        )
        assert isinstance(reply, frames.Fetched | frames.Streaming)
        assert fd is not None
        arena = MappedArena(reply.arena, fd, reply.slot_size_bytes, reply.slot_count)
        try:
            return self._open(choice, reply, arena)
        except BaseException:
            arena.close()
            if isinstance(reply, frames.Streaming):
                self.link.tell(frames.Release(arena=arena.number))
            raise

    def _open(self, choice: Choice, reply: frames.Fetched | frames.Streaming, arena: MappedArena) -> Fetched:
        manifest = decode_manifest(reply.manifest)
        if isinstance(reply, frames.Streaming):
            headers = {
                segment.segment: header
                for segment, header in zip(manifest.segments, reply.headers, strict=True)
            }
            leaves = ReceivedLeaves(manifest, leaf_runs(manifest, headers))
            stream = ShardStream(link=self.link, arena=arena, leaves=leaves, events=self.events)
            stored = StoredState(manifest, leaves)
            return Fetched(choice=choice, manifest=manifest, stored=stored, arena=arena, bulk=stream)
        arena.free = set(reply.free_slots)
        offsets = {
            segment.segment: offset
            for segment, offset in zip(manifest.segments, reply.segment_offsets_bytes, strict=True)
        }
        content = arena.view(0, reply.arena_size_bytes)
        memory = ShardMemory(
            manifest,
            content,
            offsets,
            ahead=not torch.cuda.is_initialized(),
            unclaimed=[each.name for each in self.components if not isinstance(each, ModuleState)],
        )
        try:
            stored = StoredState(manifest, memory)
        except BaseException:
            memory.close()
            raise
        return Fetched(choice=choice, manifest=manifest, stored=stored, arena=arena, bulk=memory)

    def give_back(self, found: Fetched) -> None:
        """Unmap an arena that is not needed; a ring that was made for the restore is released."""
        found.stored.close()
        found.arena.close()
        if not found.is_in_memory:
            self.link.tell(frames.Release(arena=found.arena.number))

    def _other_manifests(self, choice: Choice) -> list[Manifest]:
        """Return what rank 0 reads besides its shard, at another world size: while all may still take an older one."""
        wanted, manifests = choice.checkpoint, list[Manifest]()
        if choice.world_size == self.ranks.world_size or self.ranks.rank != 0:
            return manifests
        for rank in range(choice.world_size):
            if rank != choice.shard:
                reply, _ = self.link.client.request(
                    lambda number, shard=rank: frames.GetManifest(
                        request_id=number, attempt=wanted.attempt, step=wanted.step, rank=shard
                    )
                )
                assert isinstance(reply, frames.ManifestBytes)
                manifests.append(decode_manifest(reply.manifest))
        return manifests


def _say_passed_over(offers: frames.Offers, restored: CheckpointId) -> None:
    """Say which newer ones the store itself does not hold for whole."""
    for offer in offers.items:
        if offer.problem and CheckpointId(offer.attempt, offer.step) > restored:
            logger.error("checkpoint_not_restorable %d.%d: %s", offer.attempt, offer.step, offer.problem)


def _account(found: Fetched | None, error: EverstepError | None) -> dict[str, object]:
    """Return what other ranks hear of this one's part: what is wrong, or after how many boundaries it was taken."""
    if error is not None:
        return dict[str, object](dump_error(error))
    assert found is not None
    return {"step": None if found.lacks(RUN_COMPONENT) else RunState.step_of(found.stored)}


def check_may_restore(*, started: bool, restored: bool) -> None:
    """Raise UsageError when it is too late to restore."""
    if started or restored:
        raise UsageError(
            "restore() comes once, before the first step() or epochs()",
            hint="attach, restore, then train",
        )


def check_may_train(goal: Goal | None, *, asked: bool, refusal: str) -> None:
    """Raise UsageError where checkpoints to come would take the place of those that were to be restored.

    `refusal`: what `restore()` raised, empty if nothing; `asked`: whether it was called.
    """
    if goal is not None and not asked:
        raise UsageError(
            f"back_to={goal.text!r}, and nothing was restored",
            hint="call run.restore() before training",
        )
    if refusal:
        raise UsageError(
            f"restore() raised {refusal}; a run that may lack what it was to bring back does not train, since its"
            " checkpoints would replace those that exist",
            hint="close() the run, mend what is named and attach() again, or attach(..., fresh=True) to begin anew",
        )
