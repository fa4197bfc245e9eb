"""A run whose state on each rank is as large as it is told; one JSON line on stdout for each boundary.

Alone or under torchrun (gloo, each rank with a model of its own). Every boundary asks for a checkpoint, and with
`--settle` waits until it is complete or has failed.
"""

import argparse
import hashlib
import json
import logging
import os

import torch
import torch.distributed as dist
from torch import nn

import everstep

COLUMNS = 256


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


class Net(nn.Module):
    """A wide layer, and statistics that every forward changes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.wide = nn.Linear(COLUMNS, rows)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.wide(self.norm(batch))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()
    momenta = [optimizer.state[each].get("momentum_buffer") for each in model.parameters()]
    for tensor in [*model.state_dict().values(), *momenta]:
        if tensor is not None:
            sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[95_000], help="of the layer of each rank")
    parser.add_argument("--steps", type=int, default=3, help="of the lineage")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    rank = 0
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Net(args.rows[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with everstep.attach(
        "ring", model=model, optimizer=optimizer, storage=args.storage, every=1, debug=args.debug
    ) as run:
        restored = run.restore()
        say(
            rank=rank,
            restored=None if restored is None else str(restored.checkpoint),
            source=None if restored is None else restored.source,
            digest=digest(model, optimizer),
        )
        while run.steps < args.steps:
            batch = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(run.steps))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            run.step()
            if args.settle:
                run.wait()
            report = run.report()
            say(
                rank=rank,
                step=run.steps,
                digest=digest(model, optimizer),
                complete=report.last_complete,
                failures=list(report.failures),
                skipped={reason.value: each.count for reason, each in report.skipped.items()},
                notes=list(report.notes),
            )
    report = run.report()
    say(
        rank=rank,
        done=digest(model, optimizer),
        complete=report.last_complete,
        failures=list(report.failures),
        skipped={reason.value: each.count for reason, each in report.skipped.items()},
        notes=list(report.notes),
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
