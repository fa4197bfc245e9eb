"""How much memory `io.register_arenas` may pin, for `everstep doctor`: each lane of a drive counts its own pages."""

import os
import tomllib
from collections.abc import Iterable

from ...checkpoint.engine import EngineKind
from ...core.errors import EverstepError
from ..config import DaemonConfig
from ..configuration.keys_plan import key_text
from ..configuration.sources import ConfigSources
from ..configuration.toml_format import Value
from ..devices.device_queue import QUEUE_LANES


def pinned_max_bytes(values: Iterable[Value]) -> int:
    """Return what the arenas of a daemon with this configuration may come to, in the kernel's count; 0: nothing."""
    given = {key_text(each.path): each.text for each in values}

    def value_of(key: str) -> int:
        return int(tomllib.loads(f"value = {given[key]}")["value"])

    return _pinned_bytes(value_of("memory.arena_max_bytes")) if value_of("io.register_arenas") else 0


def private_pinned_max_bytes() -> int:
    """Return the same of the private daemon that a trainer would start from this environment."""
    try:
        config = ConfigSources(path=None, environment=os.environ).resolve(DaemonConfig).taken()
    except EverstepError:  # its start says what is wrong with it
        return 0
    is_pinned = config.io.register_arenas and config.io.engine == EngineKind.URING.value
    return _pinned_bytes(config.memory.arena_max_bytes) if is_pinned else 0


def _pinned_bytes(arena_bytes: int) -> int:
    """A device has its own part of each arena, and each of its lanes may come to pin all of that."""
    return QUEUE_LANES * arena_bytes
