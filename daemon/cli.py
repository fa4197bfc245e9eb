"""The command line `everstep`: arguments in, an exit code out. What is heavy is imported by the command that needs it.

Exit codes: 0 done; 1 damage was found, or the request was refused or failed; 2 wrong usage; 3 no daemon answers, or
what was named does not exist. `fsck`: 1 for what is repairable or was repaired, 2 where something committed is lost.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

from ..core import errors
from . import cli_analyze_arguments, cli_devices_arguments
from .cli_models import COMMANDS as MODELS
from .cli_models import add_models
from .cli_output import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_FOUND, EXIT_USAGE
from .cli_tools import COMMANDS as TOOLS
from .cli_tools import add_tools
from .cli_words import directories_in, with_storage

EXIT_CODES: dict[type[errors.EverstepError], int] = {
    errors.EverstepError: EXIT_FAILED,
    errors.UsageError: EXIT_USAGE,
    errors.RunBusyError: EXIT_FAILED,
    errors.FencedError: EXIT_FAILED,
    errors.ProtectedError: EXIT_FAILED,
    errors.NotFoundError: EXIT_NOT_FOUND,
    errors.DaemonUnavailableError: EXIT_NOT_FOUND,
}
"""By class; the nearest parent in this table counts."""

_TARGET_HELP = (
    "{what} [DIR ...]: a run by name (by id where its name holds a slash); what is a directory is storage"
)
_STORAGE_HELP = "read these directories, all of one store, without a daemon"
_EPILOG = "Without storage directories a command asks the daemon of this user ($EVERSTEP_SOCKET, or the usual place)."


class _Parser(argparse.ArgumentParser):
    """Says wrong usage as JSON where JSON was asked for."""

    as_json: ClassVar[bool] = False
    """For all parsers of this process, because each command has one of its own."""

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            _print_json_error("UsageError", message, f"{self.prog} --help", EXIT_USAGE)
            sys.exit(EXIT_USAGE)
        super().error(message)


class _Version(argparse.Action):
    """Prints the version; reading it takes longer than all the rest, so it is read only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from ..core.version import VERSION  # noqa: PLC0415

        print(f"everstep {VERSION}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command and return its exit code."""
    try:
        try:
            return _reported(_parse(arguments))
        finally:
            sys.stdout.flush()  # here, where a reader that has left is no error, whatever was said to it
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. What is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; targets may stand on both sides of an option, which argparse alone does not allow."""
    own, of_script = cli_analyze_arguments.split(sys.argv[1:] if arguments is None else arguments)
    _Parser.as_json = "--json" in own
    parser = _parser()
    parsed, rest = parser.parse_known_args(own)
    if of_script:
        parsed.script_arguments = of_script
    if rest and (not hasattr(parsed, "target") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.target += rest
    return parsed


def _reported(parsed: argparse.Namespace) -> int:
    try:
        return _carry_out(parsed)
    except errors.EverstepError as error:
        hint = with_storage(error.hint, _directories(parsed))
        return _report(error, hint, as_json=getattr(parsed, "json", False) is True)


def _directories(parsed: argparse.Namespace) -> list[str]:
    targets: list[str] = getattr(parsed, "target", [])
    storage: list[str] = getattr(parsed, "storage", [])
    return [*dict.fromkeys((*directories_in(targets), *storage))]


def _carry_out(parsed: argparse.Namespace) -> int:
    if parsed.command == "daemon":
        from .main import run_daemon  # noqa: PLC0415

        run_daemon(config_path=parsed.config, socket_path=None, private=False)
        return EXIT_DONE
    import logging  # noqa: PLC0415

    # What recovery and others log is part of the answer; without a handler it would be printed a second time.
    logging.getLogger("everstep").addHandler(logging.NullHandler())
    if parsed.command == cli_analyze_arguments.NAME:
        from . import cli_analyze  # noqa: PLC0415

        return cli_analyze.analyze(parsed)
    if parsed.command in TOOLS | MODELS:
        return (TOOLS | MODELS)[parsed.command](parsed)
    from . import cli_cache, cli_commands, cli_fsck, cli_retention  # noqa: PLC0415

    commands = cli_cache.COMMANDS | cli_commands.COMMANDS | cli_retention.COMMANDS | cli_fsck.COMMANDS
    return commands[parsed.command](parsed)


def _report(error: errors.EverstepError, hint: str, *, as_json: bool) -> int:
    code = next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
    if as_json:
        _print_json_error(error.code, error.message, hint, code)
    else:
        print(f"everstep: {error.message}", file=sys.stderr)
        if hint:
            print(f"  {hint}", file=sys.stderr)
    return code


def _print_json_error(code: str, message: str, hint: str, exit_code: int) -> None:
    document = {"error": {"code": code, "message": message, "hint": hint, "exit_code": exit_code}}
    print(json.dumps(document, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="everstep", description="Checkpoints of training runs on this node.", epilog=_EPILOG
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    as_json = _Parser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print one JSON document")

    commands.add_parser("status", parents=[as_json], help="show the daemon: runs, ranks, memory, devices")
    listing = commands.add_parser("ls", parents=[as_json], help="list checkpoints")
    _add_target(listing, "RUN", optional=True)
    show = commands.add_parser("show", parents=[as_json], help="show one checkpoint: files, notes, leaves")
    _add_target(show, "RUN[@ATTEMPT.STEP]")
    show.add_argument("--leaves", action="store_true", help="list the leaves, too")
    verify = commands.add_parser(
        "verify", parents=[as_json], help="read every block and compare its checksum"
    )
    _add_target(verify, "RUN[@ATTEMPT.STEP]", optional=True)
    verify.add_argument(
        "--ledger", action="store_true", help="prove that each sample was handed out exactly once"
    )
    remove = commands.add_parser("rm", parents=[as_json], help="remove a checkpoint, or all of a run")
    _add_target(remove, "RUN@ATTEMPT.STEP | RUN")
    remove.add_argument("--all", action="store_true", help="remove all checkpoints of the run")
    remove.add_argument(
        "--force", action="store_true", help="remove even what a restart may need, or what has a tag"
    )
    _add_retention(commands.add_parser, as_json)
    device = commands.add_parser("device", help="list, drain, retire and readmit the devices of a store")
    cli_devices_arguments.add_arguments(device, as_json)
    caches = commands.add_parser("cache", help="list and drop the caches of samples in memory")
    _add_cache(caches, as_json)
    daemon = commands.add_parser("daemon", help="run the daemon of a node in the foreground")
    daemon.add_argument("--config", type=Path, required=True, metavar="FILE", help="its configuration (TOML)")
    commands.add_parser("stop", parents=[as_json], help="let the daemon write what is sealed, then end it")
    analyze = commands.add_parser(cli_analyze_arguments.NAME, help=cli_analyze_arguments.HELP)
    cli_analyze_arguments.add_arguments(analyze)
    for add in (add_tools, add_models):
        add(lambda name, text: commands.add_parser(name, parents=[as_json], help=text))
    return parser


def _add_retention(add: Callable[..., argparse.ArgumentParser], as_json: _Parser) -> None:
    tag = add("tag", parents=[as_json], help="name a checkpoint, so that it is never collected")
    tag.add_argument("name", metavar="NAME", help="the tag")
    _add_target(tag, "RUN[@ATTEMPT.STEP]")
    untag = add("untag", parents=[as_json], help="take a tag away")
    untag.add_argument("name", metavar="NAME", help="the tag")
    _add_target(untag, "RUN")

    fsck = add(
        "fsck",
        parents=[as_json],
        help="find what is not as it should be in storage, and make it whole",
        epilog="Exit codes: 0 nothing has to be done; 1 something is repairable, or was repaired, or fsck failed;"
        " 2 something committed is lost, or wrong usage; 3 there is no store, or no daemon answers.",
    )
    fsck.add_argument("--repair", action="store_true", help="make whole what can be made whole")
    fsck.add_argument("--data", action="store_true", help="read every block, too")
    fsck.add_argument(
        "target",
        nargs="*",
        metavar="DIR",
        help="all directories of one store; none: the daemon inspects its own and changes nothing",
    )
    _add_storage(fsck)
    scrub = add("scrub", parents=[as_json], help="let the daemon read all committed bytes in the background")
    _add_target(scrub, "RUN", optional=True)


def _add_cache(cache: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    parts = cache.add_subparsers(dest="part", required=True, metavar="WHAT")
    parts.add_parser("list", parents=[as_json], help="list caches: samples, memory, readers")
    drop = parts.add_parser(
        "drop", parents=[as_json], help="give back the memory of caches that nobody reads"
    )
    drop.add_argument("number", nargs="+", type=int, metavar="CACHE", help="its number in the list")


def _add_target(parser: argparse.ArgumentParser, what: str, *, optional: bool = False) -> None:
    shown = _TARGET_HELP.format(what=f"[{what}]" if optional else what)
    parser.add_argument("target", nargs="*", metavar="TARGET", help=shown)
    _add_storage(parser)


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage", nargs="+", action="extend", default=[], metavar="DIR", help=_STORAGE_HELP
    )


if __name__ == "__main__":
    sys.exit(main())
