"""Memfds mapped where huge pages can be mapped as such, and as far as they may ever grow."""

import fcntl
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.core import advice, huge_pages, mapping
from everstep.core.mapping import map_shared

MIB = 2**20
NAME = "everstep-mapping-test"


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def maps() -> list[tuple[int, int, str]]:
    """Begin, end and what is mapped of each mapping of this process."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        found.append((begin, end, line))
    return found


def mapped_bytes() -> int:
    return sum(end - begin for begin, end, _ in maps())


def where_it_is() -> tuple[int, int]:
    (found,) = [(begin, end) for begin, end, line in maps() if NAME in line]
    return found


@pytest.mark.parametrize("size_bytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 5 * MIB + 1, 64 * MIB])
def test_it_lies_where_a_huge_page_may_begin_and_nothing_beside_it_is_taken(
    memfd: int, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "huge_page_bytes", lambda: 2 * MIB)
    os.ftruncate(memfd, size_bytes)
    pages_bytes = -(-size_bytes // 4096) * 4096
    octets = map_shared(memfd, size_bytes, is_writable=True)
    begin, end = where_it_is()
    assert (begin, end - begin) == (advice.address_of(octets), pages_bytes)
    assert size_bytes < 2 * MIB or begin % (2 * MIB) == 0
    octets[size_bytes - 1] = 7
    assert os.pread(memfd, 1, size_bytes - 1) == b"\7"
    whole_bytes = mapped_bytes()
    octets.release()
    assert whole_bytes - mapped_bytes() == pages_bytes
    assert not any(NAME in line for _, _, line in maps())


def test_a_kernel_without_huge_pages_puts_it_anywhere(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "huge_page_bytes", lambda: 0)
    os.ftruncate(memfd, 4 * MIB)
    with map_shared(memfd, 4 * MIB) as octets:
        assert octets.readonly
        assert octets[4 * MIB - 1] == 0


@pytest.mark.parametrize("size_bytes", [4096, 1024 * MIB])
def test_what_cannot_be_mapped_takes_no_addresses(memfd: int, size_bytes: int) -> None:
    os.ftruncate(memfd, size_bytes)
    reading, pipe = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY), os.pipe()
    try:
        before_bytes = mapped_bytes()
        with pytest.raises(OSError, match="No such device"):
            map_shared(pipe[0], size_bytes)
        with pytest.raises(PermissionError):
            map_shared(reading, size_bytes, is_writable=True)
        assert mapped_bytes() - before_bytes < 512 * MIB
        with map_shared(reading, size_bytes) as octets:
            assert octets[-1] == 0
    finally:
        for fd in (reading, *pipe):
            os.close(fd)


def test_where_the_second_try_fails_only_what_nobody_else_may_have_by_now_is_given_back(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an old kernel has unmapped before it failed may be another thread's."""
    size_bytes, huge = 1024 * MIB, 2 * MIB
    os.ftruncate(memfd, size_bytes)
    once, given_back = mapping._mmap, list[tuple[int, int]]()

    def failing(begin: int, *others: int) -> int:
        if begin:
            given_back.append((begin, begin + size_bytes))
            raise OSError(12, "Cannot allocate memory")
        return once(begin, *others)

    monkeypatch.setattr(mapping, "huge_page_bytes", lambda: huge)
    monkeypatch.setattr(mapping, "_mmap", failing)
    with pytest.raises(OSError, match="Cannot allocate"):
        map_shared(memfd, size_bytes)
    ((begin, end),) = given_back
    left = [each for each in maps() if each[0] < end and begin < each[1]]
    assert sum(min(each[1], end) - max(each[0], begin) for each in left) == size_bytes
    assert all("---p" in line for _, _, line in left)


def test_a_file_may_grow_into_its_mapping(memfd: int) -> None:
    with map_shared(memfd, 64 * MIB, is_writable=True) as octets:
        os.ftruncate(memfd, 64 * MIB)
        octets[-1] = 1
        assert os.pread(memfd, 1, 64 * MIB - 1) == b"\1"


def test_a_forked_child_lets_go_of_nothing_of_its_own_where_the_mapping_was(memfd: int) -> None:
    os.ftruncate(memfd, 4 * MIB)
    octets = map_shared(memfd, 4 * MIB, is_inherited=False)
    begin, _ = where_it_is()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert not any(NAME in line for _, _, line in maps())
            mapping._mmap(begin, 4 * MIB, 3, 0x31, -1)  # pyright: ignore[reportPrivateUsage] - shared, anonymous, there
            octets.release()
            gc.collect()
            status = 0 if any(each[:2] == (begin, begin + 4 * MIB) for each in maps()) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    octets.release()
    assert not any(NAME in line for _, _, line in maps())


def test_an_interrupt_while_it_is_unmapped_is_not_lost(memfd: int) -> None:
    """It would be, printed as ignored, if Python ran on the way from the last view to the kernel."""
    os.ftruncate(memfd, 4 * MIB)
    octets = map_shared(memfd, 4 * MIB, is_inherited=False)
    ran: list[str] = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        octets.release()
    finally:
        sys.setprofile(None)
    assert ran == []
    assert not any(NAME in line for _, _, line in maps())


def test_huge_pages_of_which_no_arena_is_made_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tmp_path / "hpage_pmd_size"
    monkeypatch.setattr(huge_pages, "_SIZE", size)
    for text, expected in (("2097152\n", 2 * MIB), ("33554432\n", 32 * MIB), ("536870912\n", 0), ("?", 0)):
        size.write_text(text)
        huge_pages.huge_page_bytes.cache_clear()
        assert huge_pages.huge_page_bytes() == expected
    size.unlink()
    huge_pages.huge_page_bytes.cache_clear()
    assert huge_pages.huge_page_bytes() == 0
    huge_pages.huge_page_bytes.cache_clear()


def huge_bytes(begin: int) -> int:
    """Bytes of a mapping of this process that are mapped as huge pages."""
    lines = Path("/proc/self/smaps").read_text().split(f"\n{begin:x}-")[1].splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("ShmemPmdMapped:"))


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split(".")[:2])


def is_denied() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return setting.exists() and "[deny]" in setting.read_text()


def test_memory_comes_in_huge_pages_and_its_bytes_stay(memfd: int) -> None:
    size = huge_pages.huge_page_bytes()
    if size != 2 * MIB or kernel() < (6, 1) or is_denied():
        pytest.skip(f"Linux {os.uname().release} here, huge pages of {size} bytes, denied: {is_denied()}")
    os.ftruncate(memfd, 7 * MIB)
    with map_shared(memfd, 7 * MIB, is_writable=True) as octets:
        for offset in (0, 3 * MIB + 5, 7 * MIB - 1):
            octets[offset] = 9
        assert huge_pages.take_huge_pages(memfd, octets, 1 * MIB, 7 * MIB)
        assert os.fstat(memfd).st_blocks * 512 == 4 * MIB + 2 * 4096  # two whole ones, and a page at each end
        assert [octets[offset] for offset in (0, 3 * MIB + 5, 7 * MIB - 1)] == [9, 9, 9]
        assert sum(octets) == 27
        assert huge_bytes(advice.address_of(octets)) == 4 * MIB


def test_a_range_without_a_whole_huge_page_needs_none(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 * MIB)
    os.ftruncate(memfd, 4 * MIB)
    with map_shared(memfd, 4 * MIB, is_writable=True) as octets:
        assert huge_pages.take_huge_pages(memfd, octets, MIB, 3 * MIB)
    assert os.fstat(memfd).st_blocks == 0


@pytest.mark.parametrize("why", ["no huge pages at all", "refused"])
def test_a_kernel_that_gives_none_is_told_of(memfd: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huge_pages, "huge_page_bytes", lambda: 0 if why == "no huge pages at all" else 2 * MIB
    )
    monkeypatch.setattr(advice, "madvise", lambda *_: False)
    os.ftruncate(memfd, 4 * MIB)
    with map_shared(memfd, 4 * MIB, is_writable=True) as octets:
        assert not huge_pages.take_huge_pages(memfd, octets, 0, 4 * MIB)


def test_pages_that_are_given_back_read_as_zeros(memfd: int) -> None:
    os.ftruncate(memfd, 4 * MIB)
    with map_shared(memfd, 4 * MIB, is_writable=True) as octets:
        octets[:] = b"\1" * (4 * MIB)
        mapping.give_pages_back(octets, MIB)
        assert os.fstat(memfd).st_blocks * 512 == MIB
        assert octets[:MIB].tobytes() == b"\1" * MIB
        assert octets[MIB:].tobytes() == bytes(3 * MIB)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with map_shared(memfd, 4 * MIB) as octets, pytest.raises(PermissionError):
        mapping.give_pages_back(octets, MIB)
