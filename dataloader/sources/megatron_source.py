"""Megatron's tokenised datasets: sequences or documents by number, and windows of equal length for training."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import EverstepError, UsageError
from .megatron_format import MegatronIndex
from .open_files import files_per_process, open_indexed, read_indexed, sampled_digest
from .paths import joined_fingerprint
from .per_process import PerProcess
from .protocol import checked_index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MegatronSource:
    """Sequences, or whole documents, of a `.bin` with its `.idx`: the tokens as stored, little-endian.

        documents = MegatronSource("corpus/gpt", unit="document")
        tokens = documents.tokens(documents.get_bytes(0))  # numpy, one dimension, of the stored type

    Entries of the `.idx` are read when they are needed. The fingerprint covers the sizes of both files
    and 16 pages of each.

    Args:
        prefix: path of the dataset without `.bin` and `.idx`, or of either file.
        unit: "sequence" (as Megatron's own IndexedDataset counts) or "document".

    Raises:
        UsageError: a file is missing, or it is no such dataset.
        CorruptDataError: the files do not fit each other.
        FormatVersionError: another version of the format.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, unit: str = "sequence") -> None:
        if unit not in {"sequence", "document"}:
            raise UsageError(f"unit={unit!r}", hint='say "sequence" or "document"')
        path = Path(prefix).absolute()
        stem = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
        self._bin, self._idx = f"{stem}.bin", f"{stem}.idx"
        for each in (self._bin, self._idx):
            if not Path(each).is_file():
                raise UsageError(f"there is no file {each}", hint="give the path without .bin and .idx")
        self._unit = unit
        self._bin_bytes, self._idx_bytes = Path(self._bin).stat().st_size, Path(self._idx).stat().st_size
        self._reset()
        header = self._index.value().header
        self._count = header.sequence_count if unit == "sequence" else max(0, header.bound_count - 1)
        self.token_type = header.token_type
        self.token_bytes = header.token_bytes
        self._digests = [sampled_digest(self._idx), sampled_digest(self._bin)]

    def __len__(self) -> int:
        """Return the number of sequences, or of documents."""
        return self._count

    def get_bytes(self, index: int) -> bytes:
        """Return the tokens of one sequence or document; errors as in the protocol."""
        number = checked_index(index, self._count, self)
        idx = self._index.value()
        offset, size = idx.sequence(number) if self._unit == "sequence" else idx.document(number)
        return self.read_tokens(offset, size, number)

    def read_tokens(self, offset: int, size_bytes: int, index: int) -> bytes:
        """Return bytes of the `.bin`; `index` is what an error calls the sample."""
        file = self._files.value().get(self._bin, self._bin_bytes, index)
        return read_indexed(file, offset, size_bytes, index)

    def tokens(self, data: bytes | memoryview) -> "NDArray[np.generic]":
        """Return what get_bytes returned as an array of the dataset's token type, without copying."""
        return _array(data, self.token_type)

    @property
    def token_count(self) -> int:
        """Number of tokens of all sequences."""
        return self._bin_bytes // self.token_bytes

    def fingerprint(self) -> str:
        """Return a digest over sizes and sampled pages of both files, and the unit."""
        return joined_fingerprint("megatron-1", [*self._digests, self._unit])

    def files(self) -> Iterator[str]:
        """Yield the two paths."""
        yield from (self._bin, self._idx)

    def _reset(self) -> None:
        self._files = files_per_process()
        self._index = PerProcess(self._open)

    def _open(self) -> MegatronIndex:
        file = open_indexed(self._idx, self._idx_bytes, 0)
        try:
            return MegatronIndex(file.read, self._idx_bytes, self._bin_bytes)
        except EverstepError as exc:
            raise type(exc)(f"{self._idx}: {exc.message}", hint=exc.hint) from exc

    def __getstate__(self) -> dict[str, object]:
        """Return everything but open files."""
        return {name: value for name, value in self.__dict__.items() if name not in {"_files", "_index"}}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._reset()


class TokenWindows:
    """Windows of `length + 1` tokens over all documents one after the other: input [:-1], target [1:].

        windows = TokenWindows("corpus/gpt", length=4096)
        tokens = windows.tokens(windows.get_bytes(0))  # numpy, shape [length + 1], of the stored type

    Window i starts at token i * length and shares its last token with the next one, so that each token but the
    first is a target once. An end shorter than a window is left out. Nothing is built: the loader's shuffled order
    takes the place of Megatron's shuffle index. Tokens must be stored in the order of their sequences, as Megatron
    writes them.
    """

    def __init__(self, source: MegatronSource | str | os.PathLike[str], *, length: int) -> None:
        """`source` may be the path of a dataset. UsageError where length < 1 or there is no whole window."""
        self._source = source if isinstance(source, MegatronSource) else MegatronSource(source)
        if length < 1:
            raise UsageError(f"length={length}", hint="give the context length of the model")
        self.length = length
        self.token_type = self._source.token_type
        self._count = max(0, (self._source.token_count - 1) // length)
        if not self._count:
            raise UsageError(f"{self._source.token_count} tokens make no window of {length} + 1 tokens")

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return self._count

    def get_bytes(self, index: int) -> bytes:
        """Return `length + 1` tokens as stored; errors as in the protocol."""
        number = checked_index(index, self._count, self)
        width = self._source.token_bytes
        return self._source.read_tokens(number * self.length * width, (self.length + 1) * width, number)

    def tokens(self, data: bytes | memoryview) -> "NDArray[np.generic]":
        """Return what get_bytes returned as an array of the dataset's token type, without copying."""
        return _array(data, self.token_type)

    def fingerprint(self) -> str:
        """Return that of the dataset, with the length."""
        return f"{self._source.fingerprint()}:windows-{self.length}"

    def files(self) -> Iterator[str]:
        """Yield the paths of the dataset."""
        return self._source.files()


def _array(data: bytes | memoryview, token_type: str) -> "NDArray[np.generic]":
    import numpy as np  # noqa: PLC0415  the command line reads sources without it

    return np.frombuffer(data, dtype=np.dtype(token_type).newbyteorder("<"))
