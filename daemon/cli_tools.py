"""The commands beside a daemon's work: looking at the node, measuring drives. Their arguments, and what runs them."""

import argparse
from collections.abc import Callable
from pathlib import Path

AddParser = Callable[[str, str], argparse.ArgumentParser]
"""(name, help) -> a new command's parser, which knows --json."""


def add_tools(add: AddParser) -> None:
    """Add the commands of this module to the command line."""
    doctor = add("doctor", "check the node and storage directories, and say what to do")
    doctor.add_argument(
        "directory", nargs="*", metavar="DIR", help="a directory on each drive; none: those of the daemon"
    )
    bench = add("bench", "measure drives by each engine, block size and depth, and recommend settings")
    bench.add_argument("what", choices=["io"], help="io: write and read a file that has no name")
    bench.add_argument("directory", nargs="+", metavar="DIR", help="a directory on each drive")
    bench.add_argument(
        "--seconds", type=float, default=10.0, help="for each directory, about (default: %(default)s)"
    )
    bench.add_argument(
        "--size-mib",
        type=int,
        default=256,
        help="size of the file, held in memory, too (default: %(default)s)",
    )
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")


def _doctor(arguments: argparse.Namespace) -> int:
    from . import cli_doctor  # noqa: PLC0415  the engines are slow to import

    return cli_doctor.examine(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from . import cli_bench  # noqa: PLC0415

    return cli_bench.bench_io(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"doctor": _doctor, "bench": _bench}
