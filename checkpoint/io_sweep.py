"""Measuring one device with the product's own engines, on a file that has no name: whatever ends us removes it."""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import NoSpaceError
from .direct_io import open_unnamed
from .engine import Engine, EngineConfig, EngineKind, Transfer, TransferKind
from .engine_choice import EngineChoice, choose_engine, refusal_of
from .engine_kinds import make_engine
from .io_sweep_plan import MIB, Cell, CellResult, Sample, cells, finalists, summarised, transfer_bytes
from .linux import fallocate
from .storage_ops import storage_error

SWEEP_SIZE_BYTES = 256 * MIB
FREE_LEFT_BYTES = 1024 * MIB
"""What must stay free beside the file."""

_FIRST_BYTES_PER_S = 500e6
"""Assumed before the first transfer has told more."""
_BUFFER_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSweep:
    """What was measured in one directory."""

    path: Path
    is_direct: bool
    """False: the numbers are of the page cache, too."""
    choice: EngineChoice
    """What a daemon would take there by itself."""
    left_out: dict[str, str]
    """Engines that the kernel does not give, with the reason."""
    results: tuple[CellResult, ...]


def sweep(
    directory: Path,
    *,
    seconds: float,
    size_bytes: int = SWEEP_SIZE_BYTES,
    kinds: Iterable[EngineKind] = EngineKind,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> DeviceSweep:
    """Return the speeds of each engine, block size and depth in `directory`, after about `seconds`.

    Half of the time goes round all cells, the rest round the fastest quarter. Takes `size_bytes` of memory and, while
    it runs, of the device.

    Raises:
        NoSpaceError: there is no room for the file; nothing was written.
        StorageError: the device failed.
    """
    choice = choose_engine(directory)
    _check_space(directory, size_bytes)
    refusals = {kind: refusal_of(kind) for kind in kinds}
    usable = [kind for kind, refusal in refusals.items() if not refusal and _is_useful(kind, choice)]
    samples: list[Sample] = []
    with (
        _memory(size_bytes) as arena_fd,
        _file(directory, direct=choice.alignment is not None) as file_fd,
        ThreadPoolExecutor(1, thread_name_prefix="everstep-sweep") as thread,
    ):
        bench = _Bench(file_fd, arena_fd, size_bytes, thread)
        try:
            everything = cells(usable, size_bytes)
            for round_cells in (lambda: everything, lambda: finalists(samples)):
                for sample in bench.round(round_cells(), seconds / 2):
                    samples.append(sample)
                    on_sample(sample)
        except OSError as exc:
            raise storage_error(exc, directory, "measuring a file in") from exc
    return DeviceSweep(
        path=directory,
        is_direct=choice.alignment is not None,
        choice=choice,
        left_out={kind.value: refusal for kind, refusal in refusals.items() if refusal},
        results=tuple(summarised(samples)),
    )


def _is_useful(kind: EngineKind, choice: EngineChoice) -> bool:
    """Kernel AIO without direct I/O waits in the submitting call: nothing is in flight."""
    return kind is not EngineKind.AIO or choice.alignment is not None


def _check_space(directory: Path, size_bytes: int) -> None:
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < size_bytes + FREE_LEFT_BYTES:
        raise NoSpaceError(
            f"{directory} has {free_bytes} bytes free; measuring takes {size_bytes}, and {FREE_LEFT_BYTES} stay free",
            hint="free space, or give a smaller --size",
        )


@contextmanager
def _memory(size_bytes: int) -> Generator[int]:
    """Give a memfd whose pages are there and hold what no device can compress."""
    fd = os.memfd_create("everstep-sweep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        noise = os.urandom(_BUFFER_BYTES)
        with mmap.mmap(fd, size_bytes) as content:
            for begin in range(0, size_bytes, _BUFFER_BYTES):
                content[begin : begin + _BUFFER_BYTES] = noise[: size_bytes - begin]
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _file(directory: Path, *, direct: bool) -> Generator[int]:
    fd = open_unnamed(directory)
    try:
        if direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        yield fd
    finally:
        os.close(fd)


class _Bench:
    """Transfers between one arena and one file, each as long as the speed so far says."""

    def __init__(self, file_fd: int, arena_fd: int, size_bytes: int, thread: ThreadPoolExecutor) -> None:
        self._file_fd, self._arena_fd, self._size_bytes = file_fd, arena_fd, size_bytes
        self._thread = thread
        self._speeds: dict[Cell, float] = {}
        self._last_bytes_per_s = _FIRST_BYTES_PER_S

    def round(self, wanted: list[Cell], seconds: float) -> Iterator[Sample]:
        """Yield samples of the cells in turn, a write and a read of each: once, and again while there is time."""
        until_s = time.monotonic() + seconds
        share_s = seconds / max(len(wanted), 1) / len(TransferKind)
        passed_once = False
        while wanted and not passed_once:
            for cell in wanted:
                yield from self._measure(cell, share_s)
            passed_once = time.monotonic() >= until_s

    def _measure(self, cell: Cell, wanted_s: float) -> Iterator[Sample]:
        expected = self._speeds.get(cell, self._last_bytes_per_s)
        length = transfer_bytes(cell, self._size_bytes, expected, wanted_s)
        # As for a segment: a file without blocks, reserved. Over written blocks many devices are faster.
        os.ftruncate(self._file_fd, 0)
        with suppress(OSError):  # a file system without fallocate
            fallocate(self._file_fd, length)
        os.fsync(self._file_fd)
        config = EngineConfig(block_size_bytes=cell.block_size_bytes, queue_depth=cell.queue_depth)
        engine = make_engine(EngineKind(cell.engine), config)
        try:
            for kind in (TransferKind.WRITE, TransferKind.READ):
                began_s = time.perf_counter()
                self._run(engine, self._transfer(kind, length))
                if kind is TransferKind.WRITE:
                    os.fdatasync(self._file_fd)
                speed = length / (time.perf_counter() - began_s)
                if kind is TransferKind.WRITE:
                    self._speeds[cell] = self._last_bytes_per_s = speed
                    os.posix_fadvise(self._file_fd, 0, 0, os.POSIX_FADV_DONTNEED)
                yield Sample(cell=cell, kind=kind, bytes_per_s=speed)
        finally:
            engine.close()

    def _run(self, engine: Engine, transfer: Transfer) -> None:
        """Not in the main thread: an interrupt comes between any two of its steps, and would lose completions."""
        running = self._thread.submit(engine.run, transfer)
        try:
            running.result()
        finally:
            wait([running])

    def _transfer(self, kind: TransferKind, length_bytes: int) -> Transfer:
        return Transfer(
            kind=kind,
            arena_fd=self._arena_fd,
            arena_offset_bytes=0,
            file_fd=self._file_fd,
            file_offset_bytes=0,
            length_bytes=length_bytes,
        )
