"""Sections of the index of an image folder, and the sample that each entry stands for.

    1  u64[classes + 1]  number of the first sample of each class, and the number of samples
    2  u64[classes + 1]  where each class name starts in section 3, and its length
    3  class names
    4  u64[samples + 1]  where each path starts in section 5, and its length
    5  paths below the class folder
    6  u64[samples]      sizes in bytes

Section 0 stamps each directory by its path below the root (size 0).
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.errors import CorruptDataError
from .index_format import Buffer, Index, Stamp, encode_index, little_endian, pack_names

KIND = "image-folder"


class Image(NamedTuple):
    """One file: its path below the root, size in bytes, and class number."""

    path: bytes
    size_bytes: int
    label: int


class ImageIndexBuilder:
    """Takes the images in their final order, class by class; 8 + 8 bytes and the path are kept of each."""

    def __init__(self) -> None:
        self._class_names: list[bytes] = []
        self._class_starts = array("Q")
        self._path_offsets = array("Q", [0])
        self._paths = bytearray()
        self._sizes = array("Q")

    def add_class(self, name: bytes, images: Iterable[tuple[bytes, int]]) -> int:
        """Append a class and its (path below it, size); return how many there were."""
        start = len(self._sizes)
        self._class_names.append(name)
        self._class_starts.append(start)
        for path, size in images:
            self._paths += path
            self._path_offsets.append(len(self._paths))
            self._sizes.append(size)
        return len(self._sizes) - start

    def encode(self, stamps: Sequence[Stamp]) -> list[Buffer]:
        """Return the index file in pieces."""
        starts = array("Q", [*self._class_starts, len(self._sizes)])
        sections: list[Buffer] = [
            little_endian(starts),
            *pack_names(self._class_names),
            little_endian(self._path_offsets),
            self._paths,
            little_endian(self._sizes),
        ]
        return encode_index(KIND, len(self._sizes), sections, stamps)


def check_image_index(index: Index) -> None:
    """Return if the sections fit each other; CorruptDataError otherwise."""
    classes = index.length(1) // 8 - 1 if index.section_count() > 1 else -1
    if classes < 0:
        raise CorruptDataError("the index has no classes")
    table = 8 * (classes + 1)
    index.check_lengths([table, table, None, 8 * (index.count + 1), None, 8 * index.count])
    starts = struct.unpack(f"<{classes + 1}Q", index.piece(1, 0, table))
    if starts[-1] != index.count or list(starts) != sorted(starts):
        raise CorruptDataError("the classes of the index do not add up to its samples")


def class_names(index: Index) -> list[bytes]:
    """Return the names of the class folders; a class's number is its place."""
    return [index.name(2, number) for number in range(index.name_count(2))]


def image_at(index: Index, sample: int) -> Image:
    """Return sample number `sample`; CorruptDataError where its path would lead out of the folder."""
    label = _class_of(index, sample)
    folder, below = index.name(2, label), index.name(4, sample)
    leaves = (
        below.startswith(b"/") or b".." in below.split(b"/") or b"/" in folder or folder in {b"", b".", b".."}
    )
    if not below or leaves or b"\0" in folder + below:
        raise CorruptDataError(f"the index has the path {folder!r}, {below!r} for sample {sample}")
    return Image(folder + b"/" + below, index.u64(6, sample), label)


def label_at(index: Index, sample: int) -> int:
    """Return the class number of a sample."""
    return _class_of(index, sample)


def _class_of(index: Index, sample: int) -> int:
    low, high = 0, index.length(1) // 8 - 1
    while high - low > 1:
        middle = (low + high) // 2
        if index.u64(1, middle) <= sample:
            low = middle
        else:
            high = middle
    return low
