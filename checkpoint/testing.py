"""Small states, arenas, stores and failing devices for tests; nothing of the product imports this."""

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from ..core.ids import CheckpointId
from .commit import FailedTry, ignore_try, persist_again, persist_shard
from .device_set import DeviceSet
from .engine import Engine
from .engine_lanes import LanedEngine
from .fetch import read_shard, shard_slot_offsets
from .layout_plan import Layout, plan_layout, segment_count_for
from .leaf import LeafSpec, whole_leaf
from .manifest_format import ManifestEncoder
from .manifest_parts_format import pieces_by_leaf
from .manifest_types import Draft, Manifest, ManifestHead, Piece, SegmentPlan, SegmentRecord
from .plain_engine import PlainEngine
from .publication import PersistResult
from .real_storage import RealStorage
from .recovery import RecoveryReport, recover
from .run_store import RunStore
from .shard_rules_plan import check_manifest
from .storage_ops import ArenaRange, LockHandle, SegmentHandle, StorageOps, storage_error
from .store import Store, open_store
from .store_format import LockHolder

HOLDER = LockHolder(pid=4711, socket="/run/test.sock", uid=os.geteuid(), kind="private")

SMALL_LEAVES = (
    whole_leaf("model.weight", "float32", (300, 7)),
    whole_leaf("model.half", "bfloat16", (129,)),
    whole_leaf("model.scalar", "float64", ()),
    whole_leaf("model.empty", "float32", (0, 3)),
    whole_leaf("opt.state.weight.step", "int64", ()),
    whole_leaf("flags", "bool", (5,)),
    whole_leaf("odd", "complex64", (3,)),
)
"""Kinds of leaves that differ in how they are stored; a few KiB."""


class Mode(Enum):
    """What a call that should fail does."""

    NOT_DONE = "fails before it does anything"
    DONE = "does its work and fails"
    CRASH = "the process ends here: neither this call nor any later one happens"


class CrashedError(BaseException):
    """The simulated end of the process: no handler of the product may catch it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a device."""

    name: str
    path: Path


class FaultyStorage:
    """A `StorageOps` that records its calls, and lets the n-th one after `arm` fail."""

    can_hang = False
    """Calls are counted in the order in which they begin, which threads would change."""

    def __init__(self, ops: StorageOps) -> None:
        self._ops = ops
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        """Since the last `arm`, in the order in which they began."""
        self._fail_at = 0
        self._mode = Mode.NOT_DONE
        self._times = 1
        self._number = errno.EIO
        self._only: Callable[[Call], bool] = lambda _: True
        self._count = 0
        self._crashed = False

    def arm(
        self,
        fail_at: int,
        mode: Mode = Mode.NOT_DONE,
        *,
        times: int = 1,
        number: int = errno.EIO,
        only: Callable[[Call], bool] = lambda _: True,
    ) -> None:
        """Let the call `fail_at` from here (1: the next, 0: none) and the `times` - 1 after it fail.

        Only those are counted that `only` says; in a crash, everything after the first of them is gone too.
        """
        with self._lock:
            self.calls = []
            self._count, self._only, self._crashed = 0, only, False
            self._fail_at, self._mode, self._times, self._number = fail_at, mode, times, number

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = cast(Callable[..., object], getattr(self._ops, name))

        def call(*args: object, **kwargs: object) -> object:
            path = args[0].path if isinstance(args[0], SegmentHandle) else cast(Path, args[0])
            if not self._fails(Call(name, path)):
                return real(*args, **kwargs)
            if self._mode is Mode.DONE or name == "close":  # a failing close(2) closes
                self._let_go(real(*args, **kwargs))
            if self._mode is Mode.CRASH:
                raise CrashedError(f"crash at call {self._count}, {name}")
            error = OSError(self._number, os.strerror(self._number))
            raise storage_error(error, path, name) from error

        return call

    def _let_go(self, result: object) -> None:
        """Release what a call gave that its caller never got."""
        if isinstance(result, SegmentHandle):
            self._ops.close(result)
        elif hasattr(result, "release"):
            cast(LockHandle, result).release()

    def _fails(self, made: Call) -> bool:
        with self._lock:
            self.calls.append(made)
            if self._crashed:
                return True
            if not self._fail_at or not self._only(made):
                return False
            self._count += 1
            if not self._fail_at <= self._count < self._fail_at + self._times:
                return False
            self._crashed = self._mode is Mode.CRASH
            return True

    def as_ops(self) -> StorageOps:
        """Return this as what it stands for."""
        return cast(StorageOps, cast(object, self))


@contextmanager
def memory_arena(slot_size_bytes: int, *, slot_offset_bytes: int = 0) -> Generator[ArenaRange]:
    """Give one slot in a memfd, as a daemon has it."""
    size = slot_offset_bytes + max(slot_size_bytes, 4096)
    fd = os.memfd_create("everstep-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as view:
            yield ArenaRange(
                fd=fd, map=view, slot_offset_bytes=slot_offset_bytes, slot_size_bytes=size - slot_offset_bytes
            )
    finally:
        os.close(fd)


@contextmanager
def each_engine(
    store: DeviceSet, make: Callable[[], Engine] = PlainEngine
) -> Generator[Mapping[str, Engine]]:
    """Give one engine for each device, with plain lanes unless told otherwise."""
    engines = {device.device_id: LanedEngine(make) for device in store.devices}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


@dataclass(frozen=True, slots=True)
class State:
    """A training state as bytes by leaf, and how it lies in a slot."""

    layout: Layout
    content: Mapping[str, bytes]

    def draft(self, checkpoint: CheckpointId, *, rank: int = 0, world_size: int = 1) -> Draft:
        """Return what a hook would say of it."""
        return Draft(
            checkpoint=checkpoint,
            rank=rank,
            world_size=world_size,
            parent=None,
            layout_digest=self.layout.digest,
            leaves=self.layout.leaves,
            aliases=self.layout.aliases,
            pieces=self.layout.pieces,
            segments=self.layout.segments,
            values=b'{"epoch":1}',
            notes={"epoch": "1"},
        )

    def copy_into(self, arena: ArenaRange, segment: int | None = None) -> None:
        """Put the bytes of one segment, or of all, where the layout says, as a hook's copies do."""
        for piece in self.layout.pieces:
            if segment not in (None, piece.segment):
                continue
            plan = self.layout.segments[piece.segment]
            begin = next(entry.begin for entry in plan.entries if entry.key == piece.key)
            place = plan.slot_offset_bytes + plan.header_size_bytes + begin
            part = self.content[piece.leaf][piece.offset_in_leaf_bytes :][: piece.size_bytes]
            arena.view(place, piece.size_bytes)[:] = part


def make_state(
    store: DeviceSet,
    seed: int = 0,
    leaves: Sequence[LeafSpec] = SMALL_LEAVES,
    *,
    segment_count: int | None = None,
) -> State:
    """Return random bytes for these leaves, laid out for the store's devices or in so many segments."""
    count = segment_count_for(leaves, len(store.writable)) if segment_count is None else segment_count
    layout = plan_layout(leaves, [], segment_count=count)
    random_bytes = random.Random(seed).randbytes
    return State(layout, {leaf.name: random_bytes(leaf.size_bytes) for leaf in leaves})


def save(
    run: RunStore,
    state: State,
    checkpoint: CheckpointId,
    *,
    rank: int = 0,
    world_size: int = 1,
    notes: Mapping[str, str] | None = None,
    make_engine: Callable[[], Engine] = PlainEngine,
    on_failed_try: Callable[[FailedTry], object] = ignore_try,
) -> PersistResult:
    """Persist a state from an arena of its own."""
    draft = state.draft(checkpoint, rank=rank, world_size=world_size)
    if notes is not None:
        draft = replace(draft, notes=dict(notes))
    with (
        memory_arena(state.layout.slot_size_bytes, slot_offset_bytes=8192) as arena,
        each_engine(run.store, make_engine) as engines,
    ):
        state.copy_into(arena)
        return persist_shard(run, draft, arena, engines=engines, on_failed_try=on_failed_try)


def save_again(run: RunStore, state: State, checkpoint: CheckpointId, *, rank: int = 0) -> PersistResult:
    """Write a committed shard again that has lost a device, from an arena that holds it."""
    committed = run.manifest(checkpoint, rank)
    draft = replace(
        state.draft(checkpoint, rank=rank, world_size=committed.world_size), notes=committed.notes
    )
    with (
        memory_arena(state.layout.slot_size_bytes, slot_offset_bytes=8192) as arena,
        each_engine(run.store) as engines,
    ):
        state.copy_into(arena)
        return persist_again(run, draft, committed, arena, engines=engines)


def written_pieces(draft: Draft, records: Iterable[SegmentRecord]) -> tuple[Piece, ...]:
    """Return the draft's pieces with device and generation of the files they are in, in the order of the leaves."""
    by_leaf = pieces_by_leaf(draft.pieces)
    files = {record.segment: record for record in records}
    return tuple(
        Piece(
            leaf=piece.leaf,
            offset_in_leaf_bytes=piece.offset_in_leaf_bytes,
            size_bytes=piece.size_bytes,
            segment=piece.segment,
            key=piece.key,
            device_id=files[piece.segment].device_id,
            generation=files[piece.segment].generation,
        )
        for leaf in draft.leaves
        for piece in by_leaf.get(leaf.name, ())
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file of a manifest, as the daemon writes it of a draft that says the same.

    Raises:
        CorruptDataError: the manifest does not hold together, or its values are not valid JSON.
    """
    check_manifest(manifest)
    plans = tuple(
        SegmentPlan(
            segment=record.segment,
            slot_offset_bytes=0,
            header_size_bytes=record.header_size_bytes,
            data_size_bytes=record.file_size_bytes - record.header_size_bytes,
            entries=(),
        )
        for record in manifest.segments
    )
    draft = Draft(
        checkpoint=manifest.checkpoint,
        rank=manifest.rank,
        world_size=manifest.world_size,
        parent=manifest.parent,
        layout_digest=manifest.layout_digest,
        leaves=manifest.leaves,
        aliases=manifest.aliases,
        pieces=manifest.pieces,
        segments=plans,
        values=manifest.values,
        notes=manifest.notes,
    )
    return ManifestEncoder().encode(manifest, draft)


def load(
    run: RunStore, head: ManifestHead, *, make_engine: Callable[[], Engine] = PlainEngine
) -> dict[str, bytes]:
    """Return the bytes of each leaf of a committed shard as restored through the product's own reader."""
    manifest = head if isinstance(head, Manifest) else run.manifest(head.checkpoint, head.rank)
    _, size = shard_slot_offsets(manifest)
    content = {leaf.name: bytearray(leaf.size_bytes) for leaf in manifest.leaves}
    with memory_arena(size, slot_offset_bytes=4096) as arena, each_engine(run.store, make_engine) as engines:
        for piece in read_shard(run, manifest, arena, engines=engines).pieces:
            place = slice(piece.offset_in_leaf_bytes, piece.offset_in_leaf_bytes + piece.size_bytes)
            content[piece.leaf][place] = arena.view(piece.slot_offset_bytes, piece.size_bytes)
    return {name: bytes(found) for name, found in content.items()}


def begun(store: Store) -> RunStore:
    """A run of this user in its first attempt."""
    run = store.run(os.geteuid(), "demo", create=True)
    run.begin_attempt(1, fresh=False)
    return run


def save_steps(store: Store, steps: Iterable[int]) -> RunStore:
    """The same with a checkpoint of each step, of which all are known to be complete."""
    run = begun(store)
    for step in steps:
        save(run, make_state(store, step), CheckpointId(1, step))
        run.set_complete_floor(CheckpointId(1, step))
    return run


@contextmanager
def opened(
    directories: Sequence[Path],
    *,
    ops: StorageOps | None = None,
    read_only: bool = False,
    recycles: bool = False,
) -> Generator[tuple[Store, RecoveryReport]]:
    """Give a recovered store over these directories; its locks end with the block, as with a process."""
    with open_store(
        directories,
        ops=ops or RealStorage(),
        holder=HOLDER,
        uid=os.geteuid(),
        read_only=read_only,
        recycles=recycles,
    ) as store:
        yield store, recover(store)
