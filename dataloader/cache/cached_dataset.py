"""`CachedDataset`: a dataset whose samples every process of the node reads from storage once.

The cache is filled by whoever reads a sample first, up to its budget, and nothing in it is ever replaced: with random
access once an epoch, each epoch after the first finds exactly the cached share in memory (MinIO; VLDB'21, section 4.1).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, SupportsIndex, TypeVar, cast

from torch.utils.data import Dataset

from ...core.errors import UsageError
from ...core.paths import data_socket_path
from ...core.sizes import parse_size
from ...proto.frames import CacheContent
from ..batch_maker import MapDataset
from ..sources.protocol import Source
from ..state_format import short_fingerprint
from ..tensor_tree import decode_sample, encode_sample
from .arena_format import RECORD_HEAD_BYTES, WORD_BYTES, base_bytes
from .link import Wanted
from .reader import Reader

T = TypeVar("T")

TICK_HITS = 1024
"""After so many hits the clock is looked at: a power of two."""
FLUSH_DEADLINE_S = 10.0
_BUDGET_MAX = (1 << 60) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """How a cache is now, and what this process has read through one `CachedDataset`."""

    is_attached: bool
    """A daemon is connected, as far as known."""
    sample_count: int
    cached_count: int
    """Samples in the cache, whoever brought them."""
    used_bytes: int
    """Of the budget: index, records and their padding."""
    budget_bytes: int
    """What the daemon allows; 0 while there has been none."""
    hit_count: int
    hit_bytes: int
    miss_count: int
    miss_bytes: int
    peer_count: int
    """Samples from other nodes' memory, neither hits nor misses."""
    peer_bytes: int
    oversized_count: int
    """Of the misses, samples larger than the whole budget."""
    deferred_count: int
    """Of the misses, samples that were not offered because the daemon had not yet taken in the ones before."""


class CachedDataset(Dataset[T], Generic[T]):
    """A map-style dataset over a source or another dataset, through the node's cache.

    Any process may use it, and pickles of it hold settings only: each attaches to the daemon when it first needs to.
    Where there is no daemon, or no memory, samples come from the source; a warning says so once.

    Samples are `bytes`, or what `decode` makes of them; with `prepared` the dataset's own items: tensors and arrays
    keep dtype and shape. It is a source itself, so that labels are added on top:

        cached = CachedDataset(source, budget="40GB")
        dataset = SourceDataset(cached, decode=decode_jpeg, label=source.label)
        samples = CachedDataset(dataset, prepared=True, fingerprint="v3", budget="40GB")

    `cache_info()` counts what this process read (workers count for themselves) and how full the cache is.
    """

    def __init__(
        self,
        dataset: Source | MapDataset,
        *,
        budget: int | str,
        decode: Callable[[bytes], T] | None = None,
        prepared: bool = False,
        fingerprint: str | None = None,
        members: Sequence[str] = (),
    ) -> None:
        """Attach to the node's daemon (a private one is started where there is none).

        Args:
            dataset: a source, whose bytes are cached as they are stored; or with `prepared` any map-style dataset.
            budget: bytes that the cache may take, its index included, or a text like "40GB". Where several processes
                of one dataset give different ones, the largest counts.
            decode: makes a sample of a source's bytes, at every read; None: samples are bytes.
            prepared: cache the items of the dataset as they are: trees (dict, list, tuple) of tensors, numpy arrays,
                numbers, strings and bytes. What is random in them is drawn once.
            fingerprint: what tells this content from any other; None: `dataset.fingerprint()`.
            members: addresses of the nodes that share it, the same on all of them (`members_from_store`); empty:
                those of the daemon's configuration, if any.

        Raises:
            UsageError: a bad argument, or the cache of this fingerprint has another number of samples.
        """
        self._dataset, self._decode, self._is_prepared = dataset, decode, prepared
        content = CacheContent.PREPARED if prepared else CacheContent.RAW
        _check(dataset, has_decode=decode is not None, prepared=prepared)
        self._count = len(dataset)
        self._wanted = Wanted(
            fingerprint=_fingerprint(dataset, fingerprint, prepared=prepared),
            content=content,
            sample_count=self._count,
            budget_bytes=_budget(budget),
            members=tuple(members),
        )
        self._path = data_socket_path()
        self._reader = self._new_reader()
        self._reader.attach()

    def _new_reader(self) -> Reader:
        return Reader(self._path, self._wanted)

    def __getstate__(self) -> dict[str, object]:
        """Return settings only: whoever unpickles it attaches by itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take settings; nothing is connected before the first sample is asked for."""
        self.__dict__.update(state)
        self._reader = self._new_reader()

    # -- samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: SupportsIndex) -> T:
        """Return a sample: `decode(bytes)`, the bytes, or with `prepared` an item of its own, which may be changed.

        Raises:
            IndexError: there is no such sample.
            StateTypeError: with `prepared`, a part of the item cannot be stored; the message names its path.
            Exception: whatever the source or `decode` raises.
        """
        if self._is_prepared:
            return cast(T, self._prepared(operator.index(index)))
        data = self.get_bytes(index)
        return cast(T, data) if self._decode is None else self._decode(data)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[T]:
        """Return samples as `__getitem__` does; what other nodes have of them is fetched together."""
        numbers = [operator.index(each) for each in indices]
        self.will_read(numbers)
        return [self[each] for each in numbers]

    def will_read(self, indices: Sequence[int]) -> None:
        """Say which samples are read next: what other nodes have of them is fetched together. Does not wait.

        `everstep.DataLoader` calls it for each batch; a dataset around this one may hand it on.
        """
        if self._reader.has_peers:
            self._reader.announce([self._number(each) for each in indices])

    def get_bytes(self, index: SupportsIndex) -> bytes:
        """Return the stored bytes of a sample, neither decoded nor augmented; not with `prepared`.

        Raises:
            IndexError: there is no such sample.
            UsageError: the source returned what is no bytes.
            Exception: whatever the source raises.
        """
        number = self._number(operator.index(index))
        found = self._find(number)
        if found is not None:
            return bytes(found)
        if self._reader.has_peers and (fetched := self._reader.from_peers(number)) is not None:
            return fetched
        data = cast(Source, self._dataset).get_bytes(number)
        if type(data) is not bytes:
            data = _copied(data, number, self._dataset)
        self._reader.offer(number, data)
        return data

    def peek(self, index: SupportsIndex) -> memoryview | None:
        """Return a sample's bytes where they lie in the cache, for reading only; None: they are not there.

        Nothing is copied, read or counted. With `prepared` these are the bytes of tree_format.py. The mapping lives
        for as long as anybody refers to it.
        """
        number = self._number(operator.index(index))
        view = self._reader.view
        if view is None or not (place := view.places[number]):
            return None
        begin = place + RECORD_HEAD_BYTES
        return view.octets[begin : begin + view.words[place // WORD_BYTES]]

    def _prepared(self, index: int) -> object:
        number = self._number(index)
        found = self._find(number)
        if found is not None:
            return decode_sample(bytearray(found))
        if self._reader.has_peers and (fetched := self._reader.from_peers(number)) is not None:
            return decode_sample(bytearray(fetched))
        sample = cast(MapDataset, self._dataset)[number]
        self._reader.offer(number, encode_sample(sample))
        return sample

    def _find(self, number: int) -> memoryview | None:
        """Return the bytes of a sample where they lie in the cache; None: they are not there.

        The path of a hit: no message, no lock, no system call. Why that is safe: arena_format.py, "Publication".
        """
        reader = self._reader
        view = reader.view
        if view is None and (view := reader.attached_view()) is None:
            return None
        place = view.places[number]
        if not place:
            return None
        use = reader.use
        length = view.words[place // WORD_BYTES]
        use.hit_count += 1
        use.hit_bytes += length
        if reader.is_behind:
            reader.catch_up()
        if not use.hit_count % TICK_HITS:
            reader.tick()
        begin = place + RECORD_HEAD_BYTES
        return view.octets[begin : begin + length]

    def _number(self, index: int) -> int:
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return number

    # -- the rest

    @property
    def block_sizes(self) -> Callable[[], Sequence[int]] | None:
        """Those of the source or dataset, for a block shuffle; None where it has no blocks."""
        own = getattr(self._dataset, "block_sizes", None)
        return cast("Callable[[], Sequence[int]]", own) if callable(own) else None

    def fingerprint(self) -> str:
        """Return what tells the content from any other."""
        return self._wanted.fingerprint

    def cache_info(self) -> CacheInfo:
        """Return how the cache is now, and what this process has read."""
        reader, view = self._reader, self._reader.view
        header = None if view is None else view.header()
        use = reader.use
        return CacheInfo(
            is_attached=reader.is_attached,
            sample_count=self._count,
            cached_count=header.published_count if header else 0,
            used_bytes=header.used_bytes if header else 0,
            budget_bytes=header.capacity_bytes + base_bytes(self._count) if header else 0,
            hit_count=use.hit_count,
            hit_bytes=use.hit_bytes,
            miss_count=use.miss_count,
            miss_bytes=use.miss_bytes,
            peer_count=use.peer_count,
            peer_bytes=use.peer_bytes,
            oversized_count=use.oversized_count,
            deferred_count=use.deferred_count,
        )

    def flush(self, deadline_s: float = FLUSH_DEADLINE_S) -> bool:
        """Wait until the daemon has taken in what this process has staged; False: it did not, in time."""
        return self._reader.flush(deadline_s)

    def close(self) -> None:
        """Let go of the connection and of the mapping; the next sample attaches again."""
        self._reader.close()


def _check(dataset: object, *, has_decode: bool, prepared: bool) -> None:
    if not prepared and not isinstance(dataset, Source):
        raise UsageError(
            f"{type(dataset).__name__} is no source (__len__, get_bytes, fingerprint)",
            hint="prepared=True caches the items of any map-style dataset, with what is random in them drawn once",
        )
    if prepared and has_decode:
        raise UsageError("decode= goes with a source, not with prepared=True", hint="leave it out")
    if not (hasattr(dataset, "__len__") and (not prepared or hasattr(dataset, "__getitem__"))):
        raise UsageError(
            f"{type(dataset).__name__} has no __len__ or no __getitem__", hint="give a map-style dataset"
        )


def _fingerprint(dataset: object, given: str | None, *, prepared: bool) -> str:
    """Return the fingerprint, at most 128 printable characters.

    Unlike a loader's state, a cache cannot do without: another content under the same name would be wrong data.
    """
    if given is None and prepared and not getattr(dataset, "gives_bytes", True):  # as a SourceDataset says
        raise UsageError(
            "the fingerprint of a SourceDataset is its source's: items of another decode or label would have the same",
            hint="give fingerprint=, a text that changes whenever the source, decode or label does",
        )
    own = getattr(dataset, "fingerprint", None)
    value = given if given is not None else cast(object, own() if callable(own) else own)
    if isinstance(value, bytes):
        value = value.hex()
    if not isinstance(value, str) or not value:
        raise UsageError(
            f"{type(dataset).__name__} has no fingerprint",
            hint="give fingerprint=, a text that changes whenever the content does",
        )
    return short_fingerprint(value)


def _copied(data: object, number: int, source: object) -> bytes:
    """Return what a source gave as bytes. Of a number bytes() would make so many zeros."""
    try:
        return memoryview(cast(bytes, data)).tobytes()
    except TypeError as error:
        raise UsageError(
            f"sample {number} of {type(source).__name__} is {type(data).__name__}, not bytes",
            hint="get_bytes returns the stored bytes; what is made of them belongs into decode=",
        ) from error


def _budget(budget: int | str) -> int:
    try:
        size_bytes = parse_size(budget) if isinstance(budget, str) else operator.index(budget)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"budget={budget!r}: {error}", hint='a number of bytes, or a text like "40GB"'
        ) from error
    if not 0 < size_bytes <= _BUDGET_MAX:
        raise UsageError(f"budget={budget!r}", hint='a number of bytes above 0, or a text like "40GB"')
    return size_bytes
