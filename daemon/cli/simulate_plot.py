"""A picture of `everstep simulate --json`: `python -m everstep.daemon.cli.simulate_plot FILE < JSON`."""

import sys
from importlib import import_module
from typing import Any

from ...core.durations import duration_text
from .bench_plot import save

_COLOURS = ("#bbbbbb", "#66ccee", "#ccbb44", "#aa3377", "#228833", "#4477aa", "#ee6677")
"""Told apart by colour-blind readers, too (Paul Tol's bright scheme)."""
_PARTS = (
    ("stall_s", "stall", "#332288"),
    ("waited_s", "waited for a place", "#44aa99"),
    ("slower_s", "slower steps", "#8c510a"),
    ("lost_s", "work done again", "#dfc27d"),
    ("restart_s", "restarts", "#444444"),
)
"""In none of the policies' colours."""


def draw(document: dict[str, Any]) -> Any:  # a matplotlib Figure
    """Return a figure: goodput at the left, where the rest of the time went at the right."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(12, 5), layout="constrained")
    goodput, parts = figure.subplots(1, 2)
    policies: dict[str, dict[str, dict[str, float]]] = document["policies"]
    figure.suptitle(_title(document["job"]), fontsize=10)
    _goodput(goodput, policies)
    _parts(parts, policies)
    for axis in (goodput, parts):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _title(job: dict[str, Any]) -> str:
    costs: dict[str, float] = job["phases"][0]["costs"]
    texts = {name: duration_text(costs[name]) for name in ("step_s", "stall_s", "persist_s")}
    return (
        f"steps of {texts['step_s']}, checkpoints: {texts['stall_s']} stall, {texts['persist_s']} to write; "
        f"a failure each {duration_text(job['mtbf_s'])}, for {duration_text(job['duration_s'])}"
    )


def _goodput(axis: Any, policies: dict[str, dict[str, dict[str, float]]]) -> None:
    processes = list(next(iter(policies.values())))
    width = 0.8 / len(policies)
    for number, (name, found) in enumerate(policies.items()):
        values = [100 * found[process]["goodput"] for process in processes]
        low = [
            value - 100 * found[process]["goodput_low"]
            for value, process in zip(values, processes, strict=True)
        ]
        high = [
            100 * found[process]["goodput_high"] - value
            for value, process in zip(values, processes, strict=True)
        ]
        places = [place + (number - len(policies) / 2 + 0.5) * width for place in range(len(processes))]
        # No bars, whose lengths would be compared: the axis does not begin at 0.
        axis.errorbar(places, values, yerr=[low, high], label=name, color=_COLOURS[number % len(_COLOURS)],
                      fmt="o", markersize=6, elinewidth=1, capsize=2)  # fmt: skip
    axis.set_xticks(range(len(processes)), processes)
    axis.set_ylabel("goodput, %: mean, least and most of the runs")
    _legend(axis)
    axis.grid(visible=True, axis="y", alpha=0.3)


def _parts(axis: Any, policies: dict[str, dict[str, dict[str, float]]]) -> None:
    names = list(policies)
    left = [0.0] * len(names)
    for part, label, colour in _PARTS:
        values = [_mean_share(policies[name], part) for name in names]
        axis.barh(names, values, left=left, label=label, color=colour)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("share of the time that made no progress, %")
    _legend(axis)
    axis.grid(visible=True, axis="x", alpha=0.3)


def _legend(axis: Any) -> None:
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _mean_share(found: dict[str, dict[str, float]], part: str) -> float:
    return 100 * sum(each[part] / each["wall_s"] for each in found.values()) / len(found)


if __name__ == "__main__":
    sys.exit(save(draw))
