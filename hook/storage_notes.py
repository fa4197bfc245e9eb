"""What the training loop is told of its store's devices and of writes that were repeated: log and report."""

import logging
from collections.abc import Iterable

from ..proto import frames
from ..proto.frames import DeviceCondition
from .report import CostBook

logger = logging.getLogger(__name__)


class StorageNotes:
    """Remembers how each device was, so that each change is told once, and what is not well from the start.

    `devices` are there: the daemon's notes at the opening tell of others. `take` runs on the link's reader thread.
    """

    def __init__(self, run: str, devices: Iterable[frames.DeviceInfo], costs: CostBook) -> None:
        self._run, self._costs = run, costs
        self._conditions: dict[str, DeviceCondition] = {}
        self._tell(self._changes(devices))

    def take(self, event: frames.DevicesChanged | frames.Notice) -> None:
        """Log and note what an event says."""
        self._tell([event.message] if isinstance(event, frames.Notice) else self._changes(event.devices))

    def _tell(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            logger.warning("storage_note run=%s: %s", self._run, sentence)
            self._costs.notes.append(sentence)

    def _changes(self, devices: Iterable[frames.DeviceInfo]) -> list[str]:
        told: list[str] = []
        for device in devices:
            before = self._conditions.get(device.device_id, DeviceCondition.OK)
            self._conditions[device.device_id] = device.condition
            if device.condition is not before:
                why = f": {device.reason}" if device.reason else ""
                told.append(f"device {device.path} is {device.condition.value}{why}")
        return told
