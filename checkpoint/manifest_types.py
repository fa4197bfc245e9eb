"""The parts of a manifest as values: what one rank contributed at one step, and where every byte of it lies."""

from msgspec import Struct, field

from ..core.ids import CheckpointId
from .leaf import Alias, LeafSpec

BLOCK_SIZE_BYTES = 4 * 1024 * 1024
"""Block of a segment file that one XXH3-64 covers: [k * 4 MiB, (k+1) * 4 MiB), the last one cut at the exact length."""

HEADER_ALIGNMENT_BYTES = 4096
"""A segment's data begin at a multiple of this, so that they are aligned for direct I/O on every known device."""


class PlannedPiece(Struct, frozen=True, kw_only=True, gc=False):
    """A run of bytes of one leaf inside one segment of a layout, which knows no device."""

    leaf: str
    offset_in_leaf_bytes: int
    size_bytes: int
    segment: int
    key: str
    """Name in the safetensors header: the leaf's name, or `<name>@<start>:<stop>` for rows of it."""


class Piece(PlannedPiece, frozen=True, kw_only=True, gc=False):
    """A piece as written. It may lie in another rank's or an older generation's segment."""

    device_id: str
    generation: str


class SegmentEntry(Struct, frozen=True, kw_only=True, gc=False):
    """One entry of a safetensors header; `begin` and `end` are bytes from the start of the data."""

    key: str
    dtype: str
    """safetensors dtype name."""
    shape: tuple[int, ...]
    begin: int
    end: int


class SegmentPlan(Struct, frozen=True, kw_only=True, gc=False):
    """One segment file as the layout places it in a slot: header, then the entries' bytes without holes.

    Which device gets it is dealt when it is written (deal_plan.py).
    """

    segment: int
    slot_offset_bytes: int
    """Where the file's first byte lies in the slot; a multiple of 4096."""
    header_size_bytes: int
    """8-byte length field, JSON and padding: a multiple of 4096."""
    data_size_bytes: int
    entries: tuple[SegmentEntry, ...]

    @property
    def file_size_bytes(self) -> int:
        """Exact length of the file."""
        return self.header_size_bytes + self.data_size_bytes


class SegmentRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One committed segment file: where it is, how long it is, and the checksum of each of its blocks."""

    segment: int
    device_id: str
    generation: str
    file_size_bytes: int
    header_size_bytes: int
    dio_alignment_bytes: int
    """Alignment that the file asked for when it was written directly; 0 when written through the page cache."""
    block_checksums: tuple[int, ...]
    """XXH3-64 of each 4 MiB block, in order."""


class Draft(Struct, frozen=True, kw_only=True):
    """What the hook says about a sealed snapshot: no device, no generation. Checked before it is believed."""

    checkpoint: CheckpointId
    rank: int
    world_size: int
    parent: CheckpointId | None
    layout_digest: str
    leaves: tuple[LeafSpec, ...]
    aliases: tuple[Alias, ...]
    pieces: tuple[PlannedPiece, ...]
    segments: tuple[SegmentPlan, ...]
    values: bytes
    """JSON document of the non-tensor state (tagged by value_format.py); opaque to the daemon, valid JSON."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Small facts shown by `everstep show`: epoch, finished, torch and python version, intra-op threads, …"""


class ManifestHead(Struct, frozen=True, kw_only=True):
    """A manifest without leaves and values: what recovery keeps of it."""

    run_id: str
    run_name: str
    owner_uid: int
    checkpoint: CheckpointId
    rank: int
    world_size: int
    parent: CheckpointId | None
    generation: str
    created_unix_s: float
    notes: dict[str, str]
    segments: tuple[SegmentRecord, ...]


class ManifestOverview(ManifestHead, frozen=True, kw_only=True):
    """A manifest with some of its leaves: what a person is shown of it."""

    leaves: tuple[LeafSpec, ...]
    """The first ones."""
    leaf_count: int
    """Of all."""
    aliases: tuple[Alias, ...]


class Manifest(ManifestHead, frozen=True, kw_only=True):
    """One rank's shard of one checkpoint, as committed; immutable."""

    layout_digest: str
    leaves: tuple[LeafSpec, ...]
    aliases: tuple[Alias, ...]
    pieces: tuple[Piece, ...]
    values: bytes
