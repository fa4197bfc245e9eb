"""Which contents disks may have after a power loss: every cut of a recorded trace, every legal choice of what was kept.

Pure: values in, values out. The rules (reliability: strict, weaker than any file system that we run on):

- a change of a directory is durable after a sync of that directory, one entry at a time, in any order until then;
- a rename is one change, whatever it touches;
- bytes and size of a file are durable after a sync of that file; until then each sector and each change of size may be
  kept or not, and one kept sector may be torn: old, zero and new parts;
- a failed sync makes nothing durable, and neither does a later one of the same object, which reports success all the
  same. For names that ends with the process: journals stop the file system rather than lie about names for ever;
- devices know nothing of each other, and calls made in parallel may have got any distance each.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 4096
TEAR_BYTES = 512


@dataclass(frozen=True, slots=True)
class EntryChange:
    """An atomic change of names: (directory, name, what the name stands for now or None)."""

    entries: tuple[tuple[int, str, int | None], ...]

    def objects(self) -> tuple[int, ...]:
        """Return the directories whose sync makes it durable; any one of them will do."""
        return tuple(directory for directory, _, _ in self.entries)


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A file has at least this size, or with `is_cut` exactly this one."""

    file: int
    size_bytes: int
    is_cut: bool = False

    def objects(self) -> tuple[int, ...]:
        """Return the file."""
        return (self.file,)


@dataclass(frozen=True, slots=True)
class SectorWrite:
    """Bytes within one sector of a file; what lies behind the file's end stays unseen."""

    file: int
    offset_bytes: int
    content: bytes

    def objects(self) -> tuple[int, ...]:
        """Return the file."""
        return (self.file,)


@dataclass(frozen=True, slots=True)
class Sync:
    """A file or directory was made durable; or that failed."""

    target: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What was promised from here on; of any type, hashable."""

    promise: object


@dataclass(frozen=True, slots=True)
class Restart:
    """The daemon ended, and another one began; memory of the system stayed."""


Change = EntryChange | SizeChange | SectorWrite
Op = Change | Sync | Mark | Restart


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a trace. Operations of one section in different lanes were made in parallel."""

    op: Op
    section: int = 0
    """0: in sequence with everything else."""
    lane: int = 0


class Image:
    """What disks hold. Numbers below 0 are directories, above 0 files; a number that no name leads to is not seen.

    Values are never changed in place, so a copy costs two small dictionaries.
    """

    __slots__ = ("directories", "files")

    def __init__(
        self,
        directories: Mapping[int, Mapping[str, int]] | None = None,
        files: Mapping[int, bytes] | None = None,
    ) -> None:
        self.directories: dict[int, Mapping[str, int]] = dict(directories or {})
        self.files: dict[int, bytes] = dict(files or {})

    def copy(self) -> "Image":
        """Return an image that changes on its own."""
        return Image(self.directories, self.files)

    def apply(self, change: Change) -> None:
        """Take one change."""
        match change:
            case EntryChange(entries):
                for directory, name, target in entries:
                    names = dict(self.directories.get(directory, {}))
                    if target is None:
                        names.pop(name, None)
                    else:
                        names[name] = target
                    self.directories[directory] = names
            case SizeChange(file, size, is_cut):
                content = self.files.get(file, b"")
                if size > len(content):
                    self.files[file] = content + bytes(size - len(content))
                elif is_cut:
                    self.files[file] = content[:size]
            case SectorWrite(file, offset, new):
                old = self.files.get(file, b"")
                seen = new[: max(0, len(old) - offset)]
                self.files[file] = old[:offset] + seen + old[offset + len(seen) :]

    def tree(self, root: int) -> Iterator[tuple[str, bytes | None]]:
        """Yield (path, content; None for a directory) of everything below a directory."""
        for name, target in self.directories.get(root, {}).items():
            if target > 0:
                yield name, self.files.get(target, b"")
            else:
                yield name, None
                yield from ((f"{name}/{path}", content) for path, content in self.tree(target))

    def key(self, roots: Sequence[int]) -> int:
        """Return a number that two images share when they hold the same under these directories."""
        return hash(tuple(self._node(root) for root in roots))

    def _node(self, number: int) -> object:
        names, files = self.directories.get(number), self.files
        if not names:
            return None
        return frozenset(
            [(name, files.get(each, b"") if each > 0 else self._node(each)) for name, each in names.items()]
        )


class CutState:
    """How far a trace has got: what is durable, what is not yet, and what was promised."""

    __slots__ = ("durable", "limbo", "pending", "promise")

    def __init__(self, durable: Image, promise: object = None) -> None:
        self.durable = durable
        self.pending: tuple[Change, ...] = ()
        self.limbo: frozenset[int] = frozenset()
        """Objects whose sync failed: what was pending then stays so for ever."""
        self.promise = promise

    def copy(self) -> "CutState":
        """Return a state that goes on by itself."""
        made = CutState(self.durable.copy(), self.promise)
        made.pending, made.limbo = self.pending, self.limbo
        return made

    def advance(self, op: Op) -> None:
        """Take one operation."""
        match op:
            case Mark(promise):
                self.promise = promise
            case Sync(target, failed=True):
                self.limbo |= {id(change) for change in self.pending if target in change.objects()}
            case Sync(target):
                self._sync(target)
            case Restart():
                self.limbo &= {id(change) for change in self.pending if not isinstance(change, EntryChange)}
            case _:
                self.pending = (*self.pending, op)

    def _sync(self, target: int) -> None:
        chosen = [
            index
            for index, change in enumerate(self.pending)
            if target in change.objects() and id(change) not in self.limbo
        ]
        # A name's older fates end with a newer one that is durable.
        newest: dict[tuple[int, str], int] = {}
        for index in chosen:
            for name in _names(self.pending[index]):
                newest[name] = index
        superseded = {
            index
            for index, change in enumerate(self.pending)
            if (names := _names(change)) and all(newest.get(name, -1) > index for name in names)
        }
        done = superseded.union(chosen)
        for index in sorted(done):
            self.durable.apply(self.pending[index])
        self.pending = tuple(change for index, change in enumerate(self.pending) if index not in done)

    def image(self, kept: Sequence[int], torn: Mapping[int, tuple[int, int, int]] | None = None) -> Image:
        """Return the disks after a power loss that kept these of the pending changes, some of them torn."""
        made = self.durable.copy()
        for index in kept:
            change = self.pending[index]
            tear = (torn or {}).get(index)
            if tear is not None and isinstance(change, SectorWrite):
                for part in _torn(change, *tear):
                    made.apply(part)
            else:
                made.apply(change)
        return made

    def seen(self) -> Image:
        """Return what a process sees: everything."""
        return self.image(range(len(self.pending)))


def _names(change: Change) -> list[tuple[int, str]]:
    if not isinstance(change, EntryChange):
        return []
    return [(directory, name) for directory, name, _ in change.entries]


def _torn(write: SectorWrite, begin: int, middle: int, end: int) -> Iterator[SectorWrite]:
    """Yield a write of which [begin, middle) is new, [middle, end) zero, and the rest still old."""
    new, zero = write.content[begin:middle], bytes(max(0, min(end, len(write.content)) - middle))
    yield SectorWrite(write.file, write.offset_bytes + begin, new)
    yield SectorWrite(write.file, write.offset_bytes + middle, zero)


def cuts(trace: Sequence[Step], start: CutState, rng: Random, *, lanes_max: int) -> Iterator[CutState]:
    """Yield the state after each operation; where calls ran in parallel, for each distance that each may have got.

    At most `lanes_max` of such combinations per section, drawn by `rng`. A yielded state is the receiver's.
    """
    state = start.copy()
    yield state.copy()
    for section, steps in itertools.groupby(trace, key=lambda step: step.section):
        group = list(steps)
        if section:
            for progress in _progresses(group, rng, lanes_max):
                yield _partly(state, group, progress)
        for step in group:
            state.advance(step.op)
            if not section:
                yield state.copy()
        if section:
            yield state.copy()


def _progresses(group: Sequence[Step], rng: Random, count_max: int) -> list[dict[int, int]]:
    counts: dict[int, int] = {}
    for step in group:
        counts[step.lane] = counts.get(step.lane, 0) + 1
    every = [range(count + 1) for count in counts.values()]
    total = 1
    for choices in every:
        total *= len(choices)
    if total <= count_max:
        return [dict(zip(counts, chosen, strict=True)) for chosen in itertools.product(*every)]
    drawn = {tuple(rng.randrange(len(choices)) for choices in every) for _ in range(count_max)}
    return [dict(zip(counts, chosen, strict=True)) for chosen in sorted(drawn)]


def _partly(state: CutState, group: Sequence[Step], progress: Mapping[int, int]) -> CutState:
    made, left = state.copy(), dict(progress)
    for step in group:
        if left[step.lane]:
            left[step.lane] -= 1
            made.advance(step.op)
    return made


def losses(state: CutState, rng: Random, *, count_max: int) -> Iterator[Image]:
    """Yield what disks may hold after a power loss here: all choices if few, else the telling ones and some drawn."""
    count = len(state.pending)
    everything = tuple(range(count))
    if 1 << count <= count_max:
        chosen = [subset for size in range(count + 1) for subset in itertools.combinations(everything, size)]
    else:
        chosen = _telling(everything, rng, count_max)
    for kept in chosen:
        yield state.image(kept)
        writes = [index for index in kept if isinstance(state.pending[index], SectorWrite)]
        if writes:
            yield state.image(kept, {index: _tear(rng) for index in _some(writes, rng)})


def _telling(everything: tuple[int, ...], rng: Random, count_max: int) -> list[tuple[int, ...]]:
    """Return nothing, all, prefixes, all but one, one alone, and drawn subsets: at most `count_max`."""
    sides = [
        *(everything[:index] for index in everything[1:]),
        *(everything[:index] + everything[index + 1 :] for index in everything),
        *((index,) for index in everything),
    ]
    rng.shuffle(sides)
    drawn: list[tuple[int, ...]] = [(), everything, *sides[: count_max // 2]]
    while len(drawn) < count_max:
        share = rng.random()
        drawn.append(tuple(index for index in everything if rng.random() < share))
    return list(dict.fromkeys(drawn))


def _some(indices: Sequence[int], rng: Random) -> list[int]:
    return rng.sample(indices, rng.randint(1, min(2, len(indices))))


def _tear(rng: Random) -> tuple[int, int, int]:
    begin, middle, end = sorted(TEAR_BYTES * rng.randint(0, SECTOR_BYTES // TEAR_BYTES) for _ in range(3))
    return begin, middle, end
