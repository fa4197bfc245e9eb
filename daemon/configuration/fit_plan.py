"""What a configuration asks for and the machine does not give. Pure: it takes what was found."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.sizes import size_text

SECRET_WORDS = ("token", "secret", "password", "key_file")
"""In the name of a key whose file nobody else may read."""
_GROUP_AND_OTHERS = 0o077


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file that a key names."""

    key: str
    path: str
    problem: str = ""
    """Why it cannot be read; empty: it can."""
    mode: int = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Where a key says that the daemon listens."""

    key: str
    place: str
    """`127.0.0.1:9464`."""
    problem: str = ""
    """Why nobody can listen there now; empty: one can."""
    is_ours: bool = False
    """The daemon of this configuration does so already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was found."""

    total_bytes: int
    """Memory of the machine, or of the tightest cgroup."""
    available_bytes: int
    config_path: str
    config_mode: int
    files: Sequence[NamedFile] = ()
    ports: Sequence[Port] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """One thing that does not fit."""

    key: str
    is_fatal: bool
    """The daemon would not start, or a promise would not hold."""
    found: str
    advice: str


def misfits(
    facts: MachineFacts, *, reserve_bytes: int, arena_max_bytes: int, cache_max_bytes: int
) -> list[Misfit]:
    """Return what the machine does not give."""
    found = [_reserve(facts, reserve_bytes)]
    bounds = (("memory.arena_max_bytes", arena_max_bytes), ("memory.cache_max_bytes", cache_max_bytes))
    found += [_bound(facts, key, size_bytes) for key, size_bytes in bounds]
    found.append(_writable(facts))
    found += [_file(each) for each in facts.files]
    found += [_port(each) for each in facts.ports]
    return [each for each in found if each is not None]


def _reserve(facts: MachineFacts, reserve_bytes: int) -> Misfit | None:
    if reserve_bytes < facts.total_bytes:
        return None
    return Misfit(
        key="memory.reserve_bytes",
        is_fatal=True,
        found=f"{size_text(reserve_bytes)} stay free of {size_text(facts.total_bytes)}: no arena would ever fit",
        advice="lower it below the memory that there is",
    )


def _bound(facts: MachineFacts, key: str, size_bytes: int) -> Misfit | None:
    is_set = size_bytes < 1 << 60
    if not is_set or size_bytes <= facts.total_bytes:
        return None
    return Misfit(
        key=key,
        is_fatal=False,
        found=f"{size_text(size_bytes)} of {size_text(facts.total_bytes)}: it bounds nothing",
        advice="give what the daemon may take, or leave it out: it never takes more than the node has left",
    )


def _writable(facts: MachineFacts) -> Misfit | None:
    if not facts.config_mode & 0o022:
        return None
    return Misfit(
        key="",
        is_fatal=False,
        found=f"{facts.config_path} has mode {facts.config_mode:04o}: others may change what the daemon does",
        advice=f"chmod go-w {facts.config_path}",
    )


def _file(file: NamedFile) -> Misfit | None:
    if file.problem:
        return Misfit(
            key=file.key,
            is_fatal=True,
            found=f"{file.path}: {file.problem}",
            advice="make it, or name another",
        )
    if any(word in file.key for word in SECRET_WORDS) and file.mode & _GROUP_AND_OTHERS:
        said = f"{file.path} has mode {file.mode:04o}: others may read the secret"
        return Misfit(key=file.key, is_fatal=True, found=said, advice=f"chmod 0600 {file.path}")
    return None


def _port(port: Port) -> Misfit | None:
    if not port.problem or port.is_ours:
        return None
    return Misfit(
        key=port.key,
        is_fatal=True,
        found=f"nobody can listen on {port.place}: {port.problem}",
        advice="stop who does (`ss -ltnp`), or give another port",
    )
