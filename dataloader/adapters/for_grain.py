"""Sources in the form of Grain's `RandomAccessDataSource`: `len(source)` and `source[i]`, nothing else.

A Grain source needs nothing to be given to `everstep.DataLoader`: it is a map-style dataset. `GrainSource` is the other
way round, a source of everstep's for Grain's loaders, and gives either's loader the decoded samples.
"""

from collections.abc import Callable
from operator import index as whole_number
from typing import Generic, SupportsIndex, TypeVar

from ..sources.protocol import Source

T = TypeVar("T")


class GrainSource(Generic[T]):
    """The samples of a source, decoded; picklable where source and `decode` are.

    Its `repr` names the source by fingerprint: Grain stores it beside its checkpoints and compares it at a restart.
    """

    def __init__(self, source: Source, decode: Callable[[bytes | bytearray | memoryview], T]) -> None:
        self._source = source
        self._decode = decode

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def __getitem__(self, record_key: SupportsIndex) -> T:
        """Return one sample, decoded; IndexError outside [0, len)."""
        index = whole_number(record_key)
        if not 0 <= index < len(self._source):
            raise IndexError(f"sample {index} of {len(self._source)}")
        return self._decode(self._source.get_bytes(index))

    def fingerprint(self) -> str:
        """Return the source's fingerprint: what everstep's loader keeps in its state."""
        return self._source.fingerprint()

    def __repr__(self) -> str:
        return f"GrainSource({self.fingerprint()})"
