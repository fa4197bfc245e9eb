"""Writes docs/commands.md and docs/everstep.1 from the command line. `--check`: only say whether they are fresh."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATE = "2026-11-23"
"""Of the page: when its form last changed. One of the day would never be fresh."""


def main() -> int:
    """Write them, or compare them."""
    os.environ["COLUMNS"] = "110"  # argparse asks for the width of the terminal
    import everstep
    from everstep.daemon.cli.command_tree import read_commands
    from everstep.daemon.cli.help_text import EXIT_STATUSES
    from everstep.daemon.cli.main import make_parser
    from everstep.daemon.cli.reference_format import man_page, markdown

    root = read_commands(make_parser())
    texts = {
        ROOT / "docs" / "commands.md": markdown(root, EXIT_STATUSES),
        ROOT / "docs" / "everstep.1": man_page(
            root, version=everstep.__version__, date=DATE, statuses=EXIT_STATUSES
        ),
    }
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        print(
            f"commands: {', '.join(stale)} must be written again: make commands"
            if stale
            else "commands: fresh"
        )
        return bool(stale)
    for path, text in texts.items():
        path.write_text(text)
    print(f"commands: {', '.join(path.name for path in texts)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
