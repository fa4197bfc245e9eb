"""What is known of every device of a node now: its state, its room, and whether a page can be written to it."""

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...checkpoint.device import Device
from ...checkpoint.device_set import DeviceState
from ..devices.stores import OpenStore
from .device_probe import DeviceProbe
from .section import HealthCheckSection
from .verdict_plan import Ailment, DeviceFacts, Verdict, judge

if TYPE_CHECKING:
    from ..node import Node

ANSWER_AGE_S_MAX = 10.0
"""Free space is asked for every second (devices/space_watch.py)."""
_AILMENTS = {
    DeviceState.MISSING: Ailment.MISSING,
    DeviceState.SUSPECT: Ailment.SUSPECT,
    DeviceState.SLOW: Ailment.SLOW,
}


class Examiner:
    """Owned by the event loop; never waits for a device longer than the probe's deadline."""

    def __init__(self, node: "Node", section: HealthCheckSection, probe: DeviceProbe | None = None) -> None:
        self._node, self._section = node, section
        self._probe = probe or DeviceProbe()

    async def verdict(self) -> Verdict:
        """Return whether a job may start here now."""
        stores = self._node.stores.stores
        present = {str(device.path) for opened in stores for device in opened.store.devices}
        failures = await self._probe.failures(present)
        facts = [each for opened in stores for each in self._store_facts(opened, failures)]
        return judge(facts, is_ending=self._node.lifetime.is_ending, refuse=self._section.ailments)

    def _store_facts(self, opened: OpenStore, failures: Mapping[str, OSError]) -> list[DeviceFacts]:
        store, names = opened.store, self._node.config.device_names()
        found = [
            DeviceFacts(
                name=names.get(str(device.path), str(device.path)),
                path=str(device.path),
                ailments=self._ailments(opened, device, failures),
                is_draining=device.device_id in store.membership.draining,
            )
            for device in store.devices
        ]
        found += [
            DeviceFacts(
                name=names.get(missing.path, missing.path),
                path=missing.path,
                ailments={Ailment.MISSING: missing.reason},
            )
            for missing in store.missing
        ]
        return sorted(found, key=lambda each: each.path)

    @staticmethod
    def _ailments(opened: OpenStore, device: Device, failures: Mapping[str, OSError]) -> dict[Ailment, str]:
        state, why = opened.store.device_state(device.device_id)
        found = {_AILMENTS[state]: why} if state in _AILMENTS else {}
        space = opened.space.reading(device.device_id)
        if space.space is not None and (short := opened.store.space.shortage(device, space.space.free_bytes)):
            found[Ailment.FULL] = short
        if space.age_s > ANSWER_AGE_S_MAX:
            found[Ailment.HANGING] = f"it has not told its free space for {space.age_s:.0f} s"
        elif space.reason:
            found.setdefault(Ailment.SUSPECT, space.reason)
        failure = failures.get(str(device.path))
        if failure is not None:
            ailment = _ailment_of(failure)
            found.setdefault(ailment, failure.strerror or str(failure))
        return found


def _ailment_of(failure: OSError) -> Ailment:
    if isinstance(failure, TimeoutError):
        return Ailment.HANGING
    if isinstance(failure, FileNotFoundError):
        return Ailment.MISSING
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return Ailment.FULL
    return Ailment.SUSPECT
