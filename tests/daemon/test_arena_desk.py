"""Two runs that ask for memory at once: what one gives up for an arena goes to that arena."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from everstep.core.errors import MemoryRefusedError
from everstep.daemon import arena_book
from everstep.daemon.admission_plan import MemoryBound
from everstep.daemon.config import load_config
from everstep.daemon.node import Node
from everstep.daemon.registry import Lease, RunRecord
from everstep.proto import frames

MIB = 1024**2
WAIT_S = 60.0


class Trainer:
    """One that lives and hears nothing."""

    has_ended, alive, pid = False, True, 0

    def send(self, frame: frames.Reply, fd: int | None = None) -> None:
        pass

    def died(self) -> None:
        pass

    def end(self) -> None:
        pass

    def fence(self, reason: str) -> None:
        pass


@contextlib.asynccontextmanager
async def two_runs(config: Path) -> AsyncGenerator[tuple[Node, Lease, Lease]]:
    """A node in this process with room for 8 MiB of arenas, and a trainer in each of two runs."""
    with config.open("a") as file:
        file.write(f"[memory]\narena_max_bytes = {8 * MIB}\nreserve_bytes = 0\n")
    node = Node(load_config(config), private=False, version="0", control_socket=config)
    async with contextlib.AsyncExitStack() as held, asyncio.timeout(WAIT_S):
        held.push_async_callback(node.stores.close)
        opened = await node.stores.open(["nvme0", "nvme1"])
        leases: list[Lease] = []
        async with asyncio.TaskGroup() as tasks:
            node.use_tasks(tasks)
            for name in ("first", "second"):
                store = opened.store.run(os.geteuid(), name, create=True)
                run = RunRecord(uid=os.geteuid(), name=name, run_id=store.run_id, opened=opened, store=store)
                node.registry.runs[run.uid, run.run_id] = run
                leases.append(run.rank(0).grant(Trainer()))
            yield node, leases[0], leases[1]
            for lease in leases:
                node.arena_desk.drop_memory(lease.rank)


async def ask(node: Node, lease: Lease, slot_size_bytes: int) -> int:
    """Ask for two slots; return how many there are."""
    frame = frames.MakeArena(
        request_id=1, layout_digest="d", slot_size_bytes=slot_size_bytes, slot_count=2, ring_size_bytes=MIB
    )
    ready, _ = await node.arena_desk.make_arena(lease, frame)
    assert isinstance(ready, frames.ArenaReady)
    return ready.slot_count


def test_what_a_run_gives_up_for_an_arena_goes_to_nobody_else(
    node_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with two_runs(node_config) as (node, first, second):
            assert await ask(node, first, 3 * MIB) == 2
            given_up, go_on = asyncio.Event(), asyncio.Event()
            read = arena_book.read_memory_bounds

            async def read_memory_bounds() -> list[MemoryBound]:
                if asyncio.current_task() is asking and not first.rank.arenas:
                    given_up.set()
                    await go_on.wait()
                return await read()

            monkeypatch.setattr(arena_book, "read_memory_bounds", read_memory_bounds)
            asking = asyncio.create_task(ask(node, first, 4 * MIB))
            await given_up.wait()
            other = asyncio.create_task(ask(node, second, 4 * MIB))
            await asyncio.wait([other], timeout=0.5)  # it gets what is not its own, if anything
            go_on.set()
            assert await asking == 2
            with pytest.raises(MemoryRefusedError):
                await other

    asyncio.run(run())
