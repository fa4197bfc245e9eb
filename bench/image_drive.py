"""Images on a throttled drive (bench/rig.py) whose reads are counted, and without help from the page cache.

Bytes are counted by the block device itself (/sys/block/loopN/stat). The images' index lies elsewhere, and dropping
leaves inodes in memory: what is read from the drive in an epoch are the images' pages and nothing else.
"""

import contextlib
import mmap
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

from rig import MB, Drive, RigError, rig, throttle

from everstep.dataloader.analysis.page_cache import drop
from everstep.dataloader.sources import ImageFolderSource

SECTOR_BYTES = 512
ROOM = 1.15
"""Of a drive's size over that of its images: pages, inodes, the file system's own."""
ROOM_BYTES = 350 * MB
UNTHROTTLED = 0
NOMINAL = 1000 * MB


class Part:
    """Every so-manieth image of a source: a source with all its classes, and fewer samples."""

    def __init__(self, source: ImageFolderSource, count: int) -> None:
        self._source, self._count = source, min(count, len(source))
        self._stride = len(source) // self._count

    def __len__(self) -> int:
        """Return the number of images."""
        return self._count

    def get_bytes(self, index: int) -> bytes:
        """Return the file as it is."""
        return self._source.get_bytes(index * self._stride)

    def fingerprint(self) -> str:
        """Return the whole source's, and which part it is."""
        return f"{self._source.fingerprint()}/{self._count}"[-128:]

    def path(self, index: int) -> str:
        """Return the path of an image."""
        return self._source.path(index * self._stride)

    def files(self) -> Iterator[str]:
        """Yield the path of every image."""
        for index in range(self._count):
            yield self.path(index)

    def size_bytes(self) -> int:
        """Return the bytes of all images."""
        return sum(Path(path).stat().st_size for path in self.files())


class Unbuffered:
    """A part read past the page cache (O_DIRECT): each read is one of the drive's."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._part)

    def get_bytes(self, index: int) -> bytes:
        """Return the file as it is."""
        path = self._part.path(index)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            pages = -(-os.fstat(fd).st_size // mmap.PAGESIZE) or 1
            with mmap.mmap(-1, pages * mmap.PAGESIZE) as buffer:
                return buffer[: os.preadv(fd, [buffer], 0)]
        finally:
            os.close(fd)

    def fingerprint(self) -> str:
        """Return the part's."""
        return self._part.fingerprint()


class ImageDrive:
    """Images on a drive of a known speed."""

    def __init__(self, drive: Drive, source: ImageFolderSource) -> None:
        self.source = source
        self._drive = drive
        self._stat = Path("/sys/block", Path(drive.loop).name, "stat")

    def hold(self, bytes_per_s: int) -> None:
        """Hold the drive to a speed; UNTHROTTLED lets it go."""
        throttle(self._drive, bytes_per_s)

    def read_bytes(self) -> int:
        """Return what has been read from the drive so far."""
        return int(self._stat.read_text().split()[2]) * SECTOR_BYTES

    def drop(self, part: Part) -> None:
        """Put all pages of a part's images out of memory.

        Raises:
            RigError: some stay.
        """
        dropped = drop(part.files())
        if dropped.kept or dropped.refused:
            raise RigError(
                f"{len(dropped.kept)} images stay in memory, {len(dropped.refused)} cannot be opened"
            )


@contextlib.contextmanager
def image_drive(images: Path, scratch: Path) -> Generator[ImageDrive]:
    """Copy a folder of images to a drive, and yield it; gone afterwards.

    Raises:
        RigError: it cannot be made here.
    """
    size_bytes = sum(path.stat().st_size for path in images.glob("*/*"))
    index = scratch / "index"
    index.mkdir()
    with rig([NOMINAL], size_bytes=int(size_bytes * ROOM) + ROOM_BYTES, checked=False) as (drive,):
        throttle(drive, UNTHROTTLED)
        root = drive.mount / "images"
        shutil.copytree(images, root, ignore=shutil.ignore_patterns(".*"))
        source = ImageFolderSource(root, index=index)
        made = ImageDrive(drive, source)
        made.drop(Part(source, len(source)))
        yield made
