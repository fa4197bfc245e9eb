"""What the descriptors that a service manager hands to this process are, by their names. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_FD = 3
_STORED = re.compile(r"everstep-(arena|state)-([0-9a-f]{32})")
DATA_SOCKET = "everstep-data"
"""FileDescriptorName= of the unit of the data socket."""


@dataclass(slots=True, kw_only=True)
class StoredPair:
    """What was stored of one arena; a part is missing where the daemon before died between the two."""

    arena: int | None = None
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """Descriptors by what they are."""

    sockets: list[int] = field(default_factory=list[int])
    """That may be the data socket: by this name, or of a unit that gives none."""
    arenas: dict[str, StoredPair] = field(default_factory=dict[str, StoredPair])
    """By token."""
    unknown: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Name and descriptor of what this daemon never stored, or of a second one of that name."""


def arena_name(token: str) -> str:
    """Return the name under which an arena is stored."""
    return f"everstep-arena-{token}"


def state_name(token: str) -> str:
    """Return the name under which an arena's state is stored."""
    return f"everstep-state-{token}"


def sort_inherited(names: Sequence[str]) -> Inherited:
    """Return what the descriptors from 3 on are."""
    found = Inherited()
    for fd, name in enumerate(names, FIRST_FD):
        match = _STORED.fullmatch(name)
        if match is None:
            (
                found.sockets.append(fd)
                if name == DATA_SOCKET or name.endswith(".socket")
                else found.unknown.append((name, fd))
            )
            continue
        pair = found.arenas.setdefault(match[2], StoredPair())
        if getattr(pair, match[1]) is not None:
            found.unknown.append((name, fd))
        elif match[1] == "arena":
            pair.arena = fd
        else:
            pair.state = fd
    return found


def names_of(count_text: str, names_text: str) -> list[str]:
    """Return the names of so many descriptors, from LISTEN_FDS and LISTEN_FDNAMES; ValueError for no count."""
    count = int(count_text)
    if not 0 <= count <= 1 << 16:
        raise ValueError(f"LISTEN_FDS is {count}")
    names = names_text.split(":") if names_text else []
    return [names[index] if index < len(names) else "unknown" for index in range(count)]
