"""What most tests of stores start from."""

from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest
from hanging_storage import HangingStorage

from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import opened


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Two empty directories for a store."""
    made = [tmp_path / name for name in "ab"]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def ops() -> HangingStorage:
    """The real storage, of which a test lets calls hang, or fail."""
    return HangingStorage()


@pytest.fixture
def store(dirs: list[Path], ops: HangingStorage) -> Generator[Store]:
    """A new store on it."""
    with opened(dirs, ops=cast(StorageOps, ops)) as (made, _):
        yield made
