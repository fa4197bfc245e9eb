"""When a device fails, becomes slow or is well again: trainers hear of it, and what it held is written again."""

import asyncio
from typing import TYPE_CHECKING

from ...proto import frames
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node


class DeviceWatch:
    """Listens to the stores of a node. Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    def watch(self, opened: OpenStore) -> None:
        """Show the devices of a store in the metrics, and hear of their changes from now on."""
        self._node.metrics.devices.add(opened)
        loop = asyncio.get_running_loop()
        opened.store.on_change = lambda: loop.call_soon_threadsafe(self._changed, opened)

    def _changed(self, opened: OpenStore) -> None:
        for rank in self._node.registry.ranks():
            if rank.run.opened is opened and rank.lessee is not None:
                devices = opened.device_infos(rank.device_ids)
                rank.lessee.send(frames.DevicesChanged(devices=devices))
        self._node.reporter.devices(opened)
        self._node.persister.mend(opened)
