"""The picture of a benchmark: every ratio with its quartiles beside its goal.

python bench/plot.py bench/results/storage-….json … docs/images/storage.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from paired import Row

MET, MISSED, PLAIN = "#2b8a3e", "#c92a2a", "#1864ab"


TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.3, 2, 4, 8, 16, 32]
CLOSE_TICKS = {0.8, 1.3}
WIDE = 50
"""From this range on there is no room for the close ones."""
LABEL_MIN = 0.01
LEAST = 0.005
"""What is smaller is drawn here: ratios of costs may be next to nothing, or less."""


def draw(rows: Sequence[Row], title: str, target: Path) -> None:
    """Write the picture: one line per ratio, the goal as a bar, on a logarithmic axis."""
    ratios = [row for row in rows if row.unit == "ratio"][::-1]
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(ratios) + 1.4), layout="constrained")
    for place, row in enumerate(ratios):
        colour = PLAIN if row.goal is None else (MET if row.met else MISSED)
        axes.plot(
            [max(row.low, LEAST), max(row.high, LEAST)], [place, place], color=colour, linewidth=3, alpha=0.4
        )
        axes.plot(max(row.value, LEAST), place, "o", color=colour)
        label = f"{row.value:.2f}" if row.value >= LABEL_MIN else f"{row.value:.1g}"
        axes.annotate(label, (max(row.value, LEAST), place), (6, 5), textcoords="offset points", fontsize=8)
        if row.goal is not None:
            axes.plot(row.goal, place, "|", color="black", markersize=12)
            side, anchor = ("<", "right") if row.at_most else (">", "left")
            away = -2 if row.at_most else 2
            axes.annotate(
                side, (row.goal, place), (away, -9), textcoords="offset points", fontsize=7, ha=anchor
            )
    axes.set_yticks(range(len(ratios)), [row.measure for row in ratios], fontsize=8)
    axes.set_ylim(-0.8, len(ratios) - 0.2)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high and (high < WIDE * low or tick not in CLOSE_TICKS)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "ratio: point median, line quartiles, bar goal (> at least, < at most)\n"
        "green met, red missed, blue without goal"
    )
    figure.suptitle(title, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def draw_results(results: Sequence[Path], target: Path) -> None:
    """Draw the rows of some files in one picture; of a measure that several have, the row of the last one."""
    found = [json.loads(path.read_text()) for path in results]
    origins = dict.fromkeys(f"{each['machine']}, {each['date'][:10]}" for each in found)
    commits = ", ".join(dict.fromkeys(each["commit"] for each in found))
    rows = {row["measure"]: Row(**row) for each in found for row in each["rows"]}
    draw(list(rows.values()), "\n".join([*origins, commits]), target)


def main() -> None:
    """Draw the rows of some files in one picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    draw_results(args.results, args.target)


if __name__ == "__main__":
    main()
