"""The command line as a manual page and as docs/commands.md, written from the tree of commands. Pure."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from .command_tree import Argument, Command

LINE_CHARS = 66
"""Of input, before characters are escaped."""

Statuses = Mapping[int, str]
_FILES = (
    (
        "/run/everstep/UID/data.sock, /tmp/everstep-UID/data.sock",
        "where a daemon listens for trainers; $EVERSTEP_SOCKET names another",
    ),
    (
        "daemon.json, daemon.log, daemon.stacks",
        "beside the socket: what the daemon is, a private one's log, stacks on SIGUSR1",
    ),
)
_VARIABLES = (
    ("EVERSTEP_SOCKET", "the data socket of the daemon to ask"),
    (
        "EVERSTEP_TABLE__KEY",
        "overrides a key of the daemon's configuration, such as EVERSTEP_IO__QUEUE_DEPTH=64",
    ),
)


def man_page(root: Command, *, version: str, date: str, statuses: Statuses) -> str:
    """Return everstep(1) in roff's man macros."""
    lines = [
        '.\\" Written by tools/gen_commands.py from the command line itself.',
        f'.TH EVERSTEP 1 "{date}" "everstep {version}" "User Commands"',
        ".ad l",  # long words: `A | B` of choices
        ".SH NAME",
        "everstep \\- checkpoints of PyTorch training on this node",
        ".SH SYNOPSIS",
        ".B everstep",
        ".I COMMAND",
        "[options]",
        ".SH DESCRIPTION",
        *_roff(root.description),
        *_roff(root.epilog.partition("\n\n")[0]),
        ".SH COMMANDS",
    ]
    for command in root.all():
        if command.path:
            lines += _man_command(command)
    lines.append(".SH EXIT STATUS")
    for code, meaning in statuses.items():
        lines += [".TP", f".B {code}", *_roff(meaning)]
    for heading, pairs in (("ENVIRONMENT", _VARIABLES), ("FILES", _FILES)):
        lines.append(f".SH {heading}")
        for name, meaning in pairs:
            lines += [".TP", f".B {_escaped(name)}", *_roff(meaning)]
    return "\n".join(lines) + "\n"


def _man_command(command: Command) -> list[str]:
    lines = [f".SS everstep {_escaped(command.name)}"]
    if command.parts:
        return [*lines, *_roff(_sentence(command.description))]
    lines += [*_roff(_sentence(command.description)), ".PP", ".RS", *_roff(command.usage), ".RE"]
    for argument in _told(command.arguments):
        lines += [".TP", f".B {_escaped(_written(argument))}", *_roff(argument.help or "see the usage")]
    if command.epilog:
        for block in re.split(r"\n\s*\n", command.epilog.strip("\n")):
            is_verbatim = any(line.startswith("  ") for line in block.splitlines())
            lines += [".PP", *([".nf", *_roff_lines(block), ".fi"] if is_verbatim else _roff(block))]
    return lines


def _told(arguments: Sequence[Argument]) -> list[Argument]:
    return [each for each in arguments if "--help" not in each.flags]


def _written(argument: Argument) -> str:
    return " ".join(filter(None, [", ".join(argument.flags), argument.metavar]))


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def _roff(text: str) -> list[str]:
    """Return a paragraph: each sentence begins a line of input, and none is long."""
    sentences = re.split(r"(?<=[.;:]) ", " ".join(text.split()))
    return [
        line
        for sentence in sentences
        for line in _roff_lines(
            textwrap.fill(sentence, LINE_CHARS, break_on_hyphens=False, break_long_words=False)
        )
    ]


def _roff_lines(text: str) -> list[str]:
    return [_escaped(line) for line in text.splitlines() if line.strip()]


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def markdown(root: Command, statuses: Statuses) -> str:
    """Return docs/commands.md."""
    lines = [
        "# Commands",
        "",
        "Written by `make commands` from the command line itself; `everstep COMMAND --help` says the same, and",
        "`man everstep` where the wheel is installed.",
        "",
        "| exit status | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in statuses.items()),
        "",
        "`fsck` and `config check` have statuses of their own: see below. With `--json` an error is one JSON",
        "document, too.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [`{command.name}`](#{_anchor(command)}) | {_cell(command.summary)} |"
            for command in root.all()
            if command.path and not command.parts
        ),
    ]
    for command in root.all():
        if command.path and not command.parts:
            lines += _markdown_command(command)
    return "\n".join(lines) + "\n"


def _anchor(command: Command) -> str:
    return "everstep-" + "-".join(command.path)


def _markdown_command(command: Command) -> list[str]:
    lines = ["", f"## everstep {command.name}", "", *_markdown_text(_first_upper(command.description)), ""]
    lines += ["```", command.usage, "```"]
    told = _told(command.arguments)
    if told:
        lines += ["", "| argument | meaning |", "|---|---|"]
        lines += [f"| `{_cell(_written(each))}` | {_cell(each.help)} |" for each in told]
    for block in re.split(r"\n\s*\n", command.epilog.strip("\n")) if command.epilog else []:
        lines += ["", *_markdown_text(block)]
    return lines


def _first_upper(text: str) -> str:
    return _sentence(text) if "\n" not in text.strip() else text.strip("\n")


def _markdown_text(block: str) -> list[str]:
    if any(line.startswith("  ") for line in block.splitlines()):
        return ["```", *(line.removeprefix("  ") for line in block.splitlines()), "```"]
    return [" ".join(block.split())]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
