"""Where a debug bundle's parts come from: other commands of everstep, /proc, the daemon's log, its stacks.

Everything that may hang (a device, the daemon) is asked by a process of its own, which is left behind at the deadline.
"""

import contextlib
import http.client
import importlib.metadata
import itertools
import json
import os
import platform
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ...core.errors import EverstepError
from ...core.version import VERSION
from ..peer import identify
from ..stacks import stacks_path
from .bundle_plan import ITEM_BYTES_MAX, SECRET_BYTES_MIN

LISTED_MAX = 20_000
LOG_BYTES = 1024 * 1024
CONNECT_DEADLINE_S = 2.0
STACKS_DEADLINE_S = 2.0
_PROC_FILES = ("cmdline", "status", "limits", "smaps_rollup", "io", "cgroup", "mountinfo", "sched", "wchan")
_NODE_FILES = (
    "/proc/meminfo", "/proc/cpuinfo", "/proc/loadavg", "/proc/pressure/io", "/proc/pressure/memory", "/proc/mounts",
    "/proc/diskstats", "/proc/version", "/proc/sys/fs/aio-nr", "/proc/sys/fs/aio-max-nr", "/etc/os-release",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonProcess:
    """The process behind the socket."""

    pid: int
    pidfd: int


def daemon_process(socket_path: Path) -> DaemonProcess:
    """Return the process that listens there, also where it hangs: the kernel accepts connections for it.

    Raises:
        OSError, EverstepError: nobody listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_DEADLINE_S)
        sock.connect(str(socket_path))
        peer = identify(sock)
    if _is_everstep(peer.pid):
        return DaemonProcess(pid=peer.pid, pidfd=peer.pidfd)
    os.close(peer.pidfd)  # who made the socket: a service manager that listens for it
    pid = int(json.loads(socket_path.with_name("daemon.json").read_bytes())["pid"])
    if not _is_everstep(pid):
        raise OSError(f"pid {pid}, which daemon.json names, is no daemon of everstep")
    return DaemonProcess(pid=pid, pidfd=os.pidfd_open(pid))


def _is_everstep(pid: int) -> bool:
    try:
        return b"everstep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def versions() -> bytes:
    """Return what runs here."""
    names = (
        "grpcio",
        "protobuf",
        "msgspec",
        "cffi",
        "xxhash",
        "prometheus-client",
        "rich",
        "torch",
        "numpy",
        "zstandard",
    )
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    uname = platform.uname()
    facts = {
        "everstep": VERSION,
        "python": sys.version,
        "kernel": f"{uname.system} {uname.release} {uname.version} {uname.machine}",
        "uid": os.getuid(),
        "packages": found,
        "time_unix_s": time.time(),
    }
    return json.dumps(facts, indent=2).encode()


def environment(of: Path) -> bytes:
    """Return the variables of a process that are ours, or that a service manager gave it."""
    pairs = of.joinpath("environ").read_bytes().split(b"\0")
    wanted = (
        b"EVERSTEP_",
        b"NOTIFY_SOCKET=",
        b"FDSTORE=",
        b"LISTEN_",
        b"WATCHDOG_",
        b"SLURM_JOB_ID=",
        b"KUBERNETES_SERVICE_HOST=",
    )
    return b"\n".join(pair for pair in pairs if pair.startswith(wanted)) + b"\n"


def read_node() -> bytes:
    """Return what the kernel says of this node."""
    parts: list[bytes] = []
    for name in _NODE_FILES:
        try:
            content = Path(name).read_bytes()[:65536]
        except OSError as error:
            content = f"({error.strerror})\n".encode()
        parts.append(f"--- {name}\n".encode() + content)
    return b"".join(parts)


def read_process(pid: int) -> bytes:
    """Return what the kernel says of the daemon's process: limits, memory, I/O, open files, threads."""
    root = Path("/proc") / str(pid)
    parts = [f"--- {name}\n".encode() + _proc(root / name) for name in _PROC_FILES]
    parts.append(b"--- fd\n")
    parts += [f"{fd.name} -> {_link(fd)}\n".encode() for fd in sorted(root.joinpath("fd").iterdir())[:4096]]
    parts.append(b"--- task\n")
    for task in sorted(root.joinpath("task").iterdir())[:1024]:
        where = (_proc(task / each).decode(errors="replace").strip() for each in ("comm", "wchan", "syscall"))
        parts.append(f"{task.name} {' | '.join(where)}\n".encode())
    return b"".join(parts)


def _proc(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        return f"({error.strerror})\n".encode()


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError as error:
        return f"({error.strerror})"


def read_config_file(pid: int) -> bytes:
    """Return the configuration file that a node's daemon was started with: also where it cannot say what it runs with.

    Raises:
        OSError: it cannot be read, or there is none.
    """
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    for before, word in itertools.pairwise(words):
        if before == b"--config":
            folder = Path(f"/proc/{pid}/cwd").readlink()
            return (folder / os.fsdecode(word)).read_bytes()[: ITEM_BYTES_MAX + 1]
    raise OSError("a private daemon has none")


def read_stacks(process: DaemonProcess, socket_path: Path) -> bytes:
    """Return the stacks of all threads, which the daemon writes when it is sent SIGUSR1, even where its loop hangs.

    Raises:
        OSError: it does not know that signal, or is somebody else's.
    """
    caught = next(
        line
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    )
    if not int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
        raise OSError(f"pid {process.pid} does not write its stacks: is it an older version?")
    path = stacks_path(socket_path)
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        signal.pidfd_send_signal(process.pidfd, signal.SIGUSR1)
        until_s = time.monotonic() + STACKS_DEADLINE_S
        said = b""
        while time.monotonic() < until_s:
            more = file.read()
            said += more
            if said and not more:
                return said
            select.select([process.pidfd], [], [], 0.05)
    raise OSError(f"nothing was written to {path} within {STACKS_DEADLINE_S:.0f} s (it began at {begin})")


def read_log(process: DaemonProcess | None, socket_path: Path) -> bytes:
    """Return the end of the daemon's log: the file that it writes to, the journal, or a private daemon's file.

    Raises:
        OSError: there is none that can be read.
    """
    beside = socket_path.with_name("daemon.log")
    if process is not None:
        output = Path(f"/proc/{process.pid}/fd/2")
        target = _link(output)
        if stat.S_ISREG(output.stat().st_mode):
            return _end_of(output)
        if not beside.exists():
            return _journal(process.pid, target)
    return _end_of(beside)


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - LOG_BYTES))
        return file.read(LOG_BYTES)


def _journal(pid: int, target: str) -> bytes:
    command = ["journalctl", f"_PID={pid}", "--no-pager", "--lines=5000", "--output=short-iso"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=10)
    except FileNotFoundError as error:
        raise OSError(f"the log goes to {target}, and there is no journalctl here") from error
    except subprocess.TimeoutExpired as error:
        raise OSError("journalctl did not answer within 10 s") from error
    if done.returncode or not done.stdout:
        raise OSError(
            f"the log goes to {target}: {done.stderr.decode(errors='replace').strip() or 'journal is empty'}"
        )
    return done.stdout[-LOG_BYTES:]


def read_metrics(socket_path: Path) -> bytes:
    """Return what a scrape gives.

    Raises:
        OSError, ValueError: no daemon has said where, or it does not answer.
    """
    facts = json.loads(socket_path.with_name("daemon.json").read_bytes())
    port = int(facts["metrics_port"])
    if not port:
        raise OSError("the daemon served no metrics when it started")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read(ITEM_BYTES_MAX + 1)
    except http.client.HTTPException as error:
        raise OSError(
            f"port {port} does not answer in plain HTTP, as where metrics have a certificate"
        ) from error


def list_files(directories: Sequence[Path]) -> bytes:
    """Return the names, sizes and times of what lies in directories; no content."""
    lines: list[str] = []
    for root in directories:
        lines.append(f"--- {root}")
        for folder, names, files in os.walk(root):
            names.sort()
            for name in sorted((*names, *files)):
                path = Path(folder) / name
                try:
                    status = path.lstat()
                except OSError as error:
                    lines.append(f"? {path.relative_to(root)} ({error.strerror})")
                    continue
                lines.append(
                    f"{stat.filemode(status.st_mode)} {status.st_uid} {status.st_size} {status.st_mtime:.3f}"
                    f" {str(path.relative_to(root))!r}"
                )
            if len(lines) > LISTED_MAX:
                lines.append(f"... more than {LISTED_MAX} entries")
                return ("\n".join(lines) + "\n").encode()
    return ("\n".join(lines) + "\n").encode()


def secret_files(configuration: str) -> list[str]:
    """Return the files with secrets that a configuration (TOML) names."""
    try:
        tables = tomllib.loads(configuration).values()
    except tomllib.TOMLDecodeError:
        return []
    found = [
        pair for table in tables if isinstance(table, dict) for pair in cast(dict[str, object], table).items()
    ]
    words = ("token", "secret", "password")
    return [
        value
        for key, value in found
        if key.endswith("_file") and isinstance(value, str) and value and any(word in key for word in words)
    ]


def secrets_in(paths: Sequence[str]) -> list[str]:
    """Return the lines of files with secrets, as far as this user may read them."""
    found: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found += [line.strip() for line in Path(path).read_text().splitlines()]
    return [each for each in found if len(each) >= SECRET_BYTES_MIN]


def _refusal(said: bytes) -> str:
    """Return why a command refused, where it answered with that as JSON; empty where it did not."""
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


class Asked:
    """A command of everstep that runs by itself; its answer goes to a file that has no name."""

    def __init__(self, *arguments: str) -> None:
        self.output, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in answer
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "everstep.daemon.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,
        )

    def answer(self, until_s: float) -> bytes:
        """Return what it printed, by the monotonic clock's `until_s`.

        Raises:
            TimeoutError: it did not end in time; it is killed, and not waited for: it may hang in the kernel.
            EverstepError: it failed and printed nothing.
        """
        with self.output, self.errors:
            try:
                code = self._process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.5)
                raise TimeoutError("it did not answer in time") from None
            for file in (self.output, self.errors):
                file.seek(0)
            said = self.output.read(ITEM_BYTES_MAX + 1)
            if code and (refusal := _refusal(said)):
                raise EverstepError(refusal)
            if code and not said.strip():
                raise EverstepError(
                    self.errors.read(2000).decode(errors="replace").strip() or f"exit status {code}"
                )
            return said
