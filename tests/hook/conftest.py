"""What several tests of snapshots under a late copy need."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlapping import Slow, slow_copies

from everstep.daemon.testing import daemon_process


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Late copies wait until somebody waits for them."""
    with slow_copies(monkeypatch) as made:
        yield made


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    """Two directories, and a daemon that takes any."""
    found = [tmp_path / "d0", tmp_path / "d1"]
    for path in found:
        path.mkdir()
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        yield found
