"""What `everstep top` takes."""

import argparse
from collections.abc import Callable


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.2 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"seconds from 0.2 to 3600, not {text!r}")
    return seconds


def add_top(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    top = add(
        "top",
        parents=[as_json],
        help="watch runs, devices and caches live: speed, stalls, queues, hits",
        epilog="Keys: q ends it, arrows or tab choose a run. In a pipe, and with --once or --json, it prints once.",
    )
    top.add_argument("--once", action="store_true", help="print once and end")
    top.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="ask so often (1)")
