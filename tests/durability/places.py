"""Folders that are memory where the machine has any: searches that write thousands of small files."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")


@contextmanager
def memory_folder() -> Generator[Path]:
    """Give an empty folder, in memory if there is some for files; it is removed with the block."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="es-durability-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)
