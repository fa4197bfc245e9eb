"""A small training run as a user would write it, for tests that kill it: one JSON line on stdout per event.

Runs alone or under torchrun (DDP). `--until` stops at a step by sleeping, so that a test can kill it there;
it implies `--settle`: every boundary waits for its checkpoint, so that what the test finds does not depend on who
was faster.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import everstep
from everstep.checkpoint.frequency_format import dump_decision
from everstep.dataloader import DataLoader, SharedLoader
from everstep.hook.notice import GRACE_S
from everstep.hook.pace import Pace
from everstep.hook.run import Run
from everstep.hook.run_checkpoints import RunCheckpoints


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Sample i says that it is sample i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.sin(torch.arange(16.0) * (index + 1))
        return x, x.square().sum().view(1), index


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one write: lines of several ranks do not mix


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[tuple[int, float]]) -> str:
    """Everything that must be bit-identical, in one hash."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    for parameter in optimizer.param_groups[0]["params"]:
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            sha.update(key.encode() + value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    sha.update(json.dumps(losses).encode())
    return sha.hexdigest()


def believe(needed_s: float | None) -> None:
    """Let the last rank think that a checkpoint takes so long."""
    if needed_s is not None and dist.get_rank() == dist.get_world_size() - 1:
        setattr(Pace, "own_needed_s", needed_s)  # noqa: B010  a property, for which the type checker wants a setter


def refuse_last() -> None:
    """Let the last rank have no memory for the run's last checkpoint."""
    begin = RunCheckpoints._begin

    def refused(checkpoints: RunCheckpoints, until_s: float = math.inf) -> str | None:
        return "no memory" if checkpoints._state.is_last else begin(checkpoints, until_s)

    if dist.get_rank() == dist.get_world_size() - 1:
        setattr(RunCheckpoints, "_begin", refused)  # noqa: B010


def die_at(step: int, run: Run) -> None:
    """Let the last rank die before this boundary."""
    if run.steps + 1 == step and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


class Own:
    """What each rank has of its own, and no tensor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]


class Stumbling:
    """Its state cannot be read once it is told so, once."""

    def __init__(self) -> None:
        self.is_down = False

    def state_dict(self) -> dict[str, int]:
        if self.is_down:
            self.is_down = False
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state: object) -> None:
        del state


def make_loader(args: argparse.Namespace) -> DataLoader[Any] | SharedLoader[Any]:
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": args.workers}
    if args.group:
        return SharedLoader(Squares(args.count), group=args.group, join=args.join, **arguments)
    return DataLoader(Squares(args.count), **arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--name", default="small")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--adaptive", action="store_true", help="the controller decides instead of --every")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--group", help="share the preparation of batches with the other jobs of this group")
    parser.add_argument("--join", default="private", help="what it does that comes late to its group")
    parser.add_argument("--device", default="cpu", help="where the model is; ranks share it")
    parser.add_argument(
        "--backend", default="gloo", help="what DDP speaks; NCCL wants a device for each rank"
    )
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--back-to")
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--until", type=int, default=-1, help="stop and sleep after this step of the lineage")
    parser.add_argument("--hold", type=int, default=-1, help="wait here to be killed, whatever is under way")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--die-at", type=int, default=-1, help="the last rank dies before this boundary")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument(
        "--per-rank", action="store_true", help="attach a module that is different on each rank"
    )
    parser.add_argument(
        "--stumble-at", type=int, default=-1, help="the last rank's state cannot be read here"
    )
    parser.add_argument("--replicated", action="store_true", help="no DDP; say that all ranks hold the same")
    parser.add_argument(
        "--own-buffers", action="store_true", help="DDP spreads none, and each rank has a value"
    )
    parser.add_argument("--request-at", type=int, default=-1, help="the last rank asks for a checkpoint here")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--notice", help="a file that announces the end")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="from the notice to the end")
    parser.add_argument("--lease", type=float, help="seconds from the restore on")
    parser.add_argument(
        "--needed-s", type=float, help="how long a checkpoint takes, as the last rank believes"
    )
    parser.add_argument("--refuse-last", action="store_true", help="the last rank takes no last checkpoint")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group(args.backend)
    rank = dist.get_rank() if distributed else 0

    believe(args.needed_s)
    if args.refuse_last:
        refuse_last()
    inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    inner.to(args.device)
    ddp = distributed and not args.replicated
    shared = not args.own_buffers
    model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=shared) if ddp else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loader = make_loader(args)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "loader": loader,
    }
    stumbling = Stumbling()
    state |= {"stumbling": stumbling} if args.stumble_at > 0 else {}
    state |= {"own": nn.Linear(rank + 2, 1)} if args.per_rank else {}
    state |= {"own": Own(rank)} if args.own_buffers else {}
    with everstep.attach(
        args.name,
        **state,
        storage=args.storage,
        every=None if args.adaptive else args.every,
        fresh=args.fresh,
        back_to=args.back_to,
        takeover=args.takeover,
        replicated=args.replicated,
        preemption=everstep.Preemption(notice_file=args.notice, grace_s=args.grace_s),
        # A slot is free again a moment after the next checkpoint is complete: the third spares a skip.
        slots=args.slots,
    ) as run:
        restored = run.restore()
        say(
            rank=rank,
            attempt=run.attempt,
            restored=None if restored is None else str(restored.checkpoint),
            source=None if restored is None else restored.source,
            skipped=[] if restored is None else list(restored.skipped),
            finished=run.finished,
            state=digest(inner, optimizer, []),
        )
        if args.lease:
            run.lease(args.lease)
        for epoch in run.epochs(args.epochs):
            for x, y, ids in loader:
                loss = (model(x.to(args.device)) - y.to(args.device)).square().mean() * loader.weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                run.log(loss=loss.item())
                if args.step_s:
                    time.sleep(args.step_s)
                say(  # before the boundary: what it takes may be restored however soon this process is killed
                    rank=rank,
                    epoch=epoch,
                    step=run.steps + 1,
                    ids=torch.as_tensor(ids).tolist(),
                    loss=loss.item(),
                )
                die_at(args.die_at, run)
                stumbling.is_down = run.steps + 1 == args.stumble_at and rank == run.world_size - 1
                with contextlib.suppress(RuntimeError):  # as a script that would rather go on
                    run.step()
                if run.steps == args.request_at and rank == run.world_size - 1:
                    run.checkpoint()
                time.sleep(600 if run.steps == args.hold else 0)
                if (args.settle or args.until > 0) and run.steps != args.raise_at:
                    run.wait()
                if run.steps == args.until:
                    say(
                        rank=rank,
                        waiting=run.steps,
                        complete=run.report().last_complete,
                        state=digest(inner, optimizer, []),
                    )
                    time.sleep(600)
                if run.steps == args.raise_at:
                    raise RuntimeError("the training script failed")
    report = run.report()
    say(
        rank=rank,
        done=digest(inner, optimizer, run.history("loss")),
        complete=report.last_complete,
        failures=list(report.failures),
        notes=list(report.notes),
        skipped={reason.value: each.count for reason, each in report.skipped.items()},
        stall_s=report.stall_s,
        taken=report.checkpoints_complete,
        steps=report.steps,
        decision=dump_decision(report.decision),
    )
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
