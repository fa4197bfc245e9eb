"""Which engine a directory gets, asked of a file opened in it and of the kernel, not guessed from names."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

from .direct_io import alignment_in
from .engine import Engine, EngineConfig, EngineKind
from .engine_kinds import make_engine
from .engine_process import ProcessEngine
from .kernel_aio import AioContext
from .linux import DioAlignment
from .storage_ops import storage_error
from .uring_probe import pin_limit_bytes, uring_refusal

_ORDER = (EngineKind.AIO, EngineKind.URING, EngineKind.PLAIN)
"""Where files can do direct I/O: kernel AIO is as fast as io_uring and allowed in more places (ADR 0018)."""

_WORDS = {EngineKind.AIO: "kernel AIO", EngineKind.URING: "io_uring", EngineKind.PLAIN: "pwrite and pread"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What the operator says of engines."""

    wanted: EngineKind | None = None
    """Tried first; None: what the directory and the kernel offer."""
    in_process: bool = False
    """Each engine in a process of its own."""
    config: EngineConfig = field(default_factory=EngineConfig)
    lane_count: int = 1
    """So many engines the caller makes: that the kernel gives one of a kind does not say that it gives all."""
    refused: Mapping[EngineKind, str] = field(default_factory=dict[EngineKind, str])
    """Kinds that were chosen and could not be made then, with the reason."""
    process_refusal: str = ""
    """Why engines are in threads though processes were asked for."""

    def without(self, kind: EngineKind, why: str) -> "EngineRules | None":
        """Return the rules to choose by after this kind could not be made; None: there is nothing else.

        The plain engine asks nothing of the kernel, so that where not even that could be made it was its process.
        """
        if kind is not EngineKind.PLAIN:
            return replace(self, refused={**self.refused, kind: why})
        return replace(self, in_process=False, refused={}, process_refusal=why) if self.in_process else None


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


def choose_engine(probe_dir: Path, rules: EngineRules | None = None) -> EngineChoice:
    """Return the first engine that the kernel gives, tried in this order: the wanted one; kernel AIO and io_uring if
    files in `probe_dir` can do direct I/O; plain. Leaves nothing behind.

    Raises:
        StorageError, NoSpaceError: no file can be made in `probe_dir`; `fallback_engine` still reads what is there.
    """
    rules = rules or EngineRules()
    try:
        alignment = alignment_in(probe_dir)
    except OSError as exc:
        raise storage_error(exc, probe_dir, "making a file to ask about direct I/O in") from exc
    if alignment is None:
        found = f"files in {probe_dir} cannot do direct I/O"
    else:
        found = f"direct I/O in multiples of {alignment.offset_bytes} bytes"
    return _first_possible(_ORDER if alignment else (EngineKind.PLAIN,), found, alignment, rules)


def fallback_engine(reason: str, rules: EngineRules | None = None) -> EngineChoice:
    """Return the wanted engine, else the one that works anywhere, where nothing could be asked of the directory."""
    return _first_possible((EngineKind.PLAIN,), reason, None, rules or EngineRules())


def _first_possible(
    order: tuple[EngineKind, ...], found: str, alignment: DioAlignment | None, rules: EngineRules
) -> EngineChoice:
    reasons = [f"no process of its own: {rules.process_refusal}", found] if rules.process_refusal else [found]
    for kind in order if rules.wanted is None else (rules.wanted, *order):
        refusal = rules.refused.get(kind) or refusal_of(kind, rules.config, rules.lane_count)
        if not refusal:
            asked_for = " as configured" if kind is rules.wanted else ""
            reasons.append(f"{_WORDS[kind]}{asked_for}{_pinned(kind, rules.config)}")
            return EngineChoice(
                kind=kind, reason="; ".join(reasons), alignment=alignment, factory=_factory(kind, rules)
            )
        reasons.append(f"no {_WORDS[kind]}: {refusal}")
    raise AssertionError("the plain engine is always possible")


def refusal_of(kind: EngineKind, config: EngineConfig | None = None, lane_count: int = 1) -> str:
    """Return why the kernel does not give so many engines of this kind at once; empty when it does."""
    config = config or EngineConfig()
    match kind:
        case EngineKind.AIO:
            return _aio_refusal(config.queue_depth, lane_count)
        case EngineKind.URING:
            return uring_refusal(config.queue_depth, lane_count)
        case EngineKind.PLAIN:
            return ""
        case _:
            assert_never(kind)


def _aio_refusal(depth: int, context_count: int) -> str:
    with ExitStack() as made:
        try:
            for _ in range(context_count):
                made.callback(AioContext(depth).close)
        except OSError as exc:
            return exc.strerror or str(exc)
    return ""


def _pinned(kind: EngineKind, config: EngineConfig) -> str:
    if kind is not EngineKind.URING or not config.register_arenas:
        return ""
    limit_bytes = pin_limit_bytes()
    bound = "" if limit_bytes is None else f" up to {limit_bytes} bytes (RLIMIT_MEMLOCK)"
    return f", arenas registered{bound}"


def _factory(kind: EngineKind, rules: EngineRules) -> Callable[[], Engine]:
    def make() -> Engine:
        if rules.in_process:
            return ProcessEngine(kind, rules.config)
        return make_engine(kind, rules.config)

    return make
