"""The result as one HTML page: no script, nothing fetched, every number of a plot in a table, too."""

import html
from collections.abc import Sequence

from ...core.sizes import size_text
from .measured_format import Analysis, Phase, PredictionReport, RunReport
from .svg_format import Bar, Level, Part, bars, curve

_STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--ink:#1d2227;--soft:#5b6570;--rule:#d9d6cf;--card:#fff;
--compute:#3b6ea5;--copy:#7fb2d6;--preparation:#e0a13a;--fetch:#c4503f;--accent:#2f7d5b;--note:#fff6e3}
@media(prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e7e9ea;--soft:#9aa5af;--rule:#333b43;--card:#1b2126;
--compute:#6ea3dc;--copy:#3f6f95;--preparation:#e3b15a;--fetch:#e0705f;--accent:#5fbf92;--note:#2b2616}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:15px;font-weight:600;color:var(--soft);margin:0 0 6px;overflow-wrap:anywhere}
.advice{font-size:clamp(21px,3.2vw,31px);line-height:1.28;font-weight:650;margin:0 0 14px;text-wrap:balance;max-width:32em}
.facts{color:var(--soft);margin:0 0 30px;font-size:14.5px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px 22px 18px;min-width:0}
section>p{color:var(--soft);margin:0 0 14px;font-size:14px}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px;margin-top:20px}
svg{display:block;width:100%;height:auto;max-width:640px;margin:0 auto}
svg text{fill:var(--ink);font:13px system-ui,sans-serif;font-variant-numeric:tabular-nums}
svg .tick{fill:var(--soft);font-size:12px}svg .label{fill:var(--soft)}svg .value{font-weight:600}
svg line.grid{stroke:var(--rule)}svg .curve{fill:none;stroke:var(--compute);stroke-width:3;stroke-linejoin:round}
svg .column{fill:var(--compute)}svg line.level{stroke-dasharray:5 4;stroke:var(--soft);stroke-width:1.5}
svg line.mark{stroke:var(--accent);stroke-width:2}
svg .compute{fill:var(--compute)}svg .copy{fill:var(--copy)}svg .preparation{fill:var(--preparation)}svg .fetch{fill:var(--fetch)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:10px 0 14px;font-size:14px;justify-content:center}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.scroll{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:0}tr:last-child td{border-bottom:0}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:14px}
.notes{background:var(--note);border-radius:10px;padding:14px 18px 14px 34px;margin:20px 0 0;font-size:14.5px;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13.5px;margin-top:26px}
@media(max-width:760px){main{padding:24px 14px 40px}.grid{grid-template-columns:minmax(0,1fr);gap:14px;margin-top:14px}
section{padding:16px 14px}th,td{padding:5px 7px}}
@media(max-width:760px){svg text,svg .label,svg .value{font-size:16px}svg .tick{font-size:15px}}
"""
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
            f"<footer>everstep {html.escape(analysis.version)}. Predictions: the least of what the trainer, the"
            " workers, the cores, storage and network allow, with the costs measured in these runs.</footer>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def facts_line(analysis: Analysis) -> str:
    """Return what was measured, in one line."""
    loader, model = analysis.loader, analysis.model
    length = f" of {loader.dataset_length:,} samples" if loader.dataset_length is not None else ""
    workers = f"{loader.workers} workers by {loader.start_method}" if loader.workers else "no workers"
    size = f", {size_text(analysis.dataset_bytes)}" if analysis.dataset_bytes else ""
    read = f", {size_text(model.sample_bytes)} a sample" if model.sample_bytes else ""
    return (
        f"{loader.dataset}{length}{size}{read}; batches of {loader.batch_size:g}, {workers}, {model.cores:g} cores;"
        f" steps on {analysis.device}"
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
        "<section><h2>Where a step goes</h2><p>The loop's wait for a batch, shared between fetch and preparation as"
        " the workers' time was; means over all steps.</p>"
        f'{bars("Time of a step in each run", rows, unit="ms")}<ul class="key">{key}</ul>{_table(head, cells)}</section>'
    )


def _cache(analysis: Analysis) -> str:
    rows, advice = analysis.what_if.cache, analysis.advice
    points = [(100 * row.cached, row.samples_per_s) for row in rows]
    mark = (100 * advice.cached, f"{100 * advice.cached:.0f} % is enough") if advice.cached is not None else None
    if advice.workers is not None:
        mark = None  # it holds for another number of workers than the curve
    plot = curve(
        "Speed by share of the dataset in the cache", points, x_label="in the cache, %", y_label="samples/s",
        levels=_levels(analysis), mark=mark,
    )  # fmt: skip
    return _section(
        "More in the cache", f"With {analysis.model.workers} workers, from nothing to everything in memory.", plot,
        ("in the cache", "samples/s", "bound by"), [(f"{100 * row.cached:.0f} %", *_outcome(row)) for row in rows],
    )  # fmt: skip


def _workers(analysis: Analysis) -> str:
    rows = analysis.what_if.workers
    plot = curve(
        "Speed by number of workers", [(row.workers, row.samples_per_s) for row in rows], x_label="workers",
        y_label="samples/s", levels=_levels(analysis), as_columns=True,
    )  # fmt: skip
    return _section(
        "More workers", f"Everything in memory; there are {analysis.model.workers} now.", plot,
        ("workers", "samples/s", "bound by"), [(str(row.workers), *_outcome(row)) for row in rows],
    )  # fmt: skip


def _storage(analysis: Analysis) -> str:
    rows = [row for row in analysis.what_if.storage if row.storage_bytes_per_s is not None]
    if not rows:
        return (
            "<section><h2>Faster storage</h2><p>Nothing was read from storage, so nothing is known of it.</p></section>"
        )
    points = [((row.storage_bytes_per_s or 0.0) / 1e6, row.samples_per_s) for row in rows]
    plot = curve(
        "Speed by bandwidth of storage", points, x_label="storage, MB/s", y_label="samples/s", levels=_levels(analysis)
    )
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
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
