"""The stores that this daemon holds: opened and recovered once, each device with its queue."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.engine import EngineConfig, EngineKind
from ..checkpoint.engine_choice import EngineChoice, choose_engine, make_engine
from ..checkpoint.engine_process import ProcessEngine
from ..checkpoint.recovery import RecoveryReport, recover
from ..checkpoint.storage_ops import RealStorage
from ..checkpoint.store import Store, open_store
from ..checkpoint.store_format import LockHolder
from ..core.errors import ConfigError, DeviceLockedError
from ..proto import frames
from .blocking import in_thread
from .config import DaemonConfig
from .device_queue import DeviceQueue
from .hand_over import ask_to_hand_over

logger = logging.getLogger(__name__)

HAND_OVER_DEADLINE_S = 10.0
_LOCK_POLL_S = 0.05


class OpenStore:
    """A store with its device queues."""

    def __init__(self, store: Store, queues: dict[str, DeviceQueue], report: RecoveryReport) -> None:
        self.store, self.queues, self.report = store, queues, report
        self.notes = _notes(store, queues)

    @property
    def is_new(self) -> bool:
        """Tell whether the store was made by this opening."""
        return self.store.is_new

    def describe(self) -> str:
        """Return the device directories as text."""
        return ", ".join(str(device.path) for device in self.store.devices)

    def device_infos(self) -> list[frames.DeviceInfo]:
        """Return the present devices as the hook needs them for a layout."""
        return [
            frames.DeviceInfo(device_id=device.device_id, path=str(device.path), weight=1.0)
            for device in self.store.devices
        ]

    def forget_arena(self, fd: int) -> None:
        """Make the engines unmap an arena that is going to be closed."""
        for queue in self.queues.values():
            queue.forget(fd)

    def close(self) -> None:
        """Finish transfers and let go of the devices."""
        for queue in self.queues.values():
            queue.close()
        self.store.close()


class StoreBook:
    """Opens stores by directories (private daemon) or configured names (node daemon). Owned by the event loop."""

    def __init__(self, config: DaemonConfig, *, socket: Path, private: bool) -> None:
        self._config, self._private = config, private
        self._holder = LockHolder(
            pid=os.getpid(), socket=str(socket), uid=os.getuid(), kind="private" if private else "node"
        )
        self._by_directory: dict[Path, OpenStore] = {}

    @property
    def stores(self) -> list[OpenStore]:
        """Return every open store once."""
        return list({id(opened): opened for opened in self._by_directory.values()}.values())

    async def open(self, storage: Sequence[str]) -> OpenStore:
        """Return the store of these directories or device names, opened and recovered now if it is not open.

        Raises:
            ConfigError: unknown names, or a part of them belongs to another open store.
            StorageError: see checkpoint.store.open_store.
        """
        directories = self._directories(storage)
        opened = {id(store): store for path, store in self._by_directory.items() if path in directories}
        if not opened:
            fresh = await self._open_locked(directories)
            self._by_directory |= dict.fromkeys(directories, fresh)
            return fresh
        (known, *others) = opened.values()
        if others or {path for path, store in self._by_directory.items() if store is known} != set(
            directories
        ):
            raise ConfigError(
                f"{', '.join(map(str, directories))} is not the whole of an open store ({known.describe()})",
                hint="name all directories of one store",
            )
        return known

    async def close(self) -> None:
        """Close every store."""
        for opened in self.stores:
            await in_thread(opened.close)
        self._by_directory.clear()

    def chosen(self, opened: OpenStore, storage: Sequence[str]) -> list[frames.DeviceInfo]:
        """Return the devices that a run's new bytes go to: of a node's store those named, of a private one all."""
        infos = opened.device_infos()
        if self._private:
            return infos
        wanted = {os.path.realpath(self._config.devices[name]) for name in storage}
        return [info for info in infos if info.path in wanted]

    def _directories(self, storage: Sequence[str]) -> list[Path]:
        """Return the directories of the store that is meant: a node has one store, over all its devices."""
        if not storage:
            raise ConfigError("no storage was named", hint='attach(..., storage=["/nvme0/everstep"])')
        if self._private:
            relative = [name for name in storage if not name.startswith("/")]
            if relative:
                raise ConfigError(f"storage {relative[0]!r} is not an absolute path")
            return [Path(os.path.realpath(name)) for name in storage]
        unknown = [name for name in storage if name not in self._config.devices]
        if unknown:
            raise ConfigError(
                f"this node has no device {unknown[0]!r}",
                hint=f"storage= selects among {', '.join(self._config.devices)}",
            )
        return [Path(os.path.realpath(path)) for path in self._config.devices.values()]

    async def _open_locked(self, directories: list[Path]) -> OpenStore:
        """Open; where another daemon holds a device, ask it to hand over and try again for a while."""
        deadline_s = asyncio.get_running_loop().time() + HAND_OVER_DEADLINE_S
        asked = False
        while True:
            try:
                return await in_thread(self._open_now, directories)
            except DeviceLockedError as error:
                asked = asked or await ask_to_hand_over(directories, self._holder)
                if not asked or asyncio.get_running_loop().time() > deadline_s:
                    raise error
            await asyncio.sleep(_LOCK_POLL_S)

    def _open_now(self, directories: list[Path]) -> OpenStore:
        store = open_store(directories, ops=RealStorage(), holder=self._holder, uid=os.getuid())
        try:
            report = recover(store)
            queues = {device.device_id: DeviceQueue(self._choose(device.path)) for device in store.devices}
        except BaseException:
            store.close()
            raise
        for device in store.devices:
            choice = queues[device.device_id].choice
            logger.info("device_opened path=%s engine=%s reason=%s", device.path, choice.name, choice.reason)
        return OpenStore(store, queues, report)

    def _choose(self, path: Path) -> EngineChoice:
        config, wanted = EngineConfig(), self._config.io.engine
        choice = choose_engine(path, config)
        kind, reason = choice.kind, choice.reason
        if wanted not in ("auto", kind.value):
            kind, reason = EngineKind(wanted), f"io.engine = {wanted!r} in the configuration"
        if self._config.io.process:
            return EngineChoice(
                kind=kind,
                reason=reason,
                alignment=choice.alignment,
                factory=lambda: ProcessEngine(kind, config),
            )
        return EngineChoice(
            kind=kind, reason=reason, alignment=choice.alignment, factory=lambda: make_engine(kind, config)
        )


def _notes(store: Store, queues: dict[str, DeviceQueue]) -> list[str]:
    """Return what a user should know of a store."""
    notes = list(store.notes)
    return notes + [
        f"{device.path} cannot do direct I/O: writes go through the page cache and are slower"
        for device in store.devices
        if queues[device.device_id].choice.alignment is None
    ]


def use_short_switch_interval() -> None:
    """Let submitters get the GIL back within 0.5 ms: 5 ms lets a busy thread take most of a device's speed."""
    sys.setswitchinterval(0.0005)
