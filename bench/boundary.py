"""What a checkpoint costs at its boundary, for a state of many small tensors: `python bench/boundary.py`.

Times are medians over the checkpoints, in milliseconds of CPU of the training thread: the GIL is held for all of it but
the gather. The copy thread's CPU is printed beside them; the ratio compares a boundary with one plain walk of the
state, made in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from node import hook_daemon
from paired import Row, row
from persist_rows import scratch
from torch import nn

import everstep
from everstep.checkpoint.value_format import dump_values
from everstep.hook.capture import capture_state
from everstep.hook.component import make_components
from everstep.hook.copier import CopyJob

LEAVES_PER_PARAMETER = 4
"""The parameter, and AdamW's exp_avg, exp_avg_sq and step."""
TENSORS = 10_000
CHECKPOINTS = 15
BOUNDARY_MAX_MS = 5.0


class Small(nn.Module):
    """Many linear layers of four weights and a bias each, with a BatchNorm now and then."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(parameters // 2))
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


def made(tensors: int) -> tuple[Small, torch.optim.Optimizer]:
    """Return a model and its optimizer, after a first step, whose state has about so many tensors."""
    model = Small(tensors // LEAVES_PER_PARAMETER)
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = made(options.tensors)
    components = make_components({"model": model, "optimizer": optimizer}, world_size=1)
    first = capture_state(components)
    print(f"leaves                    {len(first.leaves)}")
    print(
        f"plain walk                {median_ms(lambda: walk([leaf.tensor for leaf in first.leaves])):6.2f} ms"
    )
    print(f"capture, afresh           {median_ms(lambda: capture_state(components)):6.2f} ms")
    print(f"capture, structure proven {median_ms(lambda: capture_state(components, previous=first)):6.2f} ms")
    print(f"values                    {median_ms(lambda: dump_values(first.values)):6.2f} ms")
    boundaries, copies = whole(model, optimizer, options.checkpoints)
    print(f"run.step() with checkpoint {statistics.median(boundaries):5.2f} ms")
    print(f"copy thread                {statistics.median(copies):5.2f} ms")


def boundary_row() -> Row:
    """Return the row of `make bench-stall` about a state of 10,000 tensors."""
    boundaries, _ = whole(*made(TENSORS), CHECKPOINTS)
    return row(
        f"{TENSORS} tensors: training thread at a boundary",
        boundaries,
        goal=BOUNDARY_MAX_MS,
        at_most=True,
        unit="ms",
    )


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of boundaries with a checkpoint and of the copy thread, through a daemon."""
    boundaries: list[float] = []
    copies: list[float] = []

    def timed_run(self: CopyJob) -> None:
        began_s = time.thread_time()
        original(self)
        copies.append(1000 * (time.thread_time() - began_s))

    original = CopyJob.run
    CopyJob.run = timed_run
    try:
        with (
            scratch() as folder,
            hook_daemon(folder),
            everstep.attach("boundary", model=model, optimizer=optimizer, storage=folder, every=10**6) as run,
        ):
            while len(boundaries) <= count:
                optimizer.step()
                run.checkpoint()
                sealed = run.report().checkpoints_sealed
                began_s = time.thread_time()
                run.step()
                took_s = time.thread_time() - began_s
                assert run.wait(60)
                if run.report().checkpoints_sealed > sealed:
                    boundaries.append(1000 * took_s)
    finally:
        CopyJob.run = original
    return boundaries[1:], copies[1:]


if __name__ == "__main__":
    main()
