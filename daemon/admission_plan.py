"""How much memory an arena may take: the least of what the budget, the node and every ancestor cgroup have left. Pure.

Going over a cgroup's limit is a SIGKILL, not an error, so the answer is asked before every 256 MiB that are touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.errors import MemoryRefusedError

ALLOCATION_STEP_BYTES = 256 * 1024 * 1024
PAGE_BYTES = 4096
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """One thing that limits the arena, with what it has left."""

    source: str
    """/proc/meminfo or the cgroup's directory."""
    available_bytes: int


def parse_meminfo(text: str) -> MemoryBound:
    """Return MemAvailable of /proc/meminfo."""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return MemoryBound(source="/proc/meminfo", available_bytes=int(line.split()[1]) * 1024)
    raise MemoryRefusedError("/proc/meminfo has no MemAvailable", hint="everstep needs Linux 3.14 or newer")


def cgroup_bound(directory: str, limit_text: str, usage_text: str, stat_text: str) -> MemoryBound | None:
    """Return what a cgroup has left, or None when it sets no limit.

    Clean page cache (inactive_file) is given back under pressure and counts as available.
    """
    limit = limit_text.strip()
    if limit in ("", "max") or int(limit) >= _UNLIMITED_BYTES:
        return None
    fields = dict(line.split() for line in stat_text.splitlines() if len(line.split()) == 2)
    reclaimable = int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))
    return MemoryBound(source=directory, available_bytes=int(limit) - int(usage_text) + reclaimable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is for one more arena, by the bound that leaves least."""

    size_bytes: int
    """May be below 0."""
    why: str
    """Names the bound with its figures."""
    hint: str


def room_left(
    limit_bytes: int, bounds: Iterable[MemoryBound], *, reserve_bytes: int, promised_bytes: int
) -> Room:
    """Return what the daemon's own budget, of which `limit_bytes` are left, and every other bound have room for.

    `promised_bytes` were admitted for other arenas and are not touched yet: only the budget knows of them.
    """
    rooms = [
        Room(
            size_bytes=limit_bytes,
            why=f"the daemon's budget has {_mib(limit_bytes)} left",
            hint="raise memory.arena_max_bytes or lower slots",
        )
    ]
    for bound in bounds:
        left_bytes = bound.available_bytes - promised_bytes
        rooms.append(
            Room(
                size_bytes=left_bytes - reserve_bytes,
                why=f"{bound.source} has {_mib(left_bytes)} left of which {_mib(reserve_bytes)} are kept free",
                hint="free memory, raise the limit, or lower memory.reserve_bytes",
            )
        )
    return min(rooms, key=lambda room: room.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody would like to have; fewer slots do."""

    slot_size_bytes: int
    slot_count: int
    ring_size_bytes: int = 0
    """A ring of at least this does, too, where not even one slot fits; 0: it does not."""
    spare_size_bytes: int = 0
    """So much more in each slot, for a state that grows: as far as there is room, for which no slot is given up."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is wished for."""
        return (self.slot_size_bytes + self.spare_size_bytes) * self.slot_count

    @property
    def needed_size_bytes(self) -> int:
        """Bytes of all slots without anything to spare."""
        return self.slot_size_bytes * self.slot_count

    def text(self) -> str:
        """Return it for messages."""
        return f"an arena of {self.slot_count} slots of {_mib(self.slot_size_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What somebody gets."""

    slot_size_bytes: int
    slot_count: int
    is_ring: bool = False
    """One slot, smaller than was wished for."""
    reason: str = ""
    """Why it is less than what was wished for, and what to do; empty: it is not."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena."""
        return self.slot_size_bytes * self.slot_count


def grant(wish: Wish, room: Room, *, sharers: int = 1) -> Grant:
    """Return all that is wished for where so many `sharers` can have that, else what fits in an equal share.

    That is as many slots as possible, with as much to spare as fits beside them, or a ring as large as possible.

    Raises:
        MemoryRefusedError: neither one slot fits nor the least ring.
    """
    share_bytes = room.size_bytes // sharers
    fitting = min(wish.slot_count, share_bytes // wish.slot_size_bytes)
    slot_size_bytes = _with_spare(wish, share_bytes // fitting) if fitting >= 1 else 0
    if fitting == wish.slot_count:
        return Grant(slot_size_bytes=slot_size_bytes, slot_count=fitting)
    why = room.why if sharers == 1 else f"{room.why}, and {sharers} ranks share it"
    reason = f"{why}: {room.hint}"
    if fitting >= 1:
        return Grant(slot_size_bytes=slot_size_bytes, slot_count=fitting, reason=reason)
    pages_bytes = share_bytes // PAGE_BYTES * PAGE_BYTES
    if 0 < wish.ring_size_bytes <= pages_bytes:
        return Grant(slot_size_bytes=pages_bytes, slot_count=1, is_ring=True, reason=reason)
    least_bytes = wish.ring_size_bytes or wish.slot_size_bytes
    raise MemoryRefusedError(f"{wish.text()} needs at least {_mib(least_bytes)}, but {why}", hint=room.hint)


def _with_spare(wish: Wish, most_bytes: int) -> int:
    """Return the size of a slot that has `most_bytes`, which are enough for what is needed."""
    return min(wish.slot_size_bytes + wish.spare_size_bytes, most_bytes // PAGE_BYTES * PAGE_BYTES)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def admit(size_bytes: int, bounds: list[MemoryBound], *, reserve_bytes: int, what: str) -> None:
    """Return when `size_bytes` more fit under every bound with the reserve left.

    Raises:
        MemoryRefusedError: naming the tightest bound.
    """
    tightest = min(bounds, key=lambda bound: bound.available_bytes)
    if size_bytes + reserve_bytes > tightest.available_bytes:
        raise MemoryRefusedError(
            f"{what} needs {size_bytes / 2**20:.0f} MiB, but {tightest.source} has "
            f"{tightest.available_bytes / 2**20:.0f} MiB left of which {reserve_bytes / 2**20:.0f} MiB are kept free",
            hint="free memory, raise the limit, or lower memory.reserve_bytes",
        )


def cgroup_directories(proc_cgroup: str, mounts: dict[str, str]) -> list[tuple[str, bool]]:
    """Return (directory, is_v2) of the process's memory cgroup and all its ancestors, innermost first.

    `mounts` maps "cgroup2" and "memory" (v1) to their mount points; what is not mounted is left out.
    """
    found: list[tuple[str, bool]] = []
    for line in proc_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and "cgroup2" in mounts:
            found += [(directory, True) for directory in _ancestors(mounts["cgroup2"], path)]
        elif "memory" in controllers.split(",") and "memory" in mounts:
            found += [(directory, False) for directory in _ancestors(mounts["memory"], path)]
    return found


def parse_cgroup_mounts(proc_mounts: str) -> dict[str, str]:
    """Return where cgroup v2 and the v1 memory controller are mounted, from the text of /proc/self/mounts."""
    mounts: dict[str, str] = {}
    for line in proc_mounts.splitlines():
        fields = line.split()
        if fields[2] == "cgroup2":
            mounts.setdefault("cgroup2", fields[1])
        elif fields[2] == "cgroup" and "memory" in fields[3].split(","):
            mounts.setdefault("memory", fields[1])
    return mounts


def _ancestors(mount: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount + "".join(f"/{part}" for part in parts[:length]) for length in range(len(parts), -1, -1)]
