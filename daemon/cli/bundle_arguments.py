"""What `everstep debug` takes."""

import argparse
from pathlib import Path

NAME = "debug"
HELP = "gather what a report of a problem needs"

_BUNDLE = "write configuration, status, metrics, doctor, log, stacks and file names into one .tar.zst"
_EPILOG = (
    "The file has mode 0600. Passwords, tokens and stored data are left out; names of runs, hosts and directories are"
    " in it: look before you send it (`tar --zstd -tf FILE`). A daemon that hangs or is gone is no hindrance: what"
    " could not be had stands in manifest.json."
)


def add_arguments(debug: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    """Add the parts of the command."""
    parts = debug.add_subparsers(dest="part", required=True, metavar="WHAT")
    bundle = parts.add_parser("bundle", parents=[as_json], help=_BUNDLE, description=_BUNDLE, epilog=_EPILOG)
    bundle.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a file that is not there yet (default: everstep-debug-HOST-TIME.tar.zst)",
    )
    bundle.add_argument(
        "--storage",
        nargs="+",
        action="extend",
        default=[],
        type=_directory,
        metavar="DIR",
        help="list the files in these directories, too; none: in those of the daemon that answers",
    )
    bundle.add_argument(
        "--deadline-s",
        type=float,
        default=30.0,
        help="what takes longer is left out (default: %(default)s)",
    )
    files = parts.add_parser(
        "files", help="list what lies in directories: names, sizes and times, no content"
    )
    files.add_argument("directory", nargs="*", type=Path, metavar="DIR", help="a directory")


def _directory(text: str) -> str:
    """Return it; a directory that is gone stands in manifest.json, but what was meant as FILE must not be lost."""
    if text.endswith(".tar.zst") and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory; FILE comes before --storage")
    return text
