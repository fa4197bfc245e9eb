"""Which keys may change while a daemon runs, and what a reload would change. Pure.

A reload takes all that changed or nothing: a key that is not in the table needs a restart, and a file that changes one
is refused as a whole, so that a daemon always runs with one file as it was at one time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError
from .keys_plan import FREE, KeyPath, key_text
from .toml_format import shown, value_text

RELOADABLE: Mapping[KeyPath, str] = {
    ("daemon", "linger_s"): "for trainers that are lost from then on",
    ("daemon", "drain_s"): "at the next stop",
    ("memory", "arena_max_bytes"): "for arenas made from then on; those that are there stay",
    ("memory", "reserve_bytes"): "for arenas and caches made from then on",
    ("memory", "cache_max_bytes"): "for samples admitted from then on; what is cached stays",
    ("memory", "cache_user_max_bytes"): "for samples admitted from then on; what is cached stays",
    ("retention", "keep_last"): "at each run's next collection, after its next checkpoint",
    ("retention", "every_steps"): "at each run's next collection, after its next checkpoint",
    ("retention", "every"): "at each run's next collection, after its next checkpoint",
    ("verify", "after_s"): "for stores opened from then on",
    ("scrub", "every"): "at once; a scrub that goes on does so from where it is",
    ("scrub", "bandwidth_share"): "with the next checkpoint that is read",
    ("retire", "missing_after"): "at once",
    ("log", "level"): "at once",
    ("log", "form"): "at once",
    ("control", "clients", FREE): "with the next call; calls that run go on",
    ("quota", "memory_bytes"): "for arenas, caches and shared batches made from then on",
    ("quota", "slots"): "for arenas made from then on",
    ("quota", "disk_bytes"): "with the next checkpoint",
    ("quota", "connections"): "for connections made from then on",
    ("quota", "descriptors"): "for connections made from then on",
    ("quota", "calls"): "with the next call",
    ("quota", "calls_per_s"): "with the next call",
    ("quota", "frames_per_s"): "with the next frame",
    ("quota", "connects_per_s"): "with the next connection",
}
"""Every key that may change, and when it takes effect. `(table, FREE)` stands for all keys of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that a reload changes, or would."""

    key: str
    before: str
    """As TOML; empty: it was not set."""
    after: str
    takes_effect: str
    """When; empty: only after a restart."""

    @property
    def needs_restart(self) -> bool:
        """Tell whether a running daemon cannot take it."""
        return not self.takes_effect

    def __str__(self) -> str:
        return f"{self.key}: {self.before or 'not set'} -> {self.after or 'not set'}"


def changes(before: Mapping[KeyPath, object], after: Mapping[KeyPath, object]) -> tuple[Change, ...]:
    """Return what differs between two configurations, each the value of every key."""
    paths = [*after, *(path for path in before if path not in after)]
    return tuple(
        Change(
            key=key_text(path),
            before=_text(path, before.get(path)),
            after=_text(path, after.get(path)),
            takes_effect=RELOADABLE.get(path) or RELOADABLE.get((*path[:-1], FREE), ""),
        )
        for path in paths
        if before.get(path) != after.get(path)
    )


def check_reloadable(found: Sequence[Change]) -> None:
    """Raise ConfigError where something that changed needs a restart; it names all of that."""
    stuck = [change for change in found if change.needs_restart]
    if stuck:
        others = len(found) - len(stuck)
        also = f"; the {others} other changed keys are not taken either" if others else ""
        raise ConfigError(
            f"{', '.join(str(change) for change in stuck)}: only a restart changes that{also}",
            hint="restart the daemon, or take this back in the file and reload",
        )


def _text(path: KeyPath, value: object) -> str:
    return "" if value is None else value_text(shown(path, value))
