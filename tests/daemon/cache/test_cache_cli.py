"""`everstep cache` and `everstep status` over a real daemon."""

import json
import os
from pathlib import Path

import pytest
from cached import HostileReader
from pausing import wait_until

from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.testing import daemon_process
from everstep.dataloader.cache.arena_format import base_bytes, record_bytes


def test_caches_are_listed_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    socket_path = Path(os.environ["EVERSTEP_SOCKET"])
    with daemon_process(socket_path):
        assert main(["cache", "list"]) == 0
        assert "no dataset is cached" in capsys.readouterr().out
        with HostileReader(socket_path) as reader:
            reader.open_cache(10, fingerprint="imagenet", budget_bytes=1 << 20)
            reader.stage()
            reader.fill({3: bytes(1000)})
            assert main(["cache", "list", "--json"]) == 0
            (found,) = json.loads(capsys.readouterr().out)["caches"]
            assert found["idle_s"] == 0
            assert {name: found[name] for name in ("number", "uid", "fingerprint", "content", "reason")} == {
                "number": 1,
                "uid": os.getuid(),
                "fingerprint": "imagenet",
                "content": "raw",
                "reason": "",
            }
            assert (found["published_count"], found["sample_count"], found["client_count"]) == (1, 10, 1)
            assert (found["used_bytes"], found["budget_bytes"]) == (
                base_bytes(10) + record_bytes(1000),
                1 << 20,
            )
            assert main(["status"]) == 0
            shown = capsys.readouterr().out
            assert "1/10" in shown
            assert "imagenet (raw)" in shown
            assert main(["cache", "drop", "1"]) == 1
            assert "cache 1 is in use: 1 read it" in capsys.readouterr().err
        with connected(socket_path) as client:
            wait_until(lambda: client.status().caches[0].client_count == 0)
            before = client.status().daemon.arena_bytes
        assert main(["cache", "drop", "1"]) == 0
        assert "cache 1 is dropped: 1 sample, 1.0 MiB of memory" in capsys.readouterr().out
        with connected(socket_path) as client:
            assert (before, client.status().daemon.arena_bytes) == (1 << 20, 0)
        assert main(["cache", "drop", "1"]) == 3
