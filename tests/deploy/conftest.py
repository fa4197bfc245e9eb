"""What tests of daemons in images start from."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def socket_path() -> Path:
    """The socket of this test's own daemon."""
    return Path(os.environ["EVERSTEP_SOCKET"])
