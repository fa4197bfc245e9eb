"""Where every byte of a state lies: leaves cut into pieces, pieces packed into segments of equal size.

The arena holds the segments in exactly the form of the files, so copying a leaf into its place *is*
serialising it. A layout is a pure function of (leaves, aliases, number of segments) and is computed once per
structure. It knows no device: the daemon deals the segments when it writes them (deal_plan.py).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import UsageError
from .dtype_format import itemsize_bytes, safetensors_dtype
from .leaf import Alias, LeafSpec
from .manifest_types import PlannedPiece, SegmentEntry, SegmentPlan
from .segment_format import align_up, header_size_bytes

_PIECE_KEY = re.compile(r"(.+)@\d+:\d+", re.DOTALL)

CUT_MIN_BYTES = 1024 * 1024
"""A leaf is cut only into parts of at least this: smaller parts cost more in header and calls than they balance."""

SEGMENT_BYTES_MIN = 64 * 1024 * 1024
"""A state is cut further than once per device only while its segments stay this large: a queue of a fast drive is
refilled some ten times a second then, and one segment more or less is little of what a drive gets."""

LONE_SEGMENT_BYTES_MIN = 256 * 1024 * 1024
"""The same where nothing has to balance: a segment costs the daemon about 1 ms of a processor (ADR 0099)."""

SEGMENTS_PER_DEVICE_MAX = 16
"""Enough that a drive five times slower than its peers can be given its share to a few per cent."""

DRAFT_BYTES_PER_LEAF = 1024
DRAFT_BYTES_MIN = 4 * 1024 * 1024
"""Room for a draft, in these steps: the described leaves plus twice the non-tensor values, so that they may grow."""

DRAFT_BYTES_USUAL = 2 * DRAFT_BYTES_MIN
"""That room for a state of up to 4,000 tensors and few values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A ring of equal places at the beginning of a slot that is smaller than the state: segments take turns there."""

    count: int
    size_bytes: int
    """A multiple of 4096; no segment's file is larger."""

    def offset_bytes(self, segment: int) -> int:
        """Return where a segment begins in the slot: where the one `count` before it did."""
        return segment % self.count * self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The plan of one slot: segments one behind the other, then the region for the manifest's draft."""

    leaves: tuple[LeafSpec, ...]
    aliases: tuple[Alias, ...]
    pieces: tuple[PlannedPiece, ...]
    segments: tuple[SegmentPlan, ...]
    draft_offset_bytes: int
    draft_capacity_bytes: int
    digest: str
    """SHA-256 (hex) over leaves, aliases and number of segments, or windows: equal digests mean equal placement."""
    windows: Windows | None = None
    """Where the segments are instead, when they do not fit one behind the other."""

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one slot; a multiple of 4096."""
        return self.draft_offset_bytes + self.draft_capacity_bytes

    def has_room_for(self, values_size_bytes: int) -> bool:
        """Tell whether a draft with so many bytes of values fits in its region."""
        described_bytes = DRAFT_BYTES_PER_LEAF * (len(self.leaves) + len(self.aliases))
        return described_bytes + values_size_bytes <= self.draft_capacity_bytes

    @property
    def state_size_bytes(self) -> int:
        """Bytes of all leaves, each stored once."""
        return sum(leaf.size_bytes for leaf in self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows [start, stop) of a leaf, or all of it."""

    leaf: LeafSpec
    start: int
    stop: int
    offset_bytes: int
    size_bytes: int

    @property
    def key(self) -> str:
        if self.size_bytes == self.leaf.size_bytes:
            return self.leaf.name
        return f"{self.leaf.name}@{self.start}:{self.stop}"


def segment_count_for(leaves: Sequence[LeafSpec], device_count: int) -> int:
    """Return into how many segments a state is cut on a store of so many devices: a multiple of their number.

    One per device, and up to SEGMENTS_PER_DEVICE_MAX while none gets smaller than SEGMENT_BYTES_MIN, or on one device
    LONE_SEGMENT_BYTES_MIN.
    """
    if device_count < 1:
        raise UsageError("a store needs at least one device", hint="name a storage directory")
    state_bytes = sum(leaf.size_bytes for leaf in leaves)
    least_bytes = LONE_SEGMENT_BYTES_MIN if device_count == 1 else SEGMENT_BYTES_MIN
    per_device = state_bytes // (device_count * least_bytes)
    return device_count * min(max(per_device, 1), SEGMENTS_PER_DEVICE_MAX)


def plan_layout(
    leaves: Sequence[LeafSpec],
    aliases: Sequence[Alias],
    *,
    segment_count: int,
    values_size_bytes: int = 0,
) -> Layout:
    """Return the layout of a state in at most `segment_count` segments; none is empty of leaves.

    `values_size_bytes` is the expected size of the non-tensor part.

    Raises:
        UsageError: no segment, or two leaves of one name.
    """
    check_names(leaves, aliases)
    if segment_count < 1:
        raise UsageError(f"a layout has at least one segment, not {segment_count}")
    shares = [parts for parts in _share(storage_order(leaves), segment_count) if parts]
    draft_bytes = (
        DRAFT_BYTES_MIN + DRAFT_BYTES_PER_LEAF * (len(leaves) + len(aliases)) + 2 * values_size_bytes
    )
    return assemble(
        leaves,
        aliases,
        shares,
        draft_capacity_bytes=align_up(draft_bytes, DRAFT_BYTES_MIN),
        cut=str(segment_count),
    )


def assemble(
    leaves: Sequence[LeafSpec],
    aliases: Sequence[Alias],
    shares: Sequence[Sequence[Part]],
    *,
    draft_capacity_bytes: int,
    cut: str,
    windows: Windows | None = None,
) -> Layout:
    """Return the layout with these shares as segments; `cut` says for the digest how they were cut."""
    segments: list[SegmentPlan] = []
    pieces: list[PlannedPiece] = []
    end = 0
    for number, parts in enumerate(shares):
        plan, placed = _place(number, windows.offset_bytes(number) if windows else end, parts)
        segments.append(plan)
        pieces += placed
        end = align_up(end + plan.file_size_bytes)
    return Layout(
        leaves=tuple(leaves),
        aliases=tuple(aliases),
        pieces=tuple(pieces),
        segments=tuple(segments),
        draft_offset_bytes=windows.count * windows.size_bytes if windows else end,
        draft_capacity_bytes=draft_capacity_bytes,
        digest=_digest(leaves, aliases, cut),
        windows=windows,
    )


def check_names(leaves: Sequence[LeafSpec], aliases: Sequence[Alias]) -> None:
    """Return if no name means two leaves; else UsageError."""
    seen: set[str] = set()
    for name in [leaf.name for leaf in leaves] + [alias.name for alias in aliases]:
        if name in seen:
            raise UsageError(
                f"two leaves are named {name!r}", hint="give the objects in attach() different names"
            )
        seen.add(name)
    for name in seen:
        cut = _PIECE_KEY.fullmatch(name)
        if cut is not None and cut[1] in seen:
            raise UsageError(
                f"a leaf named {name!r} looks like rows of the leaf {cut[1]!r}", hint="give it another name"
            )


def storage_order(leaves: Sequence[LeafSpec]) -> list[LeafSpec]:
    """Return the leaves by falling item size: then each begins at a multiple of its item size without holes."""
    return sorted(leaves, key=lambda leaf: -itemsize_bytes(leaf.dtype))


def _share(leaves: Sequence[LeafSpec], segment_count: int) -> list[list[Part]]:
    """Spread the leaves over the segments in order, cutting rows off so that each segment gets its equal share."""
    share_bytes = sum(leaf.size_bytes for leaf in leaves) / segment_count
    shares: list[list[Part]] = [[] for _ in range(segment_count)]
    index, room = 0, share_bytes
    for leaf in leaves:
        start = 0
        while True:
            part = _cut(leaf, start, room if index < segment_count - 1 else float("inf"))
            if part is not None:
                shares[index].append(part)
                room -= part.size_bytes
                start = part.stop
                if _is_last(part):
                    break
            index += 1
            room += share_bytes
    return shares


def _is_last(part: Part) -> bool:
    return part.offset_bytes + part.size_bytes == part.leaf.size_bytes


def _cut(leaf: LeafSpec, start: int, room: float) -> Part | None:
    """Return the rows of `leaf` from `start` on that go into `room` bytes, or None: the next segment takes them.

    The rest goes whole when it fits, when it may not be cut, or when a cut would leave a part below CUT_MIN_BYTES
    (then to whichever segment holds more than half of it).
    """
    rows = leaf.shape[0] if leaf.shape else 1
    row_bytes = leaf.size_bytes // rows if rows else 0
    rest_bytes = leaf.size_bytes - start * row_bytes
    whole = Part(leaf=leaf, start=start, stop=rows, offset_bytes=start * row_bytes, size_bytes=rest_bytes)
    if rest_bytes <= max(
        room, 0.0
    ):  # room is below 0 after a leaf that went whole: an empty one goes there too
        return whole
    fit = int(room // row_bytes)
    may_cut = leaf.is_contiguous and rows > 1
    if may_cut and fit * row_bytes >= CUT_MIN_BYTES and rest_bytes - fit * row_bytes >= CUT_MIN_BYTES:
        return Part(
            leaf=leaf,
            start=start,
            stop=start + fit,
            offset_bytes=whole.offset_bytes,
            size_bytes=fit * row_bytes,
        )
    return whole if room >= rest_bytes / 2 else None


def _place(
    segment: int, slot_offset_bytes: int, parts: Sequence[Part]
) -> tuple[SegmentPlan, list[PlannedPiece]]:
    entries: list[SegmentEntry] = []
    pieces: list[PlannedPiece] = []
    begin = 0
    for part in parts:
        dtype, shape = _stored_as(part)
        entries.append(
            SegmentEntry(key=part.key, dtype=dtype, shape=shape, begin=begin, end=begin + part.size_bytes)
        )
        pieces.append(
            PlannedPiece(
                leaf=part.leaf.name,
                offset_in_leaf_bytes=part.offset_bytes,
                size_bytes=part.size_bytes,
                segment=segment,
                key=part.key,
            )
        )
        begin += part.size_bytes
    plan = SegmentPlan(
        segment=segment,
        slot_offset_bytes=slot_offset_bytes,
        header_size_bytes=header_size_bytes(entries),
        data_size_bytes=begin,
        entries=tuple(entries),
    )
    return plan, pieces


def _stored_as(part: Part) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape for the header; a strided leaf gets its dimensions in storage order."""
    leaf = part.leaf
    dtype = safetensors_dtype(leaf.dtype)
    if dtype is None:
        return "U8", (part.size_bytes,)
    if not leaf.is_contiguous:
        order = sorted(range(len(leaf.shape)), key=lambda d: (-leaf.strides[d], leaf.shape[d] != 1))
        return dtype, tuple(leaf.shape[d] for d in order)
    if not leaf.shape:
        return dtype, ()
    return dtype, (part.stop - part.start, *leaf.shape[1:])


def _digest(leaves: Sequence[LeafSpec], aliases: Sequence[Alias], cut: str) -> str:
    """Every field that moves a byte, in a text form that cannot be read two ways."""
    lines = [*(repr(leaf) for leaf in leaves), *(repr(alias) for alias in aliases), cut]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
