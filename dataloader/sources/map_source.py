"""Any map-style dataset as a source, where its items are bytes."""

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from ...core.errors import SourceChangedError, UsageError
from .protocol import ReadsFiles, checked_index

Bytes = bytes | bytearray | memoryview


class MapDataset(Protocol):
    """A dataset with random access, as torch means it."""

    def __getitem__(self, index: int, /) -> object:
        """Return one item."""
        ...

    def __len__(self) -> int:
        """Return the number of items."""
        ...


class MapSource:
    """The items of a dataset as they are: bytes, or what `encode` makes bytes of.

        source = MapSource([b"one", b"two"], fingerprint="my-data-v3")

    Whether it may be forked, pickled and read by several threads is the dataset's own affair. Errors that it raises
    come through with a note that names the sample.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        encode: turns an item into bytes; without it items that are not bytes are refused.
        fingerprint: what tells the contents from others; by default the dataset's own `fingerprint()`, or the
            `_fingerprint` of a Hugging Face dataset.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        encode: Callable[[object], Bytes] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.dataset = dataset
        self._encode = encode
        self._given = fingerprint
        try:
            self._count = len(dataset)
        except TypeError as exc:
            raise UsageError(
                f"{type(dataset).__name__} has no length: {exc}",
                hint="a source is read by number; give a map-style dataset",
            ) from exc
        if not callable(getattr(dataset, "__getitem__", None)):
            raise UsageError(f"{type(dataset).__name__} has no __getitem__", hint="give a map-style dataset")

    def __len__(self) -> int:
        """Return the number of items that there were when the source was made."""
        return self._count

    def get_bytes(self, index: int) -> Bytes:
        """Return one item's bytes.

        Raises:
            IndexError: there is no such sample.
            UsageError: the item is not bytes; names its type and what to do.
            SourceChangedError: the dataset has no item where it had one.
            Exception: what the dataset or `encode` raised.
        """
        number = checked_index(index, self._count, self)
        try:
            item = self.dataset[number]
            data = item if self._encode is None else cast(object, self._encode(item))
        except IndexError as exc:
            raise SourceChangedError(
                f"{type(self.dataset).__name__} had {self._count} items and raised IndexError for {number}: {exc}",
                hint="a dataset must keep its length while it is read",
            ) from exc
        except Exception as exc:
            exc.add_note(f"sample {number} of {type(self.dataset).__name__}")
            raise
        if isinstance(data, bytes | bytearray | memoryview):
            return cast(Bytes, data)
        raise UsageError(
            f"item {number} of {type(self.dataset).__name__} is {type(data).__name__}, not bytes",
            hint="return the stored bytes and decode them on top (SourceDataset), or give encode= for this source",
        )

    def fingerprint(self) -> str:
        """Return what was given, else the dataset's own; UsageError where there is neither."""
        own = cast(object, getattr(self.dataset, "fingerprint", None))
        value = (
            self._given or (own() if callable(own) else own) or getattr(self.dataset, "_fingerprint", None)
        )
        if isinstance(value, bytes):
            value = value.hex()
        if isinstance(value, str) and 0 < len(value) <= 128 and value.isascii() and value.isprintable():
            return value
        raise UsageError(
            f"{type(self.dataset).__name__} has no fingerprint of 1 to 128 printable ASCII characters: {value!r:.80}",
            hint="give fingerprint= that changes whenever the contents do, such as a path with a version",
        )

    def files(self) -> Iterator[str]:
        """Yield the dataset's own files, where it can say which."""
        if isinstance(self.dataset, ReadsFiles):
            yield from self.dataset.files()
