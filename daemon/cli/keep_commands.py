"""`everstep pin`, `everstep unpin` and `everstep drain`: what stays, and a node that is to be worked on."""

import argparse
import time
from collections.abc import Callable

from ...core.durations import parse_duration
from ...core.errors import UsageError
from ...core.paths import data_socket_path
from .output import EXIT_DONE, EXIT_FAILED, Output

AddTarget = Callable[[argparse.ArgumentParser, str], None]


def add_keeping(
    add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser, add_target: AddTarget
) -> None:
    """Add the commands' arguments."""
    pin = add(
        "pin", parents=[as_json], help="keep a checkpoint from being collected, for a time or until unpin"
    )
    pin.add_argument("label", metavar="LABEL", help="what it is for; unique in the run")
    pin.add_argument("--ttl", metavar="TIME", help="for how long: 90s, 15m, 6h, 7d (default: until unpin)")
    add_target(pin, "RUN[@ATTEMPT.STEP]")
    unpin = add("unpin", parents=[as_json], help="take a pin away")
    unpin.add_argument("label", metavar="LABEL", help="the pin")
    add_target(unpin, "RUN")
    drain = add(
        "drain", parents=[as_json], help="take no new runs, and wait until what is sealed is persisted"
    )
    drain.add_argument("--cancel", action="store_true", help="take runs again")
    drain.add_argument(
        "--deadline", default="5m", metavar="TIME", help="how long to wait (default: %(default)s)"
    )


def _pin(arguments: argparse.Namespace) -> int:
    from . import render  # noqa: PLC0415  rich is slow to import
    from .node_commands import named_run, source_of, target_of  # noqa: PLC0415

    target = named_run(target_of(arguments), "pin", "LABEL RUN[@ATTEMPT.STEP]")
    ttl_s = 0.0 if arguments.ttl is None else _duration("--ttl", arguments.ttl)
    with source_of(target, for_change=True) as (source, _):
        view = source.pin(target.run, target.checkpoint, arguments.label, ttl_s=ttl_s)
    (made,) = [each for each in view.pins if each.label == arguments.label]
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.expires_unix_s))
    until = f"until {moment}" if made.expires_unix_s else "until it is unpinned"
    Output(as_json=arguments.json).show(
        {"pin": made, "checkpoint": view},
        lambda console: render.done(
            console, f"{view.title} is pinned as {arguments.label!r} and stays {until}"
        ),
    )
    return EXIT_DONE


def _unpin(arguments: argparse.Namespace) -> int:
    from . import render  # noqa: PLC0415  rich is slow to import
    from .node_commands import named_run, source_of, target_of  # noqa: PLC0415

    target = named_run(target_of(arguments), "unpin", "LABEL RUN")
    if target.checkpoint is not None:
        raise UsageError(
            f"a pin knows its checkpoint itself, got {target.title!r}",
            hint=f"`everstep unpin {arguments.label} {target.run}`",
        )
    with source_of(target, for_change=True) as (source, _):
        checkpoint = source.unpin(target.run, arguments.label)
    Output(as_json=arguments.json).show(
        {"pin": arguments.label, "run": target.run, "checkpoint": checkpoint},
        lambda console: render.done(
            console, f"{target.run}@{checkpoint} is no longer pinned as {arguments.label!r}"
        ),
    )
    return EXIT_DONE


def _drain(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import
    from . import render  # noqa: PLC0415

    deadline_s = _duration("--deadline", arguments.deadline)
    with connected(data_socket_path()) as daemon:
        found = daemon.drain(cancel=arguments.cancel, deadline_s=deadline_s)
    attached = f"; {found.attached_count} attached trainers go on" if found.attached_count else ""
    text = "this node takes runs again" if not found.is_draining else f"this node takes no new runs{attached}"
    if found.unsettled_count:
        text += f"; {found.unsettled_count} shards are not settled yet: ask again"
    elif found.is_draining:
        text += "; everything that is sealed is persisted"
    Output(as_json=arguments.json).show({"drain": found}, lambda console: render.done(console, text))
    return EXIT_FAILED if found.unsettled_count else EXIT_DONE


def _duration(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}", hint=str(error)) from error


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"pin": _pin, "unpin": _unpin, "drain": _drain}
