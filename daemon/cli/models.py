"""The commands that compute and touch nothing: their arguments, and what runs them."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ...core.durations import parse_duration
from ...core.sizes import parse_size
from .tools import AddParser

_BUDGET_HELP = "share of training that checkpoints may cost (default: 3.5%%)"
_MTBF_HELP = "mean time between failures of the whole job"
_ASSUMED = (
    "Assumed, until a run has measured it: 5 ms at each boundary, steps 2 % slower while the state is copied,"
    " nothing while it is written; the copy fits into forward and backward, unless --step says otherwise."
)


def add_models(add: AddParser) -> None:
    """Add the commands of this module to the command line."""
    plan = add("plan", "predict bytes, memory, times, interval and drive writes of a job")
    plan.epilog = _ASSUMED
    _add_plan(plan)
    simulate = add("simulate", "replay failures of a job, and compare policies of how often to checkpoint")
    simulate.epilog = (
        "Goodput: share of the time in which steps were made that survived. All policies have the same snapshots,"
        " devices and restarts. Young/Daly and everstep are told the mean time between failures."
    )
    _add_simulate(simulate)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--params", type=_number, required=True, metavar="N", help="parameters: 7e9, or 7B")
    plan.add_argument("--optimizer", default="adamw", metavar="NAME", help="(default: %(default)s)")
    plan.add_argument(
        "--precision", default="mixed", metavar="NAME",
        help="mixed: bf16 weights with fp32 master weights and states; fp32, bf16: everything (default: mixed)",
    )  # fmt: skip
    plan.add_argument(
        "--bytes-per-param", type=float, metavar="BYTES", help="instead of optimizer and precision"
    )
    plan.add_argument("--gpus", type=int, default=1, help="of the whole job (default: 1)")
    plan.add_argument("--gpus-per-node", type=int, help="(default: 8, or all of them if fewer)")
    plan.add_argument(
        "--replicated", action="store_true",
        help="every rank writes the whole state, as under DistributedDataParallel (default: each its share)",
    )  # fmt: skip
    plan.add_argument(
        "--devices", required=True, metavar="LIST",
        help="of each node, by sustained writing and perhaps size: 4x3GBps, 4x3GBps/7.68TB",
    )  # fmt: skip
    plan.add_argument("--step", type=_duration, metavar="TIME", help="of one step, such as 800ms")
    plan.add_argument("--slots", type=int, default=2, help="snapshots in memory (default: 2)")
    plan.add_argument(
        "--memory", type=_size, metavar="SIZE",
        help="of each node, for snapshots: memory.arena_max_bytes; what does not fit streams (default: enough)",
    )  # fmt: skip
    plan.add_argument(
        "--copy-speed", type=_size, metavar="SIZE", help="GPU to memory, each second (default: 25GB)"
    )
    plan.add_argument("--budget", type=_share, default=0.035, metavar="SHARE", help=_BUDGET_HELP)
    plan.add_argument("--mtbf", type=_duration, metavar="TIME", help=_MTBF_HELP)
    plan.add_argument("--most", type=_duration, metavar="TIME", help="work that a failure may cost at most")
    plan.add_argument("--least", type=_duration, metavar="TIME", help="never more often than that")
    plan.add_argument(
        "--drive-writes-per-day", type=float, default=1.0, metavar="N",
        help="how often a day the drives may be written full (default: 1)",
    )  # fmt: skip


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    times = (
        ("--step", "2s", "of a step"),
        ("--stall", "50ms", "of one checkpoint, without the wait for a copy that is too long for a step"),
        ("--copy", "1s", "to copy a snapshot"),
        ("--persist", "12s", "to write it"),
        ("--restart", "2m", "from the loss of a node until the job trains again"),
        ("--restart-memory", "30s", "the same after a crash of a trainer"),
        ("--duration", "2d", "of the job"),
    )
    for name, default, what in times:
        simulate.add_argument(
            name,
            type=_duration,
            default=parse_duration(default),
            metavar="TIME",
            help=f"{what} (default: {default})",
        )
    simulate.add_argument(
        "--slower", type=_share, default=0.02, metavar="SHARE",
        help="of steps beside which something is copied or written (default: 2%%)",
    )  # fmt: skip
    rate = simulate.add_mutually_exclusive_group()
    rate.add_argument(
        "--gpus", type=int, default=16384, help="that fail as those of Llama 3 did (default: %(default)s)"
    )
    rate.add_argument("--mtbf", type=_duration, metavar="TIME", help=_MTBF_HELP)
    simulate.add_argument("--epoch", type=int, default=10_000, metavar="STEPS", help="(default: %(default)s)")
    simulate.add_argument(
        "--fixed", type=int, default=500, metavar="STEPS", help="of the fixed policy (default: %(default)s)"
    )
    simulate.add_argument("--slots", type=int, default=2, help="snapshots in memory (default: 2)")
    simulate.add_argument("--budget", type=_share, default=0.035, metavar="SHARE", help=_BUDGET_HELP)
    simulate.add_argument(
        "--change", default="none", metavar="WHAT",
        help="none; slow-device: five times slower for a third of the time; fast-device: five times faster after the"
        " first third; short-steps: a third as long after it; neighbour: half the CPU is taken for a third of the time"
        " (default: none)",
    )  # fmt: skip
    simulate.add_argument("--runs", type=int, default=3, help="of each kind of failures (default: 3)")
    simulate.add_argument("--seed", type=int, default=1, help="the same seed, the same failures (default: 1)")
    simulate.add_argument("--png", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")


def _number(text: str) -> float:
    """Return `7e9`, `7B`, `350M`."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if unit > 1 else text) * unit
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a number such as 7e9 or 7B; got {text!r}") from error


def _share(text: str) -> float:
    """Return `3.5%` or `0.035`."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a share such as 3.5% or 0.035; got {text!r}") from error


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _plan(arguments: argparse.Namespace) -> int:
    from . import plan_command  # noqa: PLC0415

    return plan_command.plan(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    from . import simulate_command  # noqa: PLC0415

    return simulate_command.simulate(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"plan": _plan, "simulate": _simulate}
