"""What `everstep completion` takes."""

import argparse

NAME = "completion"
HELP = "print a script that lets a shell complete commands, runs, tags and devices"

SHELLS = ("bash", "zsh", "fish")
KINDS = ("runs", "tags", "devices")

_EPILOG = (
    "bash: everstep completion bash > ~/.local/share/bash-completion/completions/everstep"
    " | zsh: everstep completion zsh > a directory of $fpath, as _everstep"
    " | fish: everstep completion fish > ~/.config/fish/completions/everstep.fish"
)


def add_arguments(completion: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    completion.epilog = _EPILOG
    completion.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    completion.add_argument(
        "--values",
        choices=KINDS,
        metavar="KIND",
        help=f"print the names that the daemon knows, one a line, if it answers at once: {', '.join(KINDS)}",
    )
