"""`everstep bench io`: how fast drives are by each engine, block size and depth, and what to configure."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.io_sweep import DeviceSweep, sweep
from ...checkpoint.io_sweep_plan import (
    DEPTHS,
    CellResult,
    Recommendation,
    recommend,
    slow_devices,
)
from ...core.errors import UsageError
from .output import EXIT_DONE, Output
from .plot_child import check_png, plot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SIZE_MIN_MIB, SIZE_MAX_MIB = 16, 65536

_DIRECTIONS = (("write", "a new file, with fdatasync at the end"), ("read", "what was just written"))


def bench_io(arguments: argparse.Namespace) -> int:
    """`everstep bench io`."""
    directories = [Path(each).absolute() for each in arguments.directory]
    _check(arguments, directories)
    output = Output(as_json=arguments.json)
    sweeps: list[DeviceSweep] = []
    for directory in directories:
        found = sweep(directory, seconds=arguments.seconds, size_bytes=arguments.size_mib * 2**20)
        sweeps.append(found)
        output.progress(lambda console, found=found: _draw_device(console, found))
    results = {str(found.path): found.results for found in sweeps}
    recommended, slow = recommend(results), slow_devices(results)
    document = _document(sweeps, recommended, slow)
    if arguments.png is not None:
        plot(document, arguments.png, "bench_plot")
    output.show(document, lambda console: _draw_advice(console, recommended, slow, arguments.png))
    return EXIT_DONE


def _check(arguments: argparse.Namespace, directories: Sequence[Path]) -> None:
    if not arguments.seconds > 0:
        raise UsageError(
            f"--seconds is {arguments.seconds}", hint="a few seconds for each directory, e.g. 10"
        )
    if not SIZE_MIN_MIB <= arguments.size_mib <= SIZE_MAX_MIB:
        raise UsageError(
            f"--size-mib is {arguments.size_mib}",
            hint=f"{SIZE_MIN_MIB} to {SIZE_MAX_MIB}: it is held in memory",
        )
    check_png(arguments.png)
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory", hint="name a directory on each drive")


def _document(
    sweeps: Sequence[DeviceSweep], recommended: Recommendation | None, slow: Mapping[str, float]
) -> dict[str, object]:
    return {
        "devices": [
            {
                "path": str(found.path),
                "is_direct": found.is_direct,
                "engine_by_default": found.choice.name,
                "left_out": found.left_out,
                "slower_than_peers": slow.get(str(found.path)),
                "cells": [
                    {
                        "engine": result.cell.engine,
                        "block_size_bytes": result.cell.block_size_bytes,
                        "queue_depth": result.cell.queue_depth,
                        "write_bytes_per_s": result.write_bytes_per_s,
                        "read_bytes_per_s": result.read_bytes_per_s,
                    }
                    for result in found.results
                ],
            }
            for found in sweeps
        ],
        "recommended": recommended,
        "toml": _toml(recommended) if recommended else "",
    }


def _toml(recommended: Recommendation) -> str:
    """Return the lines for the daemon's file."""
    return (
        "[io]\n"
        f'engine = "{recommended.engine.value}"\n'
        f"block_size_bytes = {recommended.block_size_bytes}\n"
        f"queue_depth = {recommended.queue_depth}\n"
    )


# --- for people -------------------------------------------------------------------------------------------------------


def _draw_device(console: "Console", found: DeviceSweep) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    console.print(Text(str(found.path), "bold"), soft_wrap=True)
    if not found.is_direct:
        console.print(Text("  no direct I/O: the numbers are of the page cache, too", "yellow"))
    for engine, reason in found.left_out.items():
        console.print(Text(f"  without {engine}: {reason}", "yellow"), soft_wrap=True)
    for direction, how in _DIRECTIONS:
        _draw_table(console, f"{direction}, GB/s, {how}", found, direction)
    console.print()


def _draw_table(console: "Console", title: str, found: DeviceSweep, direction: str) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    speeds = {result.cell: _speed(result, direction) for result in found.results}
    best = max(speeds.values(), default=0.0)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ENGINE")
    table.add_column("BLOCK", justify="right")
    for depth in DEPTHS:
        table.add_column(f"depth {depth}" if depth == DEPTHS[0] else str(depth), justify="right")
    rows = sorted({(cell.engine, cell.block_size_bytes) for cell in speeds})
    by_place = {
        (cell.engine, cell.block_size_bytes, cell.queue_depth): found for cell, found in speeds.items()
    }
    for engine, block in rows:
        cells = [by_place.get((engine, block, depth)) for depth in DEPTHS]
        table.add_row(engine, f"{block // 1024} KiB", *(_cell_text(speed, best) for speed in cells))
    console.print(Text(f"  {title}", "dim"))
    console.print(table)


def _cell_text(speed: float | None, best: float) -> "Text":
    from rich.text import Text  # noqa: PLC0415

    if speed is None:
        return Text("-", "dim")
    return Text(f"{speed / 1e9:.2f}", "bold green" if speed == best else "")


def _speed(result: CellResult, direction: str) -> float:
    return result.write_bytes_per_s if direction == "write" else result.read_bytes_per_s


def _draw_advice(
    console: "Console", recommended: Recommendation | None, slow: Mapping[str, float], png: Path | None
) -> None:
    from rich.text import Text  # noqa: PLC0415

    for path, ratio in slow.items():
        line = (
            f"! {path} is {ratio:.1f} times slower than its peers: a stripe is as fast as its slowest drive"
        )
        console.print(Text(line, "yellow"), soft_wrap=True)
    if recommended is None:
        console.print(Text("nothing was measured on every device: give more --seconds", "yellow"))
        return
    console.print(
        Text(
            f"{recommended.saturating_depth} blocks of {recommended.block_size_bytes // 1024} KiB in flight by"
            f" {recommended.engine.value} reach {100 * recommended.write_share:.0f} % of each drive's best. Deeper"
            " queues keep a drive busy while another thread holds the GIL. For the daemon's file:",
        ),
        soft_wrap=True,
    )
    console.print(Text("\n" + _toml(recommended), "bold"), soft_wrap=True)
    if png is not None:
        console.print(Text(f"picture: {png}", "dim"), soft_wrap=True)
