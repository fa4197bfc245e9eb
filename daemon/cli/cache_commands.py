"""`everstep cache`: the caches of a running daemon, listed and dropped, and the nodes that share them."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ...core.durations import duration_text
from ...core.paths import data_socket_path
from ...core.sizes import size_text
from ..control.views import CacheView, MemberView
from .output import EXIT_DONE, Output
from .render import DIM, WARN, count_text

if TYPE_CHECKING:
    from rich.console import Console

FINGERPRINT_SHOWN = 24
_HEADS = ("SAMPLES", "USED", "BUDGET", "HITS", "READERS", "DATASET")


def cache(arguments: argparse.Namespace) -> int:
    """`everstep cache ...`."""
    return _PARTS[arguments.part](arguments)


def _list(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.caches()
    Output(as_json=arguments.json).show({"caches": found}, lambda console: draw_caches(console, found))
    return EXIT_DONE


def _drop(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        dropped = [daemon.drop_cache(number) for number in arguments.number]
    Output(as_json=arguments.json).show({"dropped": dropped}, lambda console: _draw_dropped(console, dropped))
    return EXIT_DONE


def _members(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.members()
    Output(as_json=arguments.json).show({"members": found}, lambda console: draw_members(console, found))
    return EXIT_DONE


def draw_members(console: "Console", members: Sequence[MemberView]) -> None:
    """Draw one line for each node."""
    if not members:
        console.print(Text("this node shares its caches with no other (cache.listen)", DIM))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for head in ("MEMBER", "STATE", "FETCHED", "OFFERED"):
        table.add_column(head, justify="right" if head in {"FETCHED", "OFFERED"} else "left")
    for each in members:
        state = "this node" if each.is_me else "asked" if each.is_asked else "left alone"
        table.add_row(
            Text(each.address, overflow="fold"), state, str(each.fetched_count), str(each.offered_count)
        )
    console.print(table)
    for each in members:
        if each.problem:
            console.print(Text(f"! {each.address}: {each.problem}", WARN))
    if not any(each.is_me for each in members):
        console.print(Text("! none of them is this node: it owns no samples (cache.address)", WARN))


def draw_caches(console: "Console", caches: Sequence[CacheView]) -> None:
    """Draw one line for each cache."""
    if not caches:
        console.print(Text("no dataset is cached", DIM))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    several = len({each.uid for each in caches}) > 1
    for head in ("CACHE", *(["USER"] if several else []), *_HEADS):
        table.add_column(head, justify="left" if head in {"CACHE", "USER", "DATASET"} else "right")
    for each in caches:
        readers = str(each.client_count) if each.client_count else f"none for {duration_text(each.idle_s)}"
        table.add_row(
            str(each.number),
            *([f"uid {each.uid}"] if several else []),
            f"{each.published_count}/{each.sample_count}",
            size_text(each.used_bytes),
            size_text(each.budget_bytes),
            _hits_text(each),
            readers,
            Text(f"{_short(each.fingerprint)} ({each.content})", overflow="fold"),
        )
    console.print(table)
    for each in caches:
        if each.reason:
            has = size_text(each.allocated_bytes)
            console.print(Text(f"! cache {each.number} has {has}: {each.reason}", WARN))


def _short(fingerprint: str) -> str:
    """Return a long one's begin and end: names differ in their versions, digests anywhere."""
    if len(fingerprint) <= FINGERPRINT_SHOWN:
        return fingerprint
    return f"{fingerprint[: FINGERPRINT_SHOWN - 10]}…{fingerprint[-9:]}"


def _hits_text(cache: CacheView) -> str:
    """Return the share of reads that found their sample in the cache."""
    reads = cache.hit_count + cache.miss_count
    return f"{100 * cache.hit_count / reads:.1f} %" if reads else "-"


def _draw_dropped(console: "Console", dropped: Sequence[CacheView]) -> None:
    for each in dropped:
        samples = count_text(each.published_count, "sample")
        console.print(
            f"cache {each.number} is dropped: {samples}, {size_text(each.allocated_bytes)} of memory"
        )


_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "members": _members,
    "drop": _drop,
}
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"cache": cache}
