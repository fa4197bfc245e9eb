"""Files of datasets, and the index files beside them: whoever wrote them, and whatever became of them since."""

import io
import json
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import xxhash

from everstep.dataloader.sources import ArrowSource, ParquetSource, read_parts, read_row
from everstep.dataloader.sources.hf_format import parse_splits, parse_state
from everstep.dataloader.sources.image_index_format import (
    ImageIndexBuilder,
    check_image_index,
    class_names,
    image_at,
)
from everstep.dataloader.sources.index_format import Index, Stamp
from everstep.dataloader.sources.line_format import LineScanner, check_line_index, line_at
from everstep.dataloader.sources.megatron_format import MegatronIndex, encode_megatron_index
from everstep.dataloader.sources.object_index_format import (
    StoredObject,
    check_object_index,
    encode_object_index,
    object_at,
)
from everstep.dataloader.sources.parts_format import encode_parts
from everstep.dataloader.sources.tar_format import BLOCK_BYTES, Member, goes_on, has_end, scan_members
from everstep.dataloader.sources.tar_index_format import (
    check_tar_index,
    encode_tar_index,
    key_at,
    parts_at,
)
from everstep.dataloader.sources.url_format import public_url, secrets_of

_ROWS = 9
"""Samples that are read of each input."""
_STAMP = Stamp(path=b"", mtime_s=1, size_bytes=13)


def _image_index() -> bytes:
    builder = ImageIndexBuilder()
    builder.add_class(b"a", [(b"1.jpg", 5), (b"sub/2.jpg", 6)])
    builder.add_class(b"b", [(b"3.jpg", 7)])
    return b"".join(builder.encode([Stamp(path=b"a", mtime_s=1, size_bytes=0)]))


def _line_index() -> bytes:
    scanner = LineScanner()
    scanner.feed(b"one\ntwo\n\nthree")
    return b"".join(scanner.encode([_STAMP]))


def _tar_index() -> bytes:
    members = [Member(name, 512 * i + 512, i, i) for i, name in enumerate([b"a.jpg", b"a.txt", b"b.jpg"])]
    return b"".join(encode_tar_index(members, [_STAMP]))


def _object_index() -> bytes:
    return b"".join(encode_object_index([StoredObject("a/b", 3, "tag"), StoredObject("c", None, "")]))


INDICES = {
    "image-folder": _image_index(),
    "jsonl": _line_index(),
    "tar": _tar_index(),
    "objects": _object_index(),
}


def parse_index(content: bytes) -> object:
    """Read an index file of any kind as its source does, and what it says of the first samples."""
    kind = content[16:32].rstrip(b"\0").decode("ascii", "replace")
    check, at = _USES.get(kind, _USES["tar"])
    index = Index(content, kind=kind)
    index.stamps()
    check(index)
    return [at(index, sample) for sample in range(min(index.count, _ROWS))]


def _tar_sample(index: Index, sample: int) -> object:
    return key_at(index, sample), parts_at(index, sample)


def _image_sample(index: Index, sample: int) -> object:
    return class_names(index), image_at(index, sample)


_USES: dict[str, tuple[Callable[[Index], None], Callable[[Index, int], object]]] = {
    "image-folder": (check_image_index, _image_sample),
    "jsonl": (check_line_index, line_at),
    "tar": (check_tar_index, _tar_sample),
    "objects": (check_object_index, object_at),
}


def sign_index(content: bytes) -> bytes:
    """Return an index whose size, digest and checksum hold, as far as its table lets us."""
    data = bytearray(content)
    sections = struct.unpack_from("<I", data, 12)[0] if len(data) >= 64 else 0
    head = 64 + 16 * sections + 8
    if not 1 <= sections <= 32 or len(data) < head:
        return content
    struct.pack_into("<Q", data, 32, len(data))
    table = list(struct.iter_unpack("<QQ", data[64 : head - 8]))
    digest = xxhash.xxh3_128(bytes(data[16:32]).rstrip(b"\0") + data[40:48])
    for offset, length in table[1:]:
        digest.update(struct.pack("<Q", min(length, len(data))))
        digest.update(bytes(data[offset : offset + length]))
    data[48:64] = digest.digest()
    check = xxhash.xxh3_64(bytes(data[: head - 8]))
    check.update(bytes(data[table[0][0] : table[0][0] + table[0][1]]))
    struct.pack_into("<Q", data, head - 8, check.intdigest())
    return bytes(data)


def _archive(form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data in (("a.jpg", b"photo"), ("a.cls", b"1"), (f"{'long/' * 30}b.jpg", b"x" * 600)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()[: 20 * BLOCK_BYTES]


ARCHIVES = tuple(_archive(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))


def parse_tar(content: bytes) -> object:
    def read(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    index = Index(b"".join(encode_tar_index(scan_members(read, len(content)), [_STAMP])), kind="tar")
    has_end(read, len(content))
    goes_on(read, 0, len(content))
    return [_tar_sample(index, sample) for sample in range(min(index.count, _ROWS))]


def sign_tar(content: bytes) -> bytes:
    """Return an archive with the checksum of each of its blocks that could be a header put right."""
    data = bytearray(content)
    for offset in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        if any(data[offset + 257 : offset + 262]):
            data[offset + 148 : offset + 156] = b" " * 8
            data[offset + 148 : offset + 155] = b"%06o\0" % sum(data[offset : offset + BLOCK_BYTES])
    return bytes(data)


PARTS = encode_parts([("__key__", b"k"), ("jpg", b"photo"), ("cls", b"")])
LINES = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \nx\ry\n\x00\nlast'


def parse_lines(content: bytes) -> object:
    """Find the lines in chunks of odd sizes, and at once: both find the same ones."""
    at_once, in_chunks = LineScanner(), LineScanner()
    at_once.feed(content)
    for start in range(0, len(content), 4099):
        in_chunks.feed(content[start : start + 4099])
    index = Index(b"".join(in_chunks.encode([_STAMP])), kind="jsonl")
    assert b"".join(at_once.encode([_STAMP])) == b"".join(in_chunks.encode([_STAMP]))
    lines = [line_at(index, sample) for sample in range(index.count)]
    assert all(start >= 0 and start + length <= len(content) for start, length, _ in lines)
    return lines


MEGATRON_BIN_BYTES = 24
MEGATRON = encode_megatron_index("uint16", [3, 4, 5], [0, 1, 3])


def parse_megatron(content: bytes) -> object:
    def read(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    index = MegatronIndex(read, len(content), MEGATRON_BIN_BYTES)
    sequences = [index.sequence(number) for number in range(min(index.header.sequence_count, _ROWS))]
    documents = min(index.header.bound_count - 1, _ROWS)
    return sequences, [index.document(number) for number in range(documents)]


HF_STATE = json.dumps(
    {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": "abc",
        "_indices_files": None,
        "_split": "train",
    }
).encode()
HF_SPLITS = b'{"splits": ["train", "test"]}'

TABLE = pa.table(
    {
        "text": ["a", "bb", None, "dddd"],
        "image": [{"bytes": b"x" * 9, "path": "p"}] * 4,
        "when": pa.array([0, 1, 2, 3], pa.timestamp("us", "Europe/Paris")),
    }
)


def _parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, sink, row_group_size=2)
    return sink.getvalue()


def _arrow(new: Callable[[Any, Any], Any], table: Any = TABLE) -> bytes:
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return sink.getvalue()


PARQUET = _parquet()
ARROW_FILE, ARROW_STREAM = _arrow(pyarrow.ipc.new_file), _arrow(pyarrow.ipc.new_stream)
ROW = _arrow(pyarrow.ipc.new_stream, TABLE.slice(0, 1))


def _rows(content: bytes, name: str, kind: type[ArrowSource] | type[ParquetSource]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        rows = kind(path)
        return [read_row(rows.get_bytes(sample)) for sample in range(min(len(rows), _ROWS))]


def parse_parquet(content: bytes) -> object:
    return _rows(content, "x.parquet", ParquetSource)


def parse_arrow(content: bytes) -> object:
    return _rows(content, "x.arrow", ArrowSource)


URLS = (
    b"https://store/bucket/x.jpg?X-Amz-Signature=abcdef&id=5",
    b"sftp://me:secret-word@host:22/path?x#y",
)


def parse_url(content: bytes) -> object:
    """Take what is secret out of a text; nothing of it is left."""
    text = content.decode("utf-8", "surrogateescape")
    public = public_url(text)
    assert public_url(public) == public
    return secrets_of(text, {})


PARSERS: dict[str, tuple[Callable[[bytes], object], tuple[bytes, ...], Callable[[bytes], bytes]]] = {
    "source_index": (parse_index, tuple(INDICES.values()), sign_index),
    "source_tar": (parse_tar, ARCHIVES, sign_tar),
    "source_parts": (read_parts, (PARTS,), bytes),
    "source_lines": (parse_lines, (LINES,), bytes),
    "source_megatron": (parse_megatron, (MEGATRON,), bytes),
    "source_hf_state": (parse_state, (HF_STATE,), bytes),
    "source_hf_splits": (parse_splits, (HF_SPLITS,), bytes),
    "source_parquet": (parse_parquet, (PARQUET,), bytes),
    "source_arrow": (parse_arrow, (ARROW_FILE, ARROW_STREAM), bytes),
    "source_row": (read_row, (ROW,), bytes),
    "source_url": (parse_url, URLS, bytes),
}
"""Name -> (parser, inputs that it takes, how changed content is signed)."""
