"""`everstep controller`: how often runs take checkpoints, shown and changed; a checkpoint now."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...core.durations import duration_text, parse_duration
from ...core.errors import UsageError
from ...core.paths import data_socket_path
from ...core.sizes import size_text
from ..controller.controller_views import ControllerState, ControllerView
from .output import EXIT_DONE, Output

if TYPE_CHECKING:
    from rich.console import Console


def add_controller(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    controller = add("controller", help="show how often runs take checkpoints and why; set, force, pause")
    parts = controller.add_subparsers(dest="part", required=True, metavar="WHAT")
    show = parts.add_parser("show", parents=[as_json], help="interval, budget, what bounds it, what it costs")
    show.add_argument("run", nargs="?", default="", metavar="RUN", help="only this run")
    budget = parts.add_parser(
        "budget", parents=[as_json], help="keep to another budget until the attempt ends"
    )
    budget.add_argument("run", metavar="RUN", help="by name, or by id")
    budget.add_argument("budget", metavar="SHARE", help="of training time: 2%% or 0.02")
    force = parts.add_parser(
        "force", parents=[as_json], help="take a checkpoint now, and wait until it is durable"
    )
    force.add_argument("run", metavar="RUN", help="by name, or by id")
    force.add_argument(
        "--deadline", default="10m", metavar="TIME", help="how long to wait for it (default: %(default)s)"
    )
    pause = parts.add_parser("pause", parents=[as_json], help="take no checkpoints for a time")
    pause.add_argument("run", metavar="RUN", help="by name, or by id")
    pause.add_argument("--ttl", required=True, metavar="TIME", help="for how long: 90s, 15m, 6h; at most 7d")
    resume = parts.add_parser("resume", parents=[as_json], help="end a pause")
    resume.add_argument("run", metavar="RUN", help="by name, or by id")


def controller(arguments: argparse.Namespace) -> int:
    """`everstep controller ...`."""
    return _PARTS[arguments.part](arguments)


def _show(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.controllers(arguments.run)
    Output(as_json=arguments.json).show({"controllers": found}, lambda console: _draw_all(console, found))
    return EXIT_DONE


def _budget(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    budget = _share(arguments.budget)
    with connected(data_socket_path()) as daemon:
        view = daemon.set_budget(arguments.run, budget)
    return _shown(arguments, view)


def _force(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        forced = daemon.force_checkpoint(
            arguments.run, deadline_s=_duration("--deadline", arguments.deadline)
        )
    text = (
        f"{forced.run_name}@{forced.checkpoint} is complete: {size_text(forced.size_bytes)} after"
        f" {duration_text(forced.waited_s)}"
    )
    Output(as_json=arguments.json).show(
        {"forced": forced}, lambda console: console.print(text, soft_wrap=True)
    )
    return EXIT_DONE


def _pause(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        view = daemon.pause_checkpoints(arguments.run, _duration("--ttl", arguments.ttl))
    return _shown(arguments, view)


def _resume(arguments: argparse.Namespace) -> int:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path()) as daemon:
        view = daemon.resume_checkpoints(arguments.run)
    return _shown(arguments, view)


def _shown(arguments: argparse.Namespace, view: ControllerView) -> int:
    Output(as_json=arguments.json).show({"controller": view}, lambda console: _draw(console, view))
    return EXIT_DONE


def _share(text: str) -> float:
    """Return a share of `2%` or `0.02`."""
    number = text.removesuffix("%").strip()
    try:
        return float(number) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"the budget is {text!r}", hint="a share of training time: 2% or 0.02") from error


def _duration(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}", hint=str(error)) from error


def _draw_all(console: "Console", views: list[ControllerView]) -> None:
    if not views:
        console.print("no run has attached to this daemon", style="dim")
    for view in views:
        _draw(console, view)


def _draw(console: "Console", view: ControllerView) -> None:
    """Draw one controller as lines of name and value."""
    from rich.text import Text  # noqa: PLC0415  rich is slow to import

    lines = {
        "interval": _interval_text(view),
        "reason": view.reason,
        "goal missed": view.goal_missed,
        "budget": "" if view.budget is None else f"{100 * view.budget:.3g} % of training time",
        "asked": "" if view.asked_budget is None else f"{100 * view.asked_budget:.3g} %, not yet confirmed",
        "cost": _cost_text(view),
        "forced": f"{view.forced_count} wait for one" if view.forced_count else "",
    }
    console.print(Text(view.run_name, "bold"), soft_wrap=True)
    for name, value in lines.items():
        if value:
            console.print(Text(f"  {name:<12} {value}"), soft_wrap=True)


def _interval_text(view: ControllerView) -> str:
    if view.state is ControllerState.UNKNOWN:
        return "not known: its trainer has not reached a boundary yet"
    seconds = f", {duration_text(view.interval_steps * view.step_s)}" if view.step_s else ""
    return f"{view.interval_steps} steps{seconds} ({view.state.value}), at step {view.step}"


def _cost_text(view: ControllerView) -> str:
    if view.cost_share is None:
        return ""
    text = f"{100 * view.cost_share:.2f} %"
    if view.cost_half_width is not None:
        text += f" ± {100 * view.cost_half_width:.2f} % (95 % confidence)"
    return text + (f"; better known in {view.steps_undecided} steps" if view.steps_undecided else "")


_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": _show,
    "budget": _budget,
    "force": _force,
    "pause": _pause,
    "resume": _resume,
}
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"controller": controller}
