"""Image folders (class/x.jpg) by one memory-mapped index: a million images cost a mapping, not a million strings."""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.errors import UsageError
from .image_index_format import KIND, check_image_index, class_names, image_at, label_at
from .image_scan import class_folders, scan_tree
from .index_file import IndexHandle, index_path, is_as_stamped, open_or_build
from .index_format import Buffer, Index
from .open_files import open_indexed, read_indexed
from .protocol import checked_index

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


_CHANGED = "put the file back, or make the source anew with refresh=True"


class ImageFolderSource:
    """Each image file below `root` is one sample; classes, labels and order are those of torchvision's ImageFolder.

        source = ImageFolderSource("photos/train")  # photos/train/cat/1.jpg, …
        dataset = SourceDataset(source, decode=decode_jpeg, label=source.label)

    The index is built at the first opening (every directory read, every file's size asked for) and kept as
    `.everstep-index` in `root`, or in the directory `index`. Later openings look at the times of the directories only,
    and read the tree again where one has changed. The fingerprint covers names and sizes: a file overwritten in place
    by one of equal size is not seen.

    Args:
        root: the folder that holds the class folders.
        index: a directory for the index, for data that cannot be written to.
        extensions: endings of the files that are samples, in any case; () takes every file.
        refresh: read the tree again although no directory has changed: files were overwritten in place.

    Raises:
        UsageError: no class folders, a class without images, or no place for the index.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        index: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        refresh: bool = False,
    ) -> None:
        self.root = str(Path(root).absolute())
        self._root = os.fsencode(self.root)
        if not Path(self.root).is_dir():
            raise UsageError(
                f"{self.root} is not a folder", hint="give the folder that holds the class folders"
            )
        endings = tuple(os.fsencode(ending.lower()) for ending in extensions) or (b"",)
        name = "" if tuple(extensions) == IMAGE_EXTENSIONS else _name_of(endings)
        directory = None if index is None else os.fspath(index)
        self._handle: IndexHandle = open_or_build(
            index_path(self.root, directory, name=name, inside=True),
            KIND,
            self.root,
            lambda index: self._is_current(index) and not refresh,
            lambda: self._build(endings),
        )
        self._count = self._handle.count

    def __len__(self) -> int:
        """Return the number of images."""
        return self._count

    def get_bytes(self, index: int) -> bytes:
        """Return the file as it is; errors as in the protocol."""
        number = checked_index(index, self._count, self)
        image = image_at(self._handle.get(), number)
        file = open_indexed(self._root + b"/" + image.path, image.size_bytes, number, _CHANGED)
        return read_indexed(file, 0, image.size_bytes, number)

    def fingerprint(self) -> str:
        """Return a digest over the paths, classes and sizes of all images."""
        return f"image-folder-1:{self._handle.digest}"

    def label(self, index: int) -> int:
        """Return the number of the image's class: its place in `classes`."""
        return label_at(self._handle.get(), checked_index(index, self._count, self))

    def path(self, index: int) -> str:
        """Return the absolute path of the image."""
        image = image_at(self._handle.get(), checked_index(index, self._count, self))
        return os.fsdecode(self._root + b"/" + image.path)

    @property
    def classes(self) -> list[str]:
        """Names of the class folders, sorted."""
        return [os.fsdecode(name) for name in class_names(self._handle.get())]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Number of each class, under torchvision's name for it."""
        return {name: number for number, name in enumerate(self.classes)}

    def files(self) -> Iterator[str]:
        """Yield the path of every image."""
        for number in range(self._count):
            yield self.path(number)

    def _build(self, endings: tuple[bytes, ...]) -> list[Buffer]:
        return scan_tree(self._root, endings, time.time())

    def _is_current(self, index: Index) -> bool:
        check_image_index(index)
        if class_folders(self._root) != class_names(index):
            return False
        return all(is_as_stamped(self._root + b"/" + stamp.path, stamp) for stamp in index.stamps())


def _name_of(endings: tuple[bytes, ...]) -> str:
    return hashlib.blake2b(b"\0".join(endings), digest_size=4).hexdigest()
