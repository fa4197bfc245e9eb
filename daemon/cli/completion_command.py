"""`everstep completion`: the script of a shell, and the names that it asks for."""

import argparse
import contextlib
import threading

from ...core.errors import EverstepError, UsageError
from ...core.paths import data_socket_path
from .command_tree import read_commands
from .completion_format import script
from .output import EXIT_DONE

DEADLINE_S = 3.0
"""Somebody has pressed a key and waits."""


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
    found: list[str] = []
    asking = threading.Thread(target=_ask, args=(kind, found), daemon=True)
    asking.start()
    asking.join(DEADLINE_S)
    return list(found)


def _ask(kind: str, found: list[str]) -> None:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with contextlib.suppress(EverstepError), connected(data_socket_path()) as client:
        if kind == "devices":
            names = [device.name or device.path for store in client.devices() for device in store.devices]
        elif kind == "tags":
            names = [tag for each in client.checkpoints("") for tag in each.tags]
        else:
            names = [each.run_name for each in client.checkpoints("")] + [
                run.name for run in client.status().runs
            ]
        found.extend(name for name in dict.fromkeys(names) if name.isprintable())
