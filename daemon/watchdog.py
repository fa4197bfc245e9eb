"""Heartbeats for the service manager's watchdog (WatchdogSec=), as long as the daemon makes progress.

They come from the event loop, so that one that stands still sends none, and are held back while a device's queue has
work of which nothing ends, or the loop of the metrics port takes up nothing. The service manager then ends the
process and starts another, which finds what was sealed in the FD store.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from .service_manager import notify
from .watchdog_machine import Lane, WatchdogMachine

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

BEATS = 4
"""In each period of the watchdog, so that one that is late does not matter."""
PATIENCE = 0.5
"""Of a period: for how long a lane may stand still before the heartbeats end, and with them, a period later, the
daemon. An engine in a process of its own has given a silent device up by then (60 s; WatchdogSec= is 180)."""

WEB_LANE = "metrics port"


def watchdog_period_s() -> float | None:
    """Return how soon after a heartbeat the service manager wants the next one; None: it watches nobody here."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or not int(text) or pid not in {"", str(os.getpid())}:
        return None
    return int(text) / 1e6


def begin_feeding(node: "Node") -> "asyncio.Task[None] | None":
    """Send heartbeats until cancelled; None where nobody watches, or of a private daemon, which is no service."""
    period_s = None if node.private else watchdog_period_s()
    return None if period_s is None else node.spawn(feed_watchdog(node, period_s), "feeding the watchdog")


async def feed_watchdog(node: "Node", period_s: float) -> None:
    """Send heartbeats until cancelled."""
    loop, machine, told = asyncio.get_running_loop(), WatchdogMachine(PATIENCE * period_s), list[str]()
    while True:
        stuck = machine.look(loop.time(), _lanes(node))
        if not stuck:
            notify("WATCHDOG=1")
        elif stuck != told:
            logger.error("lane_stuck paths=%s patience_s=%.0f", ",".join(stuck), PATIENCE * period_s)
        told = stuck
        await asyncio.sleep(period_s / BEATS)


def _lanes(node: "Node") -> dict[str, Lane]:
    lanes = {
        str(device.path): opened.queues[device.device_id].lane
        for opened in node.stores.stores
        for device in opened.store.devices
    }
    if node.site is not None:
        lanes[WEB_LANE] = node.site.lane()
    return lanes
