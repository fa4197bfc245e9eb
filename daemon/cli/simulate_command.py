"""`everstep simulate`: failures of a job replayed under several policies of how often to checkpoint."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.goodput_failures import FailureProcess, mtbf_of_gpus
from ...checkpoint.goodput_plan import BudgetLoss
from ...checkpoint.goodput_policies import target_of
from ...checkpoint.goodput_replay import compare
from ...checkpoint.goodput_types import Costs, Job, Outcome, Phase
from ...checkpoint.prediction_plan import guard_wait_s
from ...core.durations import duration_text
from ...core.errors import UsageError
from .output import EXIT_DONE, Output
from .plot_child import check_png, plot

if TYPE_CHECKING:
    from rich.console import Console

RUNS_MAX = 100
STEPS_MAX = 20_000_000
CHECKPOINTS_MAX = 500_000
FAILURES_MAX = 100_000
"""Of a job: more would take minutes."""

Outcomes = Mapping[str, Mapping[FailureProcess, Sequence[Outcome]]]


def simulate(arguments: argparse.Namespace) -> int:
    """`everstep simulate`."""
    check_png(arguments.png)
    job = _job(arguments)
    outcomes = compare(job, tuple(FailureProcess), runs=arguments.runs, seed=arguments.seed)
    document = {
        "job": job,
        "seed": arguments.seed,
        "runs": arguments.runs,
        "policies": _summary(outcomes),
        "budget_loss": _budget_loss(job),
    }
    if arguments.png is not None:
        plot(document, arguments.png, "simulate_plot")
    Output(as_json=arguments.json).show(
        document, lambda console: _draw(console, job, outcomes, arguments.png)
    )
    return EXIT_DONE


def _slow_device(costs: Costs, third_s: float) -> list[Phase]:
    return [Phase(begin_s=third_s, costs=costs.times(persist=5.0)), Phase(begin_s=2 * third_s, costs=costs)]


def _fast_device(costs: Costs, third_s: float) -> list[Phase]:
    return [Phase(begin_s=third_s, costs=costs.times(persist=0.2))]


def _short_steps(costs: Costs, third_s: float) -> list[Phase]:
    return [Phase(begin_s=third_s, costs=costs.times(step=1 / 3))]


def _neighbour(costs: Costs, third_s: float) -> list[Phase]:
    return [
        Phase(begin_s=third_s, costs=costs.times(step=2.0, stall=2.0)),
        Phase(begin_s=2 * third_s, costs=costs),
    ]


def _no_change(costs: Costs, third_s: float) -> list[Phase]:
    del costs, third_s
    return []


CHANGES: Mapping[str, Callable[[Costs, float], list[Phase]]] = {
    "none": _no_change,
    "slow-device": _slow_device,
    "fast-device": _fast_device,
    "short-steps": _short_steps,
    "neighbour": _neighbour,
}


def _job(arguments: argparse.Namespace) -> Job:
    _check(arguments)
    costs = Costs(
        step_s=arguments.step,
        stall_s=arguments.stall,
        slower=arguments.slower,
        copy_s=arguments.copy,
        persist_s=arguments.persist,
    )
    changes = CHANGES[arguments.change](costs, arguments.duration / 3)
    phases = (Phase(begin_s=0.0, costs=costs), *changes)
    return Job(
        phases=tuple(replace(phase, costs=_guarded(phase.costs)) for phase in phases),
        duration_s=arguments.duration,
        mtbf_s=_mtbf_s(arguments),
        epoch_steps=arguments.epoch,
        fixed_steps=arguments.fixed,
        slot_count=arguments.slots,
        budget=arguments.budget,
        restart_s=arguments.restart,
        restart_memory_s=arguments.restart_memory,
    )


def _guarded(costs: Costs) -> Costs:
    """Return the costs with what an optimizer waits for a copy that its step is too short for."""
    return replace(costs, stall_s=costs.stall_s + guard_wait_s(step_s=costs.step_s, copy_s=costs.copy_s))


def _check(arguments: argparse.Namespace) -> None:
    if arguments.change not in CHANGES:
        raise UsageError(f"--change is {arguments.change!r}", hint=f"one of {', '.join(CHANGES)}")
    for name, most in (
        ("runs", RUNS_MAX),
        ("slots", 64),
        ("gpus", 10**7),
        ("epoch", 10**9),
        ("fixed", 10**9),
    ):
        value: int = getattr(arguments, name)
        if not 1 <= value <= most:
            raise UsageError(f"--{name} is {value}", hint=f"1 to {most}")
    for name in ("budget", "slower"):
        share: float = getattr(arguments, name)
        if not (0 < share < 1 or (share == 0 and name == "slower")):
            raise UsageError(f"--{name} is {share}", hint="a share of the time, such as 3.5% or 0.035")
    least_s: float = arguments.step + arguments.stall + arguments.copy + arguments.persist
    if arguments.duration <= least_s:
        raise UsageError(
            f"a job of {duration_text(arguments.duration)} ends before its first checkpoint is durable:"
            f" a step, the stall, copy and write take {duration_text(least_s)}",
            hint="lengthen --duration",
        )
    if arguments.duration / arguments.step > STEPS_MAX:
        raise UsageError(
            f"{duration_text(arguments.duration)} of steps of {duration_text(arguments.step)} are too many",
            hint=f"at most {STEPS_MAX} steps: shorten --duration",
        )
    each_s = min(
        max(arguments.step, arguments.persist), arguments.step * min(arguments.epoch, arguments.fixed)
    )
    if arguments.duration / each_s > CHECKPOINTS_MAX:
        raise UsageError(
            f"{duration_text(arguments.duration)} with a checkpoint each {duration_text(each_s)}, as some policy has,"
            " are too many",
            hint=f"at most {CHECKPOINTS_MAX} checkpoints: shorten --duration",
        )
    if arguments.duration / _mtbf_s(arguments) > FAILURES_MAX:
        raise UsageError(
            f"{duration_text(arguments.duration)} with a failure each {duration_text(_mtbf_s(arguments))} are too many",
            hint=f"at most {FAILURES_MAX} failures: shorten --duration",
        )


def _mtbf_s(arguments: argparse.Namespace) -> float:
    return arguments.mtbf if arguments.mtbf is not None else mtbf_of_gpus(arguments.gpus)


def _budget_loss(job: Job) -> BudgetLoss | None:
    """Return what our promise to keep the budget costs where it costs most; None where that is next to nothing."""
    losses = [target_of(job, phase.costs).loss for phase in job.phases]
    return max((loss for loss in losses if loss is not None), key=lambda loss: loss.share, default=None)


def _summary(outcomes: Outcomes) -> dict[str, dict[str, dict[str, object]]]:
    """Return, for each policy and process, the means over the runs; goodput with its extremes."""
    return {
        name: {process.value: _means(runs) for process, runs in processes.items()}
        for name, processes in outcomes.items()
    }


def _means(runs: Sequence[Outcome]) -> dict[str, object]:
    goodputs = [run.goodput for run in runs]
    names = ("overhead", "stall_s", "waited_s", "slower_s", "lost_s", "restart_s", "wall_s", "useful_s")
    counts = ("checkpoints", "skipped", "failures")
    # A mean of equal numbers is rounded: it may be beside them.
    mean = min(max(statistics.fmean(goodputs), min(goodputs)), max(goodputs))
    return {
        "goodput": mean,
        "goodput_low": min(goodputs),
        "goodput_high": max(goodputs),
        **{name: statistics.fmean(getattr(run, name) for run in runs) for name in (*names, *counts)},
    }


# --- for people -------------------------------------------------------------------------------------------------------


def _draw(console: "Console", job: Job, outcomes: Outcomes, png: Path | None) -> None:
    from rich.table import Table  # noqa: PLC0415  slow to import
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("GOODPUT, %")
    for process in FailureProcess:
        table.add_column(process.value, justify="right")
    for head in ("COST", "LOST", "INTERVAL"):
        table.add_column(head, justify="right")
    best = {
        process: max(_goodput(found[process]) for found in outcomes.values()) for process in FailureProcess
    }
    for name, found in outcomes.items():
        cells = [
            Text(f"{100 * _goodput(runs):.2f}", "bold green" if _goodput(runs) == best[process] else "")
            for process, runs in found.items()
        ]
        table.add_row(name, *cells, *_details(found))
    console.print(Text(_title(job), "dim"), soft_wrap=True)
    console.print(table)
    console.print(
        Text(
            "COST: of checkpoints, share of training. LOST: work done again, share of the time. INTERVAL: time for each"
            " checkpoint, work done again included. Means over all kinds of failures.",
            "dim",
        ),
        soft_wrap=True,
    )
    if (loss := _budget_loss(job)) is not None:
        budget = f"{100 * job.budget:.3g} %"
        console.print(
            Text(f"! everstep keeps a budget of {budget}, which costs {loss}", "yellow"), soft_wrap=True
        )
    if png is not None:
        console.print(Text(f"picture: {png}", "dim"), soft_wrap=True)


def _title(job: Job) -> str:
    costs = job.phases[0].costs
    return (
        f"steps of {duration_text(costs.step_s)}, checkpoints: {duration_text(costs.stall_s)} stall,"
        f" {duration_text(costs.copy_s)} to copy, {duration_text(costs.persist_s)} to write; a failure each"
        f" {duration_text(job.mtbf_s)}, for {duration_text(job.duration_s)}"
    )


def _goodput(runs: Sequence[Outcome]) -> float:
    return statistics.fmean(run.goodput for run in runs)


def _details(found: Mapping[FailureProcess, Sequence[Outcome]]) -> tuple[str, str, str]:
    runs = [run for outcomes in found.values() for run in outcomes]
    count = sum(run.checkpoints for run in runs)
    trained_s = sum(run.useful_s + run.lost_s for run in runs)
    return (
        f"{100 * statistics.fmean(run.overhead for run in runs):.2f} %",
        f"{100 * statistics.fmean(run.lost_s / run.wall_s for run in runs):.2f} %",
        duration_text(trained_s / count) if count else "never",
    )
