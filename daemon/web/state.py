"""What the page shows, as one JSON document for one user. Runs on the daemon's event loop."""

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..blocking import in_thread
from ..control import node_views
from ..control.views import StatusView, StoreView
from .history_machine import SAMPLE_S, History
from .state_format import EVENTS_MAX, document
from .verdict_plan import RunFacts, facts_of, sums_of

if TYPE_CHECKING:
    from ..devices.stores import OpenStore
    from ..node import Node

Document = dict[str, Any]


class State:
    """Samples runs from `start` to `stop`, and says what a user may see of the node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._history = History()
        self._began_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._sample()

    def stop(self) -> None:
        """Sample no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        now_unix_s = time.time()
        for run in node_views.run_views(self._node, None):
            sums = sums_of(run)
            if sums is not None:
                self._history.add((run.owner_uid, run.run_id), now_unix_s, sums)
        self._timer = asyncio.get_running_loop().call_later(SAMPLE_S, self._sample)

    async def document(self, uid: int, *, after: int) -> Document:
        """Return what this user may see; events after that number of the user's log."""
        visible_uid = uid or None  # as in the control API: root sees all, also of the daemon's own user
        status = await self._status(visible_uid)
        if uid not in (0, os.getuid()):
            status = _without_others(status)
        now_unix_s = time.time()
        facts = [facts_of(run, self._history, now_unix_s) for run in status.runs]
        log = self._node.events.log(visible_uid)
        is_known = 0 < after <= log.last
        begin = after if is_known else max(log.first - 1, log.last - EVENTS_MAX)
        return document(
            status,
            [(each, self._shares(each)) for each in facts],
            events=log.after(begin, count_max=EVENTS_MAX),
            log_id=log.log_id,
            now_unix_s=now_unix_s,
            sees_all=visible_uid is None,
        )

    async def _status(self, uid: int | None) -> StatusView:
        node, names = self._node, self._node.config.device_names()
        stores = [await self._store(opened, names) for opened in node.stores.stores]
        return StatusView(
            daemon=node_views.daemon_view(node, began_s=self._began_s, is_draining=node.is_draining),
            runs=node_views.run_views(node, uid),
            stores=tuple(stores),
            caches=tuple(node.caches.states(uid)),
            groups=tuple(node.shares.views(uid)),
            members=tuple(node.peers.states()),
        )

    async def _store(self, opened: "OpenStore", names: dict[str, str]) -> StoreView:
        found, scrubber = self._node.verifier.found(opened), self._node.scrubber
        lateness = scrubber.lateness(opened)
        view = await in_thread(node_views.store_view, opened, found, scrubber.view(opened), names)
        return replace(view, problems=(*view.problems, lateness)) if lateness else view

    def _shares(self, facts: RunFacts) -> list[tuple[float, float, float]]:
        history = self._history.of((facts.view.owner_uid, facts.view.run_id))
        return [(round(each.at_unix_s, 1), each.stall, each.data) for each in history.shares()]


def _without_others(status: StatusView) -> StatusView:
    """Return it without what names, or counts, other users' checkpoints."""
    return replace(
        status,
        daemon=replace(status.daemon, failed_count=0, persisted_count=0),
        stores=tuple(node_views.for_others(store) for store in status.stores),
    )
