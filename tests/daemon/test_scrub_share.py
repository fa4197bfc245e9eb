"""How much of a drive a scrub takes: a real daemon on drives of a bounded speed, by its own counters."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from pausing import wait_until
from places import memory_folder
from scraping import scrape
from watched_drives import AS_FAST_AS_IT_IS, Drives, watched_daemon

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.devices.scrub_plan import Scrub

DRIVE_BYTES_PER_S = 400e6
SHARE_MAX = 0.05
"""What the documents promise of a daemon that nobody has configured."""
CLOCKS = 1.02
"""The scrub's times are those of the wall clock, its rests go by another one."""
LEAVES = tuple(whole_leaf(f"w.{index}", "uint8", (24 << 20,)) for index in range(2))
"""A segment for each drive, in several chunks."""


@pytest.fixture
def devices() -> Generator[list[Path]]:
    with memory_folder() as folder:
        made = [folder / "d0", folder / "d1"]
        for path in made:
            path.mkdir()
        with opened(made) as (store, _):
            run = store.run(os.geteuid(), "demo", create=True)
            run.begin_attempt(1, fresh=False)
            save(run, make_state(store, 1, LEAVES), CheckpointId(1, 1))
        yield made


def moved_bytes(client: ControlClient, device: Path) -> float:
    """Return how much the daemon has read from a device since it started."""
    found = scrape(client.status().daemon.metrics_port)
    (value,) = [
        value
        for name, value in found.items()
        if name.startswith("everstep_device_moved_bytes_total") and str(device) in name and "read" in name
    ]
    return value


def ended_scrub(client: ControlClient) -> Scrub | None:
    (store,) = client.status().stores
    newest = store.scrub.newest
    return newest if newest is not None and newest.ended_unix_s is not None else None


def test_it_takes_no_more_of_a_drive_than_its_share(
    node_config: Path, socket_path: Path, devices: list[Path], tmp_path: Path
) -> None:
    with node_config.open("a") as file:
        file.write('[verify]\nafter_s = 1000.0\n[scrub]\nevery = "never"\n')
    drives = Drives(tmp_path / "drives", devices, AS_FAST_AS_IT_IS)
    with watched_daemon(drives, node_config, socket_path), connected(socket_path) as client:
        for device in devices:
            drives.hold(device.name, DRIVE_BYTES_PER_S)
        before = [moved_bytes(client, device) for device in devices]
        assert client.start_scrub("", []).checkpoint_count == 1
        wait_until(lambda: ended_scrub(client) is not None)
        scrub = ended_scrub(client)
        assert scrub is not None
        assert scrub.ended_unix_s is not None
        took_s = scrub.ended_unix_s - scrub.started_unix_s
        for device, old in zip(devices, before, strict=True):
            read = moved_bytes(client, device) - old
            assert read >= 24 << 20
            assert read <= SHARE_MAX * DRIVE_BYTES_PER_S * took_s * CLOCKS
