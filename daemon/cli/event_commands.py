"""`everstep events`: what happened on the node, as it stands or as it goes on."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...core.durations import parse_duration
from ...core.errors import UsageError
from ...core.paths import data_socket_path
from ..events.event_types import WARNINGS, Event, EventKind, EventQuery
from .output import EXIT_DONE, to_json

if TYPE_CHECKING:
    from rich.text import Text

_KINDS = {kind.value: kind for kind in EventKind}


def add_events(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    events = add(
        "events",
        parents=[as_json],
        help="show what happened: checkpoints, failures, devices, caches",
        epilog="With --json each event is one line of JSON. Numbers begin anew when the daemon does: --log says"
        " of which log --since is.",
    )
    events.add_argument("--run", default="", metavar="RUN", help="only what concerns this run")
    events.add_argument("--follow", "-f", action="store_true", help="go on until the daemon ends")
    events.add_argument(
        "--since",
        default="",
        metavar="NUMBER|AGE",
        help="only what came after the event of this number, or in the last 10m, 2h, …",
    )
    events.add_argument(
        "--log", default="", metavar="LOG", help="the log that --since is a number of (log_id)"
    )
    events.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=sorted(_KINDS),
        help="only events of this kind; repeatable",
    )


def events(arguments: argparse.Namespace) -> int:
    """`everstep events`."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    since, not_before_unix_s = _since(arguments.since)
    query = EventQuery(
        run=arguments.run,
        kinds=frozenset(_KINDS[each] for each in arguments.kind),
        since=since,
        log_id=arguments.log,
        follow=arguments.follow,
    )
    with connected(data_socket_path()) as daemon:
        for event in daemon.events(query):
            if event.unix_s >= not_before_unix_s:
                _print(event, as_json=arguments.json)
    return EXIT_DONE


def _since(text: str) -> tuple[int | None, float]:
    """Return the number and the time after which events are wanted."""
    if not text:
        return None, 0.0
    if text.isdecimal():
        return int(text), 0.0
    try:
        return 0, time.time() - parse_duration(text)
    except ValueError as error:
        raise UsageError(
            f"--since {text!r} is neither a number nor a duration", hint="e.g. 1200 or 10m"
        ) from error


def _print(event: Event, *, as_json: bool) -> None:
    """Print one line at once, for whoever reads it through a pipe."""
    if as_json:
        print(json.dumps(to_json(event)), flush=True)
    elif sys.stdout.isatty():
        from .render import make_console  # noqa: PLC0415  rich is slow to import

        make_console().print(_line(event), soft_wrap=True)
    else:
        print(_plain(event), flush=True)


def _plain(event: Event) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.unix_s))
    hint = f" ({event.hint})" if event.hint else ""
    return f"{moment}  {event.sequence:>6}  {event.kind.value:<19} {event.text}{hint}"


def _line(event: Event) -> "Text":
    from rich.text import Text  # noqa: PLC0415  rich is slow to import

    from .render import WARN  # noqa: PLC0415

    return Text(_plain(event), WARN if event.kind in WARNINGS else "")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"events": events}
