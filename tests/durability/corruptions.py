"""Structures that no write leaves behind, made in a store of two devices and two checkpoints."""

import hashlib
import os
import random
import shutil
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from everstep.checkpoint.manifest_format import MANIFEST_FILE_BYTES_MAX

_FRAME = struct.Struct("<8sIIQ32s")


@dataclass(frozen=True, slots=True)
class Places:
    """The files of a closed store, by device."""

    dirs: tuple[Path, ...]

    def run(self, device: int) -> Path:
        """Return the run's directory."""
        return next(self.dirs[device].glob("runs/*/*"))

    def manifest(self, device: int, step: int) -> Path:
        """Return a manifest."""
        return self.run(device) / "commits" / f"1.{step}.0.mf"

    def segment(self, device: int, step: int) -> Path:
        """Return a segment: the first one whose stamp names the step."""
        return self.segments(device, step)[0]

    def segments(self, device: int, step: int) -> list[Path]:
        """Return the segments whose stamp names the step."""
        mark = f'"step":"{step:020d}"'.encode()
        return [
            path
            for path in sorted(self.run(device).glob("data/*/*.safetensors"))
            if path.is_file() and mark in path.read_bytes()[:512]
        ]

    def small(self, device: int, name: str) -> Path:
        """Return disk.id, or a small file of the run."""
        return self.dirs[device] / name if name == "disk.id" else self.run(device) / name


Change = Callable[[Path, random.Random], None]
"""Spoils one file where it stands."""


def cut(path: Path, source: random.Random) -> None:
    os.truncate(path, source.randrange(path.stat().st_size))


def cut_one(path: Path, _: random.Random) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


def extend(path: Path, source: random.Random) -> None:
    with path.open("ab") as file:
        file.write(source.randbytes(source.choice((1, 512, 4096))))


def zeros(path: Path, _: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def noise(path: Path, source: random.Random) -> None:
    path.write_bytes(source.randbytes(path.stat().st_size))


def zero_block(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = source.randrange(0, len(content), 512)
    end = min(begin + 512, len(content))
    if not any(content[begin:end]):
        begin = 0
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def doubled_block(path: Path, _: random.Random) -> None:
    """The first half stands twice."""
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes((content[:half] * 3)[: len(content)])


def absurd_header(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[:8] = source.choice((0, 1, 4087, 2**31, 100_000_000, 2**63, 2**64 - 1)).to_bytes(8, "little")
    path.write_bytes(content)


def gone(path: Path, _: random.Random) -> None:
    path.unlink()


def link(path: Path, _: random.Random) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def dangling_link(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/file")


def link_to_itself(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def fifo(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def device_node(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # reads as zeros without end


def socket_file(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


def directory(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path, _: random.Random) -> None:
    os.truncate(path, MANIFEST_FILE_BYTES_MAX + 1)


def terabyte(path: Path, _: random.Random) -> None:
    os.truncate(path, 1 << 40)


def deep(path: Path, _: random.Random) -> None:
    path.write_bytes(b"[" * 1_000_000)


CHANGES: tuple[Change, ...] = (
    cut,
    cut_one,
    empty,
    extend,
    zeros,
    noise,
    zero_block,
    doubled_block,
    gone,
    link,
    dangling_link,
    link_to_itself,
    fifo,
    device_node,
    socket_file,
    directory,
    terabyte,
    absurd_header,
    huge,
    deep,
)
NEEDS_ROOT = (device_node,)


# --- what keeps a manifest's digest -----------------------------------------------------------------------------


def resign(content: bytes) -> bytes:
    """Return a manifest file with the length and digest of its payload: nobody can tell by them."""
    payload = content[_FRAME.size :]
    return _FRAME.pack(b"EVSTEPMF", 1, 0, len(payload), hashlib.sha256(payload).digest()) + payload


def rewrite_manifests(places: Places, step: int, change: Callable[[bytes], bytes]) -> None:
    """Change the manifest of a checkpoint on all devices alike."""
    for device in range(len(places.dirs)):
        path = places.manifest(device, step)
        path.write_bytes(resign(change(path.read_bytes())))


def replace_segment(places: Places, device: int, step: int, content: bytes) -> None:
    """Put other bytes in a segment's place, with a manifest that has their checksum."""
    path = places.segment(device, step)
    before, after = (
        f"{xxhash.xxh3_64_intdigest(each):016x}".encode() for each in (path.read_bytes(), content)
    )
    path.write_bytes(content)

    def with_checksum(manifest: bytes) -> bytes:
        assert manifest.count(before) == 1
        return manifest.replace(before, after)

    rewrite_manifests(places, step, with_checksum)


def swap(first: Path, second: Path) -> None:
    """Exchange two files."""
    aside = first.with_name("aside")
    first.rename(aside)
    shutil.move(second, first)
    shutil.move(aside, second)
