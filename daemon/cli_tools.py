"""The commands beside a daemon's work: looking at the node, measuring drives. Their arguments, and what runs them."""

import argparse
from collections.abc import Callable

AddParser = Callable[[str, str], argparse.ArgumentParser]
"""(name, help) -> a new command's parser, which knows --json."""


def add_tools(add: AddParser) -> None:
    """Add the commands of this module to the command line."""
    doctor = add("doctor", "check the node and storage directories, and say what to do")
    doctor.add_argument(
        "directory", nargs="*", metavar="DIR", help="a directory on each drive; none: those of the daemon"
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from . import cli_doctor  # noqa: PLC0415  the engines are slow to import

    return cli_doctor.examine(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"doctor": _doctor}
