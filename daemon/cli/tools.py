"""The commands beside a daemon's work: looking at the node, measuring drives. Their arguments, and what runs them."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ...core.sizes import parse_size

_STORAGE_HELP = "the directories of the store, without a daemon"

AddParser = Callable[[str, str], argparse.ArgumentParser]
"""(name, help) -> a new command's parser, which knows --json."""


def add_tools(add: AddParser) -> None:
    """Add the commands of this module to the command line."""
    _add_looking(add)
    _add_export(add)
    _add_import(add)


def _add_looking(add: AddParser) -> None:
    doctor = add("doctor", "check the node and storage directories, and say what to do")
    doctor.epilog = (
        "Exit statuses: 0 nothing failed, though there may be warnings; 1 something did. It changes nothing."
    )
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


def _add_export(add: AddParser) -> None:
    export = add(
        "export", "write a checkpoint as safetensors, for torch.load or torch.distributed.checkpoint"
    )
    export.add_argument(
        "run",
        nargs=1,
        metavar="RUN[@ATTEMPT.STEP]",
        help="a run: its newest complete checkpoint, or one of it",
    )
    export.add_argument("destination", metavar="DEST", help="a folder that is absent or empty")
    export.add_argument(
        "--to",
        required=True,
        choices=["safetensors", "torch", "dcp"],
        help="for whom; safetensors takes all tensors as stored: a series of run.log() ends in zeros, its room",
    )
    export.add_argument(
        "--storage", nargs="+", action="extend", default=[], metavar="DIR", help=_STORAGE_HELP
    )
    export.add_argument(
        "--rank", type=int, metavar="K", help="whose own tensors and values (default: the lowest)"
    )
    export.add_argument(
        "--shard-bytes",
        type=_size,
        default=5_000_000_000,
        metavar="SIZE",
        help="most that a safetensors file holds, such as 512MiB or 5GB; each has at least one tensor, however"
        " large (default: 5GB)",
    )
    export.add_argument("target", nargs="*", metavar="DIR", help="the same as --storage DIR")


def _add_import(add: AddParser) -> None:
    importing = add("import", "make a checkpoint of safetensors, a torch file or a folder of DCP")
    importing.add_argument(
        "source",
        metavar="SOURCE",
        help="a file, or a folder that holds one of these. The daemon takes memory for one snapshot of the state; of"
        " a DCP folder the importing process holds the whole state as well",
    )
    importing.add_argument("--run", required=True, metavar="NAME", help="a run without checkpoints")
    importing.add_argument(
        "--storage",
        nargs="+",
        required=True,
        metavar="DIR",
        help="as in attach(): directories or device names",
    )
    importing.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of the checkpoint (default: what an export of everstep says, else a whole number `step` that"
        " stands beside the objects, else 0)",
    )
    importing.add_argument(
        "--as",
        dest="as_name",
        default="model",
        metavar="NAME",
        help="keyword of a lone state dict (default: model)",
    )
    importing.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave these objects out")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor_command  # noqa: PLC0415  the engines are slow to import

    return doctor_command.examine(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from . import bench_command  # noqa: PLC0415

    return bench_command.bench_io(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from . import export_command  # noqa: PLC0415

    return export_command.export(arguments)


def _import(arguments: argparse.Namespace) -> int:
    from . import import_command  # noqa: PLC0415

    return import_command.import_source(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": _doctor,
    "bench": _bench,
    "export": _export,
    "import": _import,
}
