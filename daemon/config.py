"""The daemon's configuration: one strict TOML file (unknown keys are errors), or the defaults of a private daemon."""

import os
from pathlib import Path

import msgspec

from ..checkpoint.engine import EngineConfig, EngineKind
from ..checkpoint.keep import KEEP_LAST, Keep
from ..core.durations import parse_duration
from ..core.errors import ConfigError
from ..core.paths import data_socket_path
from .access.section import ControlSection, QuotaSection
from .configuration.layers_plan import Problem, Resolved
from .configuration.sources import ConfigSources
from .health_check.section import HealthCheckSection
from .log import LogSection
from .nodes.section import CacheSection
from .traces import TracesSection
from .web.section import MetricsSection

GIB = 1024**3
_ENGINES = ("auto", *(kind.value for kind in EngineKind))


class DaemonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[daemon]`: where it listens and how long it stays."""

    socket: str = ""
    """Path of the data socket; empty: see core/paths.py."""
    linger_s: float = 600.0
    """How long the snapshots of a crashed trainer stay in memory (and an otherwise idle private daemon alive)."""
    drain_s: float = 300.0
    """How long SIGTERM waits for what is sealed to be written."""
    reflection: bool = False
    """Whether tools such as grpcurl may ask the control API what it looks like."""
    user: str = ""
    """Started as root, become this user before anything is opened; empty: root without its rights."""
    users: list[str] = msgspec.field(default_factory=list[str])
    """A node's daemon: whose runs it saves beside its own user's, by name or uid; `*`: of all who reach its socket."""


class MemorySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[memory]`: the bounds on all arenas together, and on those of caches."""

    arena_max_bytes: int = 1 << 60
    reserve_bytes: int = GIB
    """Left free on the node and in every cgroup beside the arenas."""
    cache_max_bytes: int = 1 << 60
    """Of all caches of samples together: the rest stays for the arenas of checkpoints."""
    cache_user_max_bytes: int = 1 << 60
    """Of the caches of one user together."""


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
        try:
            return Keep(last=self.keep_last, every_steps=self.every_steps, every=self.every)
        except ConfigError as error:
            raise ConfigError(f"retention.{error.message.removeprefix('keep: ')}", hint=error.hint) from error


class VerifySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[verify]`: the newest checkpoint of each run is read in the background, first after its store was opened."""

    after_s: float = 10.0
    """How long after: a restart, which verifies what it restores, comes first."""


class ScrubSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[scrub]`: all committed bytes are read from time to time."""

    every: str = "7d"
    """`never`: only on request."""
    bandwidth_share: float = 0.05
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
    cache: CacheSection = CacheSection()
    control: ControlSection = ControlSection()
    quota: QuotaSection = QuotaSection()
    log: LogSection = LogSection()
    traces: TracesSection = TracesSection()
    health_check: HealthCheckSection = HealthCheckSection()
    devices: dict[str, str] = msgspec.field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.io.engine not in _ENGINES:
            raise ConfigError(f"io.engine is {self.io.engine!r}", hint=f"one of {', '.join(_ENGINES)}")
        self.io.engine_config()
        self.cache.check()
        self.control.check()
        self.quota.check()
        self.log.check()
        self.traces.check()
        self.health_check.check()
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
            "memory.cache_max_bytes": self.memory.cache_max_bytes,
            "memory.cache_user_max_bytes": self.memory.cache_user_max_bytes,
        }
        for key, bound in bounds.items():
            if not bound >= 0:  # also refuses what TOML calls nan
                raise ConfigError(f"{key} is {bound}", hint="0 or more")
        self.metrics.check()
        for name, directory in self.devices.items():
            if not directory.startswith("/"):
                raise ConfigError(f"devices.{name} is {directory!r}", hint="name an absolute directory")

    def device_names(self) -> dict[str, str]:
        """Return the names of the devices by their directories, links followed."""
        return {os.path.realpath(directory): name for name, directory in self.devices.items()}

    def socket_path(self) -> Path:
        """Return where the data socket is."""
        return Path(self.daemon.socket) if self.daemon.socket else data_socket_path()


def resolve_config(sources: ConfigSources) -> Resolved[DaemonConfig]:
    """Return what the sources give, with where each value is from and all that is wrong.

    Raises:
        ConfigError: the file cannot be read.
    """
    resolved = sources.resolve(DaemonConfig)
    config, path = resolved.config, sources.path
    if config is None or (path is not None) == bool(config.devices):
        return resolved
    if path is None:
        problem = Problem(
            place=next(place for key, place in resolved.origins.items() if key[0] == "devices"),
            key="devices",
            message="a private daemon has no configured devices",
            hint="its devices are what attach(storage=...) names: unset it",
        )
    else:
        problem = Problem(
            place=str(path),
            key="devices",
            message=f"{path} names no devices",
            hint='add a [devices] table, e.g. nvme0 = "/nvme0/everstep"',
        )
    return Resolved(config=None, origins=resolved.origins, problems=[problem])


def load_config(path: Path) -> DaemonConfig:
    """Return the configuration of a TOML file alone; ConfigError names file, line and key of what is wrong."""
    return resolve_config(ConfigSources(path=path, environment={})).taken()


def private_config() -> DaemonConfig:
    """Return what a private daemon runs with: the defaults, and what the environment changes."""
    return resolve_config(ConfigSources(path=None, environment=os.environ)).taken()
