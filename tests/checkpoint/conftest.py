"""What most tests of stores start from."""

from pathlib import Path

import pytest


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Two empty directories for a store."""
    made = [tmp_path / name for name in "ab"]
    for path in made:
        path.mkdir()
    return made
