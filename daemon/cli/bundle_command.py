"""`everstep debug`: everything that a report of a problem needs, in one file."""

import argparse
import contextlib
import io
import json
import os
import socket
import tarfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import EverstepError, StorageError, UsageError
from ...core.paths import data_socket_path
from ...core.sizes import size_text
from ...core.version import VERSION
from . import bundle_sources as sources
from .bundle_plan import Item, Missing, cut, fitting, redacted
from .output import EXIT_DONE, Output

ASKED: dict[str, tuple[str, ...]] = {
    "doctor.json": ("doctor", "--json"),
    "status.json": ("status", "--json"),
    "devices.json": ("device", "ls", "--json"),
    "checkpoints.json": ("ls", "--json"),
    "caches.json": ("cache", "list", "--json"),
    "configuration.toml": ("config", "show", "--origin", "--defaults"),
    "events.jsonl": ("events", "--json"),
    "quotas.json": ("quota", "--json"),
    "reload.json": ("config", "reload", "--dry-run", "--json"),
}
"""The commands of everstep whose answers are in the bundle."""


class Gathering:
    """What was had so far, and what could not be."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.missing: list[Missing] = []

    def add(self, name: str, read: Callable[[], bytes], *, keep_end: bool = False) -> None:
        """Take what `read` returns, or say why it cannot be had."""
        began_s = time.monotonic()
        try:
            content = read()
        except (OSError, EverstepError, ValueError, KeyError, StopIteration) as error:
            self.missing.append(Missing(name=name, reason=_reason(error)))
        else:
            self.items.append(cut(name, content, keep_end=keep_end, took_s=time.monotonic() - began_s))


def run(arguments: argparse.Namespace) -> int:
    """Carry out `everstep debug`."""
    if arguments.part == "files":
        print(sources.list_files(arguments.directory).decode(errors="surrogateescape"), end="")
        return EXIT_DONE
    if not 0 < arguments.deadline_s <= 600:
        raise UsageError(f"--deadline-s is {arguments.deadline_s}", hint="above 0, up to 600")
    path: Path = arguments.file or Path(_default_name())
    with _whole(path) as file:
        items, missing = _redacted(_gather(arguments))
        file.write(_archive(items, missing))
        size_bytes = file.tell()
    answer = {
        "file": str(path.absolute()),
        "size_bytes": size_bytes,
        "items": [item.name for item in items],
        "missing": missing,
    }

    def draw(console: Any) -> None:
        console.print(
            f"{path.absolute()}: {size_text(size_bytes)}, {len(items)} files", soft_wrap=True, markup=False
        )
        for each in missing:
            console.print(f"  without {each.name}: {each.reason}", soft_wrap=True, markup=False)
        console.print("Look through it before you send it: names of runs, hosts and directories are in it.")

    Output(as_json=arguments.json).show(answer, draw)
    return EXIT_DONE


def _default_name() -> str:
    host = "".join(each if each.isalnum() or each in "-." else "-" for each in socket.gethostname())
    return f"everstep-debug-{host}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.zst"


@contextlib.contextmanager
def _whole(path: Path) -> Generator[io.BufferedWriter]:
    """Give a new file, which is there after the block only if all of it is.

    Raises:
        UsageError: it cannot be made.
        StorageError: it cannot be written.
    """
    file = _created(path)
    try:
        with file:
            yield file
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {path}: {error.strerror}", hint="name a file where there is room for 32 MiB"
            ) from error
        raise


def _created(path: Path) -> io.BufferedWriter:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o600), "wb")
    except OSError as error:
        raise UsageError(
            f"cannot make {path}: {error.strerror}",
            hint="name a file that is not there yet, where you may write",
        ) from error


def _gather(arguments: argparse.Namespace) -> Gathering:
    """Return all parts. What can hang runs beside the rest, until the deadline."""
    until_s = time.monotonic() + arguments.deadline_s
    gathered, socket_path = Gathering(), data_socket_path()
    asked = {name: sources.Asked(*words) for name, words in ASKED.items()}
    gathered.add("versions.json", sources.versions)
    gathered.add("node.txt", sources.read_node)
    gathered.add("environment.txt", lambda: sources.environment(Path("/proc/self")))
    process = _process(gathered, socket_path)
    if process is not None:
        gathered.add("daemon/process.txt", lambda: sources.read_process(process.pid))
        gathered.add("daemon/environment.txt", lambda: sources.environment(Path(f"/proc/{process.pid}")))
        gathered.add("daemon/file.toml", lambda: sources.read_config_file(process.pid))
        gathered.add("daemon/stacks.txt", lambda: sources.read_stacks(process, socket_path), keep_end=True)
    gathered.add("daemon/log.txt", lambda: sources.read_log(process, socket_path), keep_end=True)
    gathered.add("daemon/daemon.json", socket_path.with_name("daemon.json").read_bytes)
    gathered.add("daemon/metrics.txt", lambda: sources.read_metrics(socket_path))
    for name, each in asked.items():
        gathered.add(name, lambda each=each: each.answer(until_s))
    directories = [str(Path(each).absolute()) for each in arguments.storage] or _directories(gathered.items)
    listing = sources.Asked("debug", "files", *directories)
    gathered.add("files.txt", lambda: listing.answer(max(until_s, time.monotonic() + 2)))
    return gathered


def _process(gathered: Gathering, socket_path: Path) -> "sources.DaemonProcess | None":
    try:
        return sources.daemon_process(socket_path)
    except (OSError, EverstepError, ValueError, KeyError) as error:
        gathered.missing.append(Missing(name="daemon/", reason=f"{socket_path}: {_reason(error)}"))
        return None


def _directories(items: Sequence[Item]) -> list[str]:
    """Return the directories of the stores that the daemon has open, by its status."""
    status = next((item.content for item in items if item.name == "status.json"), b"{}")
    try:
        stores: Any = json.loads(status).get("stores", [])
        return [device["path"] for store in stores for device in store["devices"]]
    except (ValueError, KeyError, TypeError):
        return []


def _redacted(gathered: Gathering) -> tuple[list[Item], list[Missing]]:
    values = next((item.content for item in gathered.items if item.name == "configuration.toml"), b"")
    secrets = sources.secrets_in(sources.secret_files(values.decode(errors="replace")))
    items, too_much = fitting(
        [
            Item(
                name=item.name,
                content=redacted(item.content.decode(errors="replace"), secrets).encode(),
                took_s=item.took_s,
                cut_bytes=item.cut_bytes,
            )
            for item in gathered.items
        ]
    )
    missing = [Missing(name=each.name, reason=redacted(each.reason, secrets)) for each in gathered.missing]
    return items, [*missing, *too_much]


def _archive(items: Sequence[Item], missing: Sequence[Missing]) -> bytes:
    """Return the compressed archive; every file in it has mode 0600 and no owner's name."""
    import zstandard  # noqa: PLC0415  only this command needs it

    manifest = {
        "everstep": VERSION,
        "made_unix_s": time.time(),
        "items": [
            {
                "name": item.name,
                "size_bytes": len(item.content),
                "cut_bytes": item.cut_bytes,
                "took_s": item.took_s,
            }
            for item in items
        ],
        "missing": [{"name": each.name, "reason": each.reason} for each in missing],
    }
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        whole = Item(name="manifest.json", content=json.dumps(manifest, indent=2).encode())
        for item in (whole, *items):
            entry = tarfile.TarInfo(f"everstep-debug/{item.name}")
            entry.size, entry.mode, entry.mtime = len(item.content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(item.content))
    return zstandard.ZstdCompressor(level=10).compress(output.getvalue())


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
