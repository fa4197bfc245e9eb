"""A sync that is under way while the file system shuts down may return success and have done nothing."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_disk import SIZES_MIB, LoopDisk, skip_without
from places import memory_folder

from everstep.checkpoint.durable import publish_new
from everstep.checkpoint.real_storage import RealStorage
from everstep.core.errors import StorageError

CYCLES = 40
THREADS = 3


@pytest.fixture(params=sorted(SIZES_MIB))
def disk(request: pytest.FixtureRequest) -> Iterator[LoopDisk]:
    skip_without(request.param)
    with memory_folder() as folder:
        made = LoopDisk(folder, request.param, "drive")
        try:
            made.mount()
            yield made
        finally:
            made.remove()


class Publisher(threading.Thread):
    """Publishes small files in a directory until the power is gone."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.acknowledged: list[Path] = []
        self.error: StorageError | None = None

    def run(self) -> None:
        ops = RealStorage()
        while self.error is None:
            path = self.directory / str(len(self.acknowledged))
            try:
                publish_new(ops, path, path.name.encode())
            except StorageError as exc:
                self.error = exc
            else:
                self.acknowledged.append(path)


@pytest.mark.root
def test_a_name_that_was_published_while_the_file_system_shut_down_is_there(disk: LoopDisk) -> None:
    source = random.Random(20261122)
    count = 0
    for cycle in range(CYCLES):
        publishers = [Publisher(disk.path / f"{cycle} {number}") for number in range(THREADS)]
        for publisher in publishers:
            publisher.directory.mkdir()
            RealStorage().sync_directory(disk.path)
        for publisher in publishers:
            publisher.start()
        time.sleep(source.uniform(0.002, 0.02))
        disk.cut()
        for publisher in publishers:
            publisher.join()
        disk.unmount()
        disk.mount()
        for publisher in publishers:
            count += len(publisher.acknowledged)
            assert [path for path in publisher.acknowledged if path.read_text() != path.name] == []
    assert count > CYCLES
