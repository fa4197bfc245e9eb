"""`everstep analyze`: what a training script waits for, and what would help. The runs are processes of their own."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import StorageError, UsageError
from ...dataloader.analysis import measured_format, page_format
from ...dataloader.analysis.runs import Asked, analyze_script
from .output import EXIT_DONE

if TYPE_CHECKING:
    from rich.console import Console

    from ...dataloader.analysis.measured_format import Analysis


def analyze(arguments: argparse.Namespace) -> int:
    """`everstep analyze`."""
    for file in (arguments.html, arguments.json_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} lies in no directory", hint="name a file in one that exists")
    analysis = analyze_script(
        Asked(
            script=arguments.script,
            arguments=arguments.script_arguments,
            steps=arguments.steps,
            warmup=arguments.warmup,
            seconds=arguments.seconds,
            deadline_s=arguments.deadline,
            loader=arguments.loader,
        ),
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if arguments.html is not None:
        _write(arguments.html, page_format.page(analysis).encode())
    if arguments.json_file is not None:
        _write(arguments.json_file, measured_format.encode(analysis))
    if arguments.json:
        print(measured_format.encode(analysis).decode())
        return EXIT_DONE
    from .render import make_console  # noqa: PLC0415  rich is slow to import

    _draw(make_console(), analysis)
    return EXIT_DONE


def _write(path: Path, text: bytes) -> None:
    try:
        path.write_bytes(text)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", hint="name another file") from error


def _draw(console: "Console", analysis: "Analysis") -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console.print(Text(page_format.facts_line(analysis), "dim"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("RUN")
    for head in ("SAMPLES/S", "STEP, ms", "COMPUTE", "COPY", "PREPARATION", "FETCH"):
        table.add_column(head, justify="right")
    for run in analysis.runs:
        parts = (run.times.mean_s, run.compute_s, run.copy_s, run.preparation_s, run.fetch_s)
        speed = f"{page_format.bound_text(run)}{run.samples_per_s:,.1f}"
        table.add_row(run.phase.value, speed, *(f"{1000 * part:,.1f}" for part in parts))
    console.print(table)
    console.print(Text(page_format.stalls_line(analysis), "dim"), soft_wrap=True)
    console.print(Text(f"{analysis.advice.sentence}.", "bold"), soft_wrap=True)
    for note in page_format.all_notes(analysis):
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
