"""`everstep cache`: the caches of a running daemon, listed and dropped."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..core.durations import duration_text
from ..core.paths import data_socket_path
from ..core.sizes import size_text
from .cli_output import EXIT_DONE, Output
from .cli_render import DIM, WARN, count_text
from .views import CacheView

if TYPE_CHECKING:
    from rich.console import Console

FINGERPRINT_SHOWN = 24


def cache(arguments: argparse.Namespace) -> int:
    """`everstep cache ...`."""
    return _PARTS[arguments.part](arguments)


def _list(arguments: argparse.Namespace) -> int:
    from .control_client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.status().caches
    Output(as_json=arguments.json).show({"caches": found}, lambda console: draw_caches(console, found))
    return EXIT_DONE


def _drop(arguments: argparse.Namespace) -> int:
    from .control_client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        dropped = [daemon.drop_cache(number) for number in arguments.number]
    Output(as_json=arguments.json).show({"dropped": dropped}, lambda console: _draw_dropped(console, dropped))
    return EXIT_DONE


def draw_caches(console: "Console", caches: Sequence[CacheView]) -> None:
    """Draw one line for each cache."""
    if not caches:
        console.print(Text("no dataset is cached", DIM))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for head in ("CACHE", "SAMPLES", "USED", "BUDGET", "READERS", "DATASET"):
        table.add_column(head, justify="left" if head in {"CACHE", "DATASET"} else "right")
    for each in caches:
        readers = str(each.client_count) if each.client_count else f"none for {duration_text(each.idle_s)}"
        table.add_row(
            str(each.number),
            f"{each.published_count}/{each.sample_count}",
            size_text(each.used_bytes),
            size_text(each.budget_bytes),
            readers,
            Text(f"{each.fingerprint[:FINGERPRINT_SHOWN]} ({each.content})", overflow="fold"),
        )
    console.print(table)
    for each in caches:
        if each.reason:
            has = size_text(each.allocated_bytes)
            console.print(Text(f"! cache {each.number} has {has}: {each.reason}", WARN))


def _draw_dropped(console: "Console", dropped: Sequence[CacheView]) -> None:
    for each in dropped:
        samples = count_text(each.published_count, "sample")
        console.print(
            f"cache {each.number} is dropped: {samples}, {size_text(each.allocated_bytes)} of memory"
        )


_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {"list": _list, "drop": _drop}
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"cache": cache}
