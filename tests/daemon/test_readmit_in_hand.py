"""A store is closed and opened again only when no call works with it."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from everstep.core.errors import RunBusyError
from everstep.daemon.config import load_config
from everstep.daemon.devices import device_desk
from everstep.daemon.node import Node

WAIT_S = 60.0


@pytest.mark.parametrize("ends", [True, False])
def test_a_readmission_waits_for_the_calls_that_work_with_the_store(
    node_config: Path, devices: list[Path], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The object that they have would write beside the one that takes its place."""
    monkeypatch.setattr(device_desk, "SETTLE_DEADLINE_S", WAIT_S if ends else 0.2)

    async def run() -> None:
        node = Node(load_config(node_config), private=False, version="0", control_socket=node_config)
        async with contextlib.AsyncExitStack() as held, asyncio.timeout(WAIT_S):
            held.push_async_callback(node.stores.close)
            opened = await node.stores.open(["nvme0", "nvme1"])
            async with asyncio.TaskGroup() as tasks:
                node.use_tasks(tasks)
                node.watch(opened)
                with node.stores.in_hand():  # as the control API counts a call
                    with node.stores.in_hand():
                        readmission = asyncio.create_task(node.devices.readmit(str(devices[0])))
                        if ends:
                            await asyncio.sleep(0.2)  # longer than it takes
                            assert not readmission.done()
                            assert node.stores.stores == [opened]
                        else:
                            with pytest.raises(RunBusyError, match="other calls work with the store"):
                                await readmission
                    if ends:
                        await readmission
                assert (node.stores.stores == [opened]) == (not ends)
                for part in (node.verifier, node.scrubber, node.pins, node.idle_stores, node.devices):
                    part.stop()

    asyncio.run(run())
