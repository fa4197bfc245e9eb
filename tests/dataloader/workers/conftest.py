"""What Python's start methods keep for good exists before the first look at what a test leaves behind."""

from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="module", autouse=True)
def _background_processes() -> None:  # pyright: ignore[reportUnusedFunction]
    resource_tracker.ensure_running()
    forkserver.ensure_running()
