"""The events that the product's code logs, found in its syntax trees."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
_EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


@functools.cache
def logged_events() -> dict[str, set[str]]:
    """Return the folders in which each event is logged; `…` stands for what is only known at run time."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "logging.getLogger" not in text:
                continue
            for _, template in _templates(ast.parse(text)):
                found.setdefault(_event_of(template), set()).add(folder)
    return found


@functools.cache
def logged_levels() -> dict[tuple[str, str], set[str]]:
    """Return at which levels each event is logged in a folder; `log`: at one that is chosen at run time."""
    found: dict[tuple[str, str], set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for level, template in _templates(ast.parse(path.read_text())):
                found.setdefault((_event_of(template), folder), set()).add(level)
    return found


def _event_of(template: str) -> str:
    return re.sub(r"%[a-z]", "…", template.split(" ", 1)[0].rstrip(":"))


def _templates(tree: ast.Module) -> list[tuple[str, str]]:
    """Return level and text of each call that logs."""
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    found: list[tuple[str, str]] = []
    for call in calls:
        func = call.func
        assert isinstance(func, ast.Attribute)
        owner = func.value.id if isinstance(func.value, ast.Name) else ""
        if owner not in {"logger", "_log"} or func.attr not in _LEVELS | {"log"}:
            continue
        argument = call.args[1 if func.attr == "log" else 0]
        found += [
            ("error" if func.attr == "exception" else func.attr, each.value)
            for each in ast.walk(argument)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ][:1]
    return found
