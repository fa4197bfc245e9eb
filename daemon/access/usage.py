"""What a user has taken of memory, slots and disks, and whether there is room for more within its quota."""

import resource
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.errors import MemoryRefusedError, NoSpaceError
from ...core.sizes import size_text
from ..admission_plan import PAGE_BYTES, Wish
from ..arena import Arena
from .quota_plan import Limits
from .section import UNBOUNDED, QuotaSection

if TYPE_CHECKING:
    from ..node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """One thing that is bounded."""

    name: str
    """Its key in `[quota]`."""
    used: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUse:
    """All of one user."""

    uid: int
    bounded: tuple[Bounded, ...]
    refused_count: int
    """Connections and calls that were too many, since the daemon started."""


def limits_of(section: QuotaSection) -> Limits:
    """Return what counts events; a bound of 0 descriptors becomes half of what this process may open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Limits(
        connections=section.connections,
        descriptors=section.descriptors or most // 2,
        calls=section.calls,
        calls_per_s=section.calls_per_s,
        frames_per_s=section.frames_per_s,
        connects_per_s=section.connects_per_s,
    )


def descriptors_of(node: "Node", uid: int) -> int:
    """Return how many descriptors are held for a user beside those of its connections."""
    return sum(len(rank.arenas) for rank in node.registry.ranks() if rank.run.uid == uid)


def memory_bytes_of(node: "Node", uid: int) -> int:
    """Return the memory of a user's arenas, caches and shared batches."""
    arenas = sum(
        arena.size_bytes
        for rank in node.registry.ranks()
        if rank.run.uid == uid
        for arena in rank.arenas.values()
    )
    caches = sum(each.allocated_bytes for each in node.caches.states(uid))
    return arenas + caches + sum(each.used_bytes for each in node.shares.views(uid))


def slots_of(node: "Node", uid: int) -> int:
    """Return how many slots a user's arenas have."""
    ranks = (rank for rank in node.registry.ranks() if rank.run.uid == uid)
    return sum(len(arena.machine.slots) for rank in ranks for arena in rank.arenas.values())


def disk_bytes_of(node: "Node", uid: int) -> int:
    """Return the bytes of a user's committed checkpoints, on all stores that are open."""
    runs = (run for opened in node.stores.stores for run in opened.store.runs() if run.owner_uid == uid)
    return sum(info.size_bytes for run in runs for info in run.checkpoints())


def check_arena(node: "Node", uid: int, wish: Wish, *, without: Collection[Arena] = ()) -> Wish:
    """Return what a user may wish for as one more arena: the wish, with no more to spare than the quota leaves.

    `without`: arenas of this user that would go for it.

    Raises:
        MemoryRefusedError: its memory or its slots would be more than its quota.
    """
    section = node.config.quota
    used_bytes = memory_bytes_of(node, uid) - sum(arena.size_bytes for arena in without)
    if used_bytes + wish.needed_size_bytes > section.memory_bytes:
        raise MemoryRefusedError(
            f"{wish.text()} is beyond the quota of uid {uid}: {size_text(used_bytes)} of"
            f" {size_text(section.memory_bytes)} are taken",
            hint="end other jobs, ask for fewer slots, or raise quota.memory_bytes",
        )
    used = slots_of(node, uid) - sum(len(arena.machine.slots) for arena in without)
    if used + wish.slot_count > section.slots:
        raise MemoryRefusedError(
            f"{wish.text()} is beyond the quota of uid {uid}: it has {used} of {section.slots} slots",
            hint="end other jobs, ask for fewer slots, or raise quota.slots",
        )
    left_bytes = section.memory_bytes - used_bytes - wish.needed_size_bytes
    spare_bytes = min(wish.spare_size_bytes, left_bytes // wish.slot_count)
    return replace(wish, spare_size_bytes=spare_bytes // PAGE_BYTES * PAGE_BYTES)


def check_disk(node: "Node", uid: int, size_bytes: int) -> None:
    """Return where a user may commit so many bytes more.

    Raises:
        NoSpaceError: its checkpoints would be more than its quota; nothing was written.
    """
    bound = node.config.quota.disk_bytes
    if bound >= UNBOUNDED:  # nobody has set one: walking all checkpoints at each would be for nothing
        return
    used_bytes = disk_bytes_of(node, uid)
    if used_bytes + size_bytes > bound:
        raise NoSpaceError(
            f"a shard of {size_text(size_bytes)} is beyond the quota of uid {uid}: {size_text(used_bytes)} of"
            f" {size_text(bound)} are taken",
            hint="keep fewer (a new checkpoint is whole before an old one goes), remove some (`everstep rm`), or raise "
            "quota.disk_bytes; nothing is deleted while a device is missing (`everstep status`)",
        )


def uses(node: "Node", uid: int | None) -> list[UserUse]:
    """Return what this user (None: each that has anything) has, by uid."""
    uids = {uid} if uid is not None else _known_uids(node)
    return [_use(node, each) for each in sorted(uids)]


def _known_uids(node: "Node") -> set[int]:
    stored = {run.owner_uid for opened in node.stores.stores for run in opened.store.runs()}
    cached = {each.uid for each in node.caches.states(None)}
    return stored | cached | set(node.quotas.uses) | {run.uid for run in node.registry.runs.values()}


def _use(node: "Node", uid: int) -> UserUse:
    section, limits = node.config.quota, node.quotas.limits
    counted = node.quotas.uses.get(uid)
    connections = counted.connections if counted else 0
    return UserUse(
        uid=uid,
        bounded=(
            Bounded(name="memory_bytes", used=memory_bytes_of(node, uid), bound=section.memory_bytes),
            Bounded(name="disk_bytes", used=disk_bytes_of(node, uid), bound=section.disk_bytes),
            Bounded(name="slots", used=slots_of(node, uid), bound=section.slots),
            Bounded(name="connections", used=connections, bound=limits.connections),
            Bounded(
                name="descriptors",
                used=2 * connections + descriptors_of(node, uid),
                bound=limits.descriptors,
            ),
            Bounded(name="calls", used=counted.calls if counted else 0, bound=limits.calls),
        ),
        refused_count=counted.refused if counted else 0,
    )
