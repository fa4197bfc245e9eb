"""What the metrics port says while the daemon's own event loop stands: probes hear of it, scrapes go on."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asking import Site
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.daemon.control.client import connected
from everstep.daemon.web.site import ASK_S

STATUS = Phase("everstep.daemon.control.node_views:daemon_view", number=2)
"""On the event loop; the first call is this test's own, for the port."""


def test_healthz_is_503_while_the_loop_stands_and_200_again(
    node_config: Path, socket_path: Path, pause: Pause
) -> None:
    with (
        pausing_daemon(pause, STATUS, node_config) as process,
        connected(socket_path) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        site = Site(client, client.status().daemon.metrics_port, process.pid)
        cookie = site.log_in()
        assert site.ask("/healthz").status == 200
        asked = threads.submit(client.status)
        try:
            pause.reached(process)
            began_s = time.monotonic()
            probed, looked = (
                threads.submit(site.ask, path, headers=cookie) for path in ("/healthz", "/api/state")
            )
            assert site.ask("/metrics").status == 200
            for told in (probed.result(), looked.result()):
                assert told.status == 503
                assert f"did not answer within {ASK_S:.0f} s" in told.body.decode()
            assert time.monotonic() - began_s >= ASK_S
        finally:
            pause.go()
        assert asked.result().daemon.pid == process.pid
        wait_until(lambda: site.ask("/healthz").status == 200)
        assert site.ask("/api/state", headers=cookie).status == 200
    assert "never awaited" not in socket_path.with_name("daemon.log").read_text()
