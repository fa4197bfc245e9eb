import errno
import fcntl
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.checkpoint import linux


@pytest.mark.parametrize(
    ("field", "offset"), [("stx_mask", 0), ("stx_dio_mem_align", 152), ("stx_dio_offset_align", 156)]
)
def test_statx_fields_lie_where_the_kernel_puts_them(field: str, offset: int) -> None:
    ffi = linux._ffi  # pyright: ignore[reportPrivateUsage]

    assert ffi.sizeof("struct everstep_statx") == 256
    assert ffi.offsetof("struct everstep_statx", field) == offset


@pytest.mark.parametrize(("machine", "bits"), [("riscv64", 64), ("i686", 32), ("x86_64", 32)])
def test_an_unknown_architecture_is_named(machine: str, bits: int) -> None:
    with pytest.raises(ImportError, match=f"this is {machine} with {bits}-bit"):
        linux.syscall_numbers(machine, pointer_bits=bits)


def test_a_files_alignment_is_what_direct_io_accepts(tmp_path: Path) -> None:
    file_fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        alignment = linux.dio_alignment(file_fd)
        if alignment is None or not alignment.is_possible:
            pytest.skip(f"files in {tmp_path} cannot do direct I/O")
        fcntl.fcntl(file_fd, fcntl.F_SETFL, os.O_DIRECT)
        unit = max(alignment.memory_bytes, alignment.offset_bytes)
        with mmap.mmap(-1, 2 * unit) as memory, memoryview(memory) as view:
            assert os.pwrite(file_fd, view[:unit], alignment.offset_bytes) == unit
    finally:
        os.close(file_fd)


def test_what_says_nothing_of_direct_io_has_no_alignment() -> None:
    memfd = os.memfd_create("plain")
    reader, writer = os.pipe()
    try:
        assert linux.dio_alignment(memfd) is None
        assert linux.dio_alignment(reader) is None
        assert linux.is_in_memory(memfd)
        assert not linux.is_in_memory(reader)
    finally:
        for fd in (memfd, reader, writer):
            os.close(fd)


def test_dio_alignment_of_a_closed_fd_is_an_error() -> None:
    fd = os.memfd_create("closed")
    os.close(fd)

    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        linux.dio_alignment(fd)
    assert caught.value.errno == errno.EBADF


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_rename_moves_to_a_free_name(tmp_path: Path, dir_fd: int) -> None:
    (tmp_path / "tmp ä").write_text("content")

    linux.rename_noreplace(dir_fd, "tmp ä", dir_fd, "final")

    assert os.listdir(tmp_path) == ["final"]  # noqa: PTH208
    assert (tmp_path / "final").read_text() == "content"


def test_rename_never_replaces(tmp_path: Path, dir_fd: int) -> None:
    (tmp_path / "tmp").write_text("new")
    (tmp_path / "final").write_text("old")

    with pytest.raises(FileExistsError) as caught:
        linux.rename_noreplace(dir_fd, "tmp", dir_fd, "final")

    assert (caught.value.filename, caught.value.filename2) == ("tmp", "final")
    assert ((tmp_path / "tmp").read_text(), (tmp_path / "final").read_text()) == ("new", "old")


def test_rename_of_nothing_and_of_a_zero_byte(dir_fd: int) -> None:
    with pytest.raises(FileNotFoundError):
        linux.rename_noreplace(dir_fd, "absent", dir_fd, "final")
    with pytest.raises(ValueError, match="zero byte"):
        linux.rename_noreplace(dir_fd, "a\0b", dir_fd, "final")


def test_fallocate_reserves_and_extends(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        linux.fallocate(file.fileno(), 1 << 20)
        stat = os.fstat(file.fileno())
        assert stat.st_size == 1 << 20
        assert stat.st_blocks * 512 >= 1 << 20

        linux.fallocate(file.fileno(), 4096, offset_bytes=1 << 20)
        assert os.fstat(file.fileno()).st_size == (1 << 20) + 4096


def test_fallocate_beyond_the_largest_file_is_an_error_and_reserves_nothing(tmp_path: Path) -> None:
    # Not "more than is free": a reservation that fails for room keeps what it got, so that would fill the disk.
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="File too large") as caught:
            linux.fallocate(file.fileno(), 1 << 62)
        assert caught.value.errno == errno.EFBIG
        assert os.fstat(file.fileno()).st_blocks == 0


@pytest.mark.root
def test_fallocate_says_when_there_is_no_room(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    mount = subprocess.run(command, check=False, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount here: {mount.stderr.strip()}")
    try:
        with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No space left") as caught:
            linux.fallocate(file.fileno(), 1 << 20)
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_sealed_memfd_keeps_its_size_and_stays_writable() -> None:
    memfd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memfd, 8192)
        linux.seal_size(memfd)
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(memfd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, linux.F_SEAL_FUTURE_WRITE)
        assert os.pwrite(memfd, b"still", 0) == 5
    finally:
        os.close(memfd)


def test_a_mapping_stays_out_of_forked_children() -> None:
    memfd = os.memfd_create("arena-dontfork")
    try:
        os.ftruncate(memfd, 4096)
        with mmap.mmap(memfd, 4096) as mapping:
            linux.madvise_dontfork(mapping)
            entry = Path("/proc/self/smaps").read_text().partition("arena-dontfork")[2]
            flags = next(line for line in entry.splitlines() if line.startswith("VmFlags"))
            assert "dc" in flags.split()
    finally:
        os.close(memfd)
