"""What a checkpoint costs at its boundary, for a state of many small tensors: `python bench/boundary.py`.

Times are medians over the checkpoints, in milliseconds of CPU of the training thread. What copies small leaves at once
does so without the GIL and is printed apart; so is the copy thread's CPU, and one plain walk of the state.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from node import hook_daemon
from paired import Row, row
from persist_rows import scratch
from torch import nn

import everstep
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.value_format import dump_values
from everstep.hook import snapshot
from everstep.hook.capture import capture_state
from everstep.hook.component import make_components
from everstep.hook.copier import CopyJob
from everstep.hook.slot_places import Places

LEAVES_PER_PARAMETER = 4
"""The parameter, and AdamW's exp_avg, exp_avg_sq and step."""
TENSORS = 10_000
CHECKPOINTS = 15
BOUNDARY_MAX_MS = 5.0


class Small(nn.Module):
    """Many linear layers and a BatchNorm."""

    def __init__(self, parameters: int, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(parameters // 2))
        self.norm = nn.BatchNorm1d(4)


def median_ms(call: Callable[[], object], count: int = 15) -> float:
    """Return the median CPU time of a call by this thread."""
    taken: list[float] = []
    for _ in range(count):
        began_s = time.thread_time()
        call()
        taken.append(time.thread_time() - began_s)
    return 1000 * statistics.median(taken)


def walk(tensors: list[torch.Tensor]) -> list[object]:
    """One walk in plain Python: address, version and shape of each tensor."""
    return [(tensor.data_ptr(), tensor._version, tensor.shape) for tensor in tensors]


def made(
    tensors: int, device: str = "cpu", *, inputs: int = 4, outputs: int = 1
) -> tuple[Small, torch.optim.Optimizer]:
    """Return a model and its optimizer, after a first step, whose state has about so many tensors.

    All of them are copied at the boundary unless weights have more than AT_ONCE_BYTES_MAX.
    """
    model = Small(tensors // LEAVES_PER_PARAMETER, inputs=inputs, outputs=outputs).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def main() -> None:
    """Print one line per part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS)
    parser.add_argument("--inputs", type=int, default=4, help="of each layer")
    parser.add_argument(
        "--outputs", type=int, default=1, help="512: weights and biases wait, 7,500 of 10,000 tensors"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = made(options.tensors, inputs=options.inputs, outputs=options.outputs)
    components = make_components({"model": model, "optimizer": optimizer}, world_size=1)
    first = capture_state(components)
    print(f"leaves                    {len(first.leaves)}")
    print(
        f"plain walk                {median_ms(lambda: walk([leaf.tensor for leaf in first.leaves])):6.2f} ms"
    )
    print(f"capture, afresh           {median_ms(lambda: capture_state(components)):6.2f} ms")
    print(f"capture, structure proven {median_ms(lambda: capture_state(components, previous=first)):6.2f} ms")
    print(f"values                    {median_ms(lambda: dump_values(first.values)):6.2f} ms")
    found = whole(model, optimizer, options.checkpoints)
    print(f"run.step() with checkpoint {statistics.median(found.held_ms):6.2f} ms with the GIL")
    print(f"  copies at the boundary   {statistics.median(found.gathered_ms):6.2f} ms without")
    print(f"copy thread                {statistics.median(found.copy_thread_ms):6.2f} ms")
    for part in cuda_part_rows(options.tensors):
        print(f"{part.measure}: {part.value:.2f} ms")


def boundary_rows(devices: Sequence[str]) -> list[Row]:
    """Return the rows of `make bench-stall` about a state of 10,000 tensors."""
    rows: list[Row] = []
    if "cpu" in devices:
        rows += host_rows()
    if "cuda" in devices:
        rows += device_rows()
    return rows


def host_rows() -> list[Row]:
    """Return the rows of tensors in host memory."""
    found = whole(*made(TENSORS), CHECKPOINTS)
    weights = whole(*made(TENSORS, inputs=32, outputs=16), CHECKPOINTS)
    biases_too = whole(*made(TENSORS, inputs=4, outputs=512), CHECKPOINTS)
    return [
        *boundaries_rows(f"{TENSORS} tensors", found),
        *boundaries_rows(f"{TENSORS} tensors, of which 3750 of 2 KiB wait", weights),
        *boundaries_rows(f"{TENSORS} tensors, of which 7500 of 2 and 8 KiB wait", biases_too),
        *cuda_part_rows(),
    ]


def device_rows() -> list[Row]:
    """Return the rows of the same state on a CUDA device."""
    return boundaries_rows(f"{TENSORS} tensors on CUDA", whole(*made(TENSORS, "cuda"), CHECKPOINTS))


def boundaries_rows(what: str, found: "Boundaries") -> list[Row]:
    """Return what the training thread takes, and what it takes to copy."""
    name = f"{what}: training thread at a boundary"
    return [
        row(f"{name}, with the GIL", found.held_ms, goal=BOUNDARY_MAX_MS, at_most=True, unit="ms"),
        row(f"{name}, copying without it", found.gathered_ms, goal=None, unit="ms"),
    ]


def cuda_part_rows(tensors: int = TENSORS) -> list[Row]:
    """Return what the training thread takes to say what is to be copied from CUDA tensors, over host memory."""
    model, optimizer = made(tensors)
    capture = capture_state(make_components({"model": model, "optimizer": optimizer}, world_size=1))
    count = len(capture.leaves)
    late = replace(capture, devices=(0,) * count, at_once=(False,) * count)
    layout = plan_layout(late.specs, late.aliases, segment_count=1)
    places = Places(layout, late)
    name = f"{count} tensors as on CUDA, over host memory: training thread"
    looked_up = [median_ms(lambda: places.cuda_lazy.at(late.addresses, 0), 1) for _ in range(CHECKPOINTS)]
    return [row(name, looked_up, goal=BOUNDARY_MAX_MS, at_most=True, unit="ms")]


@dataclass
class Boundaries:
    """Milliseconds of CPU, one of each for a checkpoint."""

    held_ms: list[float] = field(default_factory=list[float])
    """Of the training thread in `run.step()`, less the copies."""
    gathered_ms: list[float] = field(default_factory=list[float])
    """Of the training thread while it copies at the boundary: without the GIL."""
    copy_thread_ms: list[float] = field(default_factory=list[float])


@contextmanager
def timed(owner: object, name: str) -> Generator[list[float]]:
    """Take the CPU time, in ms, of each call of a function by the thread that calls it."""
    taken: list[float] = []
    original = getattr(owner, name)

    def call(*args: object) -> None:
        began_s = time.thread_time()
        original(*args)
        taken.append(1000 * (time.thread_time() - began_s))

    setattr(owner, name, call)
    try:
        yield taken
    finally:
        setattr(owner, name, original)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Boundaries:
    """Return what checkpoints through a daemon take, but for the first one."""
    found = Boundaries()
    with (
        timed(CopyJob, "run") as runs,
        timed(snapshot, "copy") as gathers,
        scratch() as folder,
        hook_daemon(folder),
        everstep.attach("boundary", model=model, optimizer=optimizer, storage=folder, every=10**6) as run,
    ):
        while len(found.held_ms) <= count:
            optimizer.step()
            run.checkpoint()
            sealed = run.report().checkpoints_sealed
            gathers.clear()
            began_s = time.thread_time()
            run.step()
            took_s = time.thread_time() - began_s
            assert run.wait(60)
            if run.report().checkpoints_sealed > sealed:
                found.gathered_ms.append(sum(gathers))
                found.held_ms.append(1000 * took_s - sum(gathers))
        found.copy_thread_ms = runs[1:]
    return Boundaries(found.held_ms[1:], found.gathered_ms[1:], found.copy_thread_ms)


if __name__ == "__main__":
    main()
