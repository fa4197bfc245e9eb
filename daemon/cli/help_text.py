"""What every command's --help says besides its arguments: examples, and what its exit status means.

The examples are parsed by a test, so that none of them is wrong.
"""

import argparse
import re
import textwrap
from collections.abc import Mapping

EXIT_STATUSES: Mapping[int, str] = {
    0: "done",
    1: "damage was found, or the request was refused or failed",
    2: "wrong usage, or a configuration that is wrong",
    3: "no daemon answers, or what was named does not exist",
    130: "interrupted",
}
"""Of every command; `fsck` and `config check` say in their own help where they differ."""

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "status": (("everstep status", "runs, memory and devices of the daemon of this user"),),
    "ls": (
        ("everstep ls", "all checkpoints that the daemon knows"),
        ("everstep ls my-run /nvme0/everstep /nvme1/everstep", "of one run, read without a daemon"),
    ),
    "show": (("everstep show my-run@1.2000 --leaves", "one checkpoint with its tensors"),),
    "verify": (
        ("everstep verify my-run", "read every block of the newest checkpoint"),
        ("everstep verify my-run --ledger", "prove that no sample was lost or repeated"),
    ),
    "rm": (("everstep rm my-run@1.2000", "one checkpoint"), ("everstep rm my-run --all", "all of a run")),
    "tag": (("everstep tag best my-run@1.2000", "keep it, whatever retention says"),),
    "untag": (("everstep untag best my-run", "let retention have it"),),
    "fsck": (
        ("everstep fsck /nvme0/everstep /nvme1/everstep", "look, and change nothing"),
        ("everstep fsck --repair /nvme0/everstep /nvme1/everstep", "make whole what can be"),
    ),
    "scrub": (("everstep scrub", "read all committed bytes in the background"),),
    "device ls": (("everstep device ls", "devices, their state and what lies on them"),),
    "device drain": (("everstep device drain nvme1", "before it is taken out"),),
    "device retire": (("everstep device retire nvme1 --yes", "for good"),),
    "device readmit": (("everstep device readmit /nvme1/everstep", "a new drive in its place"),),
    "cache list": (("everstep cache list", "caches of samples, with their readers"),),
    "cache members": (("everstep cache members", "nodes that share them"),),
    "cache drop": (("everstep cache drop 3", "the cache with this number in the list"),),
    "shared list": (("everstep shared list", "groups of jobs that prepare batches together"),),
    "daemon": (
        ("everstep daemon --config /etc/everstep/node.toml", "in the foreground, as a service runs it"),
        ("everstep daemon --config node.toml --set io.queue_depth=64", "with one key overridden"),
    ),
    "stop": (("everstep stop", "after what is sealed has been written"),),
    "events": (
        ("everstep events --follow --run my-run", "what happens to a run, as it happens"),
        ("everstep events --since 2h --kind shard_failed", "what could not be written in the last two hours"),
    ),
    "controller show": (("everstep controller show my-run", "how often it takes checkpoints, and why"),),
    "controller budget": (("everstep controller budget my-run 2%", "let checkpoints cost less"),),
    "controller force": (("everstep controller force my-run", "before the node is worked on"),),
    "controller pause": (("everstep controller pause my-run --ttl 15m", "none for a quarter of an hour"),),
    "controller resume": (("everstep controller resume my-run", "as before the pause"),),
    "runs": (("everstep runs", "who trains, who waits for a restart, what is only stored"),),
    "slots": (("everstep slots my-run", "what of a run lies in memory"),),
    "pin": (("everstep pin copy my-run@1.2000 --ttl 6h", "while another tool copies it"),),
    "unpin": (("everstep unpin copy my-run", "once it has been copied"),),
    "drain": (
        ("everstep drain", "before the node is worked on"),
        ("everstep drain --cancel", "afterwards"),
    ),
    "token": (
        ("everstep token --ttl 1h --read-only --file grafana.token", "a tool may look for an hour"),
        ("everstep token list", "the tokens that are valid"),
        ("everstep token revoke 1a2b3c4d", "not that one any more"),
    ),
    "quota": (("everstep quota", "what you have taken, and what you may"),),
    "web": (("everstep web", "an address for a browser on this machine"),),
    "top": (
        ("everstep top", "until q"),
        ("everstep top --once --json", "the same for a script"),
    ),
    "analyze": (
        ("everstep analyze train.py -- --epochs 3", "with the arguments of the script"),
        ("everstep analyze train.py --html page.html", "and a page with plots"),
    ),
    "plan": (("everstep plan --params 7e9 --gpus 8 --devices 4x3GBps", "a model of 7 billion parameters on one node"),),
    "simulate": (("everstep simulate --gpus 1024 --persist 30s", "a job whose checkpoints take 30 s to write"),),
    "debug files": (("everstep debug files /nvme0/everstep", "what lies on a drive"),),
    "config check": (("everstep config check /etc/everstep/node.toml", "before a start or a reload"),),
    "config show": (
        ("everstep config show --origin", "what the daemon runs with, and where each value is from"),
        ("everstep config show node.toml --defaults", "every key of a file"),
    ),
    "config reload": (
        ("everstep config reload --dry-run", "what would change"),
        ("everstep config reload", "the same as SIGHUP, with an answer"),
    ),
    "doctor": (("everstep doctor /nvme0/everstep /nvme1/everstep", "before they are used"),),
    "debug bundle": (("everstep debug bundle /tmp/everstep.tar.zst", "for a report of a problem"),),
    "completion": (("everstep completion bash", "a script for bash; zsh and fish, too"),),
    "bench": (("everstep bench io /nvme0/everstep", "settings for a drive"),),
    "export": (("everstep export my-run out --to safetensors", "the newest checkpoint"),),
    "import": (("everstep import model.safetensors --run my-run --storage /nvme0/everstep", "a file as a checkpoint"),),
}  # fmt: skip
"""Of each command: what to type, and what that does."""


class ExampleFormatter(argparse.HelpFormatter):
    """Fills paragraphs, and leaves indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(self._block(block, width, indent) for block in blocks)

    @staticmethod
    def _block(block: str, width: int, indent: str) -> str:
        if any(line.startswith("  ") for line in block.splitlines()):
            return textwrap.indent(block, indent)
        return textwrap.fill(" ".join(block.split()), width, initial_indent=indent, subsequent_indent=indent)


def complete(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), summary: str = "") -> None:
    """Give a parser and all below it one voice: a description, examples, and examples that keep their lines."""
    if parser.formatter_class is argparse.HelpFormatter:
        parser.formatter_class = ExampleFormatter
    if summary and parser.description in {None, summary}:
        parser.description = f"{summary[0].upper()}{summary[1:]}."
    if not path:
        parser.epilog = "\n\n".join([*filter(None, [parser.epilog]), exit_text()])
    examples = EXAMPLES.get(" ".join(path), ())
    if examples:
        lines = [f"  {typed}\n      {what}" for typed, what in examples]
        parser.epilog = "\n\n".join([*filter(None, [parser.epilog]), "Examples:", "\n".join(lines)])
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] - argparse has no other way
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            below: dict[str, argparse.ArgumentParser] = action.choices  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]
            helps = {each.dest: each.help or "" for each in action._choices_actions}  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            for name, each in below.items():
                complete(each, (*path, name), helps.get(name, ""))


def exit_text() -> str:
    """Return the exit statuses on one line."""
    return "Exit statuses: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_STATUSES.items()) + "."
