"""Runs and slots as operators see them, as values; those of a running daemon."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...core.errors import NotFoundError, UsageError
from ...core.ids import CheckpointId
from ..slot_machine import SlotState
from . import node_views
from .views import RankState, RunView

if TYPE_CHECKING:
    from ...checkpoint.run_store import RunStore
    from ..node import Node


class RunState(Enum):
    """Whether a trainer of a run is there."""

    ATTACHED = "attached"
    LINGERING = "lingering"
    """No trainer is; snapshots in memory wait for the restart."""
    CLOSED = "closed"
    """No trainer is, and nothing of it is in memory."""
    STORED = "stored"
    """It has not attached since the daemon started: only its checkpoints are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """One run, whether it trains or is only on the devices."""

    status: RunView
    state: RunState
    checkpoint_count: int
    size_bytes: int
    """Of its checkpoints on the devices."""
    arena_bytes: int
    """Of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDetail:
    """One slot of one rank's arenas."""

    run_name: str
    run_id: str
    owner_uid: int
    rank: int
    arena: int
    slot: int
    state: SlotState
    checkpoint: CheckpointId | None
    size_bytes: int


def run_details(node: "Node", stored: Sequence["RunStore"], uid: int | None) -> list[RunDetail]:
    """Return the runs of this user (None: of all) by name, then owner; `stored`: those that the user may see."""
    known = {(view.owner_uid, view.run_id): view for view in node_views.run_views(node, uid)}
    on_devices = {(run.owner_uid, run.run_id): run for run in stored}
    found = [_detail(view, on_devices.get(key)) for key, view in known.items()]
    found += [_stored_detail(node, run) for key, run in on_devices.items() if key not in known]
    return sorted(found, key=lambda each: (each.status.name, each.status.owner_uid))


def one_run(details: Sequence[RunDetail], text: str) -> RunDetail:
    """Return the run of this name, else of this id.

    Raises:
        NotFoundError: there is none.
        UsageError: several are meant, or none is named.
    """
    if not text:
        raise UsageError("no run is named", hint="name it as given to attach(), or by its id")
    found = [each for each in details if each.status.name == text]
    found = found or [each for each in details if each.status.run_id == text]
    found = found or [each for each in details if f"{each.status.owner_uid}/{each.status.name}" == text]
    if not found:
        raise NotFoundError(f"no run {text!r}", hint="`everstep runs` lists them")
    if len(found) > 1:
        owners = ", ".join(str(each.status.owner_uid) for each in found)
        raise UsageError(
            f"run {text!r} is there {len(found)} times, of users {owners}",
            hint=f"name it with its owner's uid: {found[0].status.owner_uid}/{text}",
        )
    return found[0]


def slot_details(node: "Node", text: str, uid: int | None) -> list[SlotDetail]:
    """Return the slots of this user's ranks (None: of all), or of one run, by name."""
    runs = [run for run in node.registry.runs.values() if uid is None or run.uid == uid]
    if text:
        named = (
            [run for run in runs if run.name == text]
            or [run for run in runs if run.run_id == text]
            or [run for run in runs if f"{run.uid}/{run.name}" == text]
        )
        if not named:
            raise NotFoundError(
                f"no run {text!r} has attached to this daemon", hint="`everstep runs` lists them"
            )
        runs = named
    return [
        SlotDetail(
            run_name=run.name,
            run_id=run.run_id,
            owner_uid=run.uid,
            rank=rank.rank,
            arena=arena.number,
            slot=index,
            state=slot.state,
            checkpoint=slot.checkpoint,
            size_bytes=arena.slot_size_bytes,
        )
        for run in sorted(runs, key=lambda each: (each.name, each.uid))
        for _, rank in sorted(run.ranks.items())
        for _, arena in sorted(rank.arenas.items())
        for index, slot in enumerate(arena.machine.slots)
    ]


def _detail(view: RunView, stored: "RunStore | None") -> RunDetail:
    states = {rank.state for rank in view.ranks}
    state = RunState.CLOSED
    if RankState.ATTACHED in states:
        state = RunState.ATTACHED
    elif RankState.LINGERING in states:
        state = RunState.LINGERING
    infos = [] if stored is None else stored.checkpoints()
    return RunDetail(
        status=view,
        state=state,
        checkpoint_count=len(infos),
        size_bytes=sum(info.size_bytes for info in infos),
        arena_bytes=sum(rank.arena_bytes for rank in view.ranks),
    )


def _stored_detail(node: "Node", run: "RunStore") -> RunDetail:
    infos = run.checkpoints()
    view = RunView(
        name=run.name,
        run_id=run.run_id,
        owner_uid=run.owner_uid,
        attempt=run.highest_attempt(),
        world_size=infos[0].world_size if infos else 0,
        ranks=(),
        complete_floor=run.complete_floor(),
        keep=node.config.retention.keep(),
        is_own_keep=False,
        pace=None,
    )
    return RunDetail(
        status=view,
        state=RunState.STORED,
        checkpoint_count=len(infos),
        size_bytes=sum(info.size_bytes for info in infos),
        arena_bytes=0,
    )
