"""What a daemon before this one has left in the FD store: snapshots that were sealed and not yet written are written.

Nothing of it is believed before it is checked; what is refused is closed, taken out of the store and logged, and none
of it keeps the daemon from starting.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...checkpoint.draft_format import DraftReader
from ...checkpoint.manifest_types import Draft
from ...checkpoint.run_store import RunStore
from ...core.errors import CorruptDataError, EverstepError, NotFoundError
from ...core.mapping import map_shared
from ..arena import Arena
from ..blocking import in_thread
from ..devices.stores import OpenStore
from ..registry import RankRecord, RunRecord
from ..slot_machine import SlotMachine
from .arena_state import ArenaState, check_memfd
from .fd_store import ENTRIES_PER_ARENA, StoredArena, forget_name, forget_stored
from .inherited_plan import Inherited, StoredPair

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """An arena that was checked, with what is sealed in it and not committed."""

    state: ArenaState
    view: memoryview
    drafts: dict[int, Draft]
    """By slot."""


async def adopt_stored(node: "Node", inherited: Inherited) -> None:
    """Take over what was stored. To be called once the stores are open, before the first trainer comes."""
    for name, fd in inherited.unknown:
        logger.warning("fd_refused name=%s reason=it is nothing that this daemon stores", name)
        await in_thread(forget_name, name)
        _close(fd)
    for token, pair in inherited.arenas.items():
        try:
            if await _adopt(node, token, pair):
                node.fd_store.entry_count += ENTRIES_PER_ARENA
        except (EverstepError, OSError) as error:
            logger.error("arena_refused stored=%s reason=%s", token, error)
            await in_thread(forget_stored, token)
            _close(pair.arena, pair.state)


async def _adopt(node: "Node", token: str, pair: StoredPair) -> bool:
    """Adopt an arena; tell whether it stays in the store. On an error its descriptors are still the caller's."""
    if pair.arena is None or pair.state is None:
        raise CorruptDataError(f"only its {'state' if pair.arena is None else 'memory'} is there")
    state = await in_thread(ArenaState.read, pair.state)
    head = state.head
    _check_arena(pair.arena, state)
    opened = next((each for each in node.stores.stores if each.store.store_id == head.store_id), None)
    if opened is None:
        # Not taken out of the store: a start with the right configuration finds it.
        logger.error(
            "arena_left run=%s rank=%d reason=store %s is not open", head.run_name, head.rank, head.store_id
        )
        _close(pair.arena, pair.state)
        return True
    try:
        store = await in_thread(opened.store.run, head.uid, head.run_name)
    except NotFoundError as error:
        raise CorruptDataError(f"run {head.run_name!r} is not on the devices any more") from error
    drafts = await in_thread(_unwritten, state, store)
    if not drafts:
        logger.info(
            "arena_outlived run=%s rank=%d: all that was sealed in it is written", store.run_id, head.rank
        )
        await in_thread(forget_stored, token)
        _close(pair.arena, pair.state)
        return False
    view = map_shared(
        pair.arena, head.slot_size_bytes * head.slot_count, is_writable=True, is_inherited=False
    )
    found = _Found(state=state, view=view, drafts=drafts)
    arena = _arena(node, StoredArena(token=token, state=state), pair.arena, found)
    rank = _rank(node, opened, store, found)
    rank.arenas[arena.number] = arena
    for slot, draft in drafts.items():
        logger.warning(
            "snapshot_adopted run=%s rank=%d checkpoint=%s", store.run_id, head.rank, draft.checkpoint
        )
        node.persister.adopt(rank, arena, slot, draft)
    return True


def _check_arena(fd: int, state: ArenaState) -> None:
    head = state.head
    size_bytes = check_memfd(fd)
    if size_bytes != head.slot_size_bytes * head.slot_count or os.fstat(fd).st_ino != head.arena_inode:
        raise CorruptDataError(f"the arena of {size_bytes} bytes is not the one of its state")


def _unwritten(state: ArenaState, store: RunStore) -> dict[int, Draft]:
    """Return what is sealed in an arena and not committed, by slot; a damaged record is logged and left out."""
    head, drafts = state.head, DraftReader()
    committed = {info.checkpoint for info in store.checkpoints() if head.rank in info.ranks}
    found: dict[int, Draft] = {}
    for slot in range(head.slot_count):
        try:
            content = state.draft(slot)
            if content is None:
                continue
            draft = drafts.read(content, head.slot_size_bytes)
            if draft.rank != head.rank:
                raise CorruptDataError(f"it is of rank {draft.rank}, the arena is of rank {head.rank}")
        except EverstepError as error:
            logger.error(
                "snapshot_refused run=%s rank=%d slot=%d reason=%s", store.run_id, head.rank, slot, error
            )
            state.clear(slot)
            continue
        if draft.checkpoint in committed:
            state.clear(slot)
        else:
            found[slot] = draft
    return found


def _arena(node: "Node", stored: StoredArena, fd: int, found: _Found) -> Arena:
    head = found.state.head
    return Arena(
        number=node.arenas.adopt(head.slot_size_bytes * head.slot_count),
        fd=fd,
        view=found.view,
        slot_size_bytes=head.slot_size_bytes,
        layout_digest=head.layout_digest,
        allocation_s=0.0,
        machine=SlotMachine(head.slot_count),
        # Whoever still lives may still write to it: until it is dead the arena serves nobody else.
        shared_with_dead=found.state.may_be_mapped,
        stored=stored,
    )


def _rank(node: "Node", opened: OpenStore, store: RunStore, found: _Found) -> RankRecord:
    """Return the record of the arena's rank, which waits for its trainer as after the trainer's own death."""
    head = found.state.head
    run = node.registry.runs.setdefault(
        (head.uid, store.run_id),
        RunRecord(
            uid=head.uid, name=store.name, run_id=store.run_id, opened=opened, store=store, is_adopted=True
        ),
    )
    rank = run.rank(head.rank)
    present = {device.device_id for device in opened.store.devices}
    rank.world_size = head.world_size
    rank.device_ids = frozenset(present.intersection(head.device_ids) or present)
    rank.kept_until_s = asyncio.get_running_loop().time() + node.config.daemon.linger_s
    return rank


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)
