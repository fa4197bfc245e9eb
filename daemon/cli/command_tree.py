"""The command line as values, read from its argparse parsers: for completion, the man page and docs/commands.md."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast


class ValueKind(Enum):
    """What a shell can offer for a value."""

    NOTHING = ""
    RUNS = "runs"
    TAGS = "tags"
    DEVICES = "devices"
    DIRECTORIES = "directories"
    FILES = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An option, or a word that stands by its place."""

    flags: tuple[str, ...]
    """Empty: a word that stands by its place."""
    metavar: str
    """What its value is called; empty: it takes none."""
    help: str
    choices: tuple[str, ...]
    kind: ValueKind
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command or a part of one; the whole command line has an empty path."""

    path: tuple[str, ...]
    summary: str
    """The line that its parent lists."""
    description: str
    epilog: str
    usage: str
    """On one line, without `usage:`."""
    arguments: tuple[Argument, ...]
    parts: tuple["Command", ...]

    @property
    def name(self) -> str:
        """How people write it, without `everstep`."""
        return " ".join(self.path)

    def all(self) -> "Iterator[Command]":
        """Yield it and everything below."""
        yield self
        for part in self.parts:
            yield from part.all()


def read_commands(parser: argparse.ArgumentParser) -> Command:
    """Return the command line that a parser takes."""
    return _command(parser, (), "")


def _command(parser: argparse.ArgumentParser, path: tuple[str, ...], summary: str) -> Command:
    arguments: list[Argument] = []
    parts: list[Command] = []
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            below = cast("dict[str, argparse.ArgumentParser]", action.choices)
            helps = {each.dest: each.help or "" for each in action._choices_actions}  # pyright: ignore[reportPrivateUsage]
            parts += [_command(each, (*path, name), helps.get(name, "")) for name, each in below.items()]
        elif action.help is not argparse.SUPPRESS:
            arguments.append(_argument(parser, action))
    return Command(
        path=path,
        summary=summary,
        description=parser.description or summary,
        epilog=parser.epilog or "",
        usage=" ".join(parser.format_usage().removeprefix("usage:").split()),
        arguments=tuple(arguments),
        parts=tuple(parts),
    )


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # pyright: ignore[reportPrivateUsage]


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    takes_value = action.nargs != 0
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(str(each) for each in cast(Any, action.choices) or ())
    if choices and action.metavar is None:
        metavar = "{" + ",".join(choices) + "}"
    formatter = parser._get_formatter()  # pyright: ignore[reportPrivateUsage]
    return Argument(
        flags=tuple(action.option_strings),
        metavar=metavar if takes_value else "",
        help=formatter._expand_help(action) if action.help else "",  # pyright: ignore[reportPrivateUsage]
        choices=choices,
        kind=_kind(parser.prog, action.dest, metavar) if takes_value else ValueKind.NOTHING,
        is_required=bool(action.option_strings) and action.required,
    )


def _kind(program: str, dest: str, metavar: str) -> ValueKind:
    """Return what a value is, by what it is called."""
    if program.endswith(" untag") and dest == "name":
        return ValueKind.TAGS
    words = metavar.replace("[", " ").replace("@", " ").replace("|", " ").split()
    first = words[0] if words else ""
    if first in ("RUN", "TARGET"):
        return ValueKind.RUNS
    if first == "DEVICE":
        return ValueKind.DEVICES
    if first in ("DIR", "DEST", "FOLDER"):
        return ValueKind.DIRECTORIES
    return ValueKind.FILES if first in ("FILE", "SOURCE", "SCRIPT") else ValueKind.NOTHING
