"""Processes that are spawned need multiprocessing's tracker, which stays: it starts before anything is counted."""

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:  # pyright: ignore[reportUnusedFunction]
    resource_tracker.ensure_running()
