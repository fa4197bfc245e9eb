"""Print what the daemon and the command line need: the package's dependencies without those that only trainers import.

For images of the node daemon: `pip install -r` it, then the wheel with `--no-deps` (docs/adr/0073).
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ONLY_TRAINERS = ("torch", "numpy")


def node_requirements() -> list[str]:
    """Return them in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = []
    for requirement in project["dependencies"]:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        if name not in ONLY_TRAINERS:
            found.append(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(node_requirements()))
