"""Which engine a directory gets, asked of a file opened in it and of the kernel, not guessed from names."""

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .aio_engine import AioEngine
from .engine import Engine, EngineConfig, EngineKind, Progress, no_progress
from .kernel_aio import AioContext
from .linux import DioAlignment, dio_alignment
from .plain_engine import PlainEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine for one directory, and why."""

    kind: EngineKind
    reason: str
    """A sentence for the log and `everstep status`."""
    alignment: DioAlignment | None
    """What direct I/O demands there; None: files there go through the page cache."""
    factory: Callable[[], Engine]
    """Makes one engine, for one device."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.kind.value


def choose_engine(probe_dir: Path, config: EngineConfig | None = None) -> EngineChoice:
    """Return kernel AIO where a file in `probe_dir` can do direct I/O and the kernel offers AIO, else plain.

    Leaves nothing behind. Raises OSError when no file can be made in `probe_dir`.
    """
    settings = config or EngineConfig()
    kind, reason, alignment = _decide(probe_dir, settings)

    def factory() -> Engine:
        return make_engine(kind, settings)

    return EngineChoice(kind=kind, reason=reason, alignment=alignment, factory=factory)


def make_engine(kind: EngineKind, config: EngineConfig, *, on_progress: Progress = no_progress) -> Engine:
    """Return a new engine that works in the calling thread."""
    if kind is EngineKind.AIO:
        return AioEngine(config, on_progress=on_progress)
    return PlainEngine(config, on_progress=on_progress)


def _decide(probe_dir: Path, config: EngineConfig) -> tuple[EngineKind, str, DioAlignment | None]:
    alignment = _probe_direct(probe_dir)
    if alignment is None:
        return EngineKind.PLAIN, f"files in {probe_dir} cannot do direct I/O, or do not say how", None
    try:
        AioContext(config.queue_depth).close()
    except OSError as exc:
        return EngineKind.PLAIN, f"the kernel gives no asynchronous I/O here: {exc}", alignment
    return EngineKind.AIO, f"direct I/O in multiples of {alignment.offset_bytes} bytes, kernel AIO", alignment


def _probe_direct(probe_dir: Path) -> DioAlignment | None:
    file_fd = _open_probe(probe_dir)
    try:
        return dio_alignment(file_fd)
    finally:
        os.close(file_fd)


def _open_probe(probe_dir: Path) -> int:
    """Return the fd of a new file that has no name (any more)."""
    try:
        return os.open(probe_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT} or not probe_dir.is_dir():
            raise
    file_fd, name = tempfile.mkstemp(prefix=".probe.", dir=probe_dir)
    Path(name).unlink()
    return file_fd
