"""Datasets of the size that users have: bounded memory, and nothing that grows with the square of the number of files.

EVERSTEP_SOURCE_IMAGES (50,000), EVERSTEP_SOURCE_SHARDS (1,000) and EVERSTEP_SOURCE_LINE_BYTES (64 MiB) are the sizes;
`EVERSTEP_SOURCE_IMAGES=1000000 EVERSTEP_SOURCE_SHARDS=10000 EVERSTEP_SOURCE_LINE_BYTES=1073741824` passes, too.
"""

import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_checks import settle
from tars import archive

from everstep.dataloader.sources import ImageFolderSource, JsonlSource, TarSource

IMAGES = int(os.environ.get("EVERSTEP_SOURCE_IMAGES", "50000"))
SHARDS = int(os.environ.get("EVERSTEP_SOURCE_SHARDS", "1000"))
LINE_BYTES = int(os.environ.get("EVERSTEP_SOURCE_LINE_BYTES", str(64 << 20)))
CLASSES = 10
LINKS_MAX = 30_000
"""Names of one file; some file systems allow 32,000."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    made = Path(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def make_images(root: Path, each: Path) -> None:
    names = [f"{number * 7919 % IMAGES:08d}_photograph.jpg" for number in range(IMAGES)]
    for begin in range(0, IMAGES, LINKS_MAX):
        file = each.with_name(f"{each.name}{begin}")
        file.write_bytes(b"jpeg")
        for number in range(begin, min(begin + LINKS_MAX, IMAGES)):
            os.link(file, root / f"class{number % CLASSES}" / names[number])
    settle(root)


def test_many_images(memory: Path) -> None:
    """Building keeps 60 bytes of an image at most, most of them its entry in the index; opening keeps none."""
    root = memory / "root"
    for number in range(CLASSES):
        (root / f"class{number}").mkdir(parents=True)
    make_images(root, memory / "jpeg")
    tracemalloc.start()
    try:
        source = ImageFolderSource(root)
        built_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        again = ImageFolderSource(root)
        opened_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(source) == len(again) == IMAGES
    assert built_bytes < (1 << 20) + 60 * IMAGES
    assert opened_bytes < 1 << 20
    assert len(pickle.dumps(source)) < 1000, "no worker gets a list"
    assert again.path(IMAGES - 1).startswith(str(root / f"class{CLASSES - 1}"))
    assert source.get_bytes(IMAGES // 2) == b"jpeg"
    assert source.fingerprint() == again.fingerprint()


def test_many_shards(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder is listed a few times, not once for each of them; no descriptor is kept of any."""
    for number in range(SHARDS):
        (memory / f"{number:05d}.tar").write_bytes(archive([(f"{number}.txt", b"%d" % number)]))
    settle(memory)
    listed: list[str] = []

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object) -> object:
            listed.append(call.__name__)
            return call(*args)

        return counting

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        source, again = TarSource(memory, part="txt"), TarSource(memory, part="txt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(listed) < 5
    assert len(source) == len(again) == SHARDS
    assert source.get_bytes(SHARDS - 1) == b"%d" % (SHARDS - 1)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.get_bytes(SHARDS // 2) == b"%d" % (SHARDS // 2)


WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from everstep.core.errors import UsageError
from everstep.dataloader.sources import JsonlSource

source, room_bytes = JsonlSource(sys.argv[1]), int(sys.argv[2])
used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + room_bytes,) * 2)
try:
    source.get_bytes(1)
except UsageError as error:
    print(error)
print(source.get_bytes(2))
"""


def test_a_line_of_any_length(memory: Path) -> None:
    """Indexing it takes a few MiB, reading it its own length; where there is no memory for it, that is said."""
    path = memory / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n"')
        file.seek(LINE_BYTES - 2, os.SEEK_CUR)  # zeros
        file.write(b'"\n{"b": 2}\n')
    settle(memory)
    tracemalloc.start()
    try:
        source = JsonlSource(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        assert len(source) == 3
        tracemalloc.reset_peak()
        line = source.get_bytes(1)
        assert len(line) == LINE_BYTES
        assert tracemalloc.get_traced_memory()[1] < LINE_BYTES + (8 << 20)
    finally:
        tracemalloc.stop()
    assert (line[:1], line[-1:], source.get_bytes(2)) == (b'"', b'"', b'{"b": 2}')

    # A fresh process: what this one's heap has freed could serve a line of that size without more address space.
    arguments = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(path), str(LINE_BYTES // 2)]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"sample 1 of {path} has {LINE_BYTES} bytes, for which there is no memory" in said[0]
    assert said[1:] == ["b'{\"b\": 2}'"]
