"""docs/logs.md lists every event that the code logs, and no other."""

import re
from pathlib import Path

from log_events import FOLDERS, ROOT, logged_events, logged_levels

TRAINER = {"hook", "dataloader"}
_ROW = re.compile(r"^\| `([a-z_0-9…]+)` \|", re.MULTILINE)


def catalogue() -> tuple[set[str], set[str]]:
    """Return the events of the daemon's table and those of a trainer's."""
    daemon, trainer = (ROOT / "docs/logs.md").read_text().split("## Events of a trainer")
    return set(_ROW.findall(daemon)), set(_ROW.findall(trainer))


def is_text_of_the_code(event: str) -> bool:
    """Tell whether it stands somewhere as a string: an event that is chosen at run time."""
    return any(
        f'"{event}' in path.read_text() for folder in FOLDERS for path in Path(ROOT / folder).rglob("*.py")
    )


def test_every_event_is_listed_where_it_is_logged() -> None:
    daemon, trainer = catalogue()
    logged = {event: folders for event, folders in logged_events().items() if event != "…"}
    not_listed = [event for event, folders in logged.items() if folders - TRAINER and event not in daemon]
    not_listed += [event for event, folders in logged.items() if folders & TRAINER and event not in trainer]
    assert not_listed == [], "add a row of each to docs/logs.md"


def test_every_event_that_is_listed_is_logged() -> None:
    daemon, trainer = catalogue()
    logged = logged_events()
    chosen = (daemon | trainer) - logged.keys()
    assert [event for event in chosen if not is_text_of_the_code(event)] == [], (
        "docs/logs.md lists what nothing logs"
    )
    assert {event for event in daemon if event in logged and not logged[event] - TRAINER} == set()
    assert {event for event in trainer if event in logged and not logged[event] & TRAINER} == set()


def test_the_table_has_the_levels_of_the_code() -> None:
    parts = (ROOT / "docs/logs.md").read_text().split("## Events of a trainer")
    wrong: list[str] = []
    for part, folders in zip(parts, (set(FOLDERS) - TRAINER, TRAINER), strict=True):
        for event, said in re.findall(r"^\| `([a-z_0-9]+)` \| ([a-z, ]+) \|", part, re.MULTILINE):
            levels = set[str]().union(*(logged_levels().get((event, each), set()) for each in folders))
            if levels and "log" not in levels and levels != set(said.split(", ")):
                wrong.append(f"{event}: {said}, and the code logs {', '.join(sorted(levels))}")
    assert wrong == []


def test_the_table_is_sorted() -> None:
    for part in (ROOT / "docs/logs.md").read_text().split("## Events of a trainer"):
        rows = _ROW.findall(part)
        assert rows == sorted(rows)
