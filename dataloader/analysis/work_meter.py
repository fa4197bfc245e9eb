"""Times what prepares batches, in the process that does: the dataset's reads and the collate function.

A batch's work runs from its first read to the end of its collation. Of that wall time the thread used the processor,
or waited for a core (/proc/thread-self/schedstat), or was blocked. For a dataset nobody knows, blocked is taken for
fetch: reading files is nearly all that blocks in a dataset. It is an estimate: copying from the page cache counts as
preparation, and so does what helper threads of the dataset compute meanwhile in a worker (the processor time is that
of the whole process; without workers it is the thread's, since the trainer has threads of its own), while a lock or a
sleep counts as fetch. Where samples come from a source (`get_bytes`), fetch is the time in
there, exactly, and the time in which a cache waits for other nodes (`from_peers`).
"""

import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

from .proc_files import ReadBytes, queued_s, read_bytes
from .worker_counters import open_row

DEPTH_MAX = 4
"""How far below the dataset a source is looked for: cached, transformed, a subset of it."""
_READS = ("__getitem__", "__getitems__")


class WorkMeter:
    """What one process spends on the batches of one loader; one thread only."""

    def __init__(self, row: "memoryview[float]", *, counts_bytes: bool, is_worker: bool) -> None:
        self._row = row
        self._used_s = time.process_time if is_worker else time.thread_time
        self._counts_bytes = counts_bytes
        self._after_batch: list[Callable[[], None]] = []
        self._begun_s: float | None = None
        self._cpu_s = self._queued_s = self._source_s = 0.0
        self._total_cpu_s = self._used_s()
        self._read = ReadBytes(0, 0)
        self.has_source = False

    def add_after_batch(self, callback: Callable[[], None]) -> None:
        """Call this at the end of each batch, outside of its time."""
        self._after_batch.append(callback)

    def touch(self) -> None:
        """Begin a batch, unless one is under way."""
        if self._begun_s is None:
            if self._counts_bytes:
                self._read = read_bytes()
            self._source_s = 0.0
            self._queued_s = queued_s()
            self._cpu_s = self._used_s()
            self._begun_s = time.perf_counter()

    def fetched(self, seconds: float) -> None:
        """Add time in a source's `get_bytes`, or in a cache's `from_peers`."""
        self._source_s += seconds

    def batch_done(self, samples: int) -> None:
        """End the batch, and let the training process see it."""
        if (
            self._begun_s is None
        ):  # a dataset whose reads cannot be seen: nothing but collation, begun by nobody
            return
        busy_s = time.perf_counter() - self._begun_s
        cpu_s, queued = self._used_s(), max(0.0, queued_s() - self._queued_s)
        blocked_s = max(0.0, busy_s - (cpu_s - self._cpu_s) - queued)
        fetch_s = min(busy_s, self._source_s) if self.has_source else blocked_s
        file_bytes = storage_bytes = 0
        if self._counts_bytes:
            now = read_bytes()
            file_bytes, storage_bytes = now.calls - self._read.calls, now.storage - self._read.storage
        added = (
            1, samples, busy_s, fetch_s, min(queued, busy_s - fetch_s), cpu_s - self._total_cpu_s, file_bytes,
            storage_bytes,
        )  # fmt: skip
        for place, value in enumerate(added):
            self._row[place] += value
        self._total_cpu_s = cpu_s
        self._begun_s = None
        for callback in self._after_batch:
            callback()


def timed(dataset: object, meter: WorkMeter) -> Callable[[], None]:
    """Let the meter see the reads of a dataset, of its kind as before to isinstance; return what undoes it.

    The object gets a class derived from its own. A dataset that does not allow it is left as it is: then only its
    collation is seen.
    """
    undo: list[Callable[[], None]] = []
    for source in sources_of(dataset):
        meter.has_source = _derive(source, _timed_fetch("get_bytes", meter), undo) or meter.has_source
    for reader in _readers_of(dataset):
        _derive(reader, _timed_fetch("from_peers", meter), undo)
    if not hasattr(dataset, "get_bytes"):
        _derive(dataset, lambda kind: _timed_reads(kind, meter), undo)

    def restore() -> None:
        for each in reversed(undo):
            each()

    return restore


class TimedCollate:
    """The loader's collate function, timed, and the end of a batch's work. Travels to workers, however started."""

    def __init__(self, collate: Callable[[Any], object], path: str, *, is_batched: bool) -> None:
        self._collate = collate
        self._path = path
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> object:
        """Return the batch."""
        meter = _meters.get((os.getpid(), self._path))
        if meter is None:
            return self._collate(samples)
        meter.touch()
        batch = self._collate(samples)
        meter.batch_done(len(samples) if self._is_batched else 1)
        return batch


_meters: dict[tuple[int, str], WorkMeter] = {}
"""By process and path of the counters: a forked worker must not take its parent's."""


def begin_meter(path: str, worker: int | None, *, counts_bytes: bool) -> WorkMeter | None:
    """Return this process' meter for the loader with these counters; None where they are out of reach.

    `worker` is its number, None in the training process.
    """
    row = open_row(path, worker or 0)
    if row is None:
        return None
    meter = WorkMeter(row, counts_bytes=counts_bytes, is_worker=worker is not None)
    _meters[os.getpid(), path] = meter
    return meter


def end_meter(path: str) -> None:
    """Forget this process' meter, if it has one."""
    _meters.pop((os.getpid(), path), None)


def sources_of(dataset: object) -> list[object]:
    """Return the objects with `get_bytes` that the dataset reads from, the nearest to storage of each chain only."""
    found: list[object] = []
    seen: set[int] = set()

    def look(item: object, depth: int) -> bool:
        if id(item) in seen or depth > DEPTH_MAX:
            return False
        seen.add(id(item))
        below = [look(each, depth + 1) for each in list(getattr(item, "__dict__", {}).values())]
        if any(below):
            return True
        if callable(getattr(type(item), "get_bytes", None)):
            found.append(item)
            return True
        return False

    look(dataset, 0)
    return found


def _readers_of(dataset: object) -> list[object]:
    """Return what asks other nodes for samples below a dataset: of each cache, the reader that it has now."""
    found: list[object] = []
    seen: set[int] = set()

    def look(item: object, depth: int) -> None:
        if id(item) in seen or depth > DEPTH_MAX:
            return
        seen.add(id(item))
        if callable(getattr(type(item), "from_peers", None)):
            found.append(item)
            return
        for each in list(getattr(item, "__dict__", {}).values()):
            look(each, depth + 1)

    look(dataset, 0)
    return found


def _derive(
    item: object, methods: Callable[[type], dict[str, object]], undo: list[Callable[[], None]]
) -> bool:
    """Give an object a class derived from its own, with these methods; return whether it took it."""
    kind = type(item)
    added = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}

    def fill(namespace: dict[str, object]) -> None:
        namespace.update(added)
        namespace.update(methods(kind))
        namespace["__slots__"] = ()

    try:
        item.__class__ = types.new_class(kind.__name__, (kind,), {}, fill)
    except TypeError:  # a class of C, or one that cannot be derived from
        return False

    def restore() -> None:
        item.__class__ = kind

    undo.append(restore)
    return True


def _timed_reads(kind: type, meter: WorkMeter) -> dict[str, object]:
    """Return a dataset's reading methods, each of which begins the batch."""
    methods: dict[str, object] = {}
    for name in _READS:
        original = cast("Callable[[object, object], object] | None", getattr(kind, name, None))
        if original is None:
            continue

        def read(
            self: object, index: object, original: Callable[[object, object], object] = original
        ) -> object:
            meter.touch()
            return original(self, index)

        methods[name] = read
    iterate = cast("Callable[[object], Iterator[object]] | None", getattr(kind, "__iter__", None))
    if iterate is not None:

        def each(self: object) -> Iterator[object]:
            samples = iterate(self)
            while True:
                meter.touch()
                try:
                    sample = next(samples)
                except StopIteration:
                    return
                yield sample

        methods["__iter__"] = each
    return methods


def _timed_fetch(name: str, meter: WorkMeter) -> Callable[[type], dict[str, object]]:
    """Return how a class is derived whose method of this name, which takes a sample's index, is fetch."""

    def methods(kind: type) -> dict[str, object]:
        original = cast(Callable[[object, int], object], getattr(kind, name))

        def fetch(self: object, index: int) -> object:
            meter.touch()
            begun_s = time.perf_counter()
            try:
                return original(self, index)
            finally:
                meter.fetched(time.perf_counter() - begun_s)

        return {name: fetch}

    return methods
