"""The daemon's configuration: one strict TOML file (unknown keys are errors), or the defaults of a private daemon."""

import difflib
import os
import re
from pathlib import Path

import msgspec

from ..checkpoint.engine import EngineConfig, EngineKind
from ..checkpoint.keep import KEEP_LAST, Keep
from ..core.durations import parse_duration
from ..core.errors import ConfigError
from ..core.paths import data_socket_path

GIB = 1024**3
_UNKNOWN_KEY = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.(\w+)`)?")
_ENGINES = ("auto", *(kind.value for kind in EngineKind))


class DaemonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[daemon]`: where it listens and how long it stays."""

    socket: str = ""
    """Path of the data socket; empty: see core/paths.py."""
    linger_s: float = 600.0
    """How long the snapshots of a crashed trainer stay in memory (and an otherwise idle private daemon alive)."""
    drain_s: float = 300.0
    """How long SIGTERM waits for what is sealed to be written."""


class MemorySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[memory]`: the bound on all arenas together."""

    arena_max_bytes: int = 1 << 60
    reserve_bytes: int = GIB
    """Left free on the node and in every cgroup beside the arenas."""


class MetricsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[metrics]`: Prometheus over HTTP on loopback."""

    enabled: bool = True
    port: int = 0
    """0: an ephemeral port, shown by `everstep status`."""


class IoSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[io]`: how bytes reach the devices."""

    engine: str = "auto"
    """auto, aio, uring or plain. What the kernel does not give is replaced, and `everstep status` says why."""
    process: bool = False
    """Run each device's engine in a process of its own."""
    register_arenas: bool = False
    """io_uring: pin an arena's pages once, not for each block."""
    block_size_bytes: int = EngineConfig().block_size_bytes
    """What is asked of a device at once; `everstep bench io` measures what serves it."""
    queue_depth: int = EngineConfig().queue_depth
    """So many blocks are in flight on each device."""
    recycle: bool = True
    """Write new segments over files of deleted checkpoints."""

    def engine_config(self) -> EngineConfig:
        """Return what an engine is made with; ConfigError names what it cannot be."""
        try:
            return EngineConfig(
                block_size_bytes=self.block_size_bytes,
                queue_depth=self.queue_depth,
                register_arenas=self.register_arenas,
            )
        except ValueError as error:
            raise ConfigError(f"[io]: {error}") from error


class RetentionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[retention]`: what GC keeps of each run whose trainer does not say so itself."""

    keep_last: int = KEEP_LAST
    every_steps: int | None = None
    """Also the first one in each stretch of so many steps."""
    every: str | None = None
    """Also the first one in each stretch of so much time: `6h`."""

    def keep(self) -> Keep:
        """Return the rules; ConfigError for values that make no sense."""
        return Keep(last=self.keep_last, every_steps=self.every_steps, every=self.every)


class VerifySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[verify]`: the newest checkpoint of each run is read in the background after its store was opened."""

    after_s: float = 10.0
    """How long after: a restart, which verifies what it restores, comes first."""


class ScrubSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[scrub]`: all committed bytes are read from time to time."""

    every: str = "7d"
    """`never`: only on request."""
    bandwidth_share: float = 0.1
    """Of each device's speed, for everything that is read in the background."""

    @property
    def every_s(self) -> float | None:
        """Seconds from one scrub to the next; None: there is no schedule. ConfigError for no duration."""
        if self.every == "never":
            return None
        try:
            return parse_duration(self.every)
        except ValueError as error:
            raise ConfigError(f"scrub.every is {self.every!r}", hint=f"{error}; or 'never'") from error


class RetireSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[retire]`: when a missing device is given up without a person."""

    missing_after: str = ""
    """A duration (`7d`) after it was first seen missing; empty: never."""

    def missing_after_s(self) -> float | None:
        """Return it in seconds; None: never. ValueError where it is no duration."""
        return parse_duration(self.missing_after) if self.missing_after else None


class DaemonConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. `devices` maps a name to the directory on that device."""

    daemon: DaemonSection = DaemonSection()
    memory: MemorySection = MemorySection()
    metrics: MetricsSection = MetricsSection()
    io: IoSection = IoSection()
    retention: RetentionSection = RetentionSection()
    verify: VerifySection = VerifySection()
    scrub: ScrubSection = ScrubSection()
    retire: RetireSection = RetireSection()
    devices: dict[str, str] = msgspec.field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.io.engine not in _ENGINES:
            raise ConfigError(f"io.engine is {self.io.engine!r}", hint=f"one of {', '.join(_ENGINES)}")
        self.io.engine_config()
        if self.retention.keep_last < 2:
            raise ConfigError(
                f"retention.keep_last is {self.retention.keep_last}", hint="at least 2 are always kept"
            )
        self.retention.keep()
        _ = self.scrub.every_s
        if not 0 < self.scrub.bandwidth_share <= 1:
            raise ConfigError(
                f"scrub.bandwidth_share is {self.scrub.bandwidth_share}", hint="above 0, up to 1"
            )
        try:
            self.retire.missing_after_s()
        except ValueError as error:
            raise ConfigError(f"retire.missing_after: {error}", hint="or leave it out") from error
        bounds = {
            "daemon.linger_s": self.daemon.linger_s,
            "daemon.drain_s": self.daemon.drain_s,
            "verify.after_s": self.verify.after_s,
            "memory.reserve_bytes": self.memory.reserve_bytes,
            "memory.arena_max_bytes": self.memory.arena_max_bytes,
        }
        for key, bound in bounds.items():
            if not bound >= 0:  # also refuses what TOML calls nan
                raise ConfigError(f"{key} is {bound}", hint="0 or more")
        if not 0 <= self.metrics.port <= 65535:
            raise ConfigError(
                f"metrics.port is {self.metrics.port}", hint="0 to 65535; 0 takes any free port"
            )
        for name, directory in self.devices.items():
            if not directory.startswith("/"):
                raise ConfigError(f"devices.{name} is {directory!r}", hint="name an absolute directory")

    def device_names(self) -> dict[str, str]:
        """Return the names of the devices by their directories, links followed."""
        return {os.path.realpath(directory): name for name, directory in self.devices.items()}

    def socket_path(self) -> Path:
        """Return where the data socket is."""
        return Path(self.daemon.socket) if self.daemon.socket else data_socket_path()


def load_config(path: Path) -> DaemonConfig:
    """Return the configuration of a TOML file; ConfigError names the key that is wrong."""
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=DaemonConfig)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give --config an existing file"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        meant = _meant_key(str(error))
        hint = f"did you mean {meant}?" if meant else "see docs/configuration.md for the keys"
        raise ConfigError(f"{path}: {error}", hint=hint) from error
    if not config.devices:
        raise ConfigError(
            f"{path} names no devices", hint='add a [devices] table, e.g. nvme0 = "/nvme0/everstep"'
        )
    return config


def _meant_key(said: str) -> str:
    """Return the key that is nearest to the unknown one that msgspec names; empty where none is near."""
    found = _UNKNOWN_KEY.search(said)
    if found is None:
        return ""
    sections = {field.name: field.type for field in msgspec.structs.fields(DaemonConfig)}
    section: object = sections.get(found[2], DaemonConfig) if found[2] else DaemonConfig
    assert isinstance(section, type)
    assert issubclass(section, msgspec.Struct)
    keys = [field.name for field in msgspec.structs.fields(section)]
    near = difflib.get_close_matches(found[1], keys, n=1)
    return near[0] if near else ""


def private_config() -> DaemonConfig:
    """Return what a private daemon runs with; $EVERSTEP_LINGER_S and $EVERSTEP_METRICS_PORT change it."""
    linger = os.environ.get("EVERSTEP_LINGER_S", "600")
    port = os.environ.get("EVERSTEP_METRICS_PORT", "")
    try:
        return DaemonConfig(
            daemon=DaemonSection(linger_s=float(linger)),
            metrics=MetricsSection(enabled=bool(port), port=int(port or "0")),
        )
    except ValueError as error:
        raise ConfigError(f"EVERSTEP_LINGER_S={linger!r}, EVERSTEP_METRICS_PORT={port!r}: {error}") from error
