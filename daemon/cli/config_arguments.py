"""What `everstep config` and `everstep daemon` take of a configuration."""

import argparse
from collections.abc import Sequence
from pathlib import Path

NAME = "config"
HELP = "check, show and reload the configuration of a node's daemon"

_CHECK = "find what is wrong in a file, and what it asks for and this machine does not give"
_SHOW = "show the values in effect as TOML: of a file, or of the daemon that answers"
_RELOAD = "let the daemon read its file again: all that changed is taken, or nothing"
_EXITS = (
    "Exit statuses: 0 nothing is wrong; 1 something is, and is named; 2 wrong usage; 3 there is no such file."
)


def add_arguments(config: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    """Add the parts of the command."""
    parts = config.add_subparsers(dest="part", required=True, metavar="WHAT")
    check = parts.add_parser("check", parents=[as_json], help=_CHECK, description=_CHECK, epilog=_EXITS)
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help=_file_help("the daemon's own"))
    _add_set(check)
    check.add_argument(
        "--no-machine", action="store_true", help="look at the file alone, for a machine that is not this one"
    )
    show = parts.add_parser("show", parents=[as_json], help=_SHOW, description=_SHOW)
    show.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help=_file_help("what the daemon runs with")
    )
    _add_set(show)
    show.add_argument("--origin", action="store_true", help="say on each line where the value is from")
    show.add_argument("--defaults", action="store_true", help="show what nobody has given, too")
    reload = parts.add_parser("reload", parents=[as_json], help=_RELOAD, description=_RELOAD)
    reload.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")


def add_daemon_arguments(daemon: argparse.ArgumentParser) -> None:
    """Add what overrides the file of `everstep daemon`."""
    _add_set(daemon)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override a key of file and environment, such as io.queue_depth=64; as often as needed",
    )


def _file_help(otherwise: str) -> str:
    return f"the configuration (TOML); none: {otherwise}"


def flags_of(arguments: argparse.Namespace) -> Sequence[str]:
    """Return what `--set` gave."""
    settings: list[str] = arguments.settings
    return settings
