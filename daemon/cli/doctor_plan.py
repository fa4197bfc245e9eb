"""What `everstep doctor` thinks of what was found: one list of checks for the node, one for each directory. Pure.

A check takes facts and returns a finding, with what to do unless all is well. Another check is another line in a list.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...checkpoint.deal_plan import SPACE_MARGIN_BYTES
from ...core.sizes import size_text
from ..admission_plan import MemoryBound
from ..devices.flush_plan import UNKNOWN, is_doubtful
from .doctor_host_plan import HOST_CHECKS, HostFacts
from .opinions import Health, Opinion
from .opinions import fail_opinion as _fail
from .opinions import ok_opinion as _ok
from .opinions import warn_opinion as _warn

SOCKET_PATH_BYTES_MAX = 107
"""struct sockaddr_un holds 108, one of them the zero at the end."""
SOCKET_ROOM_BYTES = 55
"""What Python's multiprocessing and our tests make below the temporary directory takes up to so many bytes."""

MEMORY_LOW_BYTES = 2 * 1024**3
FREE_LOW_BYTES = 1024**3
FREE_LOW_SHARE = 0.05

_TESTED_FILE_SYSTEMS = ("ext4", "xfs")
_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")
_WITHOUT_BARRIERS = ("nobarrier", "barrier=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Where a directory is mounted."""

    kind: str
    """Of the file system: ext4, xfs, …"""
    options: tuple[str, ...]
    """Of the mount and of the file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What was found on the node."""

    directory_count: int
    """Directories that no daemon holds yet."""
    requests_per_device: int
    """What a daemon reserves of kernel AIO for each."""
    aio_used: int
    aio_max: int
    """fs.aio-nr and fs.aio-max-nr; -1 where the kernel does not say."""
    uring_refusal: str
    """Empty: this process may use io_uring."""
    pin_limit_bytes: int | None
    """RLIMIT_MEMLOCK of the daemon that answers, else of this process; None: no limit holds it."""
    pinned_max_bytes: int
    """What the arenas may come to, as the kernel counts them, where `io.register_arenas` counts; 0: it does not."""
    memfd_problem: str
    """Why no memory can be shared; empty: it can."""
    has_huge_pages: bool
    """Shared memory comes in huge pages where it is asked for so."""
    not_compiled: tuple[str, ...]
    """Parts of the hook that training does without."""
    memory: tuple[MemoryBound, ...]
    socket_path: str
    socket_problem: str
    """Why the socket's directory cannot be used; empty: it can, or can be made."""
    daemon: str
    """What answered on the socket; empty: nobody."""
    temporary_directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """What was found in a directory, or why nothing could be."""

    path: str
    problem: str = ""
    """Why it cannot be looked at or written to; then the rest is worthless."""
    owner_uid: int = 0
    mode: int = 0o700
    engine: str = ""
    engine_reason: str = ""
    alignment_bytes: int = 0
    """What direct I/O asks of offsets and lengths; 0: files go through the page cache."""
    free_bytes: int = 0
    total_bytes: int = 0
    mount: Mount = Mount(kind="", options=())
    shares_with: str = ""
    """Another one of the directories, on the same file system."""
    is_absent: bool = False
    write_cache: str = UNKNOWN
    """As the kernel sees the drive's: "write back" is lost with the power unless flushed; empty: it does not say."""
    fsync_s: float | None = None
    """What making 4 KiB durable took, the fastest of a few times; None: not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check says of the node, or of a directory."""

    check: str
    place: str
    """The directory; empty: the node."""
    health: Health
    found: str
    advice: str


def judge_host(host: HostFacts) -> list[Finding]:
    """Return a finding of each check of the machine and of the daemon's surroundings."""
    return [_finding(name, "", check(host)) for name, check in HOST_CHECKS]


def judge(node: NodeFacts, directories: Sequence[DirectoryFacts]) -> list[Finding]:
    """Return a finding of each check: the node's first, then each directory's; of an unusable one only that."""
    return [_finding(name, "", check(node)) for name, check in NODE_CHECKS] + judge_directories(directories)


def judge_directories(directories: Sequence[DirectoryFacts]) -> list[Finding]:
    """Return a finding of each check of each directory; of an unusable one only that."""
    findings: list[Finding] = []
    for facts in directories:
        checks = DIRECTORY_CHECKS[:1] if facts.problem else DIRECTORY_CHECKS
        findings += [_finding(name, facts.path, check(facts)) for name, check in checks]
    return findings


def worst(findings: Sequence[Finding]) -> Health:
    """Return the worst that was found."""
    order = (Health.UNKNOWN, Health.OK, Health.WARN, Health.FAIL)
    return max((finding.health for finding in findings), key=order.index, default=Health.OK)


def _finding(name: str, place: str, opinion: Opinion) -> Finding:
    return Finding(check=name, place=place, health=opinion.health, found=opinion.found, advice=opinion.advice)


# --- the node ---------------------------------------------------------------------------------------------------------


def _aio(facts: NodeFacts) -> Opinion:
    if facts.aio_max < 0:
        return _warn("this kernel has no AIO", "nothing, where io_uring is allowed; else writes are slower")
    found = f"{facts.aio_used} of {facts.aio_max} requests are reserved"
    each = facts.requests_per_device
    if facts.aio_max - facts.aio_used < each * facts.directory_count:
        advice = f"each device reserves {each}: sysctl fs.aio-max-nr={max(1048576, 4 * facts.aio_max)}"
        return _warn(found, advice)
    return _ok(found)


def _uring(facts: NodeFacts) -> Opinion:
    if facts.uring_refusal:
        return _warn(f"no io_uring: {facts.uring_refusal}", "nothing, while kernel AIO is there")
    return _ok("this process may use it")


def _memlock(facts: NodeFacts) -> Opinion:
    if facts.pin_limit_bytes is None:
        return _ok("any amount may be locked")
    found = f"{facts.pin_limit_bytes} bytes may be locked (RLIMIT_MEMLOCK)"
    if not facts.pinned_max_bytes:
        return _ok(f"{found}; only io.register_arenas needs more: LimitMEMLOCK= of the unit, or ulimit -l")
    if facts.pin_limit_bytes >= facts.pinned_max_bytes:
        return _ok(f"{found}, enough for all arenas (io.register_arenas)")
    return _warn(
        f"{found}, and io.register_arenas is on: what arenas have beyond that is pinned anew for each block",
        "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited before the start; else io.register_arenas = false",
    )


def _shared_memory(facts: NodeFacts) -> Opinion:
    if facts.memfd_problem:
        return _fail(facts.memfd_problem, "allow memfd_create (a seccomp filter may forbid it)")
    return _ok("memfds can be made and sealed; the size of /dev/shm does not matter")


def _huge_pages(facts: NodeFacts) -> Opinion:
    if facts.has_huge_pages:
        return _ok("arenas get them")
    return _warn(
        "none: arenas are in ordinary pages, which take longer to copy and to write",
        "Linux 6.1 or newer, huge pages of 32 MiB at most, no `deny` in"
        " /sys/kernel/mm/transparent_hugepage/shmem_enabled; memory may be short just now, or in pieces",
    )


def _compiled(facts: NodeFacts) -> Opinion:
    if facts.not_compiled:
        return _warn(
            f"{' and '.join(facts.not_compiled)} not compiled here: snapshots take longer",
            "install a C compiler, then everstep again; or a wheel that was built where there is one",
        )
    return _ok("all are there")


def _memory(facts: NodeFacts) -> Opinion:
    tightest = min(facts.memory, key=lambda bound: bound.available_bytes)
    found = f"{tightest.available_bytes / 2**30:.1f} GiB left by {tightest.source}"
    if tightest.available_bytes < MEMORY_LOW_BYTES:
        return _warn(
            found, "an arena takes two slots, each as large as the state: raise the limit or free memory"
        )
    return _ok(found)


def _socket(facts: NodeFacts) -> Opinion:
    length = len(facts.socket_path.encode())
    if length > SOCKET_PATH_BYTES_MAX:
        return _fail(
            f"{facts.socket_path} has {length} bytes", "set EVERSTEP_SOCKET to a path of at most 107"
        )
    if facts.socket_problem:
        return _fail(facts.socket_problem, "remove that directory, or set EVERSTEP_SOCKET")
    return _ok(facts.socket_path)


def _daemon(facts: NodeFacts) -> Opinion:
    return _ok(facts.daemon or "none answers; attach() starts a private one")


def _temporary(facts: NodeFacts) -> Opinion:
    length = len(facts.temporary_directory.encode())
    if length > SOCKET_PATH_BYTES_MAX - SOCKET_ROOM_BYTES:
        return _warn(
            f"{facts.temporary_directory} has {length} bytes",
            f"loader workers may be unable to open sockets there: set TMPDIR to a path of at most "
            f"{SOCKET_PATH_BYTES_MAX - SOCKET_ROOM_BYTES}",
        )
    return _ok(facts.temporary_directory)


NODE_CHECKS: tuple[tuple[str, Callable[[NodeFacts], Opinion]], ...] = (
    ("kernel AIO", _aio),
    ("io_uring", _uring),
    ("locked memory", _memlock),
    ("shared memory", _shared_memory),
    ("huge pages", _huge_pages),
    ("compiled parts", _compiled),
    ("memory", _memory),
    ("socket", _socket),
    ("daemon", _daemon),
    ("temporary directory", _temporary),
)


# --- a directory ------------------------------------------------------------------------------------------------------


def _usable(facts: DirectoryFacts) -> Opinion:
    if facts.is_absent:
        return _fail(facts.problem, f"mount the drive, then mkdir -p -m 0700 {facts.path}")
    if facts.problem:
        return _fail(
            facts.problem, "name a directory on the drive that you may write to; see dmesg for errors"
        )
    if facts.mode & 0o077:
        return _warn(
            f"mode {facts.mode:04o}: other users of the node may look into it", f"chmod 0700 {facts.path}"
        )
    return _ok(f"uid {facts.owner_uid}, mode {facts.mode:04o}")


def _engine(facts: DirectoryFacts) -> Opinion:
    found = f"{facts.engine}: {facts.engine_reason}"
    if facts.engine == "plain":
        return _warn(
            found, "one block after the other goes through the page cache: slower, and it takes memory"
        )
    return _ok(found)


def _direct(facts: DirectoryFacts) -> Opinion:
    if not facts.alignment_bytes:
        return _warn(
            "no direct I/O", "use ext4 or XFS, Linux 6.1 or newer, without encryption or data=journal"
        )
    if 4096 % facts.alignment_bytes:
        return _warn(
            f"direct I/O in multiples of {facts.alignment_bytes} bytes, which segments are not aligned to",
            "files there go through the page cache; use a device with sectors of 4096 bytes or less",
        )
    return _ok(f"multiples of {facts.alignment_bytes} bytes")


def _file_system(facts: DirectoryFacts) -> Opinion:
    kind = facts.mount.kind
    if kind in _TESTED_FILE_SYSTEMS:
        return _ok(kind)
    if kind in _IN_MEMORY:
        return _warn(
            f"{kind} is memory", "nothing survives a loss of power there: name a directory on a drive"
        )
    if kind in _OVER_A_NETWORK:
        return _warn(f"{kind} is a network's", "locks and fsync differ there: use drives of this node")
    return _warn(f"{kind or 'unknown'}", "tested are ext4 and XFS; others may lose what they acknowledged")


def _options(facts: DirectoryFacts) -> Opinion:
    options = facts.mount.options
    without = [option for option in options if option in _WITHOUT_BARRIERS]
    if "ro" in options:
        return _fail(
            "mounted read-only", "remount it; a file system turns itself read-only after errors: dmesg"
        )
    if without:
        return _fail(
            f"mounted with {without[0]}",
            "a loss of power takes acknowledged checkpoints: remount with barriers",
        )
    if "discard" in options:
        return _warn(
            "mounted with discard",
            "removing checkpoints holds up the fsync of others: remount without it and enable fstrim.timer",
        )
    if "strictatime" in options:
        return _warn(
            "mounted with strictatime", "each read is a write, too: remount with noatime or relatime"
        )
    return _ok(", ".join(option for option in options if not option.startswith("seclabel")))


def _space(facts: DirectoryFacts) -> Opinion:
    found = f"{size_text(facts.free_bytes)} of {size_text(facts.total_bytes)} free"
    low_bytes = max(FREE_LOW_BYTES, math.floor(FREE_LOW_SHARE * facts.total_bytes))
    if facts.free_bytes <= SPACE_MARGIN_BYTES:
        kept = size_text(SPACE_MARGIN_BYTES)
        return _fail(found, f"nothing is written there, because {kept} stay free: free space")
    if facts.free_bytes < low_bytes:
        return _warn(found, "free space, or lower retention.keep_last")
    return _ok(found)


def _write_cache(facts: DirectoryFacts) -> Opinion:
    if facts.fsync_s is None:
        return _ok(facts.write_cache)
    found = f"{facts.write_cache}; fsync of 4 KiB takes {facts.fsync_s * 1e6:.0f} µs"
    if is_doubtful(facts.write_cache, facts.fsync_s):
        return _warn(
            found,
            "no drive empties a volatile cache so fast: unless it has a capacitor or battery, it or what is below it"
            " may lose what it acknowledged",
        )
    return _ok(found)


def _shared(facts: DirectoryFacts) -> Opinion:
    if facts.shares_with:
        return _warn(
            f"on the same file system as {facts.shares_with}",
            "one directory for each drive is what is faster",
        )
    return _ok("on a file system of its own")


DIRECTORY_CHECKS: tuple[tuple[str, Callable[[DirectoryFacts], Opinion]], ...] = (
    ("directory", _usable),
    ("engine", _engine),
    ("direct I/O", _direct),
    ("file system", _file_system),
    ("mount options", _options),
    ("write cache", _write_cache),
    ("free space", _space),
    ("drive", _shared),
)


def mount_of(mountinfo: str, path: str) -> Mount:
    """Return the mount that an absolute path without links lies in, from the text of /proc/self/mountinfo.

    The longest mount point that is the path or above it; of several there, the last one hides the others.
    """
    found, longest = Mount(kind="", options=()), -1
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            options = tuple(dict.fromkeys((*fields[5].split(","), *rest[2].split(","))))
            found, longest = Mount(kind=rest[0], options=options), len(point)
    return found


def _unescaped(text: str) -> str:
    r"""The kernel writes space, tab, newline and backslash as \040, \011, \012, \134."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
