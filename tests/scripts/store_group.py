"""One rank of a worker group whose Store outlives it, as torchrun's does; one JSON line on stdout per event.

The process group moves nothing between ranks (torch's "fake" backend): gloo would find the addresses of the dead group
in the Store. What everstep says over the Store is the same.
"""

import argparse
import json
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # pyright: ignore[reportUnusedImport]  registers the backend
from torch import nn
from torch._C._distributed_c10d import TCPStore

import everstep


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--late-s", type=float, default=0.0, help="attach that much later than the others")
    parser.add_argument("--until", type=int, default=-1, help="stop and sleep after this step of the lineage")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument(
        "--dies", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"), help="by SIGKILL"
    )
    parser.add_argument("--notice", help="a file that announces the end, a second before")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", args.port, None, False, timedelta(seconds=60))
    dist.init_process_group("fake", store=store, rank=args.rank, world_size=args.world_size)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(args.late_s)
    with everstep.attach(
        "group",
        model=model,
        optimizer=optimizer,
        storage=args.storage,
        every=2,
        replicated=True,
        slots=3,
        preemption=everstep.Preemption(notice_file=args.notice, grace_s=1.0 if args.notice else 30.0),
    ) as run:
        restored = run.restore()
        say(
            rank=args.rank,
            attempt=run.attempt,
            restored=None if restored is None else str(restored.checkpoint),
        )
        for _ in run.epochs(1):
            while run.steps < args.steps:
                time.sleep(args.step_s)
                run.step()
                say(rank=args.rank, step=run.steps)
                if (args.rank, run.steps) == tuple(args.dies):
                    os.kill(os.getpid(), signal.SIGKILL)
                run.wait()
                if run.steps == args.until:
                    say(rank=args.rank, waiting=run.steps)
                    time.sleep(600)
    report = run.report()
    say(
        rank=args.rank,
        done=run.steps,
        complete=report.last_complete,
        failures=list(report.failures),
        skipped={reason.value: each.count for reason, each in report.skipped.items()},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
