"""What a process holds and has used, read from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBy:
    """One moment of a process."""

    anonymous_bytes: int
    """Private memory: arenas, which are memfds, are apart."""
    descriptors: int
    threads: int
    memfds: int
    aio_contexts: int
    wakeups: int
    """How often its threads have gone to sleep of themselves since they began."""
    cpu_ticks: int
    """Used since it began, in 1/100 s as a rule (SC_CLK_TCK)."""


def held_by(pid: int) -> HeldBy:
    """Return what process `pid` holds now."""
    folder = Path(f"/proc/{pid}")
    targets = [_target(f"{folder}/fd/{name}") for name in os.listdir(folder / "fd")]  # noqa: PTH208
    tasks = [_status(task / "status") for task in (folder / "task").iterdir()]
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return HeldBy(
        anonymous_bytes=int(_status(folder / "status")["RssAnon"].split()[0]) * 1024,
        descriptors=len(targets),
        threads=len(tasks),
        memfds=sum(target.startswith("/memfd:") for target in targets),
        aio_contexts=sum("/[aio]" in line for line in (folder / "maps").read_text().splitlines()),
        wakeups=sum(int(task.get("voluntary_ctxt_switches", 0)) for task in tasks),
        cpu_ticks=int(fields[11]) + int(fields[12]),
    )


def _status(path: Path) -> dict[str, str]:
    try:
        return dict(line.split(":", 1) for line in path.read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
        return {}


def _target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except FileNotFoundError:  # closed meanwhile
        return ""
