"""Reads the configuration again while the daemon runs: by SIGHUP, or when an operator asks."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import ConfigError, UsageError
from ..blocking import in_thread
from ..service_manager import notify
from .keys_plan import KeyPath, values_in
from .layers_plan import DEFAULT, Resolved
from .reload_plan import Change, changes, check_reloadable
from .sources import ConfigSources
from .toml_format import Value, values_shown

if TYPE_CHECKING:
    from ..config import DaemonConfig
    from ..node import Node

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What a reload changed, or would."""

    file: str
    """Empty: a private daemon, which has none."""
    changes: tuple[Change, ...]
    problem: str
    """Why nothing would change; empty: nothing is wrong. Only of one that is tried."""
    hint: str
    values: tuple[Value, ...]
    """What the daemon runs with."""


class Reloader:
    """Owned by the event loop. One reload at a time, all or nothing."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._sources: ConfigSources | None = None
        self._origins: dict[KeyPath, str] = {}
        self._reloading = asyncio.Lock()
        self._is_signalled = False
        """A signal has come whose reload has not read the file yet: it does for all that come until then."""

    def use(self, sources: ConfigSources, origins: Mapping[KeyPath, str]) -> None:
        """Remember where the configuration is from."""
        self._sources, self._origins = sources, dict(origins)

    @property
    def file(self) -> str:
        """The daemon's file; empty: it has none."""
        return str(self._sources.path) if self._sources and self._sources.path else ""

    def values(self) -> tuple[Value, ...]:
        """Return what the daemon runs with."""
        return values_shown(values_in(self._node.config, type(self._node.config)), self._origins, DEFAULT)

    def on_signal(self) -> None:
        """Reload in the background; a failure is logged."""
        if self._node.private or not self._node.is_started:
            logger.info("reload_ignored private=%s", self._node.private)
            return
        if not self._is_signalled:
            self._is_signalled = True
            self._node.spawn(self._reload_told(), "reloading the configuration")

    async def _reload_told(self) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        status = "configuration not reloaded: an internal error, see the log"
        try:
            done = await self.reload()
            status = f"configuration reloaded: {len(done.changes)} keys changed"
        except (ConfigError, UsageError) as error:
            status = f"configuration not reloaded: {_one_line(error.message)}"
        finally:  # it serves as before, whatever went wrong
            await in_thread(notify, f"READY=1\nSTATUS={status}", patient=True)

    async def reload(self) -> Reloaded:
        """Take what changed in the file.

        Raises:
            ConfigError: the file is wrong, or changes what needs a restart; nothing has changed.
            UsageError: this daemon has no file.
        """
        async with self._reloading:
            self._is_signalled = False
            try:
                resolved, found = await self._look()
                check_reloadable(found)
            except (ConfigError, UsageError) as error:
                logger.error("configuration_not_reloaded file=%s reason=%s", self.file, error)
                self._node.reporter.configuration(0, error)
                raise
            self._node.apply_config(resolved.taken())
            self._origins = dict(resolved.origins)
        self._node.reporter.configuration(len(found))
        logger.info(
            "configuration_reloaded file=%s changes=[%s]",
            self.file,
            "; ".join(str(change) for change in found),
        )
        return self._said(found)

    async def try_reload(self) -> Reloaded:
        """Return what `reload` would do; nothing changes."""
        if not self.file:
            return self._said(())
        try:
            _, found = await self._look()
            check_reloadable(found)
        except ConfigError as error:
            return self._said((), error)
        return self._said(found)

    async def _look(self) -> "tuple[Resolved[DaemonConfig], tuple[Change, ...]]":
        from ..config import resolve_config  # noqa: PLC0415  it imports this folder

        sources, node = self._sources, self._node
        if sources is None or not self.file:
            raise UsageError(
                "this daemon is private and has no configuration file",
                hint="it takes its configuration from the environment when it starts",
            )
        resolved = await in_thread(resolve_config, sources)
        after = resolved.taken()
        kind = type(node.config)
        return resolved, changes(values_in(node.config, kind), values_in(after, kind))

    def _said(self, found: tuple[Change, ...], error: ConfigError | None = None) -> Reloaded:
        return Reloaded(
            file=self.file,
            changes=found,
            problem="" if error is None else error.message,
            hint="" if error is None else error.hint,
            values=self.values(),
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())
