"""The command line `everstep`: arguments in, an exit code out. What is heavy is imported by the command that needs it.

Exit codes: 0 done; 1 damage was found, or the request was refused or failed; 2 wrong usage; 3 no daemon answers, or
what was named does not exist. `fsck`: 1 for what is repairable or was repaired, 2 where something committed is lost.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ...core import errors
from ...core.paths import is_utf_8
from . import access_commands, analyze_arguments, config_arguments, device_arguments, help_text, operating
from .controller_commands import COMMANDS as CONTROLLER
from .controller_commands import add_controller
from .event_commands import COMMANDS as EVENTS
from .event_commands import add_events
from .keep_commands import COMMANDS as KEEPING
from .keep_commands import add_keeping
from .models import COMMANDS as MODELS
from .models import add_models
from .output import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_FOUND, EXIT_USAGE
from .run_commands import COMMANDS as RUNS
from .run_commands import add_runs
from .tools import COMMANDS as TOOLS
from .tools import add_tools
from .top_arguments import add_top
from .web_command import COMMANDS as WEB
from .web_command import add_web
from .words import directories_in, with_storage

EXIT_CODES: dict[type[errors.EverstepError], int] = {
    errors.EverstepError: EXIT_FAILED,
    errors.UsageError: EXIT_USAGE,
    errors.RunBusyError: EXIT_FAILED,
    errors.FencedError: EXIT_FAILED,
    errors.ProtectedError: EXIT_FAILED,
    errors.NotPermittedError: EXIT_FAILED,
    errors.NotFoundError: EXIT_NOT_FOUND,
    errors.DaemonUnavailableError: EXIT_NOT_FOUND,
}
"""By class; the nearest parent in this table counts."""

_TARGET_HELP = (
    "{what} [DIR ...]: a run by name (by id where its name holds a slash); what is a directory is storage"
)
_STORAGE_HELP = "all directories of a store, to work on it without a daemon"
_EPILOG = "Without storage directories a command asks the daemon of this user ($EVERSTEP_SOCKET, or the usual place)."

_UNKNOWN_COMMAND = re.compile(
    r"argument (?:COMMAND|WHAT): invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)"
)


class _Parser(argparse.ArgumentParser):
    """Says wrong usage as JSON where JSON was asked for."""

    as_json: ClassVar[bool] = False
    """For all parsers of this process, because each command has one of its own."""

    def error(self, message: str) -> NoReturn:
        message = _in_short(message)
        if self.as_json:
            _print_json_error("UsageError", message, f"{self.prog} --help", EXIT_USAGE)
            sys.exit(EXIT_USAGE)
        super().error(message)


def _in_short(message: str) -> str:
    """Return what argparse says of a command that is missing or unknown, without the list of all commands."""
    if message.endswith(("required: COMMAND", "required: WHAT")):
        return "which command? --help lists them"
    found = _UNKNOWN_COMMAND.fullmatch(message)
    if found is None:
        return message
    from difflib import get_close_matches  # noqa: PLC0415

    given, known = found["given"], [word.strip("' ") for word in found["known"].split(",")]
    near = get_close_matches(given, known, n=1)
    return f"there is no command {given!r}: " + (f"did you mean {near[0]}?" if near else "--help lists them")


class _Version(argparse.Action):
    """Prints the version; reading it takes longer than all the rest, so it is read only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from ...core.version import VERSION  # noqa: PLC0415

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
    own, of_script = analyze_arguments.split(sys.argv[1:] if arguments is None else arguments)
    _Parser.as_json = "--json" in own
    parser = _parser()
    for word in own:
        if not is_utf_8(word) and not os.path.lexists(word):
            parser.error(f"{word!a} is not UTF-8, and no file or directory either")
    parsed, rest = parser.parse_known_args(own)
    if of_script:
        parsed.script_arguments = of_script
    if rest and (not hasattr(parsed, "target") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.target += rest
    return parsed


def _reported(parsed: argparse.Namespace) -> int:
    access_commands.apply_options(parsed)
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
        from ..access.tls_floor import only_tls_1_3  # noqa: PLC0415

        only_tls_1_3()  # before anything imports gRPC
        from ..main import run_daemon  # noqa: PLC0415

        run_daemon(
            config_path=parsed.config,
            socket_path=None,
            private=False,
            flags=config_arguments.flags_of(parsed),
        )
        return EXIT_DONE
    import logging  # noqa: PLC0415

    # What recovery and others log is part of the answer; without a handler it would be printed a second time.
    logging.getLogger("everstep").addHandler(logging.NullHandler())
    if parsed.command == analyze_arguments.NAME:
        from . import analyze_command  # noqa: PLC0415

        return analyze_command.analyze(parsed)
    if parsed.command in operating.NAMES:
        return operating.carry_out(parsed, _parser)
    # People look: `web` and `top`.
    if parsed.command in WEB:
        return WEB[parsed.command](parsed)
    if parsed.command == "top":
        from . import top_command  # noqa: PLC0415

        return top_command.top(parsed)
    early = TOOLS | MODELS | EVENTS | CONTROLLER | KEEPING | RUNS
    if parsed.command in early:
        return early[parsed.command](parsed)
    from . import cache_commands, fsck_command, node_commands, retention_commands, shared_commands  # noqa: PLC0415

    commands = cache_commands.COMMANDS | shared_commands.COMMANDS | node_commands.COMMANDS
    commands |= retention_commands.COMMANDS | fsck_command.COMMANDS
    commands |= access_commands.COMMANDS  # token, quota
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
        prog="everstep", description="Checkpoints and training data of this node.", epilog=_EPILOG
    )
    access_commands.add_options(parser)  # --connect, --tls-…, --token-file
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
    device_arguments.add_arguments(device, as_json)
    caches = commands.add_parser(
        "cache", help="list and drop the caches of samples in memory, and the nodes that share them"
    )
    _add_cache(caches, as_json)
    groups = commands.add_parser("shared", help="list the groups of jobs that share their preparation")
    parts = groups.add_subparsers(dest="part", required=True, metavar="WHAT")
    parts.add_parser("list", parents=[as_json], help="list groups: jobs, window, batches, memory")
    _add_operating(commands, as_json)
    help_text.complete(parser)
    return parser


make_parser = _parser
"""Returns the parser of the whole command line: for what is written from it."""


def _add_operating(
    commands: "argparse._SubParsersAction[Any]",  # pyright: ignore[reportPrivateUsage]
    as_json: _Parser,
) -> None:
    """Add what is about the daemon, and the tools that need none."""
    daemon = commands.add_parser("daemon", help="run the daemon of a node in the foreground")
    daemon.add_argument("--config", type=Path, required=True, metavar="FILE", help="its configuration (TOML)")
    commands.add_parser("stop", parents=[as_json], help="let the daemon write what is sealed, then end it")
    add_events(commands.add_parser, as_json)
    add_controller(commands.add_parser, as_json)
    add_runs(commands.add_parser, as_json)
    add_keeping(commands.add_parser, as_json, _add_target)
    access_commands.add_commands(commands.add_parser, as_json)  # token, quota
    add_web(commands.add_parser, as_json)
    add_top(commands.add_parser, as_json)
    analyze = commands.add_parser(analyze_arguments.NAME, help=analyze_arguments.HELP)
    analyze_arguments.add_arguments(analyze)
    config_arguments.add_daemon_arguments(daemon)
    operating.add_commands(commands, as_json)
    for add in (add_tools, add_models):
        add(lambda name, text: commands.add_parser(name, parents=[as_json], help=text))


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
        epilog="Exit statuses: 0 nothing has to be done; 1 something is repairable, or was repaired, or fsck failed;"
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
    _add_target(scrub, "RUN", optional=True, storage_help="only the stores that these directories belong to")


def _add_cache(cache: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    parts = cache.add_subparsers(dest="part", required=True, metavar="WHAT")
    parts.add_parser("list", parents=[as_json], help="list caches: samples, memory, readers")
    parts.add_parser("members", parents=[as_json], help="list the nodes that share their caches")
    drop = parts.add_parser(
        "drop", parents=[as_json], help="give back the memory of caches that nobody reads"
    )
    drop.add_argument("number", nargs="+", type=int, metavar="CACHE", help="its number in the list")


def _add_target(
    parser: argparse.ArgumentParser, what: str, *, optional: bool = False, storage_help: str = _STORAGE_HELP
) -> None:
    shown = _TARGET_HELP.format(what=f"[{what}]" if optional else what)
    parser.add_argument("target", nargs="*", metavar="TARGET", help=shown)
    _add_storage(parser, storage_help)


def _add_storage(parser: argparse.ArgumentParser, storage_help: str = _STORAGE_HELP) -> None:
    parser.add_argument("--storage", nargs="+", action="extend", default=[], metavar="DIR", help=storage_help)


if __name__ == "__main__":
    sys.exit(main())
