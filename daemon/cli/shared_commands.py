"""`everstep shared`: the groups of jobs that share their preparation."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ...core.paths import data_socket_path
from ...core.sizes import size_text
from ..control.views import ShareGroupView
from .output import EXIT_DONE, Output
from .render import DIM, WARN

if TYPE_CHECKING:
    from rich.console import Console


def shared(arguments: argparse.Namespace) -> int:
    """`everstep shared list`."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.groups()
    Output(as_json=arguments.json).show({"groups": found}, lambda console: draw_groups(console, found))
    return EXIT_DONE


def draw_groups(console: "Console", groups: Sequence[ShareGroupView]) -> None:
    """Draw one line for each group, in 80 columns; how many batches lie ready and the budget are in the JSON."""
    if not groups:
        console.print(Text("no jobs share their preparation", DIM))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    table.add_column("GROUP")
    for head in ("JOBS", "WINDOW", "PREPARED", "SERVED", "PRIVATE", "MEMORY"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("SLOWEST", no_wrap=True)
    for each in groups:
        alone = f", {each.outside_count} out" if each.outside_count else ""
        table.add_row(
            Text(each.name, overflow="fold"),
            f"{each.job_count}{alone}",
            f"{each.window[0]}-{each.window[1]}",
            str(each.prepared_count),
            str(each.served_count),
            str(each.private_count),
            size_text(each.used_bytes),
            f"pid {each.slowest_pid} by {each.slowest_behind}",
        )
    console.print(table)
    for each in groups:
        if each.quarantined:
            samples = ", ".join(map(str, each.quarantined[:20]))
            console.print(Text(f"! group {each.name} leaves out samples {samples}", WARN))


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"shared": shared}
