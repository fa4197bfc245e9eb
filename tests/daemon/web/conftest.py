"""A node daemon, and questions to its metrics port."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Site

from everstep.daemon.control.client import connected
from everstep.daemon.testing import node_daemon


@pytest.fixture
def site(node_config: Path, socket_path: Path) -> Iterator[Site]:
    """A node daemon over two devices."""
    with node_daemon(node_config, socket_path) as process, connected(socket_path) as client:
        yield Site(client, client.status().daemon.metrics_port, process.pid)
