"""When the schedule has something read: short lives of a daemon, with a clock that the test sets, and a real one."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from pausing import wait_until
from scraping import scrape

from everstep.checkpoint import commit
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.scrub_mark import SCRUB_NAME, read_scrub_mark, write_scrub_mark
from everstep.checkpoint.store_format import ScrubMark
from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.ids import CheckpointId
from everstep.daemon.config import load_config
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import ScrubView
from everstep.daemon.devices import verifier as verifier_module
from everstep.daemon.devices.scrub_plan import Scrub
from everstep.daemon.devices.scrubber import Scrubber
from everstep.daemon.devices.stores import OpenStore
from everstep.daemon.devices.verifier import Verifier
from everstep.daemon.node import Node
from everstep.daemon.testing import node_daemon

START_UNIX_S = 1.7e9
DAY_S = 86400.0
STEPS = (1, 2, 3)
SLOW_SHARE = 0.02
LAST = "everstep_scrub_last_completed_timestamp_seconds"


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """A store with checkpoints, whose last scrub is long ago."""
    with opened(devices) as (store, _):
        mark = ScrubMark(store_id=store.store_id, started_unix_s=1e9, ended_unix_s=1e9)
        write_scrub_mark(store, mark)
        run = store.run(os.geteuid(), "demo", create=True)
        run.begin_attempt(1, fresh=False)
        for step in STEPS:
            save(run, make_state(store, step), CheckpointId(1, step))
    return devices


class Clock:
    def __init__(self, now_unix_s: float) -> None:
        self.now_unix_s = now_unix_s
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now_unix_s


@contextlib.asynccontextmanager
async def following(config: Path, clock: Clock) -> AsyncGenerator[tuple[Verifier, OpenStore, RunStore]]:
    """A life whose verifier has read what was the newest at the opening, and whose scrubs are not due."""
    async with life(config, clock) as (scrubber, store):
        node = scrubber._node
        node.verifier = Verifier(node, clock=clock)
        node.verifier.watch(store)
        await node.verifier.newest_are_read(store)
        (run,) = store.store.runs()
        yield node.verifier, store, run
        node.verifier.stop()


def save_newest(run: RunStore, step: int, clock: Clock) -> CheckpointId:
    """Commit a checkpoint at the clock's time."""
    checkpoint = CheckpointId(1, step)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit.time, "time", clock)
        save(run, make_state(run.store, step), checkpoint)
    return checkpoint


async def looks(clock: Clock) -> None:
    """Return when the verifier has looked twice."""
    seen = clock.asked
    await until(lambda: clock.asked >= seen + 2)


def titles(verifier: Verifier, store: OpenStore) -> list[str]:
    return [verdict.summary.title for verdict in verifier.found(store)]


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch, node_config: Path, stored: list[Path]) -> list[Path]:
    """A node whose verifier looks all the time, and has no schedule."""
    monkeypatch.setattr(verifier_module, "LOOK_FOR_NEW_S", 0.001)
    with node_config.open("a") as file:
        file.write("[verify]\nafter_s = 0.0\n[scrub]\nevery = 'never'\nbandwidth_share = 1.0\n")
    return stored


@pytest.mark.usefixtures("looking")
def test_what_becomes_the_newest_is_read_within_an_hour(node_config: Path) -> None:
    async def live() -> None:
        clock = Clock(START_UNIX_S)
        async with following(node_config, clock) as (verifier, store, run):
            assert titles(verifier, store) == ["demo@1.3"]
            for step, minutes, read in ((4, 10, 3), (5, 19, 3), (6, 1, 6), (7, 29, 6), (7, 1, 7)):
                if step not in {info.checkpoint.step for info in run.checkpoints()}:
                    save_newest(run, step, clock)
                clock.now_unix_s += 60 * minutes
                await looks(clock)
                await until(lambda read=read: titles(verifier, store) == [f"demo@1.{read}"])
            clock.now_unix_s += DAY_S
            await looks(clock)
            assert verifier.newest_read_unix_s(run, CheckpointId(1, 7)) == START_UNIX_S + 3600
            assert verifier._node.metrics.readings.verified_total.labels("intact")._value.get() == 3

    asyncio.run(live())


@pytest.mark.usefixtures("looking")
def test_damage_of_what_becomes_the_newest_is_said_and_not_offered(node_config: Path) -> None:
    async def live() -> None:
        clock = Clock(START_UNIX_S)
        async with following(node_config, clock) as (verifier, store, run):
            for step in (4, 5):
                spoil(run, save_newest(run, step, clock))
            clock.now_unix_s += 3600
            await until(lambda: len(verifier.found(store)) == 3)
            assert titles(verifier, store) == ["demo@1.3", "demo@1.5", "demo@1.4"]
            assert run.offered()[0] == CheckpointId(1, 3)
            readings = verifier._node.metrics.readings
            assert readings.verified_total.labels("damaged")._value.get() == 2
            assert readings.damaged_total._value.get() == 2
            said = verifier._node.events.log(os.getuid()).after(0, count_max=1000)
            assert sum("is damaged" in event.text for event in said.events) == 2
            await looks(clock)  # what is known to be damaged is not read again, nor is what was read before
            clock.now_unix_s += DAY_S
            await looks(clock)
            assert len(verifier.found(store)) == 3

    asyncio.run(live())


def spoil(run: RunStore, checkpoint: CheckpointId) -> None:
    """Change the last byte of a segment."""
    path = run.segment_path(run.manifest(checkpoint, 0).segments[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@contextlib.asynccontextmanager
async def life(config: Path, clock: Clock) -> AsyncGenerator[tuple[Scrubber, OpenStore]]:
    """One life of a daemon, in this process; it ends as a drained one does."""
    node = Node(
        load_config(config),
        private=False,
        version="0",
        control_socket=config,
    )
    scrubber = Scrubber(node, clock=clock)
    async with contextlib.AsyncExitStack() as held:
        held.push_async_callback(node.stores.close)
        store = await node.stores.open(["nvme0"])
        async with asyncio.TaskGroup() as tasks:
            node.use_tasks(tasks)
            scrubber.watch(store)
            yield scrubber, store
            scrubber.stop()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 (what is waited for tells nobody)
            await asyncio.sleep(0.001)


async def read_by(config: Path, clock: Clock) -> int | None:
    """Return how many checkpoints a life reads that ends when nothing is due; None when nothing was."""
    async with life(config, clock) as (scrubber, store):
        await until(lambda: clock.asked >= 2)  # how far it is; whether something is due
        if scrubber.view(store).newest is None:
            return None
        await until(lambda: _ended(scrubber.view(store)))
        return _newest(scrubber.view(store)).checkpoint_count


def _newest(view: ScrubView) -> Scrub:
    assert view.newest is not None
    return view.newest


def _ended(view: ScrubView) -> bool:
    return view.newest is not None and view.newest.ended_unix_s is not None


def configure(config: Path, *, share: float = 1.0) -> None:
    with config.open("a") as file:
        file.write(f"[verify]\nafter_s = 0.0\n[scrub]\nbandwidth_share = {share}\n")


@pytest.mark.usefixtures("stored")
def test_a_daemon_of_office_hours_reads_all_once_a_week(node_config: Path) -> None:
    configure(node_config)
    weeks = 4
    found = [
        asyncio.run(read_by(node_config, Clock(START_UNIX_S + (7 * week + day) * DAY_S)))
        for week in range(weeks)
        for day in range(5)
    ]
    read = [each for each in found if each is not None]
    assert set(read) == {len(STEPS)}
    assert weeks <= len(read) <= weeks + 1  # the days are not those of the store's own week


@pytest.mark.usefixtures("stored")
def test_a_scrub_that_each_life_cuts_off_goes_on_where_it_was(node_config: Path) -> None:
    configure(node_config, share=SLOW_SHARE)
    counts = list[int]()
    while sum(counts) < len(STEPS):
        counts.append(asyncio.run(_cut_after_one(node_config, Clock(START_UNIX_S + len(counts) * DAY_S))))
    assert len(counts) > 1
    assert sum(counts) == len(STEPS)


@pytest.mark.usefixtures("stored")
def test_a_reload_begins_changes_and_ends_the_schedule(node_config: Path) -> None:
    """From never to daily, which is due at once; and back to never, which ends it."""
    never = (
        node_config.read_text() + "[verify]\nafter_s = 0.0\n[scrub]\nevery = 'never'\nbandwidth_share = 1.0\n"
    )
    node_config.write_text(never)
    configs = {each: node_config.with_name(f"{each}.toml") for each in ("1d", "never")}
    for every, path in configs.items():
        path.write_text(never.replace("'never'", f"'{every}'"))

    async def reload() -> None:
        async with life(node_config, clock := Clock(START_UNIX_S + 30 * DAY_S)) as (scrubber, store):
            assert scrubber.view(store).next_unix_s is None
            node = scrubber._node
            node.scrubber = scrubber
            node.apply_config(load_config(configs["1d"]))
            await until(lambda: _ended(scrubber.view(store)))
            assert _newest(scrubber.view(store)).checkpoint_count == len(STEPS)
            node.apply_config(load_config(configs["never"]))
            await until(lambda: not scrubber._tasks)
            clock.now_unix_s += 30 * DAY_S
            assert scrubber.view(store).next_unix_s is None

    asyncio.run(reload())


async def _cut_after_one(config: Path, clock: Clock) -> int:
    async with life(config, clock) as (scrubber, store):
        await until(lambda: clock.asked >= 3 and _newest(scrubber.view(store)).checkpoint_count > 0)
        return _newest(scrubber.view(store)).checkpoint_count


def test_a_store_without_a_mark_waits_for_its_own_time_of_the_week(
    node_config: Path, stored: list[Path]
) -> None:
    configure(node_config)
    for path in stored:
        (path / SCRUB_NAME).unlink()
    days = [asyncio.run(read_by(node_config, Clock(START_UNIX_S + day * DAY_S))) for day in range(8)]
    assert days[0] is None
    assert [each for each in days if each is not None] == [len(STEPS)]


def test_what_the_verifier_has_read_is_not_read_again(
    node_config: Path, socket_path: Path, stored: list[Path]
) -> None:
    with node_config.open("a") as file:
        file.write("[verify]\nafter_s = 0.0\n[scrub]\nbandwidth_share = 1.0\n")
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        wait_until(lambda: _ended(_scrub(client)))
        sizes = {view.checkpoint.step: view.size_bytes for view in client.checkpoints("demo")}
        found = scrape(client.status().daemon.metrics_port)
        assert _newest(_scrub(client)).checkpoint_count == len(STEPS)
        assert found["everstep_checkpoints_verified_total{intact}"] == 1
        assert found["everstep_scrubbed_bytes_total"] == sum(sizes.values()) - sizes[max(STEPS)]
        assert found["everstep_scrub_late_seconds"] == 0


@pytest.mark.usefixtures("stored")
def test_a_scrub_that_cannot_be_in_time_says_so(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write(f'[verify]\nafter_s = 0.0\n[scrub]\nevery = "10ms"\nbandwidth_share = {SLOW_SHARE}\n')
    said = "after the next one should begin, at 0.02 of the devices' speed: raise scrub.bandwidth_share"
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        wait_until(lambda: scrape(port)["everstep_scrub_late_seconds"] > 0)
        wait_until(lambda: any(said in text for text in client.status().stores[0].problems))


def test_a_real_daemon_goes_on_after_a_restart(
    node_config: Path, socket_path: Path, stored: list[Path]
) -> None:
    configured = node_config.read_text()
    configure(node_config, share=SLOW_SHARE / 20)  # seconds for each, so that it ends before it has read all
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        wait_until(lambda: bool(newest := _scrub(client).newest) and newest.checkpoint_count > 0)
    mark = _mark(stored)
    assert mark is not None
    assert 0 < mark.checkpoint_count < len(STEPS)
    node_config.write_text(configured)
    configure(node_config)
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        wait_until(lambda: _ended(_scrub(client)))
        assert _newest(_scrub(client)).checkpoint_count == len(STEPS) - mark.checkpoint_count
    done = _mark(stored)
    assert done is not None
    assert (done.started_unix_s, done.checkpoint_count) == (mark.started_unix_s, len(STEPS))
    assert done.ended_unix_s is not None
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        wait_until(lambda: scrape(port)[LAST] == done.ended_unix_s)
        assert _scrub(client).newest is None
    assert _mark(stored) == done


def _scrub(client: ControlClient) -> ScrubView:
    (store,) = client.status().stores
    return store.scrub


def _mark(devices: list[Path]) -> ScrubMark | None:
    with opened(devices, read_only=True) as (store, _):
        return read_scrub_mark(store)
