"""What is written from the command line: the manual page, docs/commands.md, examples; all of it is fresh and right."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.daemon.cli import output
from everstep.daemon.cli.command_tree import Command, ValueKind, read_commands
from everstep.daemon.cli.help_text import EXAMPLES, EXIT_STATUSES
from everstep.daemon.cli.main import _parse, make_parser

ROOT = Path(__file__).resolve().parents[2]
NAMING = (".py", ".md", ".js", ".html", ".yml", ".yaml", ".service")
NAMED = re.compile(r"`everstep ([a-z]+)(?: ([a-z]+))?[^`\n]*`")
"""A command between backquotes, and the word after it."""
PAGE = ROOT / "docs" / "everstep.1"


def commands() -> dict[str, Command]:
    return {each.name: each for each in read_commands(make_parser()).all()}


def test_what_is_written_from_the_command_line_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "gen_commands.py", "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_the_manual_page_has_no_warning() -> None:
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "style", PAGE], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stdout.splitlines() if "longer than 80" not in line] == []


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_manual_page_renders_and_names_every_command() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tascii", "-P-cbou", PAGE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for name in commands():
        assert f"everstep {name}".strip() in text, name


@pytest.mark.parametrize(("name", "typed"), [(name, each) for name in EXAMPLES for each, _ in EXAMPLES[name]])
def test_every_example_is_one_that_the_parser_takes(name: str, typed: str) -> None:
    words = shlex.split(typed)
    assert words[0] == "everstep"
    assert words[1 : 1 + len(name.split())] == name.split()
    assert _parse(words[1:]).command == name.split(maxsplit=1)[0]
    assert name in commands()


def test_every_command_has_an_example() -> None:
    names = set(commands())
    assert {name for name in names if not any(each.startswith(f"{name} ") for each in names)} - {
        *EXAMPLES,
        "",
    } == set()


def test_every_command_that_is_named_somewhere_exists() -> None:
    """In hints, documents, rules and the page; a word after a command that has parts is one of them."""
    parts = {name.split()[0]: set[str]() for name in commands() if name}
    for name in commands():
        if " " in name:
            parts[name.split()[0]].add(name.split()[1])
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    looked_at = [ROOT / each for each in listed.stdout.split("\0") if each.endswith(NAMING)]
    assert len(looked_at) > 500
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in looked_at
        for found in NAMED.finditer(path.read_text())
        if found[1] not in parts or (parts[found[1]] and found[2] and found[2] not in parts[found[1]])
    ]
    assert wrong == []


def test_the_exit_statuses_are_those_of_the_program() -> None:
    tree = ast.parse(Path(output.__file__).read_text())
    values = {
        getattr(output, name.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id.startswith("EXIT_")
        for name in [node]
    }
    assert values == set(EXIT_STATUSES)


def test_every_command_says_what_it_does_and_every_argument_what_it_is() -> None:
    for name, command in commands().items():
        if not name:
            continue
        assert command.summary, name
        assert re.match(r"[a-z]", command.summary), (
            f"{name}: {command.summary!r} begins small, as the others do"
        )
        assert not command.summary.endswith("."), name
        for argument in command.arguments:
            assert argument.help, f"{name} {argument.flags or argument.metavar}"


def test_what_a_shell_can_offer_is_known_by_what_a_value_is_called() -> None:
    found = commands()

    def kinds(name: str) -> list[ValueKind]:
        return [each.kind for each in found[name].arguments if not each.flags]

    assert kinds("show") == [ValueKind.RUNS]
    assert kinds("untag") == [ValueKind.TAGS, ValueKind.RUNS]
    assert kinds("device drain") == [ValueKind.DEVICES]
    assert kinds("doctor") == [ValueKind.DIRECTORIES]
    assert kinds("config check") == [ValueKind.FILES]
