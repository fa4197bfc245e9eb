"""Links between documents lead somewhere: to files that exist and to headings that they have."""

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|proto|toml|yml|yaml|sh|mjs))(?:::\w+)?`")
"""A file with its folder between backquotes."""
OF_USERS = {"runs", "everstep-debug", "photos", "etc"}
"""First folders that are not the repository's: the store's, the bundle's, a user's."""


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(each for each in listed.stdout.split("\0") if each)


def pages() -> list[Path]:
    found = [ROOT / each for each in tracked() if each.endswith(".md")]
    assert len(found) > 100
    return found


def prose(page: Path) -> str:
    """Return a page without its blocks of code, which may show what looks like a link or a heading."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return how a browser names the headings: small letters, no punctuation, hyphens, and -1 where one comes again."""
    found, seen = set[str](), Counter[str]()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    dead: list[str] = []
    for page in pages():
        for link in LINK.findall(prose(page)):
            path, _, heading = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (heading and heading not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []


def test_every_file_that_is_named_with_its_folder_exists() -> None:
    """By its path from the root or from any folder: `devices/turns_machine.py` is in daemon/."""
    ends = {
        "/".join(parts[at:]) for parts in (each.split("/") for each in tracked()) for at in range(len(parts))
    }
    gone = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        if page.name != "CHANGELOG.md"  # tells of what was
        for name in NAMED.findall(prose(page))
        if name.split("/")[0] not in OF_USERS and name not in ends
    ]
    assert gone == []
