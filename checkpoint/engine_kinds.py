"""A new engine of each kind, for the calling thread."""

from typing import assert_never

from .aio_engine import AioEngine
from .engine import Engine, EngineConfig, EngineKind, Progress, no_progress
from .plain_engine import PlainEngine
from .uring_engine import UringEngine


def make_engine(
    kind: EngineKind,
    config: EngineConfig,
    *,
    on_progress: Progress = no_progress,
    held_fd: int | None = None,
) -> Engine:
    """Return a new engine. A kernel that may go on after the process is gone holds `held_fd` until it has ended."""
    match kind:
        case EngineKind.AIO:
            return AioEngine(config, on_progress=on_progress)
        case EngineKind.URING:
            return UringEngine(config, on_progress=on_progress, held_fd=held_fd)
        case EngineKind.PLAIN:
            return PlainEngine(config, on_progress=on_progress)
        case _:
            assert_never(kind)
