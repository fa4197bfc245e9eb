"""`everstep import`: other tools' files as a checkpoint that `attach` and `restore` take."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .output import EXIT_DONE, Output
from .tool_child import run_child

if TYPE_CHECKING:
    from rich.console import Console


def import_source(arguments: argparse.Namespace) -> int:
    """`everstep import`."""
    request: dict[str, object] = {
        "source": str(Path(arguments.source).absolute()),
        "run": arguments.run,
        "storage": [each if "/" not in each else str(Path(each).absolute()) for each in arguments.storage],
        "step": arguments.step,
        "as_name": arguments.as_name,
        "without": arguments.without,
    }
    answer = run_child("hook.importer", request)
    Output(as_json=arguments.json).show(answer, lambda console: _draw(console, answer))
    return EXIT_DONE


def _draw(console: "Console", answer: dict[str, object]) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    names = ", ".join(cast(list[str], answer["components"]))
    console.print(
        Text(f"imported {answer['checkpoint']} from {answer['kind']}: {names}", "green"), soft_wrap=True
    )
    for name, value in cast(dict[str, str], answer["left_out"]).items():
        console.print(Text(f"left out: {name}: {value}", "dim"), soft_wrap=True)
