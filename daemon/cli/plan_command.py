"""`everstep plan`: what checkpointing a job will take, before anything runs."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from ...checkpoint.frequency_types import Limits
from ...checkpoint.keep import KEEP_LAST
from ...checkpoint.prediction_plan import (
    COPY_BYTES_PER_S,
    OPTIMIZERS,
    PRECISIONS,
    DeviceGroup,
    PlannedJob,
    Prediction,
    bytes_per_parameter,
    parse_devices,
    predict,
)
from ...core.durations import duration_text
from ...core.errors import UsageError
from .output import EXIT_DONE, Output

if TYPE_CHECKING:
    from rich.console import Console


def plan(arguments: argparse.Namespace) -> int:
    """`everstep plan`."""
    job = _job(arguments)
    found = predict(job)
    Output(as_json=arguments.json).show(_document(job, found), lambda console: _draw(console, job, found))
    return EXIT_DONE


def _document(job: PlannedJob, found: Prediction) -> dict[str, object]:
    shown = ("kind", "need_s", "text")
    bounds = [{name: getattr(bound, name) for name in shown} for bound in found.bounds]
    prediction = {field.name: getattr(found, field.name) for field in fields(found)}
    return {"job": job, "prediction": {**prediction, "bounds": bounds}}


def _job(arguments: argparse.Namespace) -> PlannedJob:
    if arguments.optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(
            f"no optimizer {arguments.optimizer!r} is known", hint=f"one of {known}; or --bytes-per-param"
        )
    if arguments.precision not in PRECISIONS:
        raise UsageError(
            f"no precision {arguments.precision!r} is known", hint=f"one of {', '.join(PRECISIONS)}"
        )
    per_parameter: float | None = arguments.bytes_per_param
    if per_parameter is None:
        per_parameter = bytes_per_parameter(arguments.optimizer, arguments.precision)
    per_node: int | None = arguments.gpus_per_node
    return PlannedJob(
        parameters=arguments.params,
        bytes_per_parameter=per_parameter,
        gpus=arguments.gpus,
        gpus_per_node=per_node if per_node is not None else max(1, min(8, arguments.gpus)),
        is_replicated=arguments.replicated,
        devices=parse_devices(arguments.devices),
        slot_count=arguments.slots,
        memory_bytes=arguments.memory,
        step_s=arguments.step,
        copy_bytes_per_s=arguments.copy_speed or COPY_BYTES_PER_S,
        limits=Limits(
            budget=arguments.budget,
            least_s=arguments.least or 0.0,
            most_s=arguments.most,
            mtbf_s=arguments.mtbf,
            drive_writes_per_day=arguments.drive_writes_per_day,
        ),
    )


def _draw(console: "Console", job: PlannedJob, found: Prediction) -> None:
    from rich.table import Table  # noqa: PLC0415  slow to import
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in _rows(job, found):
        table.add_row(Text(name, "dim"), Text(value))
    console.print(table)
    for missed in filter(None, (found.goal_missed, found.room_missed)):
        console.print(Text(f"! {missed}", "yellow"), soft_wrap=True)
    if found.drive_writes_per_day is None:
        sized = ",".join(_with_size(group) for group in job.devices)
        console.print(
            Text(
                "the size of the drives is not known, so their endurance bounds nothing here; give it, such as "
                f"--devices {sized}",
                "dim",
            ),
            soft_wrap=True,
        )
    if job.step_s is None:
        console.print(
            Text("--step TIME adds the interval in steps, and a copy that takes longer than one", "dim")
        )


def _rows(job: PlannedJob, found: Prediction) -> list[tuple[str, str]]:
    interval = f"{duration_text(found.interval_s)}, {found.reason}"
    if found.interval_steps is not None:
        steps = "1 step" if found.interval_steps == 1 else f"{found.interval_steps} steps"
        interval = f"{steps}, {interval}"
    written = f"{_decimal(found.node_written_per_day_bytes)} by each node"
    wear = "endurance not judged: no drive size"
    if found.drive_writes_per_day is not None:
        wear = f"{found.drive_writes_per_day:.2g} drive writes"
    written = f"{written}, {wear}"
    lost = f"{duration_text(found.lost_by_crash_s)} by a crash, {duration_text(found.lost_by_node_s)} by a lost node"
    each = "each rank all of it" if job.is_replicated else f"each rank {_decimal(found.rank_size_bytes)}"
    nodes = "1 node" if found.node_count == 1 else f"{found.node_count} nodes"
    return [
        (
            "state",
            f"{_decimal(found.state_size_bytes)}, {job.bytes_per_parameter:g} bytes a parameter; {each}",
        ),
        ("written each time", f"{_decimal(found.node_size_bytes)} by each of {nodes}"),
        (
            "on the drives",
            f"{_decimal(found.node_kept_bytes)} of each node: {KEEP_LAST} kept, one being written",
        ),
        ("memory", f"{_decimal(found.node_memory_bytes)} on each node, {_slots(job, found)}"),
        ("copy", f"{duration_text(found.copy_s)}, beside forward and backward"),
        (
            "persist",
            f"{duration_text(found.persist_s)}; durable {duration_text(found.held_s)} after the boundary",
        ),
        ("stall", f"{duration_text(found.stall_s)}, and {duration_text(found.slower_s)} by slower steps"),
        ("interval", interval),
        (
            "cost",
            f"{100 * found.cost_share:.2g} % of training; the budget is {100 * job.limits.budget:.3g} %",
        ),
        ("lost at most", lost),
        ("written a day", written),
    ]


def _with_size(group: DeviceGroup) -> str:
    """Return how a kind of drives is given with a size, as an example."""
    return f"{group.count}x{_decimal(group.bytes_per_s).replace(' ', '')}ps/7.68TB"


def _slots(job: PlannedJob, found: Prediction) -> str:
    if not found.slot_count:
        needed = _decimal(found.node_slot_bytes)
        return f"too little for one slot of {needed}: the state streams, and optimizers wait for the drives"
    slots = "1 slot" if found.slot_count == 1 else f"{found.slot_count} slots"
    return slots if found.slot_count == job.slot_count else f"{slots} of the {job.slot_count} asked for"


def _decimal(size_bytes: float) -> str:
    """Return bytes as drives are sold: by thousands."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} PB"
