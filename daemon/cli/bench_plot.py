"""A picture of `everstep bench io --json`, drawn by matplotlib: `python -m everstep.daemon.cli.bench_plot FILE < JSON`.

A program of its own, because matplotlib brings numpy: the command line starts it and stays small.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_LINES = {"aio": "-", "uring": "--", "plain": ":"}
_MARKERS = {"aio": "o", "uring": "s", "plain": "D"}
_COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377")
"""Told apart by colour-blind readers, too (Paul Tol's bright scheme)."""


def save(draw: Callable[[dict[str, Any]], Any]) -> int:
    """Read the document from standard input and write its picture; the last line of stderr says why not."""
    document: dict[str, Any] = json.load(sys.stdin)
    try:
        figure = draw(document)
        figure.savefig(sys.argv[1], format="png", dpi=120)
    except (ImportError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def draw(document: dict[str, Any]) -> Any:  # a matplotlib Figure
    """Return a figure: a row for each device, writing at the left and reading at the right."""
    figure_class: Any = import_module("matplotlib.figure").Figure
    devices: list[dict[str, Any]] = document["devices"]
    figure = figure_class(figsize=(10, 1.2 + 3.2 * len(devices)), layout="constrained")
    axes = figure.subplots(len(devices), 2, squeeze=False)
    for row, device in zip(axes, devices, strict=True):
        top = 1.08 * max((_top(cell) for cell in device["cells"]), default=1.0) / 1e9
        for axis, direction in zip(row, ("write", "read"), strict=True):
            _panel(axis, device, direction, top)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _top(cell: dict[str, float]) -> float:
    return max(cell["write_bytes_per_s"], cell["read_bytes_per_s"])


def _panel(axis: Any, device: dict[str, Any], direction: str, top: float) -> None:
    series: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for cell in device["cells"]:
        point = (cell["queue_depth"], cell[f"{direction}_bytes_per_s"] / 1e9)
        series.setdefault((cell["engine"], cell["block_size_bytes"]), []).append(point)
    sizes = sorted({size for _, size in series})
    for (engine, size), points in sorted(series.items()):
        depths, speeds = zip(*sorted(points), strict=True)
        axis.plot(
            depths,
            speeds,
            _LINES[engine],
            marker=_MARKERS[engine],
            markersize=4,
            color=_COLOURS[sizes.index(size) % len(_COLOURS)],
            label=f"{engine}, {size // 1024} KiB",
        )
    ticks = sorted({cell["queue_depth"] for cell in device["cells"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, top)
    axis.set_xlabel("blocks in flight")
    axis.set_ylabel(f"{direction}, GB/s")
    axis.set_title(device["path"] if direction == "write" else "", loc="left", fontsize=9)
    axis.grid(visible=True, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(save(draw))
