"""Where a command's answer goes: one JSON document for machines, or tables for people; and the exit codes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

from ...core.ids import CheckpointId

if TYPE_CHECKING:
    from rich.console import Console

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
"""What each says stands in cli.py."""


def to_json(value: object) -> object:
    """Return views as plain JSON values: a checkpoint id as `<attempt>.<step>`, a state by its word."""
    if isinstance(value, CheckpointId):
        return str(value)
    if isinstance(value, Enum):
        return cast(object, value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in cast(Mapping[object, object], value).items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in cast(tuple[object, ...], value)]
    return value


class Output:
    """The answer of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._console: Console | None = None

    def show(self, document: Mapping[str, object], render: Callable[["Console"], None]) -> None:
        """Print the document, or let `render` draw it."""
        if self.as_json:
            print(json.dumps(to_json(document), indent=2))
        else:
            render(self.console)

    def progress(self, render: Callable[["Console"], None]) -> None:
        """Draw a part for people as soon as it is known; machines wait for the whole."""
        if not self.as_json:
            render(self.console)

    @property
    def console(self) -> "Console":
        """The terminal, or what stands for it."""
        if self._console is None:
            from .render import make_console  # noqa: PLC0415  rich is slow to import

            self._console = make_console()
        return self._console
