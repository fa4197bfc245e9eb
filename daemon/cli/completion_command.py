"""`everstep completion`: the script of a shell, and the names that it asks for."""

import argparse
import contextlib
import threading
from typing import TYPE_CHECKING

from ...core.errors import EverstepError, UsageError
from ...core.paths import data_socket_path
from .command_tree import read_commands
from .completion_format import script
from .output import EXIT_DONE

if TYPE_CHECKING:
    from ..control.client import ControlClient

DEADLINE_S = 3.0
"""For the daemon's answer: somebody has pressed a key and waits."""


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print a script, or what the daemon knows."""
    if arguments.values:
        for name in _known_in_time(arguments.values):
            print(name)
    elif arguments.shell:
        print(script(arguments.shell, read_commands(parser)), end="")
    else:
        raise UsageError("no shell is named", hint="`everstep completion bash`, zsh or fish")
    return EXIT_DONE


def _known_in_time(kind: str) -> list[str]:
    """Return what the daemon knows; nothing where it does not answer in time: nobody waits for a completion."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import: not the daemon's time

    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(EverstepError), connected(data_socket_path()) as client:
            found.extend(name for name in dict.fromkeys(_names(client, kind)) if name.isprintable())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(DEADLINE_S)
    return list(found)


def _names(client: "ControlClient", kind: str) -> list[str]:
    if kind == "devices":
        return [device.name or device.path for store in client.devices() for device in store.devices]
    if kind == "tags":
        return [tag for each in client.checkpoints("") for tag in each.tags]
    return [each.run_name for each in client.checkpoints("")] + [run.name for run in client.status().runs]
