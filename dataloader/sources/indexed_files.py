"""The files of one source with an index of each: which of them holds a sample, and what it is read from."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .index_file import IndexHandle, Unfinished, index_path, is_as_stamped, open_or_build
from .index_format import Buffer, Index
from .open_files import OpenFile, files_per_process
from .shard_plan import ShardTable


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies: number and path of its file, that file's index, and the sample's number in it."""

    file: int
    path: str
    index: Index
    number: int


class IndexedFiles:
    """Travels to other processes without its open files: each opens them for itself."""

    def __init__(
        self,
        paths: Sequence[str],
        kind: str,
        directory: str | None,
        *,
        check: Callable[[Index], None],
        build: Callable[[str], list[Buffer]],
        builders: int = 1,
    ) -> None:
        """Open the index of each file, or build it; `builders` of them at a time. Errors as `open_or_build`.

        Args:
            paths: the files, in the order of their samples.
            kind: what the indices are.
            directory: where the indices lie; None: each beside its file.
            check: CorruptDataError where an index contradicts itself.
            build: the index of a file, in pieces.
            builders: threads.
        """
        unfinished = Unfinished()

        def opened(path: str) -> IndexHandle:
            def is_current(index: Index) -> bool:
                check(index)
                return is_as_stamped(path, index.file_stamp())

            where = index_path(path, directory)
            return open_or_build(where, kind, path, is_current, lambda: build(path), unfinished=unfinished)

        with ThreadPoolExecutor(min(builders, len(paths))) as pool:
            self._handles = list(pool.map(opened, paths))
        self._paths = list(paths)
        self._sizes = [handle.get().file_stamp().size_bytes for handle in self._handles]
        self._table = ShardTable(handle.count for handle in self._handles)
        self._files = files_per_process()

    def __len__(self) -> int:
        """Return the number of samples of all files."""
        return len(self._table)

    def locate(self, sample: int) -> Place:
        """Return where a sample lies that exists."""
        file, number = self._table.locate(sample)
        return Place(file, self._paths[file], self._handles[file].get(), number)

    def opened(self, file: int, sample: int) -> OpenFile:
        """Return a file, open in this process; SourceChangedError names `sample` if it is gone or has another size."""
        return self._files.value().get(self._paths[file], self._sizes[file], sample)

    def digests(self) -> list[str]:
        """Return the digest of each index."""
        return [handle.digest for handle in self._handles]

    def counts(self) -> list[int]:
        """Return the number of samples of each file."""
        return self._table.counts()

    def paths(self) -> Iterator[str]:
        """Yield each path once."""
        yield from dict.fromkeys(self._paths)

    def __getstate__(self) -> dict[str, object]:
        """Return everything but open files."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._files = files_per_process()
