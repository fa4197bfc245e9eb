"""What most tests of the daemon start from."""

import os
from pathlib import Path

import pytest
from pausing import Pause


@pytest.fixture
def socket_path() -> Path:
    """The socket of this test's own daemon."""
    return Path(os.environ["EVERSTEP_SOCKET"])


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    """Two empty directories for a store."""
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    """Stops a daemon at a call."""
    return Pause(tmp_path / "pause")


@pytest.fixture
def node_config(tmp_path: Path, devices: list[Path], socket_path: Path) -> Path:
    """The configuration of a node daemon over both devices; a test appends to it before it starts one."""
    path = tmp_path / "node.toml"
    path.write_text(
        f'[devices]\nnvme0 = "{devices[0]}"\nnvme1 = "{devices[1]}"\n[daemon]\nsocket = "{socket_path}"\n'
    )
    return path
