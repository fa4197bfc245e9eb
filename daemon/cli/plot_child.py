"""Pictures, drawn by a process of their own: this one stays free of numpy."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import UsageError
from .output import to_json

PLOT_DEADLINE_S = 120.0


def check_png(png: Path | None) -> None:
    """Return where a picture can be written there, or none is wanted: asked before anything is measured.

    Raises:
        UsageError: it lies in no directory.
    """
    if png is not None and not png.absolute().parent.is_dir():
        raise UsageError(f"{png} lies in no directory", hint="name a file in one that exists")


def plot(document: Mapping[str, object], png: Path, program: str) -> None:
    """Let `program`, a module of this folder, draw the document.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    command = [sys.executable, "-P", "-m", f"everstep.daemon.cli.{program}", str(png.absolute())]
    text = json.dumps(to_json(document))
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=PLOT_DEADLINE_S
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UsageError(
            f"no picture was drawn: {said[-1] if said else f'exit code {done.returncode}'}",
            hint="pip install 'everstep[plot]', or leave out --png",
        )
