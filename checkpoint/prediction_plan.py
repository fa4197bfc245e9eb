"""What checkpointing a job will take, before anything runs: bytes, memory, times, interval, writes a day. Pure.

Bounds and interval are those of the controller (`frequency_plan.py`), fed with predicted figures.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from ..core.durations import duration_text
from ..core.errors import UsageError
from ..core.sizes import parse_size
from .drift_machine import exactly
from .frequency_plan import (
    DAY_S,
    Target,
    find_target,
    full_after_bytes,
    hard_bounds,
    steps_at_least,
    steps_at_most,
)
from .frequency_types import MOST_S, Bound, BoundKind, Figures, Limits
from .keep import KEEP_LAST
from .layout_plan import DRAFT_BYTES_USUAL
from .ring_layout_plan import SEGMENTS_MOST, WINDOW_BYTES_MIN

COPY_BYTES_PER_S = 25e9
"""From a GPU into pinned memory over PCIe 4.0 x16 (25.9 to 26.2 GB/s: README of nvbandwidth)."""
EAGER_S = 0.005
"""At a boundary, what holds the GIL: what is promised for a state of 10,000 tensors."""
SLOWER_COPY = 0.02
"""What steps are slower by while a GPU's state is copied: what is promised."""
GUARD_AT = 0.9
"""Share of a step that forward and backward take: the copy has so long before the optimizer waits."""
KEPT_LEAST = 2
"""Complete checkpoints that no setting lets go: the newest, and the one before it."""

BOUNDS = {
    "parameters": (1, 1e18),
    "bytes_per_parameter": (1e-3, 1e6),
    "gpus": (1, 10**7),
    "gpus_per_node": (1, 10**7),
    "copy_bytes_per_s": (1, 1e18),
    "memory_bytes": (1, 10**24),
    "step_s": (1e-6, 1e7),
}
"""Beyond these nothing can be meant, and numbers overflow."""
SLOTS_MAX = 64

_STATES = {"sgd": 0, "momentum": 1, "lion": 1, "muon": 1, "adam": 2, "adamw": 2, "amsgrad": 3}
OPTIMIZERS = tuple(_STATES)
"""By how many numbers they keep for each parameter."""
PRECISIONS = ("mixed", "fp32", "bf16")
"""mixed: bf16 weights, fp32 master weights and fp32 states; fp32, bf16: everything."""

_SPEED = re.compile(r"(?:([0-9]{1,4})x)?([^/]+?)(?:ps|/s)(?:/(.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Some equal devices of one node."""

    count: int
    bytes_per_s: float
    """Sustained writing, of each."""
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job as a person describes it."""

    parameters: float
    bytes_per_parameter: float
    gpus: int
    gpus_per_node: int
    is_replicated: bool
    """Every rank writes the whole state, as plain DDP does; else each its share."""
    devices: Sequence[DeviceGroup]
    """Of each node."""
    slot_count: int = 2
    memory_bytes: int | None = None
    """Of each node, for snapshots; None: enough."""
    step_s: float | None = None
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value: float | None = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}", hint=f"{least:g} to {most:g}")
        if not self.devices:
            raise UsageError("no devices", hint="such as 4x3GBps: four drives of 3 GB/s in each node")
        if not 2 <= self.slot_count <= SLOTS_MAX:
            raise UsageError(
                f"slots is {self.slot_count}",
                hint=f"2 to {SLOTS_MAX}: one is kept while the next is copied",
            )
        if self.gpus % self.gpus_per_node and self.gpus > self.gpus_per_node:
            raise UsageError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}", hint="give --gpus-per-node"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What it will take. Times in seconds."""

    state_size_bytes: int
    """Of the whole job, each value once."""
    rank_size_bytes: int
    """Of one rank's snapshot."""
    node_size_bytes: int
    """That the devices of one node write for one checkpoint."""
    node_slot_bytes: int
    """One slot of each rank of a node, state and description."""
    node_memory_bytes: int
    """For the slots of its ranks, or their rings."""
    slot_count: int
    """Snapshots that each rank has room for; 0: not even for one, so they stream through rings."""
    node_count: int
    copy_s: float
    persist_s: float
    held_s: float
    """From the boundary until it is durable."""
    stall_s: float
    """That training stands still for each checkpoint."""
    slower_s: float
    """That the steps beside it take longer, altogether."""
    interval_s: float
    interval_steps: int | None
    """None while nobody says how long a step takes."""
    reason: str
    goal_missed: str
    bounds: tuple[Bound, ...]
    cost_share: float
    """Whole cost as a share of training without checkpoints."""
    lost_by_crash_s: float
    """Most work that a crash of a trainer costs: its snapshot is safe from that once it is copied."""
    lost_by_node_s: float
    """Most work that the loss of a node costs."""
    node_written_per_day_bytes: float
    drive_writes_per_day: float | None
    """Of the drive that is written full most often; None where nobody says how large they are."""
    node_kept_bytes: int
    """What the drives of one node hold at most: the checkpoints that are kept, and the one that is being written."""
    room_missed: str
    """Why the drives have no room for that; empty where they have, or where nobody says how large they are."""


def bytes_per_parameter(optimizer: str, precision: str) -> float:
    """Return what a checkpoint holds for each parameter: weights, master weights, states of the optimizer."""
    states = _STATES[optimizer]
    return {"mixed": 2 + 4 + 4 * states, "fp32": 4 + 4 * states, "bf16": 2 + 2 * states}[precision]


def parse_devices(text: str) -> tuple[DeviceGroup, ...]:
    """Return the devices that `4x3GBps`, `4x3GBps/7.68TB` or several of these with commas between them describe.

    Raises:
        UsageError: it is none of these.
    """
    return tuple(_group(part.strip()) for part in text.split(","))


def _group(text: str) -> DeviceGroup:
    found = _SPEED.fullmatch(text)
    try:
        if found is None:
            raise ValueError(text)
        count = int(found[1] or 1)
        speed = float(parse_size(found[2]))
        capacity_bytes = parse_size(found[3]) if found[3] else None
    except ValueError as error:
        raise UsageError(
            f"{text!r} describes no devices",
            hint="such as 4x3GBps, or with their size 4x3GBps/7.68TB; several kinds: 2x3GBps,2x7GBps",
        ) from error
    if not count:
        raise UsageError(f"{text!r} describes no devices", hint="at least one")
    return DeviceGroup(count=count, bytes_per_s=speed, capacity_bytes=capacity_bytes)


def predict(job: PlannedJob) -> Prediction:
    """Return what checkpointing this job will take."""
    state_bytes = math.ceil(job.parameters * job.bytes_per_parameter)
    rank_bytes = state_bytes if job.is_replicated else math.ceil(state_bytes / job.gpus)
    ranks = min(job.gpus, job.gpus_per_node)
    node_bytes = ranks * rank_bytes
    copy_s = rank_bytes / job.copy_bytes_per_s
    persist_s = node_bytes / sum(group.count * group.bytes_per_s for group in job.devices)
    described_bytes = ranks * DRAFT_BYTES_USUAL
    slot_bytes = node_bytes + described_bytes
    ring_bytes = described_bytes + ranks * max(WINDOW_BYTES_MIN, rank_bytes // SEGMENTS_MOST)
    slots, memory_bytes = _memory(job, slot_bytes, ring_bytes)
    # What does not fit in a ring is copied only as what was before it there is written.
    copied_s = (
        copy_s if slots else max(copy_s, persist_s * (1 - (memory_bytes - described_bytes) / node_bytes))
    )
    step_s = job.step_s or (copy_s / GUARD_AT if slots else 0.0)
    stall_s = EAGER_S + guard_wait_s(step_s=step_s, copy_s=copied_s)
    slower_s = SLOWER_COPY * copy_s
    fill = _fill(job.devices, node_bytes)
    figures = Figures(
        step=exactly(job.step_s) if job.step_s else None,
        stall=exactly(stall_s),
        persist=exactly(persist_s),
        held=exactly(copy_s + persist_s),
        slot_count=max(slots, 1),
        fill={"node": fill} if fill is not None else {},
    )
    limits = _checked(job, step_s)
    target = find_target(figures, limits, mtbf_s=limits.mtbf_s, slower_s=slower_s)
    is_assumed = limits.least_s > job.limits.least_s
    known = hard_bounds(figures, limits, slower_s=slower_s)
    bounds = tuple(_explained(bound, is_assumed=is_assumed) for bound in known)
    interval_s, interval_steps = _interval(target, job.step_s)
    per_day = DAY_S / interval_s if interval_s else math.inf
    return Prediction(
        state_size_bytes=state_bytes,
        rank_size_bytes=rank_bytes,
        node_size_bytes=node_bytes,
        node_slot_bytes=slot_bytes,
        node_memory_bytes=memory_bytes,
        slot_count=slots,
        node_count=math.ceil(job.gpus / job.gpus_per_node),
        copy_s=copy_s,
        persist_s=persist_s,
        held_s=copy_s + persist_s,
        stall_s=stall_s,
        slower_s=slower_s,
        interval_s=interval_s,
        interval_steps=interval_steps,
        reason=f"bound by {_explained(target.bound, is_assumed=is_assumed).text}",
        goal_missed=target.goal_missed.replace(known[0].text, bounds[0].text),
        bounds=bounds,
        cost_share=(stall_s + slower_s) / interval_s,
        lost_by_crash_s=interval_s + copied_s,
        lost_by_node_s=interval_s + copy_s + persist_s,
        node_written_per_day_bytes=node_bytes * per_day,
        drive_writes_per_day=fill * per_day if fill is not None else None,
        node_kept_bytes=(KEEP_LAST + 1) * node_bytes,
        room_missed=_room_missed(job.devices, node_bytes) if fill is not None else "",
    )


def guard_wait_s(*, step_s: float, copy_s: float) -> float:
    """Return how long an optimizer waits for a copy that forward and backward are too short for."""
    return max(0.0, copy_s - GUARD_AT * step_s)


def _memory(job: PlannedJob, slot_bytes: int, ring_bytes: int) -> tuple[int, int]:
    """Return how many snapshots each rank has room for, 0 where they stream, and a node's bytes for that.

    `slot_bytes`, `ring_bytes`: one slot, and the smallest ring, of each rank of the node, with its description.
    """
    if job.memory_bytes is None:
        return job.slot_count, job.slot_count * slot_bytes
    least_bytes = min(slot_bytes, ring_bytes)
    if job.memory_bytes < least_bytes:
        raise UsageError(
            f"memory_bytes is {job.memory_bytes}, too little for a node's snapshots to stream through",
            hint=f"{math.ceil(least_bytes / 2**20)}MiB at least: a slot or a ring for each rank, with its description",
        )
    slots = min(job.slot_count, job.memory_bytes // slot_bytes)
    return slots, slots * slot_bytes or job.memory_bytes


def _interval(target: Target, step_s: float | None) -> tuple[float, int | None]:
    if step_s is None:
        return target.aim_s, None
    steps = int(min(steps_at_least(target.aim_s, step_s), steps_at_most(target.most_s, step_s)))
    return steps * step_s, steps


def _checked(job: PlannedJob, assumed_s: float) -> Limits:
    """Return the limits; those in steps mean nothing where nobody says how long a step takes.

    `assumed_s`: what it takes then, so that the copy fits.
    """
    if job.step_s is not None:
        return job.limits
    if job.limits.least_steps > 1 or job.limits.most_steps is not None:
        raise UsageError(
            "an interval in steps, and no --step", hint="say how long a step takes, or give seconds"
        )
    return replace(job.limits, least_steps=1, least_s=max(job.limits.least_s, min(assumed_s, MOST_S)))


def _explained(bound: Bound, *, is_assumed: bool) -> Bound:
    """Return the bound; the least interval as what it is where nobody has asked for it."""
    if bound.kind is not BoundKind.LEAST or not is_assumed:
        return bound
    return structs.replace(
        bound, text=f"each step: {duration_text(bound.need_s)} at least, for the copy to fit beside it"
    )


def _room_missed(devices: Sequence[DeviceGroup], node_bytes: int) -> str:
    """Return why drives of a known size cannot hold what is kept beside what is written; empty where they can."""
    room = sum(group.count * (group.capacity_bytes or 0) for group in devices) / node_bytes
    if room >= KEEP_LAST + 1:
        return ""
    held = f"the drives of a node hold {math.floor(10 * room) / 10:g} checkpoints: too few for the"
    if room < KEPT_LEAST + 1:
        return f"{held} {KEPT_LEAST} that are always kept and the one being written"
    return (
        f"{held} {KEEP_LAST} that are kept and the one being written; set retention.keep_last = {KEPT_LEAST}"
    )


def _fill(devices: Sequence[DeviceGroup], node_bytes: int) -> float | None:
    """Return the largest share of a drive that one checkpoint writes: each drive gets bytes by its speed."""
    sized = [group for group in devices if group.capacity_bytes is not None]
    if sized and len(sized) < len(devices):
        raise UsageError(
            "only some devices have a size", hint="give each kind its size, such as 4x3GBps/7.68TB"
        )
    drives = [(group.bytes_per_s, group.capacity_bytes or 0) for group in devices for _ in range(group.count)]
    full_bytes = full_after_bytes(drives)
    return node_bytes / full_bytes if full_bytes else None
