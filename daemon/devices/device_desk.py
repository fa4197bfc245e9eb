"""Devices of a running daemon: listed, drained, retired by hand or by policy, and taken back."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.device import Device
from ...checkpoint.device_change import holdings, note_missing, retire
from ...checkpoint.late_plan import LATE_CALL_S
from ...checkpoint.readmission import Readmission, take_back
from ...checkpoint.retire_plan import Verdict, judge_missing
from ...checkpoint.side_by_side import Apart
from ...checkpoint.store import Store
from ...core.errors import EverstepError, NotFoundError, RunBusyError, StorageError
from ..blocking import in_thread
from ..control import device_views
from ..control.device_views import DeviceDetail, ReadmitView, RetireView, StoreDevices
from .store_use import refusal_to_close
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 3600.0
"""A missing device is looked at this often, or after the policy's time where that is shorter."""


SETTLE_DEADLINE_S = 20.0
"""For what is being written or collected before a store is opened again."""


class DeviceDesk:
    """Owned by the event loop; what reaches a device goes to threads."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._watching: dict[OpenStore, asyncio.Task[None]] = {}
        self._taking: dict[Device, asyncio.Future[None]] = {}

    async def devices(self, uid: int | None) -> list[StoreDevices]:
        """Return the devices of every open store, with the parts of this user's checkpoints (None: of all)."""
        stores = [opened.store for opened in self._node.stores.stores]
        names = self._node.config.device_names()
        return [await in_thread(_named_devices, store, uid, names) for store in stores]

    async def drain(self, name: str, *, cancel: bool) -> DeviceDetail:
        """Let a device get no new segments from the next write on, or end that."""
        store, device_id = self._find(name)
        detail = await in_thread(device_views.drain, store, device_id, cancel=cancel)
        logger.info("device_drain path=%s cancel=%s", detail.path, cancel)
        self._tell_changes()
        return detail

    async def retire(self, name: str, *, force: bool, dry_run: bool) -> RetireView:
        """Take a device out of its store; runs that are attached go on."""
        store, device_id = self._find(name)
        done = await in_thread(
            device_views.retire, store, device_id, force=force, dry_run=dry_run, now_unix_s=time.time()
        )
        self._tell_changes()
        return done

    def _tell_changes(self) -> None:
        for opened in self._node.stores.stores:
            self._node.reporter.devices(opened)

    async def readmit(self, directory: str) -> ReadmitView:
        """Take a directory back into its store: one that has failed at once, else by closing and opening the store.

        Raises:
            NotFoundError: no open store was opened with this directory.
            RunBusyError: it is missing, or was retired, and a trainer is attached to the store, or something waits in
                memory for a restart.
            StorageError and others: see readmission.take_back and prepare_readmission.
        """
        path = await in_thread(Path(directory).resolve)
        opened = self._opened_with(path)
        device = next((each for each in opened.store.devices if each.path == path), None)
        if device is not None and refusal_to_close(self._node, opened):
            await self._take_back(opened.store, device)
            return await self._readmitted(opened, path, aside=None, is_new=False)
        with self._node.stores.not_in_hand():
            fresh, done = await self._reopen(path)
        return await self._readmitted(fresh, path, aside=done.aside, is_new=done.is_new)

    async def _take_back(self, store: Store, device: Device) -> None:
        """In a thread of its own, one for a device whoever asks: it may hang again."""
        taking = self._taking.get(device)
        if taking is None:
            work = Apart("readmit").submit(take_back, store, device)
            taking = self._taking[device] = asyncio.wrap_future(work)
            taking.add_done_callback(lambda done: self._taken_back(device, done))
        await asyncio.wait([taking], timeout=LATE_CALL_S)
        if not taking.done():
            raise StorageError(
                f"{device.path} has not answered for {LATE_CALL_S:.0f} s",
                hint="it is taken back when it answers; `everstep device ls` says so",
            )
        await taking

    def _taken_back(self, device: Device, taking: asyncio.Future[None]) -> None:
        del self._taking[device]
        if (error := taking.exception()) is not None:
            logger.warning("device_not_readmitted path=%s reason=%s", device.path, error)

    def _opened_with(self, path: Path) -> OpenStore:
        opened = self._node.stores.opened_with(path)
        if opened is None:
            raise NotFoundError(
                f"no open store was opened with {path}",
                hint="name it in storage=, or in [devices] of the node's file: an empty directory becomes a device"
                " when the daemon starts with it",
            )
        return opened

    async def _reopen(self, path: Path) -> tuple[OpenStore, Readmission]:
        node = self._node
        async with node.opening():
            opened = self._opened_with(path)
            if refusal := refusal_to_close(node, opened):
                raise refusal
            await node.stores.check_readmission(opened, path)
            await self._settle()
            await node.forget_store(opened)
            if watching := self._watching.pop(opened, None):
                watching.cancel()
                await asyncio.wait([watching])
            try:
                await self._put_down()
                return await node.stores.reopen(opened, path)
            finally:
                if (fresh := node.stores.opened_with(path)) is not None:
                    node.watch(fresh)

    async def _readmitted(
        self, opened: OpenStore, path: Path, *, aside: Path | None, is_new: bool
    ) -> ReadmitView:
        if absent := next((each for each in opened.store.missing if each.path == str(path)), None):
            raise StorageError(f"{path} is missing still: {absent.reason or 'it is not where it was'}")
        device_id = next(each.device_id for each in opened.store.devices if each.path == path)
        detail = await in_thread(device_views.device_detail, opened.store, device_id, None)
        logger.info("device_readmitted path=%s device=%s new=%s", path, device_id, is_new)
        return ReadmitView(device=detail, is_new=is_new, aside=str(aside or ""))

    def watch(self, opened: OpenStore) -> None:
        """Retire the missing devices of a store when the policy says so; of a node's only."""
        missing_after_s = self._node.config.retire.missing_after_s()
        if missing_after_s is not None and not self._node.private and opened.store.missing:
            self._watching[opened] = self._node.spawn(
                self._retire_missing(opened, missing_after_s), "retiring missing devices"
            )

    async def go_by_other_policy(self) -> None:
        """Watch the missing devices by a policy that has changed."""
        watching = list(self._watching.values())
        self._watching.clear()
        for task in watching:
            task.cancel()
        if watching:
            await asyncio.wait(watching)
        for opened in self._node.stores.stores:
            if opened not in self._watching and not self._node.lifetime.is_ending:
                self.watch(opened)

    def stop(self) -> None:
        """End what goes on in the background."""
        for task in self._watching.values():
            task.cancel()

    # -- parts

    def _find(self, name: str) -> tuple[device_views.Store, str]:
        named = self._node.config.devices.get(name)
        stores = [opened.store for opened in self._node.stores.stores]
        return device_views.find(stores, os.path.realpath(named) if named else name)

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                await self._node.persister.idle()
        except TimeoutError:
            raise RunBusyError("checkpoints are still being written", hint="try again") from None

    async def _put_down(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                await self._node.stores.out_of_all_hands()
        except TimeoutError:
            raise RunBusyError(
                "other calls work with the store still", hint="try again when they have ended"
            ) from None

    async def _retire_missing(self, opened: OpenStore, missing_after_s: float) -> None:
        while opened.store.missing:
            try:
                await in_thread(_retire_due, opened, missing_after_s, time.time())
                self._tell_changes()
            except EverstepError as error:
                logger.error("missing_device_not_retired reason=%s", error)
            await asyncio.sleep(min(LOOK_EVERY_S, max(missing_after_s, 1.0)))


def _named_devices(store: Store, uid: int | None, names: Mapping[str, str]) -> StoreDevices:
    """Return a store's devices, its members with their names in the configuration."""
    found = device_views.store_devices(store, uid)
    is_member = store.membership.members.__contains__
    devices = [
        replace(each, name=names.get(each.path, "")) if is_member(each.device_id) else each
        for each in found.devices
    ]
    return replace(found, devices=tuple(devices))


def _retire_due(opened: OpenStore, missing_after_s: float, now_unix_s: float) -> None:
    """Remember since when devices are missing, and retire those whose time has come and that nobody needs."""
    store = opened.store
    note_missing(store, now_unix_s)
    for missing in store.missing:
        since_unix_s = store.membership.missing_since_unix_s.get(missing.device_id)
        if since_unix_s is None:
            continue  # somebody has retired it meanwhile
        held = holdings(store, missing.device_id)
        verdict = judge_missing(since_unix_s, held, now_unix_s=now_unix_s, missing_after_s=missing_after_s)
        if verdict is not Verdict.WAIT:
            missing_s = now_unix_s - since_unix_s
            logger.warning(
                "missing_device path=%s missing_s=%.0f verdict=%s reason=%s",
                missing.path,
                missing_s,
                verdict.name,
                verdict.value,
            )
        if verdict is Verdict.RETIRE:
            retire(store, missing.device_id, force=False, now_unix_s=now_unix_s)
