"""`everstep runs` and `everstep slots`: what a daemon serves, in more detail than `status`."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...core.paths import data_socket_path
from ...core.sizes import size_text
from .output import EXIT_DONE, Output

if TYPE_CHECKING:
    from rich.console import Console

    from ..control.run_views import RunDetail, SlotDetail


def add_runs(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the commands' arguments."""
    runs = add("runs", parents=[as_json], help="list runs: trainers, memory, checkpoints")
    runs.add_argument("run", nargs="?", default="", metavar="RUN", help="only this run")
    slots = add("slots", parents=[as_json], help="list the slots in memory: what is copied, written, kept")
    slots.add_argument("run", nargs="?", default="", metavar="RUN", help="only this run")


def _runs(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = [daemon.run(arguments.run)] if arguments.run else daemon.runs()
    Output(as_json=arguments.json).show({"runs": found}, lambda console: _draw_runs(console, found))
    return EXIT_DONE


def _slots(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.slots(arguments.run)
    Output(as_json=arguments.json).show({"slots": found}, lambda console: _draw_slots(console, found))
    return EXIT_DONE


def _draw_runs(console: "Console", runs: "Sequence[RunDetail]") -> None:
    rows = [
        (
            each.status.name,
            each.state.value,
            str(each.status.attempt),
            f"{sum(rank.state.value == 'attached' for rank in each.status.ranks)}/{each.status.world_size}",
            size_text(each.arena_bytes),
            str(each.checkpoint_count),
            size_text(each.size_bytes),
            str(each.status.complete_floor or "-"),
        )
        for each in runs
    ]
    heads = ("RUN", "STATE", "ATTEMPT", "RANKS", "MEMORY", "CHECKPOINTS", "ON DEVICES", "NEWEST COMPLETE")
    _table(console, heads, rows, "no run is known")


def _draw_slots(console: "Console", slots: "Sequence[SlotDetail]") -> None:
    rows = [
        (
            each.run_name,
            str(each.rank),
            f"{each.arena}.{each.slot}",
            each.state.value,
            str(each.checkpoint or "-"),
            size_text(each.size_bytes),
        )
        for each in slots
    ]
    _table(console, ("RUN", "RANK", "SLOT", "STATE", "CHECKPOINT", "MEMORY"), rows, "nothing is in memory")


def _table(console: "Console", heads: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    from rich.table import Table  # noqa: PLC0415  rich is slow to import
    from rich.text import Text  # noqa: PLC0415

    from .render import DIM  # noqa: PLC0415

    if not rows:
        console.print(Text(nothing, DIM))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"runs": _runs, "slots": _slots}
