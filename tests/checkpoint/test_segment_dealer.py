"""Shards that begin at the same moment: each deal knows of the one before."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.segment_dealer import SegmentDealer
from everstep.checkpoint.testing import opened

WHILE_S = 1.0
"""For so long another deal may try to be made in the middle of one; it must not."""


def test_nobody_deals_between_a_deal_and_its_backlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = [tmp_path / name for name in "ab"]
    for path in dirs:
        path.mkdir()
    layout = plan_layout([whole_leaf("w", "uint8", (1 << 20,))], [], segment_count=1)
    with opened(dirs) as (store, _), ThreadPoolExecutor(1) as other:
        store.run(os.geteuid(), "demo", create=True)
        first, second = (SegmentDealer(store, layout.segments, store.devices) for _ in range(2))
        queue, is_first = store.speeds.queue, threading.Event()

        def queue_late(device_id: str, size_bytes: int) -> None:
            if not is_first.is_set():
                is_first.set()
                wait([seconds], WHILE_S)
            queue(device_id, size_bytes)

        monkeypatch.setattr(store.speeds, "queue", queue_late)
        seconds = other.submit(lambda: (is_first.wait(60), second.reserve())[1])
        with first.reserve(), seconds.result():
            assert {*first.devices, *second.devices} == {*store.devices}
        first.close()
        second.close()
        assert [store.speeds.backlog_bytes(device.device_id) for device in store.devices] == [0, 0]
