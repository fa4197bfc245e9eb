"""Controllers of runs, as operators see and change them: shown, given another budget, paused, asked for a checkpoint.

Everything is asked of trainers, over the data socket; what they decide comes back with their next `Costs`.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ...checkpoint.frequency_types import BUDGET_LEAST
from ...core.durations import duration_text
from ...core.errors import DeadlineError, NotFoundError, RanksLostError, RunBusyError, UsageError
from ...core.ids import CheckpointId
from ...proto import frames
from ..events.event_types import Event, EventQuery
from .controller_views import ControllerState, ControllerView, ForcedView
from .force_machine import ForceMachine, Next

if TYPE_CHECKING:
    from ..node import Node
    from ..registry import RankRecord, RunRecord

logger = logging.getLogger(__name__)

PAUSE_S_MAX = 7 * 86400.0
"""Nobody may forget a pause for longer."""
CONFIRM_S_MAX = 15.0
"""For a change to reach rank 0, perhaps on another node, and come back with a plan: figures travel every 2 s."""
ASK_AGAIN_S = 0.2
"""After a checkpoint that could not be begun."""
_LOOK_S = 0.05
_FORCES_MAX = 16
"""Calls that wait for a checkpoint of the same run."""

_Key = tuple[int, str]
Holds = Callable[[ControllerView], bool]


_SOONEST_S = 0.001
"""Wishes are told apart by it."""


def steered(known: frames.Steer, wish: Mapping[str, float]) -> frames.Steer:
    """Return all that was asked, with this wish as the newest, also where the clock was set back since the last one."""
    facts: dict[str, Any] = msgspec.structs.asdict(known) | dict(wish)
    for name in ("budget_asked_unix_s", "pause_asked_unix_s"):
        if name in wish:
            facts[name] = max(wish[name], getattr(known, name) + _SOONEST_S)
    return frames.Steer(**facts)


class ControllerDesk:
    """Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._steering: dict[_Key, frames.Steer] = {}
        """What was asked here of each run that is attached; the trainers keep it, too."""
        self._heard: dict[int, asyncio.Future[CheckpointId]] = {}
        self._numbers = 0
        self._waiting = Counter[_Key]()

    # -- asked by operators

    def views(self, run: str, uid: int | None) -> list[ControllerView]:
        """Return the controllers of the runs of this user (None: of all), or of one run, by name.

        Raises:
            NotFoundError: there is no such run here.
        """
        runs = [self.find(run, uid)] if run else list(self._node.registry.runs.values())
        found = [each for each in runs if uid is None or each.uid == uid]
        return [self._view(each) for each in sorted(found, key=lambda each: (each.name, each.uid))]

    async def set_budget(self, run: "RunRecord", budget: float, left_s: float) -> ControllerView:
        """Let the controller keep to another budget until the attempt ends; answers when rank 0 does, or with what is.

        Raises:
            UsageError: it is no share, or the run's interval is fixed.
        """
        if not BUDGET_LEAST <= budget < 1:
            raise UsageError(f"budget is {budget:g}", hint="a share of the time, such as 0.035 for 3.5 %")
        _refuse_fixed(self._view(run))
        self._steer(run, budget=budget, budget_asked_unix_s=time.time())
        text = f"somebody asked for a budget of {100 * budget:.3g} % for run {run.name!r}"
        self._tell(run, "budget", text)
        view = await self._confirmed(run, left_s, lambda view: view.asked_budget is None)
        _refuse_fixed(view)  # nobody knew before its first boundary
        return view

    async def pause(self, run: "RunRecord", ttl_s: float, left_s: float) -> ControllerView:
        """Let the controller take no checkpoint for so long; those that are forced, and the last one, are taken."""
        if not 0 < ttl_s <= PAUSE_S_MAX:
            raise UsageError(
                f"a pause of {ttl_s:g} s is not possible", hint=f"more than 0 and at most {PAUSE_S_MAX:.0f} s"
            )
        now_unix_s = time.time()
        self._steer(run, paused_until_unix_s=now_unix_s + ttl_s, pause_asked_unix_s=now_unix_s)
        text = f"somebody paused the checkpoints of run {run.name!r} for {duration_text(ttl_s)}"
        self._tell(run, "pause", text)
        until_unix_s = self._steering[run.uid, run.run_id].paused_until_unix_s
        return await self._confirmed(run, left_s, lambda view: view.paused_until_unix_s == until_unix_s)

    async def resume(self, run: "RunRecord", left_s: float) -> ControllerView:
        """End a pause; nothing where there is none."""
        self._steer(run, paused_until_unix_s=0.0, pause_asked_unix_s=time.time())
        self._tell(run, "resume", f"somebody let the checkpoints of run {run.name!r} go on")
        return await self._confirmed(run, left_s, lambda view: view.state is not ControllerState.PAUSED)

    async def force(self, run: "RunRecord", left_s: float) -> ForcedView:
        """Return when a checkpoint of a boundary after this call is complete on all ranks.

        Raises:
            NotFoundError: no trainer of the run is attached.
            DeadlineError: it is not complete `left_s` later; it may still become so.
            EverstepError: it failed, and why.
        """
        key = (run.uid, run.run_id)
        if self._waiting[key] >= _FORCES_MAX:
            raise RunBusyError(f"{_FORCES_MAX} calls wait for a checkpoint of run {run.name!r} already")
        began_s = time.monotonic()
        machine = ForceMachine(run.name, CheckpointId(max(run.attempt, 1), 0))
        query = EventQuery(run=run.run_id, follow=True)
        self._waiting[key] += 1
        try:
            async with asyncio.timeout(left_s):
                done = await self._taken(run, machine, query)
        except TimeoutError:
            raise machine.late(time.monotonic() - began_s) from None
        finally:
            self._waiting[key] -= 1
        waited_s = time.monotonic() - began_s
        return ForcedView(
            run_name=run.name,
            checkpoint=str(done.checkpoint),
            size_bytes=done.size_bytes,
            waited_s=waited_s,
        )

    async def _taken(self, run: "RunRecord", machine: ForceMachine, query: EventQuery) -> Event:
        """Ask one rank, and follow what happens: from before it is asked."""
        since = self._node.events.log(run.uid).last
        following = EventQuery(run=query.run, follow=True, since=since)
        self._tell(run, "force", f"somebody asked for a checkpoint of run {run.name!r}")
        machine.first = await self._ask(run)
        events = self._node.events.watch(run.uid, following, is_bounded=False)
        try:
            async for event in events:
                step = machine.take(event)
                if step is Next.DONE:
                    return event
                if step is Next.ASK_AGAIN:
                    await asyncio.sleep(ASK_AGAIN_S)
                    await self._ask(run)
        finally:
            await events.aclose()
        raise DeadlineError("the daemon ended before the checkpoint was complete")

    async def _ask(self, run: "RunRecord") -> CheckpointId:
        """Let a trainer ask all ranks; return the first checkpoint that counts."""
        rank = self._any_rank(run)
        self._numbers += 1
        number = self._numbers
        heard: asyncio.Future[CheckpointId] = asyncio.get_running_loop().create_future()
        self._heard[number] = heard
        lease = rank.lease
        assert lease is not None
        lease.holder.send(frames.Force(number=number))
        try:
            while not heard.done():
                await asyncio.wait([heard], timeout=_LOOK_S)
                if not lease.is_valid:
                    raise RanksLostError(
                        f"rank {rank.rank} of run {run.name!r} is gone before it has heard of the request",
                        hint="start it again, and ask again",
                    )
            return heard.result()
        finally:
            del self._heard[number]

    # -- told by trainers

    def force_heard(self, frame: frames.ForceHeard) -> None:
        """A trainer has asked all ranks."""
        heard = self._heard.get(frame.number)
        if heard is not None and not heard.done():
            heard.set_result(CheckpointId(frame.attempt, frame.step))

    def costs_told(self, rank: "RankRecord", costs: frames.Costs) -> None:
        """Keep what the run follows of a pause, which another daemon was asked of later, or one before this.

        Else the next attempt would hear of it as it was asked here, or nothing.
        """
        key = (rank.run.uid, rank.run.run_id)
        known = self._steering.get(key, frames.Steer())
        if costs.pause_asked_unix_s > known.pause_asked_unix_s:
            self._steering[key] = msgspec.structs.replace(
                known,
                paused_until_unix_s=costs.paused_until_unix_s,
                pause_asked_unix_s=costs.pause_asked_unix_s,
            )

    def attached(self, rank: "RankRecord") -> None:
        """A rank has begun an attempt, and hears what was asked of it; of the attempt before only a pause goes on.

        Its time ends that. One that was ended is handed on, too: another node's daemon may know of it only as it began.
        """
        key = (rank.run.uid, rank.run.run_id)
        steering = self._steering.get(key)
        if steering is None:
            return
        others = [
            each for each in rank.run.ranks.values() if each is not rank and each.attempt == rank.attempt
        ]
        if not any(each.lessee is not None for each in others):
            self._steering[key] = steering = frames.Steer(
                paused_until_unix_s=steering.paused_until_unix_s,
                pause_asked_unix_s=steering.pause_asked_unix_s,
            )
        if rank.lessee is not None:
            rank.lessee.send(steering)

    # -- parts

    def find(self, text: str, uid: int | None) -> "RunRecord":
        """Return the run of this name, else of this id, that attached since the daemon started."""
        runs = [each for each in self._node.registry.runs.values() if uid is None or each.uid == uid]
        found = (
            [each for each in runs if each.name == text]
            or [each for each in runs if each.run_id == text]
            or [each for each in runs if f"{each.uid}/{each.name}" == text]
        )
        if not found:
            names = ", ".join(sorted({each.name for each in runs})[:10])
            raise NotFoundError(
                f"no run {text!r} has attached to this daemon", hint=f"those that have: {names or 'none'}"
            )
        if len(found) > 1:
            owners = ", ".join(str(each.uid) for each in found)
            raise UsageError(
                f"run {text!r} is there {len(found)} times, of users {owners}",
                hint=f"name it with its owner's uid: {found[0].uid}/{text}",
            )
        return found[0]

    def _any_rank(self, run: "RunRecord") -> "RankRecord":
        ranks = [run.ranks[number] for number in sorted(run.ranks)]
        rank = next((each for each in ranks if each.lessee is not None and each.attempt == run.attempt), None)
        if rank is None:
            raise NotFoundError(
                f"no trainer of run {run.name!r} is attached", hint="`everstep status` shows who is"
            )
        return rank

    def _steer(self, run: "RunRecord", **wish: float) -> None:
        self._any_rank(run)
        key = (run.uid, run.run_id)
        self._steering[key] = steering = steered(self._steering.get(key, frames.Steer()), wish)
        for rank in run.ranks.values():
            if rank.lessee is not None:
                rank.lessee.send(steering)

    def _tell(self, run: "RunRecord", code: str, text: str) -> None:
        logger.info("controller_%s run=%s", code, run.run_id)
        self._node.reporter.controller(run, code, text)

    async def _confirmed(self, run: "RunRecord", left_s: float, holds: Holds) -> ControllerView:
        """Return what the controller says once it does what it was asked, or what it says when time is over."""
        until_s = time.monotonic() + min(left_s, CONFIRM_S_MAX)
        while not holds(view := self._view(run)) and time.monotonic() < until_s:  # noqa: ASYNC110 - or it is late
            await asyncio.sleep(_LOOK_S)
        return view

    def _view(self, run: "RunRecord") -> ControllerView:
        said = [rank.costs for rank in run.present if rank.costs is not None]
        costs = max(said, key=_cost_share, default=None)
        key = (run.uid, run.run_id)
        steering = self._steering.get(key, frames.Steer())
        state = _state(costs)
        return ControllerView(
            run_name=run.name,
            run_id=run.run_id,
            owner_uid=run.uid,
            state=state,
            attached_count=sum(rank.lease is not None for rank in run.ranks.values()),
            step=max((each.step for each in said), default=0),
            step_s=max((each.step_s for each in said), default=0.0),
            interval_steps=costs.interval_steps if costs else 0,
            bound=costs.bound if costs else "",
            reason=costs.reason if costs else "",
            goal_missed=costs.goal_missed if costs else "",
            budget=costs.budget if costs else None,
            asked_budget=steering.budget if _is_pending(steering, costs) else None,
            cost_share=costs.cost_share if costs else None,
            cost_half_width=costs.cost_half_width if costs else None,
            steps_undecided=costs.steps_undecided if costs else 0,
            paused_until_unix_s=_paused_until_unix_s(costs, steering),
            forced_count=self._waiting[key],
        )


def _state(costs: frames.Costs | None) -> ControllerState:
    if costs is None:
        return ControllerState.UNKNOWN
    if costs.bound == "paused":
        return ControllerState.PAUSED
    is_fixed = costs.bound in {"fixed", "lost"} and costs.budget is None
    return ControllerState.FIXED if is_fixed else ControllerState.ADAPTIVE


def _refuse_fixed(view: ControllerView) -> None:
    is_paused = view.state is ControllerState.PAUSED
    if view.state is ControllerState.FIXED or (is_paused and view.budget is None):
        raise UsageError(
            f"run {view.run_name!r} takes a checkpoint every {view.interval_steps} steps, as its script says",
            hint="a budget needs attach() without every=",
        )


def _is_pending(steering: frames.Steer, costs: frames.Costs | None) -> bool:
    """Tell whether a budget that was asked for here may still come to be followed.

    Not where the interval is fixed, nor where one is followed that was asked for later, perhaps of another daemon.
    """
    if costs is None:
        return True
    is_followed = costs.budget == steering.budget or costs.budget_asked_unix_s >= steering.budget_asked_unix_s
    return costs.budget is not None and not is_followed


def _paused_until_unix_s(costs: frames.Costs | None, steering: frames.Steer) -> float:
    """Return what the trainer says; what was asked here, of one that does not say it; 0: it is not paused."""
    if costs is None or _state(costs) is not ControllerState.PAUSED:
        return 0.0
    return costs.paused_until_unix_s or steering.paused_until_unix_s


def _cost_share(costs: frames.Costs) -> float:
    return -math.inf if costs.cost_share is None else costs.cost_share
