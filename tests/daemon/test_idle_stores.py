"""A private daemon that goes on for one run closes the stores of those that have ended."""

import asyncio
import os
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.checkpoint.testing import opened
from everstep.core.errors import DeviceLockedError
from everstep.core.ids import CheckpointId
from everstep.daemon.blocking import in_thread
from everstep.daemon.config import DaemonConfig
from everstep.daemon.control.client import connected
from everstep.daemon.devices.stores import StoreBook
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Made when they are needed, and kept."""


def save_one(socket_path: Path, devices: list[Path], *, name: str) -> None:
    """A run that saves a checkpoint and ends well."""
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.open_run(devices, name=name), frames.RunOpened)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 7), seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
        assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)


def closed_count(socket_path: Path) -> int:
    return socket_path.with_name("daemon.log").read_text().count("store_closed ")


def held(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    fds, tasks = (len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task"))
    return fds, tasks


def test_stores_of_ended_runs_are_closed_while_another_trains(
    socket_path: Path, devices: list[Path], tmp_path: Path
) -> None:
    trials = [tmp_path / f"trial{number}" for number in range(5)]
    for trial in trials:
        trial.mkdir()
    with daemon_process(socket_path, linger_s=1.0) as daemon, FakeTrainer(socket_path) as living:
        living.open_run(devices, name="living")
        descriptors = threads = 0
        for number, trial in enumerate(trials):
            save_one(socket_path, [trial], name="trial")
            wait_until(lambda count=number + 1: closed_count(socket_path) == count)
            with connected(socket_path) as client:
                assert [store.devices[0].path for store in client.status().stores] == [str(devices[0])]
                assert {run.name for run in client.status().runs} == {"living"}
            if number == 0:
                descriptors, threads = held(daemon.pid)
        wait_until(lambda: held(daemon.pid)[0] <= descriptors)
        assert held(daemon.pid)[1] <= threads + EXECUTOR_THREADS
        with opened(trials[:1]) as (store, _):  # nobody holds its lock
            assert len(store.runs()) == 1
        with FakeTrainer(socket_path) as restarted:
            found = restarted.open_run(trials[:1], name="trial")
            assert isinstance(found, frames.RunOpened)
            assert found.highest_attempt == 1
            restarted.begin_attempt(2)
            assert [(each.attempt, each.step) for each in restarted.offers()] == [(1, 7)]
            with pytest.raises(DeviceLockedError), opened(trials[:1]):
                pass


def test_a_store_stays_open_as_long_as_memory_waits_for_a_restart(
    socket_path: Path, devices: list[Path], tmp_path: Path
) -> None:
    (trial := tmp_path / "trial").mkdir()
    with daemon_process(socket_path, linger_s=2.0), FakeTrainer(socket_path) as living:
        living.open_run(devices, name="living")
        with FakeTrainer(socket_path) as crashing:
            crashing.open_run([trial], name="crashing")
            crashing.begin_attempt(1)
            arena = crashing.make_arena(crashing.layout())
            arena.save(CheckpointId(1, 7), seed=1)
            assert isinstance(crashing.event(frames.Persisted), frames.Persisted)
            arena.close()
        wait_until(lambda: closed_count(socket_path) == 1)
        log = socket_path.with_name("daemon.log").read_text()
    assert log.index("memory_given_back ") < log.index("store_closed ")


def test_who_asks_for_a_store_that_is_being_closed_opens_it_again(socket_path: Path, tmp_path: Path) -> None:
    async def run() -> None:
        book = StoreBook(DaemonConfig(), socket=socket_path, private=True)
        with book.in_hand():
            assert book.is_in_hand
        assert not book.is_in_hand
        before = await book.open([str(tmp_path)])
        may_close = asyncio.Event()

        async def close() -> None:
            await may_close.wait()
            await in_thread(before.close)

        book.withdraw(before, asyncio.create_task(close()))
        assert book.stores == []
        opening = asyncio.create_task(book.open([str(tmp_path)]))
        assert not (await asyncio.wait([opening], timeout=0.2))[0]
        may_close.set()
        assert await opening is not before
        assert book.stores == [await opening]
        await book.close()

    asyncio.run(run())
