"""What the training loop is told of its store's devices and of writes that were repeated: log and report."""

import logging
from collections.abc import Iterable

from ..proto import frames
from ..proto.frames import DeviceCondition
from .report import CostBook

logger = logging.getLogger(__name__)


class StorageNotes:
    """Remembers how each device was, so that each change is told once, and what is not well from the start.

    `devices` are there: the daemon's notes at the opening tell of others. One that is not listed any more was retired,
    or was not there when the daemon started anew.
    `take` runs on the link's threads.
    """

    def __init__(self, run: str, devices: Iterable[frames.DeviceInfo], costs: CostBook) -> None:
        self._run, self._costs = run, costs
        self._known: dict[str, frames.DeviceInfo] = {}
        self._tell(self._changes(devices))

    def take(self, event: frames.DevicesChanged | frames.Notice) -> None:
        """Log and note what an event says."""
        self._tell([event.message] if isinstance(event, frames.Notice) else self._changes(event.devices))

    def _tell(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            logger.warning("storage_note run=%s: %s", self._run, sentence)
            self._costs.notes.append(sentence)

    def _changes(self, devices: Iterable[frames.DeviceInfo]) -> list[str]:
        before, self._known = self._known, {each.device_id: each for each in devices}
        told: list[str] = []
        for device_id, device in self._known.items():
            known = before.get(device_id)
            if device.condition is not (known.condition if known else DeviceCondition.OK):
                why = f": {device.reason}" if device.reason else ""
                told.append(f"device {device.path} is {device.condition.value}{why}")
        gone = [each for device_id, each in before.items() if device_id not in self._known]
        return told + [f"device {each.path} is not used any more: it is retired, or missing" for each in gone]
