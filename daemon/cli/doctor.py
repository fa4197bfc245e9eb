"""Looking at the node and at directories for `everstep doctor`; what it means says doctor_plan.py. Changes nothing."""

import asyncio
import contextlib
import ctypes
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...checkpoint.engine import EngineConfig
from ...checkpoint.engine_choice import EngineRules, choose_engine
from ...checkpoint.linux import seal_size
from ...checkpoint.uring_probe import pin_limit_bytes, uring_refusal
from ...core.errors import EverstepError
from ...core.huge_pages import huge_page_bytes, take_huge_pages
from ...core.mapping import map_shared
from ...core.paths import data_socket_path
from ..devices.device_queue import QUEUE_LANES
from ..devices.drive_flush import look_at_flush
from ..node_memory import read_memory_bounds
from .doctor_plan import DirectoryFacts, NodeFacts, mount_of

_ALL = os.R_OK | os.W_OK | os.X_OK

COMPILED = ("copies", "tensor_facts")
"""Parts of the hook that are there where a compiler was when everstep was installed."""
HOOK = Path(__file__).parents[2] / "hook"


def look_at_node(
    directory_count: int, daemon: str, *, daemon_pid: int = 0, pinned_max_bytes: int = 0
) -> NodeFacts:
    """Return what is found on this node, to which a daemon would add so many directories.

    `daemon` says who answered on the user's socket; `daemon_pid`: who listens there, 0 for nobody; `pinned_max_bytes`:
    see `NodeFacts`.
    """
    socket_path, queue_depth = data_socket_path(), EngineConfig().queue_depth
    return NodeFacts(
        directory_count=directory_count,
        requests_per_device=QUEUE_LANES * queue_depth,
        aio_used=_number("/proc/sys/fs/aio-nr"),
        aio_max=_number("/proc/sys/fs/aio-max-nr"),
        uring_refusal=uring_refusal(queue_depth, QUEUE_LANES),
        pin_limit_bytes=_pin_limit_bytes(daemon_pid),
        pinned_max_bytes=pinned_max_bytes,
        memfd_problem=_memfd_problem(),
        has_huge_pages=_has_huge_pages(),
        not_compiled=_not_compiled(HOOK),
        memory=tuple(asyncio.run(read_memory_bounds())),
        socket_path=str(socket_path),
        socket_problem=_socket_problem(socket_path.parent),
        daemon=daemon,
        temporary_directory=tempfile.gettempdir(),
    )


def look_at_directories(
    directories: Sequence[Path], in_use: Mapping[Path, tuple[str, str]] | None = None
) -> list[DirectoryFacts]:
    """Return what is found in each directory; a file without a name is made there and is gone again.

    `in_use`: engine and reason of those that a daemon holds, by its configuration, which nobody here knows.
    """
    found = [_look(directory, in_use or {}) for directory in directories]
    return [_with_peer(facts, key, found) for facts, key in found]


def _with_peer(
    facts: DirectoryFacts, file_system_id: int | None, found: Sequence[tuple[DirectoryFacts, int | None]]
) -> DirectoryFacts:
    """Return the facts with the first other directory on the same file system."""
    peers = [other.path for other, key in found if key == file_system_id and other.path != facts.path]
    return replace(facts, shares_with=peers[0]) if peers and file_system_id is not None else facts


def _look(directory: Path, in_use: Mapping[Path, tuple[str, str]]) -> tuple[DirectoryFacts, int | None]:
    path = directory.absolute()
    try:
        path = path.resolve(strict=True)
        status, space = path.stat(), os.statvfs(path)
        if not stat.S_ISDIR(status.st_mode):
            return DirectoryFacts(path=str(path), problem=f"{path} is no directory"), None
        if not space.f_flag & os.ST_RDONLY and not os.access(path, _ALL, effective_ids=True):
            mode = stat.S_IMODE(status.st_mode)
            problem = f"it belongs to uid {status.st_uid} with mode {mode:04o}: uid {os.geteuid()} may not write there"
            return DirectoryFacts(path=str(path), problem=problem), None
        choice = choose_engine(path, EngineRules(lane_count=QUEUE_LANES))
    except FileNotFoundError:
        return DirectoryFacts(path=str(path), problem="there is no such directory", is_absent=True), None
    except OSError as error:
        return DirectoryFacts(path=str(path), problem=f"{error.strerror or error}"), None
    except EverstepError as error:
        return DirectoryFacts(path=str(path), problem=error.message), None
    alignment, flush = choice.alignment, look_at_flush(path)
    engine, reason = in_use.get(path, (choice.name, choice.reason))
    facts = DirectoryFacts(
        path=str(path),
        owner_uid=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        engine=engine,
        engine_reason=reason,
        alignment_bytes=max(alignment.memory_bytes, alignment.offset_bytes) if alignment else 0,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        write_cache=flush.write_cache,
        fsync_s=flush.fsync_s,
        mount=mount_of(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"), str(path)),
    )
    return facts, status.st_dev


def _pin_limit_bytes(pid: int) -> int | None:
    try:
        return pin_limit_bytes(pid)
    except OSError:  # it is another user's, or has just ended
        return pin_limit_bytes()


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except OSError:  # a kernel built without CONFIG_AIO
        return -1


def _memfd_problem() -> str:
    try:
        fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create failed: {error.strerror}"
    try:
        os.ftruncate(fd, 4096)
        seal_size(fd)
    except OSError as error:
        return f"a memfd cannot be sized and sealed: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def _not_compiled(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in COMPILED if not _can_be_loaded(folder / f"_{name}.abi3.so"))


def _can_be_loaded(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _has_huge_pages() -> bool:
    size_bytes = huge_page_bytes()
    if not size_bytes:
        return False
    try:
        fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            with map_shared(fd, size_bytes, is_writable=True) as octets:
                return take_huge_pages(fd, octets, 0, size_bytes)
        finally:
            os.close(fd)
    except OSError:  # which the check of shared memory says, or that of memory
        return False


def _socket_problem(directory: Path) -> str:
    """Return why the directory cannot hold our socket; one that is absent can be made."""
    with contextlib.suppress(FileNotFoundError):
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{directory} is no directory"
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            return (
                f"{directory} belongs to uid {status.st_uid} and has mode {mode:04o}, expected 0700 and yours"
            )
    return ""
