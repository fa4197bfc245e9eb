"""What is complete is recorded and collected in rounds: nobody is ever further behind."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import open_store
from everstep.checkpoint.testing import HOLDER, make_state, save
from everstep.core.ids import CheckpointId
from everstep.daemon.config import load_config
from everstep.daemon.events.event_types import EventKind
from everstep.daemon.node import Node
from everstep.daemon.registry import RunRecord

COUNT = 30
WAIT_S = 60.0


class CountedLock:
    """A lock that knows how often it was taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taken = 0

    def __enter__(self) -> None:
        self.lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@contextlib.asynccontextmanager
async def one_run(config: Path) -> AsyncGenerator[tuple[Node, RunRecord]]:
    """A node in this process, and a run whose checkpoints are on its drives and not known to be complete."""
    node = Node(load_config(config), private=False, version="0", control_socket=config)
    async with contextlib.AsyncExitStack() as held:
        held.push_async_callback(node.stores.close)
        opened = await node.stores.open(["nvme0", "nvme1"])
        store = opened.store.run(os.geteuid(), "demo", create=True)
        store.begin_attempt(1, fresh=False)
        for step in range(1, COUNT + 1):
            save(store, make_state(opened.store, step), CheckpointId(1, step), world_size=2)
        async with asyncio.TaskGroup() as tasks:
            node.use_tasks(tasks)
            yield (
                node,
                RunRecord(uid=os.geteuid(), name="demo", run_id=store.run_id, opened=opened, store=store),
            )


def steps(store: RunStore) -> list[int]:
    return [each.checkpoint.step for each in store.checkpoints()]


def complete_events(node: Node) -> list[tuple[int, bool]]:
    """Return the step of each event of a complete checkpoint, and whether its size was known then."""
    log = node.events.log(os.geteuid())
    found = log.after(0, count_max=1000).events
    return [
        (each.checkpoint.step, each.size_bytes > 0)
        for each in found
        if each.kind is EventKind.CHECKPOINT_COMPLETE and each.checkpoint is not None
    ]


def test_what_is_told_while_a_drive_is_busy_is_recorded_and_collected_at_once(node_config: Path) -> None:
    async def run() -> None:
        async with one_run(node_config) as (node, record), asyncio.timeout(WAIT_S):
            changing = CountedLock()
            record.store.changing = changing  # pyright: ignore[reportAttributeAccessIssue]
            with changing.lock:  # as while a drive takes its time
                for step in range(1, COUNT + 1):
                    node.persister.complete(record, CheckpointId(1, step))
                    node.persister.complete(record, CheckpointId(1, step))  # as the second rank says
                await asyncio.sleep(0)
            await node.persister.idle()
            assert changing.taken <= 2
            assert steps(record.store) == [COUNT, COUNT - 1, COUNT - 2], "as many as are kept"
            assert record.store.complete_floor() == CheckpointId(1, COUNT)
            assert complete_events(node) == [(step, True) for step in range(1, COUNT + 1)]

    asyncio.run(run())


def test_one_that_fails_keeps_nobody_from_the_next(node_config: Path) -> None:
    async def run() -> None:
        async with one_run(node_config) as (node, record), asyncio.timeout(WAIT_S):
            broken = record.store.changing
            record.store.changing = None  # pyright: ignore[reportAttributeAccessIssue]
            node.persister.complete(record, CheckpointId(1, 4))
            await node.persister.idle()
            assert steps(record.store) == list(range(COUNT, 0, -1))
            record.store.changing = broken
            node.persister.complete(record, CheckpointId(1, 9))
            node.persister.give_up(record, CheckpointId(1, 12))
            await node.persister.idle()
            assert steps(record.store) == [*range(COUNT, 12, -1), 11, 10, 9, 8]
            assert [step for step, _ in complete_events(node)] == [4, 9]

    asyncio.run(run())


def test_a_run_that_was_opened_elsewhere_meanwhile_is_recorded_there(
    node_config: Path, tmp_path: Path
) -> None:
    """The record before may still wait for a drive; the name and the user are the same."""

    async def run() -> None:
        async with one_run(node_config) as (node, before), asyncio.timeout(WAIT_S):
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir()
            with open_store(
                [elsewhere], ops=RealStorage(), holder=HOLDER, uid=os.geteuid(), recycles=False
            ) as store:
                recover(store)
                moved = store.run(os.geteuid(), "demo", create=True)
                moved.begin_attempt(1, fresh=False)
                for step in (5, 6):
                    save(moved, make_state(store, step), CheckpointId(1, step))
                after = replace(before, store=moved, collecting=asyncio.Lock(), ranks={})
                changing = threading.Lock()
                before.store.changing = changing
                with changing:
                    node.persister.complete(before, CheckpointId(1, 2))
                    node.persister.complete(after, CheckpointId(1, 6))
                    while node.persister.is_completing(after):  # noqa: ASYNC110 - nothing tells of it
                        await asyncio.sleep(0.01)
                    assert moved.complete_floor() == CheckpointId(1, 6)
                await node.persister.idle()
                assert before.store.complete_floor() == CheckpointId(1, 2)

    asyncio.run(run())
