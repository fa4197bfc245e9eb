"""Every parser of what comes from a disk, a socket or a user's file: its good inputs, and the errors it may raise."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from component_documents import (
    DOCUMENTS,
    MEMORIES,
    PLAN,
    RANK_STATE,
    REFUSALS,
    parse_documents,
    parse_memory,
)
from foreign_files import (
    INDEX,
    SAFETENSORS,
    SIDE_DOCUMENT,
    parse_index,
    parse_safetensors,
    parse_side_document,
)
from source_files import PARSERS as SOURCES

from everstep.checkpoint.draft_format import decode_draft, encode_draft
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import Alias, LeafSpec, whole_leaf
from everstep.checkpoint.manifest_format import (
    decode_manifest,
    decode_manifest_head,
    decode_manifest_overview,
)
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES, Draft, Manifest, SegmentRecord
from everstep.checkpoint.segment_format import (
    SegmentStamp,
    align_up,
    build_header,
    header_size_of,
    parse_header,
    read_stamp,
)
from everstep.checkpoint.shard_rules_plan import check_draft
from everstep.checkpoint.store_format import (
    Attempt,
    DamagedShard,
    DamageList,
    DiskId,
    Floor,
    LockHolder,
    RetiredDevice,
    RunId,
    ScrubMark,
    ScrubPlace,
    Tag,
    decode_attempt,
    decode_damage,
    decode_disk_id,
    decode_floor,
    decode_lock,
    decode_run,
    decode_scrub_mark,
    decode_tag,
    encode_attempt,
    encode_damage,
    encode_disk_id,
    encode_floor,
    encode_lock,
    encode_run,
    encode_scrub_mark,
    encode_tag,
)
from everstep.checkpoint.testing import encode_manifest, written_pieces
from everstep.checkpoint.value_format import decode_value, dump_values, encode_value, load_values
from everstep.core.errors import (
    CorruptDataError,
    DaemonUnavailableError,
    DataError,
    LoaderStateError,
    StateTypeError,
    UsageError,
)
from everstep.core.ids import CheckpointId, run_id_of
from everstep.core.version import VERSION
from everstep.daemon.control.ledger_check import find_loaders
from everstep.dataloader.ledger_format import LedgerRecord, Tally, parse_ledger
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.state_format import LoaderState, parse_state
from everstep.dataloader.tensor_tree import decode_batch, decode_sample, encode_batch, encode_sample
from everstep.hook.rank_format import load_plan, load_state
from everstep.proto import frames, peer_frames, share_frames
from everstep.proto.wire import FrameError, decode_reply, decode_request, pack

DEVICES = ("a" * 32, "b" * 32)
GENERATION = "c" * 32
CHECKPOINT = CheckpointId(2, 40)
SLOT_SIZE_BYTES = 1 << 24
_LENGTH_BYTES = 4
_FRAME_BYTES = 56
_HEADER_LENGTH_BYTES = 8

LEAVES = (
    whole_leaf("model.weight", "float32", (600, 1024)),
    LeafSpec(
        name="channels_last",
        dtype="bfloat16",
        shape=(2, 3, 4, 5),
        strides=(60, 1, 15, 3),
        global_shape=(2, 3, 4, 5),
        global_offset=(0, 0, 0, 0),
    ),
    whole_leaf("scalar", "float64", (), replicas=2),
)
ALIASES = (
    Alias(
        name="tied", of="model.weight", offset_bytes=0, dtype="float32", shape=(600, 1024), strides=(1024, 1)
    ),
)
VALUES = {"lr": 0.1, "betas": (0.9, 0.999), 7: b"x", "big": 1 << 200, "none": None, "nan": float("nan")}


@dataclass(frozen=True, slots=True)
class Target:
    """One parser."""

    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    """Inputs that it takes."""
    errors: tuple[type[Exception], ...]
    """What it may raise on any other input."""
    sign: Callable[[bytes], bytes] = bytes
    """Makes changed content believable: puts the digest of the changed bytes where a file has it."""


def _draft() -> Draft:
    layout = plan_layout(LEAVES, ALIASES, segment_count=len(DEVICES))
    return Draft(
        checkpoint=CHECKPOINT,
        rank=1,
        world_size=2,
        parent=CheckpointId(1, 30),
        layout_digest=layout.digest,
        leaves=layout.leaves,
        aliases=layout.aliases,
        pieces=layout.pieces,
        segments=layout.segments,
        values=dump_values(encode_value(VALUES, "values")),
        notes={"epoch": "3"},
    )


def _manifest(draft: Draft) -> Manifest:
    records = tuple(
        SegmentRecord(
            segment=plan.segment,
            device_id=device_id,
            generation=GENERATION,
            file_size_bytes=plan.file_size_bytes,
            header_size_bytes=plan.header_size_bytes,
            dio_alignment_bytes=512,
            block_checksums=tuple(range(-(-plan.file_size_bytes // BLOCK_SIZE_BYTES))),
        )
        for device_id, plan in zip(DEVICES, draft.segments, strict=True)
    )
    return Manifest(
        run_id=run_id_of("demo"),
        run_name="demo",
        owner_uid=1000,
        checkpoint=draft.checkpoint,
        rank=draft.rank,
        world_size=draft.world_size,
        parent=draft.parent,
        generation=GENERATION,
        created_unix_s=1_700_000_000.25,
        layout_digest=draft.layout_digest,
        leaves=draft.leaves,
        aliases=draft.aliases,
        pieces=written_pieces(draft, records),
        segments=records,
        values=draft.values,
        notes=draft.notes,
    )


def sign_manifest(content: bytes) -> bytes:
    """Return a manifest file whose payload is that of `content`, with the length and digest that it needs."""
    payload = content[_FRAME_BYTES:]
    digest = hashlib.sha256(payload).digest()
    return struct.pack("<8sIIQ32s", b"EVSTEPMF", 1, 0, len(payload), digest) + payload


def _headers(draft: Draft) -> tuple[bytes, ...]:
    stamp = SegmentStamp(
        generation=GENERATION, run_id=run_id_of("demo"), checkpoint=CHECKPOINT, rank=1, segment=0
    )
    return tuple(build_header(plan.entries, replace(stamp, segment=plan.segment)) for plan in draft.segments)


def sign_segment(content: bytes) -> bytes:
    """Return a header whose length field and padding are those of its text."""
    text = content[_HEADER_LENGTH_BYTES:].rstrip(b" ")
    size = align_up(_HEADER_LENGTH_BYTES + len(text)) - _HEADER_LENGTH_BYTES
    return size.to_bytes(_HEADER_LENGTH_BYTES, "little") + text.ljust(size, b" ")


def _parse_segment(content: bytes) -> object:
    """Read a header as that of an empty file and of the two files that good headers belong to."""
    read_stamp(content)
    for size_bytes in (len(content), *_FILE_SIZES_BYTES):
        try:
            return parse_header(content, size_bytes)
        except CorruptDataError:
            header_size_of(content, 1 << 40)
    raise CorruptDataError("the header of no file")


def _parse_draft(content: bytes) -> object:
    draft = decode_draft(content)
    check_draft(draft, SLOT_SIZE_BYTES)
    return draft


def _json(content: bytes) -> object:
    """Return any JSON value, as the state of a loader comes to its parser; None for what is no JSON."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_FILE_SIZES_BYTES = tuple(plan.file_size_bytes for plan in _draft().segments)
_REQUESTS = (
    frames.Hello(protocol=frames.PROTOCOL, version=VERSION, role=frames.Role.TRAINER),
    frames.OpenRun(request_id=1, name="demo", rank=0, world_size=2, storage=["/a", "/b"], takeover=False),
    frames.OpenRun(
        request_id=2,
        name="demo",
        rank=0,
        world_size=1,
        storage=["/a"],
        takeover=True,
        keep=frames.KeepRules(last=2, every_steps=1000, every="6h"),
    ),
    frames.Seal(
        arena=1,
        slot=0,
        attempt=2,
        step=40,
        draft_offset_bytes=4096,
        draft_size_bytes=100,
        draft_sha256="0" * 64,
    ),
    peer_frames.AskAddress(request_id=4),
    peer_frames.OpenInbox(request_id=5, size_bytes=1 << 20),
    peer_frames.AskPeers(request_id=6, samples=[0, 7, 1 << 40]),
    peer_frames.FlushPeers(request_id=7),
    share_frames.StageShare(request_id=8, size_bytes=4096),
    share_frames.PublishShare(
        request_id=9, batch=3, offset_bytes=0, size_bytes=4096, xxh3=1, left_out=[(5, 3, "SIGKILL")]
    ),
    share_frames.WantShare(request_id=10, batch=3),
    share_frames.OfferShare(count=2),
    share_frames.TookShare(batch=3),
)
_REPLIES = (
    frames.Persisted(attempt=2, step=40, size_bytes=1, persist_s=0.5, devices_s=0.4, under_replicated=False),
    frames.ManifestBytes(re=3, manifest=b"x" * 40),
    peer_frames.PeerAddress(re=4, address="node-1:7070"),
    peer_frames.InboxReady(re=5, size_bytes=1 << 20),
    peer_frames.PeersGave(re=6, items=[(7, 0, 100)], left_out=[8]),
    peer_frames.CacheMembers(members=["node-1:7070", "node-2:7070"], me="node-1:7070"),
    share_frames.ShareLeased(batches=[3], quarantined=[(5, 3, "SIGKILL")]),
    share_frames.ShareReady(re=10, batch=3, size_bytes=4096, left_out=[(5, 3, "SIGKILL")]),
)
_SCRUB = ScrubMark(
    store_id="d" * 32,
    started_unix_s=1.5e9,
    checkpoint_count=3,
    place=ScrubPlace(owner_uid=7, run_id="f" * 32, checkpoint=CHECKPOINT),
)
_DAMAGE = DamageList(
    change=3,
    shards=(DamagedShard(checkpoint=CHECKPOINT, rank=1, generation="a" * 32, problem="block 3 is not"),),
)
_TAG = Tag(name="best so far", checkpoint=CHECKPOINT)
_LOADER = LoaderState(
    fingerprint="abc", sample_count=1000, order=OrderSpec(kind=OrderKind.PERMUTED, seed=7), epoch=2, cursor=30
).to_dict()
_LEDGER = LedgerRecord(7, {0: Tally(1000, (1, 2), 3, 0), 1: Tally(30, (3, 4), 0, 1)}).to_dict()
_TREE = {"image": torch.arange(6).reshape(2, 3), "meta": [None, 1.5, "text", (1 << 70, b"bytes")]}
_BATCH = b"".join(encode_batch(np.arange(2), _TREE).pieces)
_SAMPLE = encode_sample(_TREE | {"array": np.arange(3.0), "scalar": np.float32(1)})


def _targets() -> dict[str, Target]:
    draft = _draft()
    manifest = encode_manifest(_manifest(draft))
    disk_id = DiskId(
        device_id=DEVICES[0], store_id="d" * 32, members=dict.fromkeys(DEVICES, "/a"), is_ready=True
    )
    changed = replace(
        disk_id,
        members=dict.fromkeys(DEVICES[:1], "/a"),
        draining=frozenset(DEVICES[:1]),
        retired={
            "e" * 32: RetiredDevice(
                path="/b", retired_unix_s=1.5e9, highest={f"7/{'f' * 32}": CheckpointId(2, 5)}
            )
        },
        missing_since_unix_s=dict.fromkeys(DEVICES[:1], 1.6e9),
    )
    disk_ids = (encode_disk_id(disk_id), encode_disk_id(changed))
    floor = Floor(newest=CHECKPOINT, previous=CheckpointId(1, 3))
    loaders = dump_values({"loader": _LOADER, "ledger": _LEDGER})
    data, values = (DataError,), draft.values
    loader, frame = (LoaderStateError,), (FrameError,)
    sources = {
        name: Target(parse, seeds, (DataError, UsageError), sign)
        for name, (parse, seeds, sign) in SOURCES.items()
    }
    return {
        **sources,
        "manifest": Target(decode_manifest, (manifest,), data, sign_manifest),
        "manifest_head": Target(decode_manifest_head, (manifest,), data, sign_manifest),
        "manifest_overview": Target(
            lambda each: decode_manifest_overview(each, 2), (manifest,), data, sign_manifest
        ),
        "segment_header": Target(_parse_segment, _headers(draft), data, sign_segment),
        "draft": Target(_parse_draft, (encode_draft(draft),), data),
        "disk_id": Target(lambda each: decode_disk_id(each, "disk.id"), disk_ids, data),
        "lock": Target(
            decode_lock, (encode_lock(LockHolder(pid=1, socket="/s", uid=2, kind="private")),), ()
        ),
        "run": Target(lambda each: decode_run(each, "run.json"), (encode_run(RunId.of("demo", 7)),), data),
        "attempt": Target(
            lambda each: decode_attempt(each, "1"), (encode_attempt(Attempt(attempt=1, fresh=True)),), data
        ),
        "floor": Target(lambda each: decode_floor(each, "floor.json"), (encode_floor(floor),), data),
        "tag": Target(lambda each: decode_tag(each, "tag", _TAG.file_name), (encode_tag(_TAG),), data),
        "damage": Target(lambda each: decode_damage(each, "damaged.json"), (encode_damage(_DAMAGE),), data),
        "scrub_mark": Target(
            lambda each: decode_scrub_mark(each, "scrub.json"), (encode_scrub_mark(_SCRUB),), data
        ),
        "values": Target(lambda each: decode_value(load_values(each)), (values,), data),
        "loaders_in_values": Target(lambda each: find_loaders(0, each), (loaders, values), data),
        "loader_state": Target(lambda each: parse_state(_json(each)), (dump_values(_LOADER),), loader),
        "ledger": Target(lambda each: parse_ledger(_json(each)), (dump_values(_LEDGER),), loader),
        "documents": Target(parse_documents, (DOCUMENTS,), REFUSALS),
        "frequency_memory": Target(parse_memory, MEMORIES, data),
        "rank_state": Target(load_state, (RANK_STATE,), data),
        "rank_plan": Target(load_plan, (PLAN,), data),
        "foreign_safetensors": Target(parse_safetensors, (SAFETENSORS,), data),
        "foreign_index": Target(parse_index, (INDEX,), data),
        "foreign_side_document": Target(parse_side_document, (SIDE_DOCUMENT,), (DataError, StateTypeError)),
        "prepared_batch": Target(lambda each: decode_batch(memoryview(each), {}), (_BATCH,), data),
        "prepared_sample": Target(lambda each: decode_sample(bytearray(each)), (_SAMPLE,), data),
        "request": Target(decode_request, tuple(pack(each)[_LENGTH_BYTES:] for each in _REQUESTS), frame),
        "reply": Target(
            decode_reply,
            tuple(pack(each)[_LENGTH_BYTES:] for each in _REPLIES),
            (DaemonUnavailableError,),
        ),
    }


TARGETS = _targets()
