"""A source as a dataset for everstep.DataLoader: decoding and labels on top of bytes."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from torch.utils.data import Dataset

from ...core.errors import UsageError
from ..announcing import announcer
from .protocol import ReadsBlocks, Source, checked_index

T_co = TypeVar("T_co", covariant=True)
Bytes = bytes | bytearray | memoryview


class SourceDataset(Dataset[T_co], Generic[T_co]):
    """Sample i is `decode(source.get_bytes(i))`, or `(that, label(i))` where `label` is given.

        source = ImageFolderSource("train")
        dataset = SourceDataset(source, decode=decode_jpeg, label=source.label)

    Augment in `decode`: the loader seeds the global generators for each sample. With workers that are spawned,
    `decode` must be picklable: a function of a module, not a lambda.
    """

    def __init__(
        self,
        source: Source,
        decode: Callable[[Bytes], object] | None = None,
        *,
        label: Callable[[int], object] | None = None,
    ) -> None:
        """UsageError where `source` is none."""
        if not isinstance(source, Source):  # pyright: ignore[reportUnnecessaryIsInstance]  users have no checker
            raise UsageError(
                f"{type(source).__name__} is no source",
                hint="it needs __len__, get_bytes(index) and fingerprint(); MapSource makes one of a dataset",
            )
        self.source = source
        self._decode = decode
        self._label = label

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def __getitem__(self, index: int) -> T_co:
        """Return one sample, decoded; IndexError outside [0, len)."""
        number = checked_index(index, len(self.source), self)
        data = self.source.get_bytes(number)
        sample = data if self._decode is None else self._decode(data)
        return cast(T_co, sample if self._label is None else (sample, self._label(number)))

    @property
    def gives_bytes(self) -> bool:
        """Whether samples are what the source gives, so that its fingerprint tells them from any others."""
        return self._decode is None and self._label is None

    @property
    def block_sizes(self) -> Callable[[], Sequence[int]] | None:
        """The source's own, for a block shuffle; None where it has no blocks."""
        return self.source.block_sizes if isinstance(self.source, ReadsBlocks) else None

    @property
    def will_read(self) -> Callable[[Sequence[int]], object] | None:
        """The source's own: a cache over nodes wants to hear what is read next. None where it has none."""
        return announcer(self.source)

    def fingerprint(self) -> str:
        """Return the source's: how samples are decoded is not part of it."""
        return self.source.fingerprint()
