"""The result as one HTML page: no script, nothing fetched, every number of a plot in a table, too."""

import html
from collections.abc import Sequence

from ...core.sizes import size_text
from .measured_format import Analysis, Phase, PredictionReport, RunReport
from .page_style_format import STYLE
from .svg_format import Bar, Level, Part, bars, curve

_WARM_BOUND = "the warm run is an upper bound of the preparation stall"
_PARTS = ("compute", "copy", "preparation", "fetch")
_SAID = {
    Phase.SYNTHETIC: "a few batches again and again",
    Phase.WARM: "files in memory",
    Phase.COLD: "files on storage only",
}


def page(analysis: Analysis) -> str:
    """Return the whole page."""
    title = f"Stall analysis of {analysis.subject}"
    body = "\n".join(
        [
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="advice">{html.escape(analysis.advice.sentence)}.</p>',
            f'<p class="facts">{html.escape(facts_line(analysis))}</p>',
            _runs(analysis),
            '<div class="grid">',
            _cache(analysis),
            _workers(analysis),
            _storage(analysis),
            _peers(analysis),
            "</div>",
            _notes(analysis),
            (
                f"<footer>everstep {html.escape(analysis.version)}. Predictions: the least of what the trainer, the"
                " workers, the cores, storage and network allow, with the costs measured in these runs.</footer>"
            ),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def facts_line(analysis: Analysis) -> str:
    """Return what was measured, in one line."""
    loader, model = analysis.loader, analysis.model
    length = f" of {loader.dataset_length:,} samples" if loader.dataset_length is not None else ""
    noun = "worker" if loader.workers == 1 else "workers"
    workers = f"{loader.workers} {noun} by {loader.start_method}" if loader.workers else "no workers"
    size = f", {size_text(analysis.dataset_bytes)}" if analysis.dataset_bytes else ""
    read = f", {size_text(model.sample_bytes)} a sample" if model.sample_bytes else ""
    return (
        f"{loader.dataset}{length}{size}{read}; batches of {loader.batch_size:g}, {workers}, {model.cores:g} cores;"
        f" steps on {analysis.device}"
    )


def stalls_line(analysis: Analysis) -> str:
    """Return how much of a step each of the two stalls is."""
    stalls = analysis.stalls
    return (
        f"preparation stall {100 * stalls.preparation_share:.0f} % of a step with everything in memory,"
        f" fetch stall {100 * stalls.fetch_share:.0f} % of a step with nothing in memory"
    )


def bound_text(run: RunReport) -> str:
    """Return the sign before a speed that is only a bound, or nothing."""
    if not run.is_bound:
        return ""
    return "≤ " if run.phase is Phase.COLD else "≥ "


def limit_text(limit: str) -> str:
    """Return what bounds a prediction, in words."""
    return {"serial": "no workers"}.get(limit, limit)


def _runs(analysis: Analysis) -> str:
    rows = [
        Bar(
            name=run.phase.value,
            parts=[Part(name=name, value=1000 * getattr(run, f"{name}_s"), style=name) for name in _PARTS],
        )
        for run in analysis.runs
    ]
    key = "".join(f'<li><i style="background:var(--{name})"></i>{name}</li>' for name in _PARTS)
    head = ("run", "", "samples/s", "step, ms", "quartiles, ms", *(f"{name}, ms" for name in _PARTS), "steps")
    cells = [
        (
            run.phase.value, _SAID[run.phase], f"{bound_text(run)}{run.samples_per_s:,.1f}",
            _ms(run.times.mean_s), f"{_ms(run.times.low_s)} to {_ms(run.times.high_s)}",
            *(_ms(getattr(run, f"{name}_s")) for name in _PARTS), str(run.times.count),
        )
        for run in analysis.runs
    ]  # fmt: skip
    return (
        '<section class="wide"><h2>Where a step goes</h2><p>The wait of the loop for a batch, shared between fetch and'
        " preparation as the workers' time was; means over all steps."
        f" {html.escape(stalls_line(analysis).capitalize())}.</p>"
        f'{bars("Time of a step in each run", rows, unit="ms")}<ul class="key">{key}</ul>'
        f"{_table(head, cells)}</section>"
    )


def _cache(analysis: Analysis) -> str:
    rows, advice = analysis.what_if.cache, analysis.advice
    points = [(100 * row.cached, row.samples_per_s) for row in rows]
    mark = (
        (100 * advice.cached, f"{100 * advice.cached:.0f} % is enough") if advice.cached is not None else None
    )
    if advice.workers is not None:
        mark = None  # it holds for another number of workers than the curve
    plot = curve(
        "Speed by share of the dataset in the cache", points, x_label="in the cache, %", y_label="samples/s",
        levels=_levels(analysis), mark=mark,
    )  # fmt: skip
    return _section(
        "More in the cache", f"Workers: {analysis.model.workers}. From nothing to everything in memory.", plot,
        ("in the cache", "samples/s", "bound by"), [(f"{100 * row.cached:.0f} %", *_outcome(row)) for row in rows],
    )  # fmt: skip


def _workers(analysis: Analysis) -> str:
    rows = analysis.what_if.workers
    plot = curve(
        "Speed by number of workers", [(row.workers, row.samples_per_s) for row in rows], x_label="workers",
        y_label="samples/s", levels=_levels(analysis), as_columns=True,
    )  # fmt: skip
    return _section(
        "More workers", f"Everything in memory. Now: {analysis.model.workers}.", plot,
        ("workers", "samples/s", "bound by"), [(str(row.workers), *_outcome(row)) for row in rows],
    )  # fmt: skip


def _storage(analysis: Analysis) -> str:
    rows = [row for row in analysis.what_if.storage if row.storage_bytes_per_s is not None]
    if not rows:
        said = "Nothing was read from storage, or reading cost too little to be seen: nothing is known of it."
        return f"<section><h2>Faster storage</h2><p>{said}</p></section>"
    points = [((row.storage_bytes_per_s or 0.0) / 1e6, row.samples_per_s) for row in rows]
    plot = curve(
        "Speed by bandwidth of storage", points, x_label="storage, MB/s", y_label="samples/s",
        levels=_levels(analysis), mark=((analysis.model.storage_bytes_per_s or 0.0) / 1e6, "as measured"),
    )  # fmt: skip
    return _section(
        "Faster storage", "Nothing in the cache. From half of what was measured on.", plot,
        ("storage", "samples/s", "bound by"),
        [(f"{(row.storage_bytes_per_s or 0.0) / 1e6:,.0f} MB/s", *_outcome(row)) for row in rows],
    )  # fmt: skip


def _peers(analysis: Analysis) -> str:
    what_if = analysis.what_if
    plot = curve(
        "Speed by number of peers", [(row.peers, row.samples_per_s) for row in what_if.peers], x_label="other nodes",
        y_label="samples/s", levels=_levels(analysis), as_columns=True,
    )  # fmt: skip
    said = (
        f"Each node has {100 * what_if.peer_cached:.0f} % of the dataset in memory, none what another has, and"
        f" {what_if.peer_bytes_per_s * 8 / 1e9:.0f} Gbit/s between them."
    )
    return _section(
        "More nodes", said, plot, ("other nodes", "samples/s", "bound by"),
        [(str(row.peers), *_outcome(row)) for row in what_if.peers],
    )  # fmt: skip


def _levels(analysis: Analysis) -> list[Level]:
    synthetic = next(run for run in analysis.runs if run.phase is Phase.SYNTHETIC)
    return [Level(name="compute alone", value=synthetic.samples_per_s, style="compute")]


def _outcome(row: PredictionReport) -> tuple[str, str]:
    return f"{row.samples_per_s:,.1f}", limit_text(row.limit)


def _section(title: str, said: str, plot: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(said)}</p>{plot}"
        f"<details><summary>Numbers</summary>{_table(head, rows)}</details></section>"
    )


def _notes(analysis: Analysis) -> str:
    notes = all_notes(analysis)
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def all_notes(analysis: Analysis) -> list[str]:
    """Return everything that a reader of the numbers must know."""
    reasons = [
        f"{'the cold run is a lower bound of the fetch stall' if run.phase is Phase.COLD else _WARM_BOUND}: {reason}"
        for run in analysis.runs
        for reason in run.reasons
    ]
    written = [
        f"the script wrote outside of its scratch folder: {', '.join(analysis.written_files[:5])}"
    ] if analysis.written_files else []  # fmt: skip
    return [*reasons, *written, *analysis.notes]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
