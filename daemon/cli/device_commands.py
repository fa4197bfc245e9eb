"""`everstep device`: devices listed, drained, retired and taken back; by a daemon, or on directories without one."""

import argparse
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...core.paths import data_socket_path
from ..control.device_views import DeviceSource
from ..control.views import DeviceStatus
from . import device_render as render
from .device_arguments import STORAGE_HINT
from .output import EXIT_DONE, EXIT_FAILED, Output

if TYPE_CHECKING:
    from ..control.client import ControlClient


def device(arguments: argparse.Namespace) -> int:
    """`everstep device ...`."""
    return _PARTS[arguments.part](arguments)


def _list(arguments: argparse.Namespace) -> int:
    with _source([*arguments.directories, *arguments.storage]) as source:
        found, label = source.devices(), source.label
    document = {"source": label, "stores": found}
    Output(as_json=arguments.json).show(document, lambda console: render.devices(console, found, label))
    return EXIT_DONE


def _drain(arguments: argparse.Namespace) -> int:
    with _source(arguments.storage, "everstep device drain") as source:
        found = source.drain_device(_place(arguments.device), cancel=arguments.cancel)
    Output(as_json=arguments.json).show(
        {"device": found}, lambda console: render.drained(console, found, is_cancelled=arguments.cancel)
    )
    return EXIT_DONE


def _retire(arguments: argparse.Namespace) -> int:
    output, device = Output(as_json=arguments.json), _place(arguments.device)
    if arguments.json and not arguments.yes:
        raise UsageError(
            "`--json` asks nothing", hint="add --yes; `everstep device ls --json` says what lies there"
        )
    with _source(arguments.storage, "everstep device retire") as source:
        if not arguments.yes:
            planned = source.retire_device(device, force=arguments.force, dry_run=True)
            output.progress(lambda console: render.loss(console, planned.device))
            if planned.device.held_bytes and not _is_confirmed():
                output.progress(lambda console: render.not_retired(console, planned.device))
                return EXIT_FAILED
        done = source.retire_device(device, force=arguments.force, dry_run=False)
    document = {"device": done.device, "lost": done.device.parts, "problems": done.problems}
    output.show(document, lambda console: render.retired(console, done, with_loss=arguments.yes))
    return EXIT_DONE


def _place(device: str) -> str:
    """Return a device's path as stores know it; what is no path stays."""
    return os.path.realpath(device) if "/" in device else device


def _is_confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked", hint="add --yes when what is lost may be lost")
    print("Retire it? What is listed cannot be had back. [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _readmit(arguments: argparse.Namespace) -> int:
    was_well = False
    if arguments.storage:
        from . import offline  # noqa: PLC0415  the daemon's side is slow to import

        done = offline.readmit([Path(each) for each in arguments.storage], Path(arguments.directory))
    else:
        with _connected() as daemon:
            path = os.path.realpath(arguments.directory)
            here = [each for store in daemon.devices() for each in store.devices if each.path == path]
            was_well = any(each.state in (DeviceStatus.OK, DeviceStatus.SLOW) for each in here)
            done = daemon.readmit_device(path)
    document = {"device": done.device, "is_new": done.is_new, "aside": done.aside}
    Output(as_json=arguments.json).show(
        document, lambda console: render.readmitted(console, done, was_well=was_well)
    )
    return EXIT_DONE


_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _list,
    "drain": _drain,
    "retire": _retire,
    "readmit": _readmit,
}


@contextmanager
def _source(directories: Sequence[str], changing: str = "") -> Generator[DeviceSource]:
    """Give who answers; `changing`: the command that changes something, and so takes the locks."""
    if not directories:
        with _connected() as daemon:
            yield daemon
        return
    from . import offline  # noqa: PLC0415  the daemon's side is slow to import

    paths = [Path(each).absolute() for each in dict.fromkeys(directories)]
    with offline.changing(paths, changing) if changing else offline.reading(paths) as store:
        yield store


@contextmanager
def _connected() -> Generator["ControlClient"]:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path(), hint=STORAGE_HINT) as daemon:
        yield daemon
