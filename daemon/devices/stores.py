"""The stores that this daemon holds: opened and recovered once, each device with its queue."""

import asyncio
import gc
import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ...checkpoint.device import Device
from ...checkpoint.engine import EngineKind
from ...checkpoint.engine_choice import EngineChoice, EngineRules, choose_engine, fallback_engine
from ...checkpoint.readmission import Readmission, check_readmission, prepare_readmission
from ...checkpoint.real_storage import RealStorage
from ...checkpoint.recovery import RecoveryReport, recover
from ...checkpoint.store import Store, open_store
from ...checkpoint.store_format import LockHolder
from ...core.errors import ConfigError, DeviceLockedError, StorageError
from ...proto import frames
from ..blocking import in_thread
from ..config import DaemonConfig
from .device_queue import QUEUE_LANES, DeviceQueue
from .drive_flush import DriveFlush, look_at_flush
from .flush_plan import is_doubtful
from .hand_over import ask_to_hand_over
from .space_watch import SpaceWatch

logger = logging.getLogger(__name__)

HAND_OVER_DEADLINE_S = 10.0
_LOCK_POLL_S = 0.05


class OpenStore:
    """A store with its device queues."""

    def __init__(self, store: Store, queues: dict[str, DeviceQueue], report: RecoveryReport) -> None:
        self.store, self.queues, self.report = store, queues, report
        self._capacities = _capacities_bytes(store.devices)
        self.space = SpaceWatch(store.devices)
        self.flushes = {device.device_id: look_at_flush(device.path) for device in store.devices}
        self._needed_count = 0

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of the store now."""
        return [*self.store.notes, *_engine_notes(self.store, self.queues)]

    @property
    def is_needed(self) -> bool:
        """Tell whether a persist or a restore is under way; asked by any thread."""
        return self._needed_count > 0

    @contextmanager
    def needed(self) -> Generator[None]:
        """Let what reads in the background give way while the block runs; entered on the event loop only."""
        self._needed_count += 1
        try:
            yield
        finally:
            self._needed_count -= 1

    @property
    def is_new(self) -> bool:
        """Tell whether the store was made by this opening."""
        return self.store.is_new

    @property
    def paths(self) -> list[str]:
        """Return the directories of the present devices."""
        return [str(device.path) for device in self.store.devices]

    def describe(self) -> str:
        """Return the device directories as text."""
        return ", ".join(self.paths)

    def device_infos(self, device_ids: Collection[str] | None = None) -> list[frames.DeviceInfo]:
        """Return the present devices (of these ids), and how they are, for a trainer."""
        return [
            self._info(device)
            for device in self.store.devices
            if device_ids is None or device.device_id in device_ids
        ]

    def _info(self, device: Device) -> frames.DeviceInfo:
        state, reason = self.store.device_state(device.device_id)
        return frames.DeviceInfo(
            device_id=device.device_id,
            path=str(device.path),
            condition=frames.DeviceCondition(state.value),
            reason=reason,
            write_bytes_per_s=self.store.speeds.reading(device.device_id).bytes_per_s or 0.0,
            capacity_bytes=self._capacities.get(device.device_id, 0),
        )

    async def forget_arena(self, fd: int) -> None:
        """Return when the engines, after the transfers before it, have unmapped an arena that is to be closed."""
        await asyncio.gather(*(asyncio.wrap_future(queue.forgetting(fd)) for queue in self.queues.values()))

    def close(self) -> None:
        """Finish transfers and let go of the devices."""
        self.space.stop()
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
        self._closing: dict[Path, asyncio.Task[None]] = {}
        self._in_hand_count = 0
        self._was_put_down = asyncio.Event()

    @property
    def stores(self) -> list[OpenStore]:
        """Return every open store once."""
        return list({id(opened): opened for opened in self._by_directory.values()}.values())

    @property
    def is_in_hand(self) -> bool:
        """Tell whether somebody who is not attached works with stores now."""
        return self._in_hand_count > 0

    @contextmanager
    def in_hand(self) -> Generator[None]:
        """Let no store be withdrawn while the block runs."""
        self._in_hand_count += 1
        try:
            yield
        finally:
            self._put_down()

    @contextmanager
    def not_in_hand(self) -> Generator[None]:
        """Count whoever is counted by `in_hand` as nobody while the block runs."""
        self._put_down()
        try:
            yield
        finally:
            self._in_hand_count += 1

    def _put_down(self) -> None:
        self._in_hand_count -= 1
        self._was_put_down.set()

    async def out_of_all_hands(self) -> None:
        """Return when nobody who is not attached works with stores; until the next await nobody does."""
        while self._in_hand_count > 0:
            self._was_put_down.clear()
            await self._was_put_down.wait()

    def withdraw(self, opened: OpenStore, closing: asyncio.Task[None]) -> None:
        """Give a store to nobody any more; who asks for its directories opens it again when `closing` has ended."""
        for path in self._directories_of(opened):
            del self._by_directory[path]
            self._closing[path] = closing
            closing.add_done_callback(lambda _, path=path: self._closing.pop(path))

    async def open(self, storage: Sequence[str]) -> OpenStore:
        """Return the store of these directories or device names, opened and recovered now if it is not open.

        Raises:
            ConfigError: unknown names, or a part of them belongs to another open store.
            StorageError: see checkpoint.store.open_store.
        """
        directories = self._directories(storage)
        if closing := {self._closing[path] for path in directories if path in self._closing}:
            await asyncio.wait(closing)
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

    def opened_with(self, directory: Path) -> OpenStore | None:
        """Return the open store that this directory was named for, whether or not a device is there."""
        return self._by_directory.get(directory)

    async def check_readmission(self, opened: OpenStore, directory: Path) -> None:
        """Return if a directory of an open store can be taken back; see readmission.check_readmission."""
        directories = self._directories_of(opened)
        await in_thread(check_readmission, directories, directory, ops=RealStorage(), uid=os.getuid())

    async def reopen(self, opened: OpenStore, readmit: Path) -> tuple[OpenStore, Readmission]:
        """Close a store that nobody uses, and return it opened again with one of its directories taken back.

        Where that fails it is opened again without.
        """
        directories = self._directories_of(opened)
        for path in directories:
            del self._by_directory[path]
        await in_thread(opened.close)
        readmission = Readmission(adopt=(), is_new=False, aside=None)
        try:
            readmission = await in_thread(
                prepare_readmission,
                directories,
                readmit,
                ops=RealStorage(),
                holder=self._holder,
                uid=os.getuid(),
            )
        finally:
            fresh = await in_thread(self._open_now, directories, readmission.adopt)
            self._by_directory |= dict.fromkeys(directories, fresh)
        return fresh, readmission

    def _directories_of(self, opened: OpenStore) -> list[Path]:
        return [path for path, store in self._by_directory.items() if store is opened]

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
        wanted = {self._path_of(named) for named in storage}
        return [info for info in infos if info.path in wanted]

    def _path_of(self, named: str) -> str | None:
        """Return the real path of the node's device of that name or path; None: it has no such device."""
        for name, path in self._config.devices.items():
            real = os.path.realpath(path)
            if named == name or os.path.normpath(named) in (os.path.normpath(path), real):
                return real
        return None

    def _directories(self, storage: Sequence[str]) -> list[Path]:
        """Return the directories of the store that is meant: a node has one store, over all its devices."""
        if not storage:
            raise ConfigError("no storage was named", hint='attach(..., storage=["/nvme0/everstep"])')
        if self._private:
            relative = [name for name in storage if not name.startswith("/")]
            if relative:
                raise ConfigError(
                    f"storage {relative[0]!r} does not exist, and this daemon is private: it has no devices by name",
                    hint="create the directory, or correct the path",
                )
            return [Path(os.path.realpath(name)) for name in storage]
        unknown = [named for named in storage if self._path_of(named) is None]
        if unknown:
            raise ConfigError(
                f"this node has no device {unknown[0]!r}",
                hint=f"storage= selects among {', '.join(self._config.devices)}, or by their directories",
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

    def _open_now(self, directories: list[Path], adopt: Sequence[Path] = ()) -> OpenStore:
        store = open_store(
            directories,
            ops=RealStorage(),
            holder=self._holder,
            uid=os.getuid(),
            adopt=adopt,
            recycles=self._config.io.recycle,
        )
        try:
            report = recover(store)
            queues = self._queues(store.devices)
        except BaseException:
            store.close()
            raise
        for device in store.devices:
            choice = queues[device.device_id].choice
            logger.info("device_opened path=%s engine=%s reason=%s", device.path, choice.name, choice.reason)
        opened = OpenStore(store, queues, report)
        for device in store.devices:
            _say_doubt(device, opened.flushes[device.device_id])
        opened.space.start()
        return opened

    def _queues(self, devices: Sequence[Device]) -> dict[str, DeviceQueue]:
        """Return a queue for each device, or none at all."""
        with ExitStack() as made:
            queues: dict[str, DeviceQueue] = {}
            for device in devices:
                queue = queues[device.device_id] = self._queue(device.path)
                made.callback(queue.close)
            made.pop_all()
        return queues

    def _queue(self, path: Path) -> DeviceQueue:
        """Return a device's queue with the first engine that is given as often as the queue has lanes.

        Between asking for them and making them another process may have taken what was left.
        """
        io = self._config.io
        rules = EngineRules(
            wanted=None if io.engine == "auto" else EngineKind(io.engine),
            in_process=io.process,
            config=io.engine_config(),
            lane_count=QUEUE_LANES,
        )
        while True:
            choice = self._choose(path, rules)
            try:
                return DeviceQueue(choice)
            except (OSError, StorageError) as error:
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                without = rules.without(choice.kind, why)
                if without is None:
                    raise StorageError(f"no engine can be made for {path}: {why}") from error
                rules = without

    def _choose(self, path: Path, rules: EngineRules) -> EngineChoice:
        try:
            return choose_engine(path, rules)
        except StorageError as error:
            # What the device holds can still be restored, so that it is no reason to refuse the store.
            logger.warning("device_not_asked path=%s reason=%s", path, error)
            return fallback_engine(f"could not ask about direct I/O: {error}", rules)


def _capacities_bytes(devices: Sequence[Device]) -> dict[str, int]:
    """Return the size of each device's file system, in equal parts where several devices share one."""
    sharing = Counter(device.file_system_id for device in devices)
    found: dict[str, int] = {}
    for device in devices:
        with suppress(OSError):  # a drive that does not answer has no size
            space = os.statvfs(device.path)
            found[device.device_id] = space.f_blocks * space.f_frsize // sharing[device.file_system_id]
    return found


def _say_doubt(device: Device, flush: DriveFlush) -> None:
    if is_doubtful(flush.write_cache, flush.fsync_s):
        logger.warning(
            "flush_doubtful path=%s write_cache=%s fsync_s=%.6f",
            device.path,
            flush.write_cache,
            flush.fsync_s,
        )


def _engine_notes(store: Store, queues: dict[str, DeviceQueue]) -> list[str]:
    return [
        f"writes to {device.path} go through the page cache and are slower: {choice.reason}"
        for device in store.devices
        if (choice := queues[device.device_id].choice).alignment is None
    ]


def use_all_descriptors() -> None:
    """Raise the soft limit of open files to the hard one: all segments of a shard are open while it is written."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def use_short_switch_interval() -> None:
    """Let submitters get the GIL back within 0.5 ms: 5 ms lets a busy thread take most of a device's speed."""
    sys.setswitchinterval(0.0005)


def collect_garbage_rarely() -> None:
    """Look for cycles seldom: in the middle of decoding 20,000 leaves that quadruples the time without the GIL.

    What decoding makes holds no cycles. 37 ms instead of 132 (2 cores, Python 3.11).
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
