"""Free space is asked beside whoever looks: a device that hangs stops neither a scrape nor the others."""

import math
import os
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from pausing import wait_until
from prometheus_client import start_http_server
from scraping import scrape

from everstep.checkpoint.engine_choice import fallback_engine
from everstep.checkpoint.testing import opened
from everstep.daemon.control.metrics import Metrics
from everstep.daemon.control.node_views import store_view
from everstep.daemon.control.views import ScrubView
from everstep.daemon.devices import space_watch
from everstep.daemon.devices.device_queue import DeviceQueue
from everstep.daemon.devices.space_watch import Space, SpaceWatch, ask_space
from everstep.daemon.devices.stores import OpenStore


class Drives:
    """Answers for the real file system until a drive hangs or fails."""

    def __init__(self) -> None:
        self.hanging = ""
        self.failing = ""
        self.asked: list[str] = []
        self.go = threading.Event()

    def ask(self, path: str) -> Space:
        self.asked.append(path)
        if path == self.hanging:
            assert self.go.wait(60)
        if path == self.failing:
            raise OSError(5, os.strerror(5))
        return ask_space(path)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> Generator[Drives]:
    monkeypatch.setattr(space_watch, "ASK_EVERY_S", 0.01)
    made = Drives()
    yield made
    made.go.set()


@pytest.fixture
def store(devices: list[Path], drives: Drives) -> Generator[OpenStore]:
    with opened(devices) as (found, report):
        queues = {each.device_id: DeviceQueue(fallback_engine("a test")) for each in found.devices}
        made = OpenStore(found, queues, report)
        made.space = SpaceWatch(found.devices, drives.ask)
        yield made
        drives.go.set()
        made.close()


def test_a_scrape_does_not_wait_for_a_device_that_hangs(drives: Drives, store: OpenStore) -> None:
    bad, good = (device.path for device in store.store.devices)
    metrics = Metrics("test")
    metrics.devices.add(store)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    port = int(server.server_port)
    try:
        assert math.isnan(scrape(port)[f"everstep_device_free_bytes{{{bad}}}"])  # nobody was asked yet
        store.space.start()
        assert scrape(port)[f"everstep_device_free_bytes{{{bad}}}"] > 0
        drives.hanging = str(bad)
        wait_until(lambda: scrape(port)[f"everstep_device_space_age_seconds{{{bad}}}"] > 0.2)
        asked = drives.asked.count(str(bad))
        found = scrape(port)
        assert found[f"everstep_device_free_bytes{{{bad}}}"] > 0  # what it said last
        assert found[f"everstep_device_full{{{bad}}}"] == 0
        wait_until(lambda: scrape(port)[f"everstep_device_space_age_seconds{{{good}}}"] < 0.2)
        assert drives.asked.count(str(bad)) == asked  # once, and no thread more for each that looks
        drives.go.set()
        wait_until(lambda: scrape(port)[f"everstep_device_space_age_seconds{{{bad}}}"] < 0.2)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_device_that_cannot_be_asked_is_said_to_be_so(drives: Drives, store: OpenStore) -> None:
    bad, good = store.store.devices
    drives.failing = str(bad.path)
    store.space.start()
    view = store_view(store, (), ScrubView(newest=None, next_unix_s=None), {})
    reasons = {device.path: device.reason for device in view.devices}
    assert reasons == {str(bad.path): f"{bad.path}: {os.strerror(5)}", str(good.path): ""}
